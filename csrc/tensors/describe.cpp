// Counts elements and bytes, and hashes the types and sizes of tensor lists.
#include "tensors/describe.h"

namespace gflow {
namespace {

// FNV-1a over 64-bit words. Any hash that all ranks compute alike would do.
void mix(uint64_t& hash, uint64_t word) { hash = (hash ^ word) * 0x100000001b3ULL; }

uint64_t bytes_of(const at::Tensor& tensor) {
  // A sparse tensor has no storage of its own; users think of its dense size.
  return static_cast<uint64_t>(tensor.numel()) * tensor.element_size();
}

// Elements for each rank; in torch's convention no splits mean equal ones. Uneven arguments are not
// refused here (arguments.h does that).
rust::Vec<uint64_t> counts(const at::Tensor& tensor, const std::vector<int64_t>& splits,
                           int world) {
  rust::Vec<uint64_t> result;
  const int64_t rows = tensor.dim() > 0 ? tensor.size(0) : 0;
  const int64_t row = rows > 0 ? tensor.numel() / rows : 0;
  for (int rank = 0; rank < world; ++rank) {
    const int64_t split =
        splits.empty() ? rows / world : splits.at(std::min<size_t>(rank, splits.size() - 1));
    result.push_back(static_cast<uint64_t>(split * row));
  }
  return result;
}

rust::Vec<uint64_t> counts(const Tensors& tensors) {
  rust::Vec<uint64_t> result;
  for (const auto& tensor : tensors) result.push_back(static_cast<uint64_t>(tensor.numel()));
  return result;
}

CallDescription empty_description(c10d::OpType kind) {
  CallDescription call{};
  call.kind = static_cast<uint8_t>(kind);
  call.layout = 0xcbf29ce484222325ULL;
  call.device = -1;
  return call;
}

CallDescription all_to_all(c10d::OpType kind, const at::Tensor& first) {
  auto call = empty_description(kind);
  call.tensors = 1;
  call.dtype = static_cast<uint8_t>(first.scalar_type());
  return call;
}

}  // namespace

CallDescription describe(c10d::OpType kind, const Tensors& tensors) {
  auto call = empty_description(kind);
  call.tensors = static_cast<uint32_t>(tensors.size());
  if (!tensors.empty()) call.dtype = static_cast<uint8_t>(tensors.front().scalar_type());
  for (const auto& tensor : tensors) {
    call.numel += static_cast<uint64_t>(tensor.numel());
    call.bytes += bytes_of(tensor);
    mix(call.layout, static_cast<uint64_t>(tensor.scalar_type()));
    mix(call.layout, static_cast<uint64_t>(tensor.numel()));
    // Sparse tensors are added by index, so their shapes must match and not only their sizes.
    if (tensor.is_sparse()) {
      for (const auto size : tensor.sizes()) mix(call.layout, static_cast<uint64_t>(size));
    }
  }
  return call;
}

CallDescription describe_all_to_all(const Tensors& outputs, const Tensors& inputs) {
  TORCH_CHECK(!inputs.empty(), "gflow: all_to_all needs a tensor for each rank, got none");
  auto call = all_to_all(c10d::OpType::ALLTOALL, inputs.front());
  call.sends = counts(inputs);
  call.receives = counts(outputs);
  for (const auto& tensor : inputs) call.bytes += bytes_of(tensor);
  return call;
}

CallDescription describe_all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                                           const std::vector<int64_t>& output_splits,
                                           const std::vector<int64_t>& input_splits, int world) {
  auto call = all_to_all(c10d::OpType::ALLTOALL_BASE, input);
  call.sends = counts(input, input_splits, world);
  call.receives = counts(output, output_splits, world);
  call.bytes = bytes_of(input);
  return call;
}

}  // namespace gflow
