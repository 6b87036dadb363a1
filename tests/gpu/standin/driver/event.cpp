#include "event.h"

namespace standin {

void Record::set() {
  std::lock_guard lock(mutex_);
  is_set_ = true;
  time_ = std::chrono::steady_clock::now();
  changed_.notify_all();
}

void Record::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return is_set_; });
}

bool Record::is_set() {
  std::lock_guard lock(mutex_);
  return is_set_;
}

std::chrono::steady_clock::time_point Record::time() {
  std::lock_guard lock(mutex_);
  return time_;
}

void Event::record_on(Stream& stream) {
  auto record = std::make_shared<Record>();
  Work work{
      .name = "a record of an event", .run = [record] { record->set(); }, .is_only_order = true};
  stream.submit(std::move(work), [&](VectorClock& clock) { record->clock = clock; });
  std::lock_guard lock(mutex_);
  last_ = std::move(record);
}

void Event::make_wait(Stream& stream) {
  auto record = last();
  if (!record) {
    return;
  }
  Work work{
      .name = "a wait for an event", .run = [record] { record->wait(); }, .is_only_order = true};
  stream.submit(std::move(work), [&](VectorClock& clock) { clock.join(record->clock); });
}

std::shared_ptr<Record> Event::last() {
  std::lock_guard lock(mutex_);
  return last_;
}

}  // namespace standin
