// The memory of gradient buckets: where DDP's Reducer gets it from, and how a bucket is known
// again. It must never mistake another tensor for a bucket: only buckets may be compressed.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <mutex>
#include <unordered_map>

#include "rust/bridge.rs.h"

namespace gflow {

class BucketMemory {
 public:
  // A flat tensor for the Reducer, remembered while its storage lives. It lies in `shared`, which
  // the ranks of this host can reach, or in ordinary memory if that has no address.
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options,
                      rust::Box<SharedMemory> shared);

  // Whether `tensor` is the whole of a storage that allocate() made and that is still alive.
  // Pointers alone do not tell: freed memory is handed out again.
  bool holds(const at::Tensor& tensor);

 private:
  struct Bucket {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    size_t nbytes;
  };

  std::mutex mutex_;
  std::unordered_map<const void*, Bucket> buckets_;
};

}  // namespace gflow
