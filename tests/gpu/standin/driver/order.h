// The order of work: one lock under which work is queued, and what the host knows to be over.
//
// Whether two pieces of work are ordered is decided when they are queued, from streams, events and
// waits of the host alone, never from when they happened to run.

#pragma once

#include <mutex>

#include "clock.h"

namespace standin {

// Held while clocks and histories are looked at.
std::mutex& order();

// What the calling thread knows to be over, with the order held: what any thread has waited for,
// since threads tell each other, and what this thread has found done by asking. An answer to one
// thread must not count for another: that would hide a missing wait whenever somebody polls.
VectorClock known_to_host();

// Somebody has waited for all of this.
void host_has_waited_for(const VectorClock& clock);
// The calling thread was told that all of this is over.
void host_was_told_of(const VectorClock& clock);

}  // namespace standin
