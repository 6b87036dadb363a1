#include "order.h"

namespace standin {

namespace {

VectorClock& waited_for() {
  static auto* clock = new VectorClock;
  return *clock;
}

thread_local VectorClock told_of;

}  // namespace

std::mutex& order() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

VectorClock known_to_host() {
  VectorClock known = waited_for();
  known.join(told_of);
  return known;
}

void host_has_waited_for(const VectorClock& clock) {
  std::lock_guard lock(order());
  waited_for().join(clock);
}

void host_was_told_of(const VectorClock& clock) { told_of.join(clock); }

}  // namespace standin
