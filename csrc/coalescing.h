// Coalescing: calls of one thread between startCoalescing and endCoalescing, which are over as one.
// On a device the inner backend makes one of them, so that messages in both directions do not wait
// for each other. It must never begin anything on a backend that nobody calls, and never concern
// what other threads call meanwhile: that would depend on time, and so differ between ranks.
#pragma once

#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace gflow {

class Coalescing {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

  // From now on. What was started before and never ended, because of an error, is given up.
  void start();

  // Whether what this thread calls belongs to it.
  bool is_active() const;

  // Is told of every call on the inner backend of a device, before it.
  void enter(const BackendPtr& inner);

  // Is given what every other call returns, and returns it.
  WorkPtr note(WorkPtr work);

  // One work for all calls since the start; none if there were none.
  WorkPtr end();

 private:
  struct Calls {
    std::thread::id of = std::this_thread::get_id();
    BackendPtr inner;
    std::vector<WorkPtr> works;
  };

  // With the mutex held: the calls, if they are this thread's.
  bool are_of_this_thread() const { return calls_ && calls_->of == std::this_thread::get_id(); }

  mutable std::mutex mutex_;
  std::optional<Calls> calls_;
};

}  // namespace gflow
