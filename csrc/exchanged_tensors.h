// The tensors of one collective, from the call until it is over.
//
// They are kept alive, and made such that they can be exchanged, when the collective's turn comes
// and not before: the user's program may still be writing them when it queues a collective behind
// another. Only whoever runs the collective calls the methods, one after the other.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>
#include <vector>

#include "contiguous.h"
#include "rust/bridge/types.rs.h"

namespace gflow {

class ExchangedTensors {
 public:
  using TensorLists = std::vector<std::vector<at::Tensor>>;

  ExchangedTensors(TensorLists outputs, TensorLists inputs)
      : outputs_(std::move(outputs)), inputs_(std::move(inputs)) {}

  // Comes first: makes copies of those that are not contiguous.
  void make_contiguous();

  // Comes first for tensors on a device, which are exchanged where they are: throws if one has
  // gaps.
  void check_dense() const;

  // Their memory, for the engine.
  TensorSpans spans() const;

  // The outputs and the inputs, for the inner backend.
  std::pair<TensorLists, TensorLists> for_inner() const;

  // Puts results that were copies where they belong.
  void write_back() const;

 private:
  TensorLists outputs_;
  TensorLists inputs_;
  std::optional<ContiguousCopies> filled_;
};

}  // namespace gflow
