// Checks the arguments of a collective on this rank. Each function returns what is wrong with them,
// in words, or an empty string.
//
// The inner backend would notice too, but only after the ranks have agreed, and on this rank alone:
// the others would wait for it until they time out. So each rank checks first and tells the others.
#pragma once

#include <string>

#include "tensors/tensor_lists.h"

namespace gflow::arguments {

// A collective that reduces or broadcasts one tensor in place.
std::string check_in_place(const Tensors& tensors);

// `lists` must be one list, with a tensor for each rank that is like `own`, which is one tensor.
std::string check_one_per_rank(const char* what, const TensorLists& lists, const Tensors& own,
                               int world);

// Each of `wholes` must be `world` times as large as its part, and of the same type.
std::string check_parts(const char* whole_is, const Tensors& wholes, const Tensors& parts,
                        int world);

// For a coalesced all_gather: a list like `inputs` for each rank.
std::string check_lists_per_rank(const TensorLists& lists, const Tensors& inputs, int world);

// For the two forms of all_to_all.
std::string check_lists(const Tensors& outputs, const Tensors& inputs, int world);
std::string check_splits(const char* what, const at::Tensor& tensor,
                         const std::vector<int64_t>& splits, int world);

}  // namespace gflow::arguments
