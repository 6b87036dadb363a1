// TorchOperation: a collective on torch tensors as the engine sees it. It keeps the tensors alive
// until it has run, and hands the outcome to the GflowWork that the caller holds.
#pragma once

#include <ATen/ThreadLocalState.h>

#include <functional>
#include <mutex>

#include "bridge/operation.h"
#include "gflow_work.h"

namespace gflow {

class TorchOperation : public Operation {
 public:
  // `body` moves the data; it runs on the engine's thread, with the grad mode of this thread.
  TorchOperation(c10::intrusive_ptr<GflowWork> work, std::function<void()> body)
      : work_(std::move(work)), body_(std::move(body)) {}

  void run() const override;
  bool settle(rust::Str error, bool as_thrown) const override;
  void notify() const override { work_->complete_future(); }

 private:
  const c10::intrusive_ptr<GflowWork> work_;
  const std::function<void()> body_;
  const at::ThreadLocalState caller_;
  // What run() threw, so that the user gets the exception itself and not only its text. Locked,
  // because an abort may settle from another thread while the worker runs.
  mutable std::mutex mutex_;
  mutable std::exception_ptr thrown_;
};

}  // namespace gflow
