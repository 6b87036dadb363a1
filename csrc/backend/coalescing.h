// Coalescing: the calls of one thread between startCoalescing and endCoalescing complete as one. On
// a device the inner backend merges them, so that messages in both directions do not wait for each
// other.
//
// It must never start coalescing on a backend that is not called, nor affect the calls of other
// threads: that would depend on timing, and so differ between ranks. (If another thread calls the
// inner backend directly meanwhile, NCCL's takes the call for a part of the coalesced ones, as it
// does without gflow.)
//
// Thread safety: every method may be called from any thread, and concerns that thread's calls.
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

  // Starts coalescing. Calls that an earlier start() collected and an error kept from ending are
  // dropped: in a healthy group the inner backend ends them; in a failed one that would wait for
  // lost ranks.
  void start(bool group_is_healthy);

  // Whether this thread's calls are being coalesced.
  bool is_active() const;

  // Call it before every call on the inner backend of a device.
  void enter(const BackendPtr& inner);

  // Pass it the work of every other call; returns the same work.
  WorkPtr note(WorkPtr work);

  // One work for all calls since start(); null if there were none.
  WorkPtr end();

 private:
  struct Calls {
    BackendPtr inner;
    std::vector<WorkPtr> works;
  };

  // Removes and returns this thread's calls, if it is coalescing.
  std::optional<Calls> take();

  mutable std::mutex mutex_;
  std::map<std::thread::id, Calls> calls_;
};

}  // namespace gflow
