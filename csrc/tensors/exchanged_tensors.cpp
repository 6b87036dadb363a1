// Gives the engine addresses and sizes, and the inner backend detached tensors.
#include "tensors/exchanged_tensors.h"

namespace gflow {
namespace {

size_t address_of(void* data) { return reinterpret_cast<size_t>(data); }

}  // namespace

void ExchangedTensors::make_contiguous() {
  output_copies_.emplace(outputs_);
  // Inputs are not written back.
  ContiguousCopies input_copies(inputs_);
}

void ExchangedTensors::check_dense() const {
  for (const auto& list : outputs_) {
    for (const auto& tensor : list) {
      TORCH_CHECK_VALUE(tensor.is_non_overlapping_and_dense(),
                        "gflow: tensors on a device must be dense, without gaps or overlaps: call "
                        ".contiguous()");
    }
  }
}

TensorSpans ExchangedTensors::spans() const {
  TensorSpans spans;
  for (const auto& list : outputs_) {
    for (const auto& tensor : list) {
      spans.outputs.push_back({address_of(tensor.mutable_data_ptr()), tensor.nbytes()});
    }
  }
  for (const auto& list : inputs_) {
    for (const auto& tensor : list) {
      auto* data = const_cast<void*>(tensor.const_data_ptr());
      spans.inputs.push_back({address_of(data), tensor.nbytes()});
    }
  }
  return spans;
}

std::pair<TensorLists, TensorLists> ExchangedTensors::for_inner() const {
  auto outputs = outputs_;
  auto inputs = inputs_;
  hide_from_python(outputs);
  hide_from_python(inputs);
  return {std::move(outputs), std::move(inputs)};
}

void ExchangedTensors::write_back() const { output_copies_->write_back(); }

}  // namespace gflow
