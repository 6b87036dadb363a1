// TorchOperation: an operation on torch tensors as the engine sees it. It keeps the tensors alive
// until it has ended, and reports its outcome to the GflowWork that the caller holds.
//
// Thread safety: see Operation (bridge/operation.h).
#pragma once

#include <ATen/ThreadLocalState.h>

#include <functional>
#include <mutex>
#include <optional>

#include "bridge/operation.h"
#include "rust/bridge/types.rs.h"
#include "work/gflow_work.h"

namespace gflow {

class TorchOperation : public Operation {
 public:
  // What the operation does, on the engine's threads or the caller's. For a collective either
  // `spans` is called (the engine carries it out) or `begin` (the inner backend does); for an
  // operation outside the queue neither. `end` comes last. The steps of a collective run with the
  // caller's thread-local state, such as its grad mode; those of other operations do not, because
  // they may outlive the interpreter.
  struct Steps {
    std::function<void()> prepare;
    std::function<TensorSpans()> spans;
    std::function<c10::intrusive_ptr<c10d::Work>()> begin;
    std::function<void()> end;
    // The engine's stream, for a collective on a device. It is the current stream in every step, so
    // that all work is in order with what the engine puts there.
    std::optional<c10::Stream> stream;
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
  bool complete(rust::Str error, bool as_thrown) const override;
  void notify() const override { work_->complete_future(); }

 private:
  // Runs a step, keeps what it throws, and lets nothing but a std::exception out.
  void run(const std::function<void()>& step) const;

  const c10::intrusive_ptr<GflowWork> work_;
  const Steps steps_;
  std::optional<at::ThreadLocalState> caller_;
  // The collective on the inner backend. Only the thread that runs the operation touches it.
  mutable c10::intrusive_ptr<c10d::Work> inner_;
  // What a step threw, so that the user gets the exception itself and not only its text. Locked,
  // because an abort may complete the operation from another thread.
  mutable std::mutex mutex_;
  mutable std::exception_ptr thrown_;
  mutable bool broke_connection_ = false;
};

}  // namespace gflow
