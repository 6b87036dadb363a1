// Device memory with the semantics of torch's caching allocator: a freed block is reused at once on
// the stream it was allocated for. If other streams used it too, it is reused only when they are
// done.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

namespace standin_device {

c10::Allocator* allocator();

// Records that `stream` uses the memory too.
void record_stream(const c10::DataPtr& memory, const c10::Stream& stream);

}  // namespace standin_device
