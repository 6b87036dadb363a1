// Tensors as the inner backend may have them: contiguous, and unknown to Python.
//
// Gloo takes the memory of a tensor as it lies, which would mix up elements when the ranks' strides
// differ, and overwrite what lies in gaps. And it lets go of tensors on threads of its own, where
// letting go of a Python object would end the process if the interpreter is just ending.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace gflow {

class ContiguousCopies {
 public:
  // Replaces every tensor of `lists` by an alias of its memory, or by a copy if it is not
  // contiguous. Sparse tensors stay.
  explicit ContiguousCopies(std::vector<std::vector<at::Tensor>>& lists);

  // Writes the copies back to where they came from.
  void write_back() const;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> originals_and_copies_;
};

}  // namespace gflow
