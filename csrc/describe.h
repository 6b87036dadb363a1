// From torch's arguments to the description of a call that the ranks compare.
#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "rust/bridge/types.rs.h"

namespace gflow {

// Torch 2.13 has the collective but no name for it; the number is that of later versions.
constexpr auto kAllGatherIntoTensorCoalesced = static_cast<c10d::OpType>(20);

// A call on `tensors`: those which must have the same type and size on every rank.
CallDescription describe(c10d::OpType kind, const std::vector<at::Tensor>& tensors);

// The same, of an all-to-all: sizes may differ by rank, but what one sends the other must expect.
CallDescription describe_all_to_all(const std::vector<at::Tensor>& outputs,
                                    const std::vector<at::Tensor>& inputs);
CallDescription describe_all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                                           const std::vector<int64_t>& output_splits,
                                           const std::vector<int64_t>& input_splits, int world);

}  // namespace gflow
