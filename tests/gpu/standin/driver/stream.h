// A stream: a thread that does what is queued on it, one after the other, and nothing else orders
// it. A wait for an event is one more thing in the queue.

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

// Something to do on a stream.
struct Work {
  std::string name;
  std::vector<Access> accesses;
  std::function<void()> run;
  // Copies reach the memory of all devices, everything else that of its own only.
  bool reaches_all_devices = false;
  // Done even if the device has had a fault: waits and records, which others depend on.
  bool is_only_order = false;
};

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  static std::shared_ptr<Stream> start(Device& device, int priority);

  // Queues it. `in_order` is called with the clock of the stream, when all that was queued before
  // is in it and the work itself is too, with the order held.
  void submit(Work work, const std::function<void(VectorClock&)>& in_order = nullptr);

  // Waits for all that has been queued so far. A frozen stream lets nobody through.
  void wait();
  // The same without saying that the host waited, for what only happens to wait.
  void let_run_out();
  bool is_done();
  // No more work will come; the thread ends when it has done all.
  void end();

  void freeze(bool frozen);

  Device& device() const { return device_; }
  int priority() const { return priority_; }
  // Streams are numbered through all devices.
  size_t number() const { return number_; }
  std::atomic<bool> is_capturing{false};

 private:
  Stream(Device& device, int priority);
  void live();
  void perform(Work& work);
  // What has been queued so far: how much, and as a clock.
  std::pair<uint64_t, VectorClock> so_far();
  void wait_until_finished(uint64_t count);

  Device& device_;
  const int priority_;
  const size_t number_;
  // With the order held.
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
// Whether the calling thread is that of a stream, which must not call CUDA.
bool is_stream_thread();

}  // namespace standin
