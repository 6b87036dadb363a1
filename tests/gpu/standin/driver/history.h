// The history of one allocation: who touched which part of it last, and when. It tells whether a
// new access is ordered after all earlier ones that matter.
//
// Accesses must be given in an order that events allow, such as the one in which they were queued.
// Then the last write is enough: whoever is not ordered after an earlier one is not ordered after
// the last one either.

#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "clock.h"

namespace standin {

// A piece of work as far as its place in the order goes.
struct Moment {
  size_t stream = 0;
  Tick tick = 0;
  // What it is, for reports.
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

  // Takes note of an access to [start, end) by `now`, which comes after all that `clock` has seen.
  // Returns one conflict, if there is any.
  std::optional<Conflict> add(size_t start, size_t end, bool writes, const Moment& now,
                              const VectorClock& clock);

 private:
  struct Segment {
    size_t end = 0;
    std::optional<Moment> write;
    // Since that write, the last one of every stream.
    std::vector<Moment> reads;
  };

  // Makes a segment begin here, if there is one around.
  void cut(size_t at);

  // By where they start; they do not overlap.
  std::map<size_t, Segment> segments_;
};

}  // namespace standin
