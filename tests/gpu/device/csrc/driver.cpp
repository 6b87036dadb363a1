#include "driver.h"

#include <mutex>
#include <vector>

namespace standin_device {
namespace {

CUcontext context_of(c10::DeviceIndex device) {
  static std::mutex mutex;
  static std::vector<CUcontext> contexts(static_cast<size_t>(device_count()));
  std::lock_guard<std::mutex> lock(mutex);
  TORCH_CHECK(device >= 0 && static_cast<size_t>(device) < contexts.size(), "there is no device ",
              static_cast<int>(device), " of the stand-in");
  auto& context = contexts[static_cast<size_t>(device)];
  if (context == nullptr) CHECK_DRIVER(cuDevicePrimaryCtxRetain(&context, device));
  return context;
}

}  // namespace

void check(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return;
  const char* text = "unknown error";
  cuGetErrorString(result, &text);
  TORCH_CHECK(false, "stand-in: ", what, " failed: ", text);
}

c10::DeviceIndex device_count() noexcept {
  static const int count = [] {
    int devices = 0;
    const bool works = cuInit(0) == CUDA_SUCCESS && cuDeviceGetCount(&devices) == CUDA_SUCCESS;
    return works ? devices : 0;
  }();
  return static_cast<c10::DeviceIndex>(count);
}

ContextGuard::ContextGuard(c10::DeviceIndex device) {
  CHECK_DRIVER(cuCtxGetCurrent(&before_));
  enter_context(device);
}

ContextGuard::~ContextGuard() { cuCtxSetCurrent(before_); }

void enter_context(c10::DeviceIndex device) { CHECK_DRIVER(cuCtxSetCurrent(context_of(device))); }

}  // namespace standin_device
