// Send and receive over Gloo, with an agreement first.
//
// Gloo ends the process when a message is larger than the buffer that waits for it, and fills the
// front of the buffer when it is smaller. So a sender first shows an envelope (size and type), the
// receiver answers whether it expects that, and only then the data moves. A mismatch raises on
// both ends, with both views.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <unordered_map>

namespace gflow {

class PointToPoint {
 public:
  static constexpr int kAnySource = -1;

  explicit PointToPoint(c10::intrusive_ptr<c10d::Backend> gloo) : gloo_(std::move(gloo)) {}

  // Both begin at once, in the caller's order, which is what pairs sends with receives. What they
  // return does the rest: it blocks until the peer has taken part, and throws if it does not fit.
  std::function<void()> begin_send(const at::Tensor& tensor, int to, int tag);

  // The finished receive gives the rank that the message came from.
  std::function<int()> begin_receive(const at::Tensor& tensor, int from, int tag);

 private:
  const c10::intrusive_ptr<c10d::Backend> gloo_;
  std::mutex mutex_;
  // The number of the next message to each rank; it is part of the tags of that message alone.
  std::unordered_map<int, uint64_t> next_number_;
};

}  // namespace gflow
