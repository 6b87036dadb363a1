// DeviceQueues: the devices on which a group exchanges gradients, and on each the stream that the
// engine works on. It names no kind of device: any torch accelerator will do whose raw streams the
// engine understands.
//
// Thread safety: open() may be called from any thread.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <mutex>
#include <unordered_map>

#include "rust/bridge/entries.rs.h"

namespace gflow {

class DeviceQueues {
 public:
  explicit DeviceQueues(const Group& group) : group_(group) {}

  // The engine's stream on `device`, which is prepared at the first call. If that fails, the next
  // collective there tells all ranks why. All ranks must open their devices in the same order.
  c10::Stream open(c10::Device device);

 private:
  const Group& group_;
  std::mutex mutex_;
  std::unordered_map<c10::Device, c10::Stream> streams_;
};

// The calling thread's current stream.
c10::Stream current_stream(c10::Device device);

// The stream as the device's driver knows it.
uint64_t raw_handle(const c10::Stream& stream);

// Whether work put on the stream is captured into a graph instead of run.
bool is_capturing(const c10::Stream& stream);

}  // namespace gflow
