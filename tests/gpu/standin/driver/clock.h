// A vector clock: how much of each stream's work is known to be complete.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace standin {

// Numbers the pieces of work on a stream, from 1.
using Tick = uint64_t;

class VectorClock {
 public:
  bool has_seen(size_t stream, Tick tick) const {
    return stream < seen_.size() && seen_[stream] >= tick;
  }

  void see(size_t stream, Tick tick) {
    if (stream >= seen_.size()) {
      seen_.resize(stream + 1);
    }
    seen_[stream] = std::max(seen_[stream], tick);
  }

  void join(const VectorClock& other) {
    seen_.resize(std::max(seen_.size(), other.seen_.size()));
    for (size_t stream = 0; stream < other.seen_.size(); ++stream) {
      seen_[stream] = std::max(seen_[stream], other.seen_[stream]);
    }
  }

 private:
  std::vector<Tick> seen_;
};

}  // namespace standin
