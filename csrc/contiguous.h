// Tensors as they can be exchanged: contiguous, and for the inner backend unknown to Python.
//
// The memory of a tensor is taken as it lies, which would mix up elements when the ranks' strides
// differ, and overwrite what lies in gaps. And Gloo lets go of tensors on threads of its own, where
// letting go of a Python object would end the process if the interpreter is just ending.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace gflow {

class ContiguousCopies {
 public:
  // Replaces every tensor of `lists` that is not contiguous by a copy. Sparse tensors stay.
  explicit ContiguousCopies(std::vector<std::vector<at::Tensor>>& lists);

  // Writes the copies back to where they came from.
  void write_back() const;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> originals_and_copies_;
};

// Replaces every tensor of `lists` by an alias of its memory that Python does not know. A sparse
// tensor stays: it is filled by giving it other memory, which an alias would not see.
void hide_from_python(std::vector<std::vector<at::Tensor>>& lists);

}  // namespace gflow
