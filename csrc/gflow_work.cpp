#include "gflow_work.h"

#include <ATen/core/jit_type.h>

namespace gflow {

GflowWork::GflowWork(int rank, c10d::OpType kind, const char* title, TensorLists results,
                     std::chrono::milliseconds timeout,
                     const std::optional<std::vector<at::Tensor>>& inputs)
    : c10d::Work(rank, kind, title, inputs), results_(std::move(results)), timeout_(timeout) {}

bool GflowWork::wait(std::chrono::milliseconds timeout) {
  if (before_wait_ && !isCompleted()) before_wait_();
  if (limits_waits_ && timeout == kNoTimeout && !completed_within(timeout_)) {
    C10_THROW_ERROR(DistBackendError,
                    c10::str("gflow: Timed out after ", timeout_.count(), " ms, waiting for ",
                             c10d::opTypeToString(opType_),
                             ": the other rank did not take part. It can still be waited for"));
  }
  const bool done = c10d::Work::wait(timeout);
  // Waiters are released before the Future is completed; whoever waited may look at it next.
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    future = future_;
  }
  if (future) future->wait();
  return done;
}

bool GflowWork::completed_within(std::chrono::milliseconds limit) {
  std::unique_lock<std::mutex> lock(mutex_);
  return cv_.wait_for(lock, limit, [&] { return completed_; });
}

std::vector<at::Tensor> GflowWork::result() {
  TORCH_CHECK(isCompleted(), "gflow: result() before the collective is complete: wait() first");
  TORCH_CHECK(results_.size() <= 1,
              "gflow: this collective has several lists of results, which "
              "result() cannot return: use get_future()");
  return results_.empty() ? std::vector<at::Tensor>() : results_.front();
}

c10::intrusive_ptr<c10::ivalue::Future> GflowWork::getFuture() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  bool over;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (future_) return future_;
    auto list = c10::ListType::create(c10::TensorType::get());
    c10::TypePtr type = list;
    if (results_.size() > 1) type = c10::ListType::create(list);
    future_ = c10::make_intrusive<c10::ivalue::Future>(type);
    future = future_;
    over = settled_;
  }
  if (over) complete(*future);
  return future;
}

bool GflowWork::settle(std::exception_ptr error) {
  bool future_waits;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (settled_) return false;
    settled_ = true;
    exception_ = error;
    // Whoever asks from now on completes the Future it makes.
    future_waits = future_ != nullptr;
  }
  finish(error);
  return future_waits;
}

void GflowWork::complete_future() { complete(*future_); }

void GflowWork::complete(c10::ivalue::Future& future) const {
  if (exception_) {
    future.setErrorIfNeeded(exception_);
  } else if (results_.size() > 1) {
    future.markCompleted(c10::IValue(results_));
  } else {
    future.markCompleted(
        c10::IValue(results_.empty() ? std::vector<at::Tensor>() : results_.front()));
  }
}

}  // namespace gflow
