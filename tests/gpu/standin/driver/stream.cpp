#include "stream.h"

#include <pthread.h>

#include <chrono>
#include <cstdlib>
#include <random>
#include <thread>
#include <utility>

#include "device.h"
#include "order.h"
#include "reports.h"

namespace standin {

namespace {

std::atomic<int> longest_delay{[] {
  const char* given = std::getenv("STANDIN_DELAY");
  return given ? std::atoi(given) : 0;
}()};
std::atomic<uint64_t> queued{0};
std::atomic<size_t> next_number{0};
thread_local bool this_is_a_stream = false;

void random_delay() {
  int longest = longest_delay;
  if (longest <= 0) {
    return;
  }
  thread_local std::minstd_rand random(std::random_device{}());
  std::uniform_int_distribution<int> delays(0, longest);
  std::this_thread::sleep_for(std::chrono::microseconds(delays(random)));
}

std::string describe(const Moment& moment, bool writes) {
  return *moment.name + " on stream " + std::to_string(moment.stream) +
         (writes ? " writes" : " reads");
}

}  // namespace

void delay_streams(int microseconds) { longest_delay = microseconds; }
uint64_t queued_so_far() { return queued; }
bool is_stream_thread() { return this_is_a_stream; }

Stream::Stream(Device& device, int priority)
    : device_(device), priority_(priority), number_(next_number++) {}

std::shared_ptr<Stream> Stream::start(Device& device, int priority) {
  std::shared_ptr<Stream> stream(new Stream(device, priority));
  std::thread thread([stream] { stream->run_queue(); });
  pthread_setname_np(thread.native_handle(), "standin-stream");
  // Never joined: a stream that waits forever must not keep the process from exiting.
  thread.detach();
  return stream;
}

void Stream::submit(Work work, const std::function<void(VectorClock&)>& in_order) {
  std::lock_guard lock(order());
  ++queued;
  clock_.join(known_to_host());
  Moment now{number_, ++last_tick_, std::make_shared<const std::string>(work.name)};
  bool is_reported = false;
  for (const Access& access : work.accesses) {
    auto allocation = device_.memory().find(access.address);
    if (!allocation || access.bytes == 0) {
      continue;  // An invalid access; reported when the work runs.
    }
    size_t start = access.address - allocation->address;
    auto conflict =
        allocation->history.add(start, start + access.bytes, access.writes, now, clock_);
    if (conflict && !std::exchange(is_reported, true)) {
      report(Wrong::Race, describe(now, access.writes) + " and " +
                              describe(conflict->earlier, conflict->earlier_writes) + " bytes " +
                              std::to_string(conflict->start) + " to " +
                              std::to_string(conflict->end) + " of " +
                              std::to_string(allocation->bytes) + " on device " +
                              std::to_string(allocation->device) + ", with no event between them");
    }
  }
  clock_.see(number_, now.tick);
  if (in_order) {
    in_order(clock_);
  }
  std::lock_guard queue_lock(mutex_);
  queue_.push_back(std::move(work));
  ++submitted_;
  changed_.notify_all();
}

void Stream::run_queue() {
  this_is_a_stream = true;
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return !is_frozen_ && (!queue_.empty() || has_ended_); });
    if (queue_.empty()) {
      return;
    }
    Work work = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    random_delay();
    lock.lock();
    changed_.wait(lock, [this] { return !is_frozen_; });
    lock.unlock();
    perform(work);
    // Drop what the work owns before reporting it finished; it may hold the last reference.
    work = {};
    lock.lock();
    // If the stream was frozen meanwhile, the work hasn't finished yet.
    changed_.wait(lock, [this] { return !is_frozen_; });
    ++finished_;
    changed_.notify_all();
  }
}

void Stream::perform(Work& work) {
  if (!work.is_only_order && device_.fault() != CUDA_SUCCESS) {
    return;
  }
  for (const Access& access : work.accesses) {
    int device = work.reaches_all_devices ? -1 : device_.index();
    std::string problem = device_.memory().problem_with(access, device);
    if (!problem.empty()) {
      report(Wrong::Fault, work.name + " on stream " + std::to_string(number_) + " of device " +
                               std::to_string(device_.index()) +
                               (access.writes ? " writes " : " reads ") + problem);
      device_.fail(CUDA_ERROR_ILLEGAL_ADDRESS);
      return;
    }
  }
  work.run();
}

std::pair<uint64_t, VectorClock> Stream::snapshot() {
  std::lock_guard lock(order());
  std::lock_guard queue_lock(mutex_);
  return {submitted_, clock_};
}

void Stream::wait_until_finished(uint64_t count) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return finished_ >= count; });
}

void Stream::wait() {
  auto [count, clock] = snapshot();
  wait_until_finished(count);
  host_has_waited_for(clock);
}

void Stream::drain() { wait_until_finished(snapshot().first); }

bool Stream::is_done() {
  auto [count, clock] = snapshot();
  std::unique_lock lock(mutex_);
  if (finished_ < count) {
    return false;
  }
  lock.unlock();
  host_was_told_of(clock);
  return true;
}

void Stream::end() {
  std::lock_guard lock(mutex_);
  has_ended_ = true;
  changed_.notify_all();
}

void Stream::freeze(bool frozen) {
  std::lock_guard lock(mutex_);
  is_frozen_ = frozen;
  changed_.notify_all();
}

}  // namespace standin
