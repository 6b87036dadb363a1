// Coalescing: calls of one thread between startCoalescing and endCoalescing, which are over as one.
// On a device the inner backend makes one of them, so that messages in both directions do not wait
// for each other. It must never begin anything on a backend that nobody calls, and never decide
// anything for calls of other threads: that would depend on time, and so differ between ranks.
// (What other threads call on the inner backend itself meanwhile is torch's business: NCCL's takes
// that for a part of it.)
#pragma once

#include <map>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace gflow {

class Coalescing {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

  // From now on. What was started before and never ended, because of an error, is given up: in a
  // group that `is_well` the inner backend ends it, in another one that would wait for lost ranks.
  void start(bool is_well);

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
    BackendPtr inner;
    std::vector<WorkPtr> works;
  };

  // This thread's calls, if it is at it.
  std::optional<Calls> take();

  mutable std::mutex mutex_;
  std::map<std::thread::id, Calls> calls_;
};

}  // namespace gflow
