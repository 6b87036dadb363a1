// Device memory, as torch's caching allocator gives it: what is let go of is handed out again at
// once to the stream that it was made for, and only when they are done if others used it too.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

namespace standin_device {

c10::Allocator* allocator();

// The memory is also used on this stream.
void record_stream(const c10::DataPtr& memory, const c10::Stream& stream);

}  // namespace standin_device
