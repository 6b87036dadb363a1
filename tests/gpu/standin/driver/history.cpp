#include "history.h"

namespace standin {

void History::cut(size_t at) {
  auto after = segments_.upper_bound(at);
  if (after == segments_.begin()) {
    return;
  }
  auto around = std::prev(after);
  if (around->first == at || around->second.end <= at) {
    return;
  }
  Segment rest = around->second;
  around->second.end = at;
  segments_.emplace(at, std::move(rest));
}

std::optional<History::Conflict> History::add(size_t start, size_t end, bool writes,
                                              const Moment& now, const VectorClock& clock) {
  std::optional<Conflict> conflict;
  if (start >= end) {
    return conflict;
  }
  cut(start);
  cut(end);
  auto is_unordered = [&](const Moment& earlier) {
    return earlier.stream != now.stream && !clock.has_seen(earlier.stream, earlier.tick);
  };
  size_t at = start;
  while (at < end) {
    auto segment = segments_.lower_bound(at);
    if (segment == segments_.end() || segment->first > at) {
      size_t gap_end = segment == segments_.end() ? end : std::min(end, segment->first);
      segment = segments_.emplace(at, Segment{gap_end, {}, {}}).first;
    }
    auto& [segment_start, past] = *segment;
    if (past.write && is_unordered(*past.write)) {
      conflict = Conflict{*past.write, true, segment_start, past.end};
    }
    if (writes) {
      for (const Moment& read : past.reads) {
        if (is_unordered(read)) {
          conflict = Conflict{read, false, segment_start, past.end};
        }
      }
      past.write = now;
      past.reads.clear();
    } else {
      std::erase_if(past.reads, [&](const Moment& read) { return read.stream == now.stream; });
      past.reads.push_back(now);
    }
    at = past.end;
  }
  return conflict;
}

}  // namespace standin
