// Reductions: one operation on one type of element, on memory of the host.
//
// 16-bit floats are added as 32-bit ones, and rounded whenever they are stored, to nearest, ties to
// even. Which order numbers are combined in is the caller's business.

#pragma once

#include <nccl.h>

#include <cstddef>
#include <vector>

namespace standin {

// 0 for a type that is not known here.
size_t element_bytes(ncclDataType_t type);
bool is_known(ncclRedOp_t operation);

struct Reduction {
  ncclDataType_t type;
  ncclRedOp_t operation;
  int ranks;

  // own = incoming op own, stored; `finish` if all contributions are in it then.
  void combine(void* own, const void* incoming, size_t elements, bool finish) const;
  // From left to right, stored once.
  void fold(void* result, const std::vector<const void*>& contributions, size_t elements) const;
};

}  // namespace standin
