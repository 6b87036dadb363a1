// GflowWork: the handle of one collective that torch and the user hold. It only waits and
// reports; the collective itself is a TorchOperation, which the engine runs.
#pragma once

#include <ATen/core/ivalue.h>

#include <atomic>
#include <functional>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace gflow {

using TensorLists = std::vector<std::vector<at::Tensor>>;

class GflowWork : public c10d::Work {
 public:
  // `results` are what the Future gives and result() returns; they are kept alive until then.
  GflowWork(int rank, c10d::OpType kind, const char* title, TensorLists results,
            std::chrono::milliseconds timeout,
            const std::optional<std::vector<at::Tensor>>& inputs);

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
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

  void set_seq(uint64_t seq) { seq_ = seq; }
  void set_source(int rank) { source_ = rank; }

  // Releases whoever waits. Only the first call counts. Returns whether a Future was handed out
  // that complete_future() has to complete.
  bool settle(std::exception_ptr error);

  // Completes the Future and so runs the user's callbacks. Call it with no lock and no GIL held.
  void complete_future();

 private:
  bool completed_within(std::chrono::milliseconds limit);
  void complete(c10::ivalue::Future& future) const;

  const TensorLists results_;
  const std::chrono::milliseconds timeout_;
  std::atomic<uint64_t> seq_{0};
  std::atomic<int> source_{-1};
  // Made when somebody asks, because completing one costs more than a small collective.
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::function<void()> before_wait_;
  bool settled_ = false;
  bool limits_waits_ = false;
};

}  // namespace gflow
