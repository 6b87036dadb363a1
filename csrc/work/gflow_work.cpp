// Waiting on the host and on the device, and the Future.
#include "work/gflow_work.h"

#include <ATen/core/jit_type.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <thread>

namespace gflow {

GflowWork::GflowWork(int rank, c10d::OpType kind, const char* title, TensorLists results,
                     std::chrono::milliseconds timeout, const std::optional<Tensors>& inputs,
                     std::optional<c10::Stream> engine_stream)
    : c10d::Work(rank, kind, title, inputs),
      results_(std::move(results)),
      timeout_(timeout),
      engine_stream_(engine_stream) {}

GflowWork::~GflowWork() {
  if (!engine_stream_) return;
  try {
    // Free events on their own device, whatever thread this is: otherwise torch would initialize
    // the current device as well, which costs memory there.
    const c10::DeviceGuard on_device(engine_stream_->device());
    end_.reset();
    future_.reset();
  } catch (const std::exception&) {
    // The device has failed; there is nothing left to free.
  }
}

bool GflowWork::wait(std::chrono::milliseconds timeout) {
  const auto start = std::chrono::steady_clock::now();
  if (before_wait_ && !is_released()) before_wait_();
  if (limits_waits_ && timeout == kNoTimeout && !is_released_within(timeout_)) {
    C10_THROW_ERROR(DistBackendError,
                    c10::str("gflow: Timed out after ", timeout_.count(), " ms, waiting for ",
                             c10d::opTypeToString(opType_),
                             ": the other rank did not take part. It can still be waited for"));
  }
  // Ends with synchronize().
  const bool done = c10d::Work::wait(timeout);
  poll_device();
  if (timeout != kNoTimeout) await_device(start + timeout);
  // Waiters are released before the Future is completed, and callers may look at it next.
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    future = future_;
  }
  if (future) future->wait();
  return done;
}

bool GflowWork::is_released() {
  std::lock_guard<std::mutex> lock(mutex_);
  return completed_;
}

bool GflowWork::is_released_within(std::chrono::milliseconds limit) {
  std::unique_lock<std::mutex> lock(mutex_);
  return cv_.wait_for(lock, limit, [&] { return completed_; });
}

bool GflowWork::isCompleted() {
  if (!is_released()) return false;
  return exception_ || is_done_on_device();
}

void GflowWork::record_end_on_device() {
  end_.emplace(engine_stream_->device_type());
  end_->record(*engine_stream_);
}

void GflowWork::synchronize() {
  if (!end_) return;
  end_->block(c10::impl::VirtualGuardImpl(engine_stream_->device_type())
                  .getStream(engine_stream_->device()));
}

bool GflowWork::poll_device() {
  if (was_done_) return true;
  // In this order: a group is marked as failed before its work on devices is aborted, and an abort
  // triggers the event too. So if the group is healthy after the event, the device really finished.
  const bool done = is_done_on_device();
  if (check_ && end_) check_();
  if (done) was_done_ = true;
  return done;
}

void GflowWork::await_device(std::chrono::steady_clock::time_point deadline) {
  // An event can be polled, or waited for without a limit.
  constexpr auto kPause = std::chrono::milliseconds(1);
  while (!poll_device()) {
    if (std::chrono::steady_clock::now() >= deadline) {
      C10_THROW_ERROR(
          DistBackendError,
          c10::str("gflow: Timed out, waiting for ", c10d::opTypeToString(opType_), " #",
                   seq_.load(), ", which is under way on ", engine_stream_->device()));
    }
    std::this_thread::sleep_for(kPause);
  }
}

Tensors GflowWork::result() {
  TORCH_CHECK(is_released(), "gflow: result() before the collective is complete: wait() first");
  TORCH_CHECK(results_.size() <= 1,
              "gflow: this collective has several lists of results, which "
              "result() cannot return: use get_future()");
  return results_.empty() ? Tensors() : results_.front();
}

c10::intrusive_ptr<c10::ivalue::Future> GflowWork::getFuture() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  bool has_outcome;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (future_) return future_;
    auto list = c10::ListType::create(c10::TensorType::get());
    c10::TypePtr type = list;
    if (results_.size() > 1) type = c10::ListType::create(list);
    std::vector<c10::Device> devices;
    if (engine_stream_) devices.push_back(engine_stream_->device());
    future_ = c10::make_intrusive<c10::ivalue::Future>(type, std::move(devices));
    future = future_;
    has_outcome = outcome_is_set_;
  }
  if (has_outcome) fill(*future);
  return future;
}

bool GflowWork::complete(std::exception_ptr error) {
  bool has_future;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (outcome_is_set_) return false;
    outcome_is_set_ = true;
    exception_ = error;
    // From now on getFuture() completes the Future that it makes.
    has_future = future_ != nullptr;
  }
  finish(error);
  return has_future;
}

void GflowWork::complete_future() { fill(*future_); }

void GflowWork::fill(c10::ivalue::Future& future) const {
  if (exception_) return future.setErrorIfNeeded(exception_);
  try {
    // The Future records the current stream, and makes its callbacks wait for it.
    const c10::OptionalStreamGuard on_stream(engine_stream_);
    // Detects a failed device. The Future would notice too late: it would count as completed
    // already, but its waiters would never be woken.
    if (engine_stream_) c10::Event(engine_stream_->device_type()).record(*engine_stream_);
    if (results_.size() > 1) {
      future.markCompleted(c10::IValue(results_));
    } else {
      future.markCompleted(c10::IValue(results_.empty() ? Tensors() : results_.front()));
    }
  } catch (const std::exception&) {
    future.setErrorIfNeeded(std::current_exception());
  }
}

}  // namespace gflow
