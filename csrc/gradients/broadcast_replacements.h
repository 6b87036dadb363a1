// Broadcasts from this rank whose content is replaced. DDP broadcasts the layout of its buckets; so
// it gets the layout that it had when a state was saved.
//
// Thread safety: every method may be called from any thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <mutex>
#include <vector>

namespace gflow {

class BroadcastReplacements {
 public:
  // The tensors to send, in order; replaces earlier ones.
  void set(std::vector<at::Tensor> tensors);

  // Copies the next of them into `tensor`, if type and size match.
  void apply(at::Tensor& tensor);

 private:
  std::mutex mutex_;
  std::deque<at::Tensor> replacements_;
};

}  // namespace gflow
