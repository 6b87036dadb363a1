// GflowWork: the handle of one collective that torch and the user hold. It only waits and
// reports; the collective itself is a TorchOperation, which the engine runs.
//
// A collective on a device is settled as soon as all of it is on the engine's stream there. Who
// waits for it waits on the host until then, and has its own stream wait for the rest.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <functional>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace gflow {

using TensorLists = std::vector<std::vector<at::Tensor>>;

class GflowWork : public c10d::Work {
 public:
  // `results` are what the Future gives and result() returns; they are kept alive until then.
  // `lane` is the engine's stream if they are on a device.
  GflowWork(int rank, c10d::OpType kind, const char* title, TensorLists results,
            std::chrono::milliseconds timeout, const std::optional<std::vector<at::Tensor>>& inputs,
            std::optional<c10::Stream> lane = std::nullopt);
  ~GflowWork() override;

  // With a timeout it also waits for the device, as torch's own backends do.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  bool isCompleted() override;
  // The calling thread's stream waits for the engine's.
  void synchronize() override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return seq_; }
  // Not marked "override": torch 2.13 does not have it yet.
  std::chrono::milliseconds getTimeout() const { return timeout_; }

  // The rank that a received message came from.
  int sourceRank() const override { return source_; }

  // Makes wait() give up after the timeout of this work, without ending the operation.
  void limit_waits() { limits_waits_ = true; }

  // Is called before anybody waits who would have to.
  void before_wait(std::function<void()> action) { before_wait_ = std::move(action); }

  // Throws if the group has failed; is asked when somebody waits who has not seen the device be
  // done.
  void check_with(std::function<void()> check) { check_ = std::move(check); }

  // All that belongs to it is on the engine's stream now, and nothing else after it. Before
  // settle(), by whoever runs the collective.
  void mark_end_on_device();

  void set_seq(uint64_t seq) { seq_ = seq; }
  void set_source(int rank) { source_ = rank; }

  // Releases whoever waits. Only the first call counts. Returns whether a Future was handed out
  // that complete_future() has to complete.
  bool settle(std::exception_ptr error);

  // Completes the Future and so runs the user's callbacks. Call it with no lock and no GIL held.
  void complete_future();

 private:
  bool is_settled();
  bool settled_within(std::chrono::milliseconds limit);
  bool is_done_on_device() const { return !end_ || end_->query(); }
  // Whether the device is done; throws if the group has failed before that was seen.
  bool look_at_device();
  void await_device(std::chrono::steady_clock::time_point deadline);
  void complete(c10::ivalue::Future& future) const;

  const TensorLists results_;
  const std::chrono::milliseconds timeout_;
  const std::optional<c10::Stream> lane_;
  // Recorded on the engine's stream; written before the work is settled and never after.
  std::optional<c10::Event> end_;
  std::atomic<uint64_t> seq_{0};
  std::atomic<int> source_{-1};
  // Made when somebody asks, because completing one costs more than a small collective.
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::function<void()> before_wait_;
  std::function<void()> check_;
  // The device was done while the group was well: what happens to the group later is no matter.
  std::atomic<bool> was_done_{false};
  bool settled_ = false;
  bool limits_waits_ = false;
};

}  // namespace gflow
