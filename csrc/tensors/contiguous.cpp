// Clones tensors that are not contiguous or not aligned, and copies the results back.
#include "tensors/contiguous.h"

#include <ATen/core/grad_mode.h>

namespace gflow {

namespace {

// Contiguous and aligned; a view of bytes may begin anywhere.
bool is_plain(const at::Tensor& tensor) {
  const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  return tensor.is_contiguous() && address % tensor.element_size() == 0;
}

}  // namespace

ContiguousCopies::ContiguousCopies(TensorLists& lists) {
  for (auto& list : lists) {
    for (auto& tensor : list) {
      if (tensor.layout() != at::kStrided || is_plain(tensor)) continue;
      const auto original = tensor;
      tensor = original.detach().clone(at::MemoryFormat::Contiguous);
      originals_and_copies_.emplace_back(original, tensor);
    }
  }
}

void ContiguousCopies::write_back() const {
  // Autograd must not record the result of a collective, not even for a leaf.
  at::NoGradGuard no_grad;
  for (const auto& [original, copy] : originals_and_copies_) original.copy_(copy);
}

void hide_from_python(TensorLists& lists) {
  for (auto& list : lists) {
    for (auto& tensor : list) {
      if (tensor.layout() == at::kStrided) tensor = tensor.detach();
    }
  }
}

}  // namespace gflow
