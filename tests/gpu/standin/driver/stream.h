// A stream: a thread that runs its queue in order. Streams aren't ordered with each other; waiting
// for an event is just another item in the queue.

#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "access.h"
#include "clock.h"
#include "history.h"

namespace standin {

class Device;

// An item of a stream's queue.
struct Work {
  std::string name;
  std::vector<Access> accesses;
  std::function<void()> run;
  // Copies can reach the memory of all devices, other work only that of its own.
  bool reaches_all_devices = false;
  // Runs even after a device fault: event waits and records, which others depend on.
  bool is_only_order = false;
};

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  static std::shared_ptr<Stream> start(Device& device, int priority);

  // Queues the work. Calls `in_order` with the order lock held and the stream's clock, which
  // already includes this work.
  void submit(Work work, const std::function<void(VectorClock&)>& in_order = nullptr);

  // Waits for everything queued so far. Never returns while the stream is frozen.
  void wait();
  // The same, but doesn't count as a host wait for the race checker.
  void drain();
  bool is_done();
  // No more work will follow; the thread exits once the queue is empty.
  void end();

  void freeze(bool frozen);

  Device& device() const { return device_; }
  int priority() const { return priority_; }
  // Unique across all devices.
  size_t number() const { return number_; }
  std::atomic<bool> is_capturing{false};

 private:
  Stream(Device& device, int priority);
  void run_queue();
  void perform(Work& work);
  // The count of work queued so far, and the clock at that point.
  std::pair<uint64_t, VectorClock> snapshot();
  void wait_until_finished(uint64_t count);

  Device& device_;
  const int priority_;
  const size_t number_;
  // Guarded by the order lock.
  VectorClock clock_;
  Tick last_tick_ = 0;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> queue_;
  uint64_t submitted_ = 0;
  uint64_t finished_ = 0;
  bool is_frozen_ = false;
  bool has_ended_ = false;
};

void delay_streams(int microseconds);
uint64_t queued_so_far();
// Whether the calling thread belongs to a stream. Such a thread must not call CUDA.
bool is_stream_thread();

}  // namespace standin
