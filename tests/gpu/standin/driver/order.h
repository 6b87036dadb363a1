// The order of work: the lock under which work is queued, and what the host knows to be complete.
//
// Whether two pieces of work are ordered is decided when they are queued, from streams, events and
// host waits alone, never from when they happened to run.

#pragma once

#include <mutex>

#include "clock.h"

namespace standin {

// Guards clocks and histories.
std::mutex& order();

// What the calling thread knows to be complete: everything that any thread has waited for (threads
// can tell each other), and what this thread has learned from queries. A query's answer must not
// count for other threads: that would hide a missing wait whenever another thread polls. Call with
// the order lock held.
VectorClock known_to_host();

// A host thread has waited for all of this.
void host_has_waited_for(const VectorClock& clock);
// A query told the calling thread that all of this is complete.
void host_was_told_of(const VectorClock& clock);

}  // namespace standin
