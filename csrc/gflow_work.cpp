#include "gflow_work.h"

#include <ATen/core/jit_type.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <thread>

namespace gflow {

GflowWork::GflowWork(int rank, c10d::OpType kind, const char* title, TensorLists results,
                     std::chrono::milliseconds timeout,
                     const std::optional<std::vector<at::Tensor>>& inputs,
                     std::optional<c10::Stream> lane)
    : c10d::Work(rank, kind, title, inputs),
      results_(std::move(results)),
      timeout_(timeout),
      lane_(lane) {}

GflowWork::~GflowWork() {
  if (!lane_) return;
  try {
    // Whatever thread this is, events are given back on their own device: on another one torch
    // would begin to use that as well, at the cost of some of its memory.
    const c10::DeviceGuard on_device(lane_->device());
    end_.reset();
    future_.reset();
  } catch (const std::exception&) {
    // The device has failed; there is nothing left to give back.
  }
}

bool GflowWork::wait(std::chrono::milliseconds timeout) {
  const auto start = std::chrono::steady_clock::now();
  if (before_wait_ && !is_settled()) before_wait_();
  if (limits_waits_ && timeout == kNoTimeout && !settled_within(timeout_)) {
    C10_THROW_ERROR(DistBackendError,
                    c10::str("gflow: Timed out after ", timeout_.count(), " ms, waiting for ",
                             c10d::opTypeToString(opType_),
                             ": the other rank did not take part. It can still be waited for"));
  }
  // Ends with synchronize().
  const bool done = c10d::Work::wait(timeout);
  look_at_device();
  if (timeout != kNoTimeout) await_device(start + timeout);
  // Waiters are released before the Future is completed; whoever waited may look at it next.
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    future = future_;
  }
  if (future) future->wait();
  return done;
}

bool GflowWork::is_settled() {
  std::lock_guard<std::mutex> lock(mutex_);
  return completed_;
}

bool GflowWork::settled_within(std::chrono::milliseconds limit) {
  std::unique_lock<std::mutex> lock(mutex_);
  return cv_.wait_for(lock, limit, [&] { return completed_; });
}

bool GflowWork::isCompleted() {
  if (!is_settled()) return false;
  return exception_ || is_done_on_device();
}

void GflowWork::mark_end_on_device() {
  end_.emplace(lane_->device_type());
  end_->record(*lane_);
}

void GflowWork::synchronize() {
  if (!end_) return;
  end_->block(c10::impl::VirtualGuardImpl(lane_->device_type()).getStream(lane_->device()));
}

bool GflowWork::look_at_device() {
  if (was_done_) return true;
  // In this order: a group fails before it aborts what is on its devices, and an abort reaches the
  // event too. So an event that was reached before a group that has not failed was reached in
  // order.
  const bool done = is_done_on_device();
  if (check_ && end_) check_();
  if (done) was_done_ = true;
  return done;
}

void GflowWork::await_device(std::chrono::steady_clock::time_point deadline) {
  // An event can only be asked, or be waited for without a limit.
  constexpr auto kPause = std::chrono::milliseconds(1);
  while (!look_at_device()) {
    if (std::chrono::steady_clock::now() >= deadline) {
      C10_THROW_ERROR(DistBackendError,
                      c10::str("gflow: Timed out, waiting for ", c10d::opTypeToString(opType_),
                               " #", seq_.load(), ", which is under way on ", lane_->device()));
    }
    std::this_thread::sleep_for(kPause);
  }
}

std::vector<at::Tensor> GflowWork::result() {
  TORCH_CHECK(is_settled(), "gflow: result() before the collective is complete: wait() first");
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
    std::vector<c10::Device> devices;
    if (lane_) devices.push_back(lane_->device());
    future_ = c10::make_intrusive<c10::ivalue::Future>(type, std::move(devices));
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
  if (exception_) return future.setErrorIfNeeded(exception_);
  try {
    // The Future takes the end of the current stream for its own, and has callbacks wait for it.
    const c10::OptionalStreamGuard on_lane(lane_);
    // A device that has failed shows here. In the Future it would show too late: that counts as
    // completed then, but whoever sleeps there is never woken.
    if (lane_) c10::Event(lane_->device_type()).record(*lane_);
    if (results_.size() > 1) {
      future.markCompleted(c10::IValue(results_));
    } else {
      future.markCompleted(
          c10::IValue(results_.empty() ? std::vector<at::Tensor>() : results_.front()));
    }
  } catch (const std::exception&) {
    future.setErrorIfNeeded(std::current_exception());
  }
}

}  // namespace gflow
