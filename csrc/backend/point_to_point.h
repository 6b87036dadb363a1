// PointToPoint: send and receive over Gloo, after the two ranks have agreed on size and type.
//
// Gloo ends the process if a message is larger than the receiver's buffer, and fills only the front
// of the buffer if it is smaller. So a sender first sends an offer (size and type), the receiver
// answers whether it expects that, and only then the data moves. A mismatch raises on both ends and
// says what each has.
//
// Thread safety: every method may be called from any thread.
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

  // Both begin immediately, in the caller's order, which is what pairs sends with receives. The
  // function they return does the rest: it blocks until the peer takes part, and throws if the two
  // tensors do not match.
  std::function<void()> begin_send(const at::Tensor& tensor, int to, int tag);

  // The function returns the rank that the message came from.
  std::function<int()> begin_receive(const at::Tensor& tensor, int from, int tag);

 private:
  const c10::intrusive_ptr<c10d::Backend> gloo_;
  std::mutex mutex_;
  // The number of the next message to each rank, which makes the tags of its answer and data
  // unique.
  std::unordered_map<int, uint64_t> next_number_;
};

}  // namespace gflow
