// The driver as this torch device uses it: errors as exceptions, and contexts by device.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <cuda.h>

namespace standin_device {

constexpr auto kType = c10::DeviceType::PrivateUse1;

// Throws what the driver says was wrong.
void check(CUresult result, const char* what);

c10::DeviceIndex device_count() noexcept;

// Makes the context of a device current, for a scope.
class InContext {
 public:
  explicit InContext(c10::DeviceIndex device);
  ~InContext();
  InContext(const InContext&) = delete;
  InContext& operator=(const InContext&) = delete;

 private:
  CUcontext before_ = nullptr;
};

// Makes the context of a device current, for good.
void enter_context(c10::DeviceIndex device);

}  // namespace standin_device

#define CHECK_DRIVER(call) ::standin_device::check(call, #call)
