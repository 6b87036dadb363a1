// The streams of the device as torch knows them: a default one, two pools by priority, and the one
// that each thread works on.
#pragma once

#include <c10/core/Stream.h>

#include "driver.h"

namespace standin_device {

c10::DeviceIndex current_device();
void set_device(c10::DeviceIndex device);

c10::Stream default_stream(c10::DeviceIndex device);
c10::Stream stream_from_pool(c10::DeviceIndex device, bool high_priority);
c10::Stream current_stream(c10::DeviceIndex device);
// Returns the one before.
c10::Stream set_stream(c10::Stream stream);

// As the driver knows it; the default stream is no handle at all, as on CUDA.
CUstream raw(const c10::Stream& stream);

// Blocks until the stream has done all that was put there.
void synchronize(const c10::Stream& stream);

}  // namespace standin_device
