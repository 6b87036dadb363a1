// Turns torch's arguments into the description of a call, which the ranks compare.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "rust/bridge/types.rs.h"
#include "tensors/tensor_lists.h"

namespace gflow {

// Torch 2.13 has the collective but no name for it; later versions give it this number.
constexpr auto kAllGatherIntoTensorCoalesced = static_cast<c10d::OpType>(20);

// A call whose `tensors` must have the same types and sizes on every rank.
CallDescription describe(c10d::OpType kind, const Tensors& tensors);

// An all-to-all: sizes may differ between ranks, but what one sends the other must expect.
CallDescription describe_all_to_all(const Tensors& outputs, const Tensors& inputs);
CallDescription describe_all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                                           const std::vector<int64_t>& output_splits,
                                           const std::vector<int64_t>& input_splits, int world);

}  // namespace gflow
