// Takes a high-priority stream from torch's pool for each device, and registers it with the engine.
#include "backend/device_queues.h"

namespace gflow {
namespace {

// Torch 2.13 cannot tell; there the engine asks the driver.
template <typename Stream>
bool is_capturing_if_known(const Stream& stream) {
  if constexpr (requires { stream.is_capturing(); }) return stream.is_capturing();
  return false;
}

}  // namespace

c10::Stream DeviceQueues::open(c10::Device device) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = streams_.find(device);
  if (found == streams_.end()) {
    // Torch's pool keeps its streams for the life of the process. High priority: work that other
    // hosts wait for goes before work that only this one needs.
    const auto stream = c10::impl::VirtualGuardImpl(device.type())
                            .getStreamFromGlobalPool(device, /*isHighPriority=*/true);
    found = streams_.emplace(device, stream).first;
  }
  group_.open_device(device.index(), raw_handle(found->second));
  return found->second;
}

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

uint64_t raw_handle(const c10::Stream& stream) {
  return reinterpret_cast<uint64_t>(stream.native_handle());
}

bool is_capturing(const c10::Stream& stream) { return is_capturing_if_known(stream); }

}  // namespace gflow
