// TorchOperation: an operation on torch tensors as the engine sees it. It keeps the tensors alive
// until it is over, and hands the outcome to the GflowWork that the caller holds.
#pragma once

#include <ATen/ThreadLocalState.h>

#include <functional>
#include <mutex>
#include <optional>

#include "bridge/operation.h"
#include "gflow_work.h"
#include "rust/bridge/types.rs.h"

namespace gflow {

class TorchOperation : public Operation {
 public:
  // A collective is either opened (the engine carries it out) or begun on the inner backend; an
  // operation that runs aside is neither. `end` is called when that is over. All run on the
  // engine's threads or the caller's; a collective with the grad mode of the caller, which an
  // operation aside does not keep: it may outlive the interpreter.
  struct Steps {
    std::function<void()> prepare;
    std::function<TensorSpans()> open;
    std::function<c10::intrusive_ptr<c10d::Work>()> begin;
    std::function<void()> end;
    // The engine's stream, of a collective on a device. It is the current one in every step, so
    // that whatever a step leads to is in order with what the engine puts there.
    std::optional<c10::Stream> lane;
  };

  TorchOperation(c10::intrusive_ptr<GflowWork> work, Steps steps)
      : work_(std::move(work)), steps_(std::move(steps)) {
    if (steps_.begin) caller_.emplace();
  }

  void prepare() const override;
  TensorSpans open() const override;
  void start(rust::Box<Done> done) const override;
  void finish() const override;
  bool broke_connection() const override;
  bool settle(rust::Str error, bool as_thrown) const override;
  void notify() const override { work_->complete_future(); }

 private:
  // Runs a step so that nothing but a std::exception leaves it, and keeps what was thrown.
  void run(const std::function<void()>& step) const;

  const c10::intrusive_ptr<GflowWork> work_;
  const Steps steps_;
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
