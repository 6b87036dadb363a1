// Tensors as c10d's methods take them: one list, or a list of lists.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace gflow {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<std::vector<at::Tensor>>;

inline Tensors flatten(const TensorLists& lists) {
  Tensors all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

// The device of the first tensor; the CPU if there are none.
inline at::Device device_of(const Tensors& tensors) {
  return tensors.empty() ? at::Device(at::kCPU) : tensors.front().device();
}

}  // namespace gflow
