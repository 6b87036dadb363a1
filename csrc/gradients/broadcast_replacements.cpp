// A queue of replacements, each used for the next broadcast of the same size and type.
#include "gradients/broadcast_replacements.h"

namespace gflow {

void BroadcastReplacements::set(std::vector<at::Tensor> tensors) {
  std::lock_guard<std::mutex> lock(mutex_);
  replacements_.assign(tensors.begin(), tensors.end());
}

void BroadcastReplacements::apply(at::Tensor& tensor) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (replacements_.empty() || tensor.sizes() != replacements_.front().sizes() ||
      tensor.scalar_type() != replacements_.front().scalar_type()) {
    return;
  }
  tensor.copy_(replacements_.front());
  replacements_.pop_front();
}

}  // namespace gflow
