#include "entry.h"

#include <unistd.h>

#include <atomic>
#include <string>
#include <utility>

#include "failures.h"
#include "stream_handles.h"

namespace standin {

namespace {

// The process that called cuInit; CUDA can't be used in its forked children.
std::atomic<pid_t> initialised_in{0};
std::atomic<uint64_t> waits{0};
std::atomic<int> captures{0};
thread_local CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

}  // namespace

std::string without_version(std::string function) {
  size_t at = function.rfind("_v");
  return at == std::string::npos ? function : function.substr(0, at);
}

CUresult init_driver() {
  pid_t nobody = 0;
  initialised_in.compare_exchange_strong(nobody, getpid());
  if (initialised_in != getpid()) {
    return CUDA_ERROR_NOT_INITIALIZED;
  }
  return devices().empty() ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS;
}

CUresult enter(const char* function, Needs needs) {
  if (auto code = take_failure(without_version(function))) {
    return static_cast<CUresult>(*code);
  }
  if (needs == Needs::Nothing) {
    return CUDA_SUCCESS;
  }
  if (is_stream_thread()) {
    return CUDA_ERROR_NOT_PERMITTED;
  }
  if (initialised_in != getpid()) {
    return CUDA_ERROR_NOT_INITIALIZED;
  }
  if (needs == Needs::Driver) {
    return CUDA_SUCCESS;
  }
  Device* device = current_device();
  return device ? device->fault() : CUDA_ERROR_INVALID_CONTEXT;
}

std::shared_ptr<Stream> stream_of(CUstream handle) {
  if (handle == nullptr || handle == CU_STREAM_LEGACY) {
    Device* device = current_device();
    return device ? device->default_stream() : nullptr;
  }
  return stream_handles().find(handle);
}

Handles<Stream>& stream_handles() {
  static auto* handles = new Handles<Stream>;
  return *handles;
}

CUstreamCaptureMode exchange_capture_mode(CUstreamCaptureMode mode) {
  return std::exchange(capture_mode, mode);
}

void count_captures(int more) { captures += more; }

bool would_invalidate_capture() {
  return captures > 0 && capture_mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
}

void count_host_wait() { ++waits; }
uint64_t host_waits() { return waits; }

}  // namespace standin
