// The access history of one allocation: the last work that touched each part of it, and when. It
// tells whether a new access is ordered after all earlier conflicting ones.
//
// Accesses must be added in an order that events allow, such as the order of queueing. Then keeping
// the last write is enough: work not ordered after an earlier write isn't ordered after the last
// one either.

#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "clock.h"

namespace standin {

// Identifies a piece of work and its position in the order.
struct Moment {
  size_t stream = 0;
  Tick tick = 0;
  // The name used in reports.
  std::shared_ptr<const std::string> name;
};

class History {
 public:
  struct Conflict {
    Moment earlier;
    bool earlier_writes = false;
    size_t start = 0;
    size_t end = 0;
  };

  // Records an access to [start, end) by `now`, which is ordered after everything in `clock`.
  // Returns one conflict, if there is any.
  std::optional<Conflict> add(size_t start, size_t end, bool writes, const Moment& now,
                              const VectorClock& clock);

 private:
  struct Segment {
    size_t end = 0;
    std::optional<Moment> write;
    // The last read of each stream since that write.
    std::vector<Moment> reads;
  };

  // Splits the segment that contains `at`, so that one begins there.
  void cut(size_t at);

  // Keyed by start; segments don't overlap.
  std::map<size_t, Segment> segments_;
};

}  // namespace standin
