#include "bucket_memory.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_as_real.h>

namespace gflow {

namespace {

at::Tensor flat_tensor(int64_t numel, const at::TensorOptions& options,
                       rust::Box<SharedMemory> shared) {
  auto* address = reinterpret_cast<void*>(shared->address());
  if (address == nullptr) return at::empty({numel}, options);
  // The memory is given back when the storage goes, whenever and on whatever thread that is.
  auto kept = std::make_shared<rust::Box<SharedMemory>>(std::move(shared));
  return at::from_blob(address, {numel}, [kept](void*) {}, options);
}

}  // namespace

at::Tensor BucketMemory::allocate(int64_t numel, const at::TensorOptions& options,
                                  rust::Box<SharedMemory> shared) {
  auto tensor = flat_tensor(numel, options, std::move(shared));
  // The Reducer lays out complex buckets as their real and imaginary parts. They are not
  // remembered: complex gradients are exchanged exactly.
  if (tensor.is_complex()) return at::view_as_real(tensor).reshape(-1);
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(buckets_, [](const auto& entry) { return entry.second.storage.expired(); });
  if (storage->nbytes() > 0) {
    auto owner = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage);
    buckets_.insert_or_assign(
        storage->data(),
        Bucket{c10::weak_intrusive_ptr<c10::StorageImpl>(owner), storage->nbytes()});
  }
  return tensor;
}

bool BucketMemory::holds(const at::Tensor& tensor) {
  if (!tensor.has_storage() || !tensor.is_contiguous()) return false;
  const auto* storage = tensor.storage().unsafeGetStorageImpl();
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = buckets_.find(tensor.const_data_ptr());
  if (found == buckets_.end()) return false;
  auto owner = found->second.storage.lock();
  return owner.get() == storage && found->second.nbytes == tensor.nbytes();
}

}  // namespace gflow
