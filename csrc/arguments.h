// What is wrong with the arguments of a collective on this rank, in words; empty if nothing is.
//
// The inner backend would find out too, but only after the ranks have agreed, and on this rank
// alone: the others would wait for it until their timeout. So each rank looks first and tells the
// others.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace gflow::arguments {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<std::vector<at::Tensor>>;

// A collective that reduces or broadcasts one tensor in place.
std::string check_in_place(const Tensors& tensors);

// `lists` must be one list with a tensor like `own` for each rank.
std::string check_one_per_rank(const char* what, const TensorLists& lists, const Tensors& own,
                               int world);

// `whole` must be `world` times as large as `part`, and of the same type.
std::string check_parts(const char* whole_is, const Tensors& wholes, const Tensors& parts,
                        int world);

// The coalesced all_gather: for each rank a list like `inputs`.
std::string check_lists_per_rank(const TensorLists& lists, const Tensors& inputs, int world);

// The two forms of all_to_all.
std::string check_lists(const Tensors& outputs, const Tensors& inputs, int world);
std::string check_splits(const char* what, const at::Tensor& tensor,
                         const std::vector<int64_t>& splits, int world);

}  // namespace gflow::arguments
