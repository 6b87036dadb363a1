// GflowWork: the handle of one collective, held by torch and the user. It only waits and reports;
// the collective itself is a TorchOperation, which the engine runs.
//
// A collective on a device is complete for the host as soon as all of its work is queued on the
// engine's stream there. wait() blocks the host until then, and makes the caller's stream wait for
// the rest.
//
// Thread safety: c10d::Work's methods, complete() and complete_future() may be called from any
// thread. before_wait(), check_with() and limit_waits() only before the work is handed out.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <functional>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "tensors/tensor_lists.h"

namespace gflow {

class GflowWork : public c10d::Work {
 public:
  // `results` is what the Future holds and result() returns; kept alive until then. `engine_stream`
  // is set if the tensors are on a device.
  GflowWork(int rank, c10d::OpType kind, const char* title, TensorLists results,
            std::chrono::milliseconds timeout, const std::optional<Tensors>& inputs,
            std::optional<c10::Stream> engine_stream = std::nullopt);
  ~GflowWork() override;

  // With a timeout it also waits for the device, as torch's own backends do.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  bool isCompleted() override;
  // Makes the calling thread's stream wait for the engine's.
  void synchronize() override;
  Tensors result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return seq_; }
  // Not marked "override": torch 2.13 does not have it yet.
  std::chrono::milliseconds getTimeout() const { return timeout_; }

  // The rank that a received message came from.
  int sourceRank() const override { return source_; }

  // Makes wait() give up after the timeout of this work, without ending the operation.
  void limit_waits() { limits_waits_ = true; }

  // Runs before a wait() that would block.
  void before_wait(std::function<void()> action) { before_wait_ = std::move(action); }

  // `check` throws if the group has failed. wait() calls it unless the device had already finished.
  void check_with(std::function<void()> check) { check_ = std::move(check); }

  // Records that all of this collective's work is on the engine's stream now. The thread that runs
  // the collective calls it before complete().
  void record_end_on_device();

  void set_seq(uint64_t seq) { seq_ = seq; }
  void set_source(int rank) { source_ = rank; }

  // Releases all waiters. Only the first call counts. Returns whether a Future was handed out that
  // complete_future() has to complete.
  bool complete(std::exception_ptr error);

  // Completes the Future, which runs the user's callbacks. Call it with no lock and no GIL held.
  void complete_future();

 private:
  // Whether waiters have been released.
  bool is_released();
  bool is_released_within(std::chrono::milliseconds limit);
  bool is_done_on_device() const { return !end_ || end_->query(); }
  // Whether the device has finished; throws if the group failed before that was seen.
  bool poll_device();
  void await_device(std::chrono::steady_clock::time_point deadline);
  // Gives a Future the outcome.
  void fill(c10::ivalue::Future& future) const;

  const TensorLists results_;
  const std::chrono::milliseconds timeout_;
  const std::optional<c10::Stream> engine_stream_;
  // Recorded on the engine's stream; not written after complete().
  std::optional<c10::Event> end_;
  std::atomic<uint64_t> seq_{0};
  std::atomic<int> source_{-1};
  // Made on demand, because completing one costs more than a small collective.
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::function<void()> before_wait_;
  std::function<void()> check_;
  // The device finished while the group was healthy: a later failure of the group does not matter.
  std::atomic<bool> was_done_{false};
  // Whether complete() has been called.
  bool outcome_is_set_ = false;
  bool limits_waits_ = false;
};

}  // namespace gflow
