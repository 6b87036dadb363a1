// GflowBackend: the memory of gradient buckets, what is kept of them between steps, and metrics.
#include "backend/errors.h"
#include "backend/gflow_backend.h"

namespace gflow {

bool GflowBackend::supportsTensorAlloc(c10::DeviceIndex device) {
  // The Reducer asks for the CPU with index -1. On devices where nothing is compressed it should
  // allocate as if it had not asked: whether NCCL's own memory is better is not gflow's decision.
  return device < 0 || compresses_on_devices();
}

at::Tensor GflowBackend::allocateTensor(long size, at::TensorOptions options) {
  if (options.device().is_cpu()) {
    const auto bytes = static_cast<size_t>(size) * options.dtype().itemsize();
    auto shared = as_backend_error([&] { return group_->allocate(bytes); });
    forget_dead_buckets();
    return buckets_.allocate(size, options, std::move(shared));
  }
  if (!compresses_on(options.device())) {
    return inner_for(options.device())->allocateTensor(size, options);
  }
  forget_dead_buckets();
  return buckets_.allocate_on_device(size, options);
}

void GflowBackend::forget_dead_buckets() {
  const auto dead = buckets_.take_dead();
  group_->forget({dead.data(), dead.size()});
}

MetricsSnapshot GflowBackend::metrics() {
  forget_dead_buckets();
  return as_backend_error([&] { return group_->metrics(); });
}

BucketState GflowBackend::bucket_state(uint32_t number, uint64_t step) const {
  return as_backend_error([&] { return group_->bucket_state(number, step, timeout_ms()); });
}

void GflowBackend::load_bucket(uint32_t number, BucketState state, bool owes) {
  as_backend_error([&] { group_->load_bucket(number, std::move(state), owes, timeout_ms()); });
}

void GflowBackend::set_momentum(float factor, bool nesterov) {
  as_backend_error([&] { group_->set_momentum(factor, nesterov, timeout_ms()); });
}

void GflowBackend::set_stepping(const std::string& stepping, const std::vector<uint32_t>& buckets) {
  as_backend_error(
      [&] { group_->set_stepping(stepping, {buckets.data(), buckets.size()}, timeout_ms()); });
}

std::string GflowBackend::chosen_method() const {
  return as_backend_error([&] { return std::string(group_->chosen_method(timeout_ms())); });
}

void GflowBackend::set_chosen_method(const std::string& method) {
  as_backend_error([&] { group_->set_chosen_method(method, timeout_ms()); });
}

void GflowBackend::keep_for_undo(bool enabled) {
  as_backend_error([&] { group_->keep_for_undo(enabled, timeout_ms()); });
}

void GflowBackend::keep_last_step() {
  as_backend_error([&] { group_->keep_last_step(timeout_ms()); });
}

void GflowBackend::add_layout(const ModelLayout& layout) {
  const auto& [parameters, buckets, indices, numels] = layout;
  as_backend_error([&] {
    group_->add_layout(parameters, {buckets.data(), buckets.size()},
                       {indices.data(), indices.size()}, {numels.data(), numels.size()});
  });
  buckets_.add_layout(layout);
}

void GflowBackend::record_step(bool skipped, float factor) {
  as_backend_error([&] { group_->record_step(skipped, factor, timeout_ms()); });
}

}  // namespace gflow
