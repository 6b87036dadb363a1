// Driver calls for the torch device: errors become exceptions, contexts are looked up by device.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <cuda.h>

namespace standin_device {

constexpr auto kType = c10::DeviceType::PrivateUse1;

// Throws with the driver's description of the error.
void check(CUresult result, const char* what);

c10::DeviceIndex device_count() noexcept;

// Makes the context of a device current for a scope.
class ContextGuard {
 public:
  explicit ContextGuard(c10::DeviceIndex device);
  ~ContextGuard();
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  CUcontext before_ = nullptr;
};

// Makes the context of a device current permanently.
void enter_context(c10::DeviceIndex device);

}  // namespace standin_device

#define CHECK_DRIVER(call) ::standin_device::check(call, #call)
