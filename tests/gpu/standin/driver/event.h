// An event: a name for "all that this stream has queued so far". Recording it again gives it a new
// meaning; who waits for the old one still waits for the old one.

#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "clock.h"
#include "stream.h"

namespace standin {

// One recording.
class Record {
 public:
  void set();
  void wait();
  bool is_set();
  std::chrono::steady_clock::time_point time();

  // What is over when it is set. Fixed before anybody else sees the record.
  VectorClock clock;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_set_ = false;
  std::chrono::steady_clock::time_point time_;
};

class Event {
 public:
  Event(Device& device, bool has_time) : device(device), has_time(has_time) {}

  void record_on(Stream& stream);
  // Of an event that was never recorded nothing is waited for.
  void make_wait(Stream& stream);
  // The last recording, nothing if there is none.
  std::shared_ptr<Record> last();

  Device& device;
  const bool has_time;

 private:
  std::mutex mutex_;
  std::shared_ptr<Record> last_;
};

}  // namespace standin
