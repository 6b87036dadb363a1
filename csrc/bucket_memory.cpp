#include "bucket_memory.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_as_real.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "caller.h"

namespace gflow {

namespace {

at::Tensor flat_tensor(int64_t numel, const at::TensorOptions& options,
                       rust::Box<SharedMemory> shared) {
  auto* address = reinterpret_cast<void*>(shared->address());
  if (address == nullptr) {
    auto tensor = at::empty({numel}, options);
    prefer_huge_pages(static_cast<uint8_t*>(tensor.mutable_data_ptr()), tensor.nbytes());
    return tensor;
  }
  // The memory is given back when the storage goes, whenever and on whatever thread that is.
  auto kept = std::make_shared<rust::Box<SharedMemory>>(std::move(shared));
  return at::from_blob(address, {numel}, [kept](void*) {}, options);
}

}  // namespace

at::Tensor BucketMemory::allocate(int64_t numel, const at::TensorOptions& options,
                                  rust::Box<SharedMemory> shared) {
  return remember(flat_tensor(numel, options, std::move(shared)));
}

at::Tensor BucketMemory::allocate_on_device(int64_t numel, const at::TensorOptions& options) {
  return remember(at::empty({numel}, options));
}

at::Tensor BucketMemory::remember(at::Tensor tensor) {
  // The Reducer lays out complex buckets as their real and imaginary parts. They are not
  // remembered: complex gradients are exchanged exactly.
  if (tensor.is_complex()) return at::view_as_real(tensor).reshape(-1);
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  const bool lasts = torch::autograd::get_current_graph_task_id() < 0;
  std::lock_guard<std::mutex> lock(mutex_);
  clean_up();
  if (storage->nbytes() > 0) {
    auto owner = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage);
    buckets_.insert_or_assign(
        storage->data(), Bucket{c10::weak_intrusive_ptr<c10::StorageImpl>(owner), storage->nbytes(),
                                lasts ? ++newest_ : kUnnumbered, nullptr, layout_});
  }
  return tensor;
}

std::optional<uint32_t> BucketMemory::find(const at::Tensor& tensor) {
  if (!tensor.has_storage() || !tensor.is_contiguous()) return std::nullopt;
  const auto* storage = tensor.storage().unsafeGetStorageImpl();
  std::unique_lock<std::mutex> lock(mutex_);
  auto found = buckets_.find(tensor.const_data_ptr());
  if (found == buckets_.end()) return std::nullopt;
  const auto owner = found->second.storage.lock();
  if (owner.get() != storage || found->second.nbytes != tensor.nbytes()) return std::nullopt;
  if (!found->second.parameter) found->second.parameter = current_parameter();
  const auto [number, layout] = std::pair(found->second.number, found->second.layout);
  // Not with the lock held: it takes Python's.
  lock.unlock();
  if (!reducer_brings(layout, torch::autograd::get_current_graph_task_id())) return std::nullopt;
  return number;
}

bool BucketMemory::reducer_brings(uint64_t layout, int pass) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto asked = asked_.find(layout);
  if (asked != asked_.end() && asked->second.first == pass) return asked->second.second;
  lock.unlock();
  const bool answer = called_by_autograd_itself();
  lock.lock();
  asked_.insert_or_assign(layout, std::pair(pass, answer));
  return answer;
}

bool BucketMemory::is_last_of_model(uint32_t number) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto own = std::ranges::find_if(
      buckets_, [&](const auto& entry) { return entry.second.number == number; });
  if (own == buckets_.end()) return true;
  return std::ranges::none_of(buckets_, [&](const auto& entry) {
    return entry.second.layout == own->second.layout && entry.second.number > number;
  });
}

std::vector<BucketMemory::Listed> BucketMemory::list() {
  std::lock_guard<std::mutex> lock(mutex_);
  clean_up();
  std::vector<Listed> listed;
  for (const auto& [address, bucket] : buckets_) {
    if (bucket.number == kUnnumbered) continue;
    listed.push_back({bucket.number, bucket.nbytes, bucket.parameter});
  }
  std::ranges::sort(listed, {}, &Listed::number);
  return listed;
}

std::vector<uint32_t> BucketMemory::take_gone() {
  std::lock_guard<std::mutex> lock(mutex_);
  clean_up();
  return std::exchange(gone_, {});
}

void BucketMemory::clean_up() {
  std::erase_if(buckets_, [&](const auto& entry) {
    if (!entry.second.storage.expired()) return false;
    if (entry.second.number != kUnnumbered) gone_.push_back(entry.second.number);
    asked_.erase(entry.second.layout);
    return true;
  });
}

}  // namespace gflow
