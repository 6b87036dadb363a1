// The hooks every torch device must implement: devices, streams and events.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"
#include "streams.h"

namespace standin_device {
namespace {

CUevent as_event(void* event) { return static_cast<CUevent>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }

  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kType, current_device()}; }
  void setDevice(c10::Device device) const override { set_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    try {
      set_device(device.index());
    } catch (const std::exception&) {
      // A noexcept function can't report this.
    }
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device.has_index() ? device.index() : current_device());
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return default_stream(device.index());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    return stream_from_pool(device.has_index() ? device.index() : current_device(), high_priority);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return getStreamFromGlobalPool(device, priority < 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return set_stream(stream); }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return raw(stream); }
  bool queryStream(const c10::Stream& stream) const override {
    ContextGuard context(stream.device_index());
    const auto result = cuStreamQuery(raw(stream));
    if (result == CUDA_ERROR_NOT_READY) return false;
    CHECK_DRIVER(result);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(stream); }
  bool isStreamCapturing(const c10::Stream& stream) const override {
    ContextGuard context(stream.device_index());
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    CHECK_DRIVER(cuStreamIsCapturing(raw(stream), &status));
    return status != CU_STREAM_CAPTURE_STATUS_NONE;
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    ContextGuard context(device);
    CHECK_DRIVER(cuCtxSynchronize());
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag flag) const override {
    ContextGuard context(stream.device_index());
    if (*event == nullptr) {
      CUevent made = nullptr;
      const bool times = flag == c10::EventFlag::BACKEND_DEFAULT;
      CHECK_DRIVER(cuEventCreate(&made, times ? CU_EVENT_DEFAULT : CU_EVENT_DISABLE_TIMING));
      *event = made;
    }
    CHECK_DRIVER(cuEventRecord(as_event(*event), raw(stream)));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    ContextGuard context(stream.device_index());
    CHECK_DRIVER(cuStreamWaitEvent(raw(stream), as_event(event), 0));
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    const auto result = cuEventQuery(as_event(event));
    if (result == CUDA_ERROR_NOT_READY) return false;
    CHECK_DRIVER(result);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) CHECK_DRIVER(cuEventSynchronize(as_event(event)));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event != nullptr) cuEventDestroy(as_event(event));
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    float milliseconds = 0;
    CHECK_DRIVER(cuEventElapsedTime(&milliseconds, as_event(from), as_event(to)));
    return milliseconds;
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  // The stand-in treats all host memory as pinned.
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  bool isPinnedPtr(const void*) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = current_device();
    set_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device() : exchangeDevice(device);
  }
};

const bool hooks_are_there = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace
}  // namespace standin_device
