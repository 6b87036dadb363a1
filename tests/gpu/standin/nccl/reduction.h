// Reductions: one operation on one element type, in host memory.
//
// 16-bit floats are added in f32 and rounded whenever they are stored, to nearest, ties to even.
// The caller chooses the order of summation.

#pragma once

#include <nccl.h>

#include <cstddef>
#include <vector>

namespace standin {

// 0 for an unsupported type.
size_t element_bytes(ncclDataType_t type);
bool is_known(ncclRedOp_t operation);

struct Reduction {
  ncclDataType_t type;
  ncclRedOp_t operation;
  int ranks;

  // Stores `incoming op own` in `own`. Set `finish` when this is the last contribution.
  void combine(void* own, const void* incoming, size_t elements, bool finish) const;
  // Folds from left to right, and rounds once.
  void fold(void* result, const std::vector<const void*>& contributions, size_t elements) const;
};

}  // namespace standin
