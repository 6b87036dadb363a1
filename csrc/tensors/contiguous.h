// Makes tensors exchangeable: contiguous, and for the inner backend unknown to Python.
//
// The engine reads and writes a tensor's memory without regard to strides. That would mix up
// elements if the ranks' strides differ, and overwrite gaps. And Gloo frees tensors on its own
// threads, where freeing a Python object would end the process if the interpreter is exiting.
//
// Thread safety: none; one thread at a time.
#pragma once

#include <utility>

#include "tensors/tensor_lists.h"

namespace gflow {

class ContiguousCopies {
 public:
  // Replaces every tensor in `lists` that is not contiguous by a copy. Sparse tensors stay.
  explicit ContiguousCopies(TensorLists& lists);

  // Writes the copies back to the originals.
  void write_back() const;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> originals_and_copies_;
};

// Replaces every tensor in `lists` by an alias that Python does not know. Sparse tensors stay: they
// are filled by replacing their memory, which an alias would not see.
void hide_from_python(TensorLists& lists);

}  // namespace gflow
