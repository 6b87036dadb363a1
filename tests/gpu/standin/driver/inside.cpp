#include "inside.h"

#include "entry.h"
#include "order.h"

namespace standin {

int index_of_current_device() { return current_device() ? current_device()->index() : -1; }

int index_of_device_of(CUstream handle) {
  auto stream = stream_of(handle);
  return stream ? stream->device().index() : -1;
}

CUresult queue_on(CUstream handle, Work work) {
  auto stream = stream_of(handle);
  if (!stream) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  if (stream->is_capturing) {
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  if (CUresult fault = stream->device().fault(); fault != CUDA_SUCCESS) {
    return fault;
  }
  stream->submit(std::move(work));
  return CUDA_SUCCESS;
}

void* alias_of(uint64_t address) { return device_memory().alias(address); }

VectorClock knowledge_of_this_thread() {
  std::lock_guard lock(order());
  return known_to_host();
}

void take_over(const VectorClock& knowledge) { host_was_told_of(knowledge); }

}  // namespace standin
