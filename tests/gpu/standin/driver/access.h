// An access: a range of device memory that work on a stream reads or writes.

#pragma once

#include <cstddef>
#include <cstdint>

namespace standin {

struct Access {
  uint64_t address = 0;
  size_t bytes = 0;
  bool writes = false;
};

inline Access reading(uint64_t address, size_t bytes) { return {address, bytes, false}; }
inline Access writing(uint64_t address, size_t bytes) { return {address, bytes, true}; }

}  // namespace standin
