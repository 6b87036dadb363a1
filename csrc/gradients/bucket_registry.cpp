// A table of the buckets that are alive, by the address of their memory.
#include "gradients/bucket_registry.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_as_real.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "gradients/caller.h"

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
  // Freed together with the storage, whenever and on whatever thread that is.
  auto owner = std::make_shared<rust::Box<SharedMemory>>(std::move(shared));
  return at::from_blob(address, {numel}, [owner](void*) {}, options);
}

}  // namespace

at::Tensor BucketRegistry::allocate(int64_t numel, const at::TensorOptions& options,
                                    rust::Box<SharedMemory> shared) {
  return add(flat_tensor(numel, options, std::move(shared)));
}

at::Tensor BucketRegistry::allocate_on_device(int64_t numel, const at::TensorOptions& options) {
  return add(at::empty({numel}, options));
}

at::Tensor BucketRegistry::add(at::Tensor tensor) {
  // The Reducer lays out complex buckets as their real and imaginary parts. They are not
  // registered: complex gradients are exchanged exactly.
  if (tensor.is_complex()) return at::view_as_real(tensor).reshape(-1);
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  const bool is_lasting = torch::autograd::get_current_graph_task_id() < 0;
  std::lock_guard<std::mutex> lock(mutex_);
  remove_dead();
  if (storage->nbytes() > 0) {
    auto owner = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage);
    buckets_.insert_or_assign(
        storage->data(), Bucket{c10::weak_intrusive_ptr<c10::StorageImpl>(owner), storage->nbytes(),
                                is_lasting ? ++newest_ : kUnnumbered, nullptr, layout_});
  }
  return tensor;
}

std::optional<uint32_t> BucketRegistry::find(const at::Tensor& tensor) {
  if (!tensor.has_storage() || !tensor.is_contiguous()) return std::nullopt;
  const auto* storage = tensor.storage().unsafeGetStorageImpl();
  std::unique_lock<std::mutex> lock(mutex_);
  auto found = buckets_.find(tensor.const_data_ptr());
  if (found == buckets_.end()) return std::nullopt;
  const auto owner = found->second.storage.lock();
  if (owner.get() != storage || found->second.nbytes != tensor.nbytes()) return std::nullopt;
  if (!found->second.parameter) found->second.parameter = current_parameter();
  const auto [number, layout] = std::pair(found->second.number, found->second.layout);
  // Without the lock: it takes the GIL.
  lock.unlock();
  const int pass = torch::autograd::get_current_graph_task_id();
  if (!submitted_by_reducer(layout, pass)) return std::nullopt;
  lock.lock();
  last_ = {pass, number};
  return number;
}

void BucketRegistry::add_layout(const ModelLayout& layout) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto number : layout.buckets) parameters_[number] = layout.parameters;
}

uint32_t BucketRegistry::model_whose_uses_are_counted(const at::Tensor& tensor, int pass) {
  if (!tensor.is_cpu() || tensor.scalar_type() != at::kInt) return kUnnumbered;
  std::unique_lock<std::mutex> lock(mutex_);
  const auto [last_pass, number] = last_;
  const auto model = parameters_.find(number);
  if (last_pass != pass || model == parameters_.end() ||
      static_cast<size_t>(tensor.numel()) != model->second) {
    return kUnnumbered;
  }
  // Without the lock: it takes the GIL. A hook of the user's may sum such a tensor, too.
  lock.unlock();
  return called_by_autograd_itself() ? number : kUnnumbered;
}

bool BucketRegistry::submitted_by_reducer(uint64_t layout, int pass) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto known = by_reducer_.find(layout);
  if (known != by_reducer_.end() && known->second.first == pass) return known->second.second;
  lock.unlock();
  const bool answer = called_by_autograd_itself();
  lock.lock();
  by_reducer_.insert_or_assign(layout, std::pair(pass, answer));
  return answer;
}

bool BucketRegistry::is_last_of_model(uint32_t number) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto bucket = std::ranges::find_if(
      buckets_, [&](const auto& entry) { return entry.second.number == number; });
  if (bucket == buckets_.end()) return true;
  return std::ranges::none_of(buckets_, [&](const auto& entry) {
    return entry.second.layout == bucket->second.layout && entry.second.number > number;
  });
}

std::vector<BucketRegistry::LiveBucket> BucketRegistry::live() {
  std::lock_guard<std::mutex> lock(mutex_);
  remove_dead();
  std::vector<LiveBucket> live;
  for (const auto& [address, bucket] : buckets_) {
    if (bucket.number == kUnnumbered) continue;
    live.push_back({bucket.number, bucket.nbytes, bucket.parameter});
  }
  std::ranges::sort(live, {}, &LiveBucket::number);
  return live;
}

std::vector<uint32_t> BucketRegistry::take_dead() {
  std::lock_guard<std::mutex> lock(mutex_);
  remove_dead();
  return std::exchange(dead_, {});
}

void BucketRegistry::remove_dead() {
  std::erase_if(buckets_, [&](const auto& entry) {
    if (!entry.second.storage.expired()) return false;
    if (entry.second.number != kUnnumbered) dead_.push_back(entry.second.number);
    by_reducer_.erase(entry.second.layout);
    parameters_.erase(entry.second.number);
    return true;
  });
}

}  // namespace gflow
