// The devices that a group exchanges gradients on, and the stream of each that the engine's work
// goes on. It must never name a kind of device: whatever torch calls an accelerator and whose raw
// streams the engine understands will do.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <mutex>
#include <unordered_map>

#include "rust/bridge/entries.rs.h"

namespace gflow {

class DeviceLanes {
 public:
  explicit DeviceLanes(const Group& group) : group_(group) {}

  // The engine's stream on `device`, which is made ready at the first call; if it cannot be, the
  // collective that comes next tells all ranks why. All ranks must open their devices in the same
  // order.
  c10::Stream open(c10::Device device);

 private:
  const Group& group_;
  std::mutex mutex_;
  std::unordered_map<c10::Device, c10::Stream> streams_;
};

// The stream that the calling thread works on.
c10::Stream current_stream(c10::Device device);

// The stream as the driver of the device knows it.
uint64_t raw_handle(const c10::Stream& stream);

// Whether what is put on the stream is recorded for later, and not done.
bool is_capturing(const c10::Stream& stream);

}  // namespace gflow
