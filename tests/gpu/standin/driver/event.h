// An event: marks everything that a stream has queued so far. Recording it again moves the mark,
// but existing waits still wait for the old one.

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

  // The work that is complete once this is set. Fixed before the record is shared.
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
  // Doesn't wait if the event was never recorded.
  void make_wait(Stream& stream);
  // The latest recording, or null.
  std::shared_ptr<Record> last();

  Device& device;
  const bool has_time;

 private:
  std::mutex mutex_;
  std::shared_ptr<Record> last_;
};

}  // namespace standin
