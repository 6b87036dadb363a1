#include "contiguous.h"

#include <ATen/core/grad_mode.h>

namespace gflow {

ContiguousCopies::ContiguousCopies(std::vector<std::vector<at::Tensor>>& lists) {
  for (auto& list : lists) {
    for (auto& tensor : list) {
      // A sparse tensor is filled by giving it other memory, which an alias would not see.
      if (tensor.layout() != at::kStrided) continue;
      const auto original = tensor;
      tensor = original.detach();
      if (original.is_contiguous()) continue;
      tensor = tensor.contiguous();
      originals_and_copies_.emplace_back(original, tensor);
    }
  }
}

void ContiguousCopies::write_back() const {
  // The result of a collective is no step that autograd knows of, also for a leaf.
  at::NoGradGuard no_grad;
  for (const auto& [original, copy] : originals_and_copies_) original.copy_(copy);
}

}  // namespace gflow
