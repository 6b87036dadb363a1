// The device's streams as torch sees them: a default stream, two pools by priority, and a current
// stream per thread.
#pragma once

#include <c10/core/Stream.h>

#include "driver.h"

namespace standin_device {

c10::DeviceIndex current_device();
void set_device(c10::DeviceIndex device);

c10::Stream default_stream(c10::DeviceIndex device);
c10::Stream stream_from_pool(c10::DeviceIndex device, bool high_priority);
c10::Stream current_stream(c10::DeviceIndex device);
// Returns the previous stream.
c10::Stream set_stream(c10::Stream stream);

// The driver's handle; null for the default stream, as on CUDA.
CUstream raw(const c10::Stream& stream);

// Blocks until all work enqueued on the stream is done.
void synchronize(const c10::Stream& stream);

}  // namespace standin_device
