// The tensors of one collective, kept alive from the call until it has ended.
//
// They are made exchangeable only when the collective's turn comes: the user's program may still be
// writing them when it queues a collective behind another.
//
// Thread safety: none; only the thread that runs the collective calls the methods.
#pragma once

#include <optional>
#include <utility>

#include "rust/bridge/types.rs.h"
#include "tensors/contiguous.h"

namespace gflow {

class ExchangedTensors {
 public:
  ExchangedTensors(TensorLists outputs, TensorLists inputs)
      : outputs_(std::move(outputs)), inputs_(std::move(inputs)) {}

  // Call it first: copies tensors that are not contiguous.
  void make_contiguous();

  // For tensors on a device, which are exchanged in place, call this first instead: throws if one
  // has gaps.
  void check_dense() const;

  // The memory of the tensors, for the engine.
  TensorSpans spans() const;

  // The outputs and inputs, for the inner backend.
  std::pair<TensorLists, TensorLists> for_inner() const;

  // Writes results that are in copies back to the user's tensors.
  void write_back() const;

 private:
  TensorLists outputs_;
  TensorLists inputs_;
  std::optional<ContiguousCopies> output_copies_;
};

}  // namespace gflow
