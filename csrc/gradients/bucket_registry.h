// Gradient buckets: allocates their memory for DDP's Reducer, and recognises them when they are
// reduced. It must never take another tensor for a bucket: only buckets may be compressed.
//
// Thread safety: every method may be called from any thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "rust/bridge/entries.rs.h"

namespace gflow {

// Where the parameters of a model are in its buckets. The lists have an entry for each of those
// that are in one, in the order of the buckets: the bucket, the index of the parameter, its
// elements.
struct ModelLayout {
  size_t parameters;
  std::vector<uint32_t> buckets;
  std::vector<uint32_t> indices;
  std::vector<uint64_t> numels;
};

class BucketRegistry {
 public:
  // Stands for a bucket that has no number.
  static constexpr uint32_t kUnnumbered = 0;

  struct LiveBucket {
    uint32_t number;
    size_t nbytes;
    // The address of a parameter of its model; null until the bucket was first reduced.
    const void* parameter;
  };

  // A flat tensor for the Reducer, recognised for as long as its storage lives. It lies in
  // `shared`, which the ranks of this host can reach, or in ordinary memory if that has no address.
  // Buckets are numbered from 1 in the order of allocation, which is the same on all ranks because
  // their Reducers allocate together. A bucket allocated during a backward pass lives for that pass
  // only and has no number.
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options,
                      rust::Box<SharedMemory> shared);

  // The same, in the memory of the device that `options` names.
  at::Tensor allocate_on_device(int64_t numel, const at::TensorOptions& options);

  // The number of the bucket, if `tensor` is the whole of a live storage from allocate() and the
  // Reducer itself submits it. Comparing pointers would not do: freed memory is reused.
  std::optional<uint32_t> find(const at::Tensor& tensor);

  // A model whose steps may leave parameters unused.
  void add_layout(const ModelLayout& layout);

  // A bucket of the model for which this tensor counts how many ranks used each parameter in this
  // backward pass; kUnnumbered if it is no such tensor. With `find_unused_parameters` the Reducer
  // sums these counts right after the model's last bucket.
  uint32_t model_whose_uses_are_counted(const at::Tensor& tensor, int pass);

  // Whether no bucket of the same layout comes after this one.
  bool is_last_of_model(uint32_t number);

  // Called with every collective: buckets allocated from now on belong to another layout.
  void end_layout() { ++layout_; }

  // The numbered buckets that are alive, by number.
  std::vector<LiveBucket> live();

  // The numbers of buckets freed since the last call.
  std::vector<uint32_t> take_dead();

 private:
  struct Bucket {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    size_t nbytes;
    uint32_t number;
    const void* parameter = nullptr;
    // Buckets that were allocated together have the same layout.
    uint64_t layout = 0;
  };

  // Registers the tensor and returns it in the form that the Reducer expects.
  at::Tensor add(at::Tensor tensor);

  // Removes freed buckets. Call it with the lock held.
  void remove_dead();

  // Whether the Reducer itself, and not a user's hook, submits the buckets of this layout in this
  // backward pass. Finding out takes the GIL, so the answer is kept for the pass.
  bool submitted_by_reducer(uint64_t layout, int pass);

  std::mutex mutex_;
  // Keyed by the address of the storage.
  std::unordered_map<const void*, Bucket> buckets_;
  uint32_t newest_ = kUnnumbered;
  std::atomic<uint64_t> layout_{0};
  std::vector<uint32_t> dead_;
  // The bucket that the Reducer has submitted last, and the pass.
  std::pair<int, uint32_t> last_{-1, kUnnumbered};
  // How many parameters the models have that were added, by the number of each of their buckets.
  std::unordered_map<uint32_t, size_t> parameters_;
  // Keyed by layout: the last pass checked, and the answer.
  std::unordered_map<uint64_t, std::pair<int, bool>> by_reducer_;
};

}  // namespace gflow
