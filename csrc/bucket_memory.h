// The memory of gradient buckets: where DDP's Reducer gets it from, and how a bucket is known
// again. It must never mistake another tensor for a bucket: only buckets may be compressed.
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

class BucketMemory {
 public:
  // Stands for a bucket that has no number.
  static constexpr uint32_t kUnnumbered = 0;

  // A bucket as others see it.
  struct Listed {
    uint32_t number;
    size_t nbytes;
    // Of a parameter of its model; null until it has been exchanged.
    const void* parameter;
  };

  // A flat tensor for the Reducer, remembered while its storage lives. It lies in `shared`, which
  // the ranks of this host can reach, or in ordinary memory if that has no address. Buckets are
  // numbered from 1 in the order in which they are made, which is the same on all ranks: the
  // Reducer makes them together. One that is made in the middle of a backward pass lives for that
  // pass only and has no number.
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options,
                      rust::Box<SharedMemory> shared);

  // The same, in the memory of the device that the options name.
  at::Tensor allocate_on_device(int64_t numel, const at::TensorOptions& options);

  // The number of the bucket that `tensor` is, if it is the whole of a storage that allocate() made
  // and that is still alive, and the Reducer itself brings it. Pointers alone do not tell: freed
  // memory is handed out again.
  std::optional<uint32_t> find(const at::Tensor& tensor);

  // Whether no bucket that was made together with this one comes after it.
  bool is_last_of_model(uint32_t number);

  // A collective was called: buckets that are made from now on belong to another layout.
  void end_layout() { ++layout_; }

  // The numbered buckets that are alive, in their order.
  std::vector<Listed> list();

  // The numbers of buckets that have gone since the last call.
  std::vector<uint32_t> take_gone();

 private:
  struct Bucket {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    size_t nbytes;
    uint32_t number;
    const void* parameter = nullptr;
    // Which buckets were made together.
    uint64_t layout = 0;
  };

  // Knows the tensor again from now on; returns it as the Reducer is to get it.
  at::Tensor remember(at::Tensor tensor);

  // Takes out what is gone. With the lock held.
  void clean_up();

  // Whether the Reducer itself brings the buckets of this layout in this backward pass, and not a
  // hook of the user's. It takes Python's lock, so it is asked once a pass.
  bool reducer_brings(uint64_t layout, int pass);

  std::mutex mutex_;
  std::unordered_map<const void*, Bucket> buckets_;
  uint32_t newest_ = kUnnumbered;
  std::atomic<uint64_t> layout_{0};
  std::vector<uint32_t> gone_;
  // By layout: the last pass that was asked about, and the answer.
  std::unordered_map<uint64_t, std::pair<int, bool>> asked_;
};

}  // namespace gflow
