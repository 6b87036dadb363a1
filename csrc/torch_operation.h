// TorchOperation: an operation on torch tensors as the engine sees it. It keeps the tensors alive
// until it is over, and hands the outcome to the GflowWork that the caller holds.
#pragma once

#include <ATen/ThreadLocalState.h>

#include <functional>
#include <mutex>
#include <optional>

#include "bridge/operation.h"
#include "gflow_work.h"

namespace gflow {

class TorchOperation : public Operation {
 public:
  // `begin` starts a collective on the inner backend; an operation that runs aside has none.
  // `end` is called when that is over. Both run on the engine's threads; a collective with the grad
  // mode of this one, which an operation aside does not keep: it may outlive the interpreter.
  TorchOperation(c10::intrusive_ptr<GflowWork> work,
                 std::function<c10::intrusive_ptr<c10d::Work>()> begin, std::function<void()> end)
      : work_(std::move(work)), begin_(std::move(begin)), end_(std::move(end)) {
    if (begin_) caller_.emplace();
  }

  void start(rust::Box<Done> done) const override;
  void finish() const override;
  bool broke_connection() const override;
  bool settle(rust::Str error, bool as_thrown) const override;
  void notify() const override { work_->complete_future(); }

 private:
  // Runs a step so that nothing but a std::exception leaves it, and keeps what was thrown.
  void run(const std::function<void()>& step) const;

  const c10::intrusive_ptr<GflowWork> work_;
  const std::function<c10::intrusive_ptr<c10d::Work>()> begin_;
  const std::function<void()> end_;
  std::optional<at::ThreadLocalState> caller_;
  // The collective on the inner backend. Only the worker touches it.
  mutable c10::intrusive_ptr<c10d::Work> inner_;
  // What a step threw, so that the user gets the exception itself and not only its text. Locked,
  // because an abort may settle from another thread.
  mutable std::mutex mutex_;
  mutable std::exception_ptr thrown_;
  mutable bool broke_connection_ = false;
};

}  // namespace gflow
