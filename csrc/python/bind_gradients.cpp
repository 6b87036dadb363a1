// gflow._C: gradient buckets, and what is kept of them between steps.
#include <limits>
#include <optional>

#include "python/bindings.h"

namespace gflow {
namespace {

using LiveBucket = std::tuple<uint32_t, size_t, size_t>;

std::vector<LiveBucket> live_buckets(const BackendPtr& backend) {
  std::vector<LiveBucket> live;
  for (const auto& one : gflow_backend(backend).buckets()) {
    live.emplace_back(one.number, one.nbytes, reinterpret_cast<size_t>(one.parameter));
  }
  return live;
}

std::pair<size_t, size_t> shard_of(const BackendPtr& backend, size_t bytes) {
  const auto range = gflow_backend(backend).shard_of(bytes);
  return {range.start, range.end};
}

at::Tensor to_tensor(const rust::Vec<float>& values) {
  auto tensor = at::empty({static_cast<int64_t>(values.size())}, at::kFloat);
  std::copy(values.begin(), values.end(), tensor.mutable_data_ptr<float>());
  return tensor;
}

rust::Vec<float> to_rust(const at::Tensor& tensor) {
  const auto flat = tensor.to(at::kCPU, at::kFloat).contiguous();
  rust::Vec<float> values;
  values.reserve(flat.numel());
  std::copy_n(flat.const_data_ptr<float>(), flat.numel(), std::back_inserter(values));
  return values;
}

using SavedBucket = std::tuple<uint64_t, at::Tensor, at::Tensor, at::Tensor>;

SavedBucket bucket_state(const BackendPtr& backend, uint32_t number, std::optional<uint64_t> step) {
  const auto newest = std::numeric_limits<uint64_t>::max();
  const auto state = gflow_backend(backend).bucket_state(number, step.value_or(newest));
  return {state.step, to_tensor(state.residual), to_tensor(state.velocity), to_tensor(state.sizes)};
}

void load_bucket(const BackendPtr& backend, uint32_t number, uint64_t step,
                 const at::Tensor& residual, const at::Tensor& velocity, const at::Tensor& sizes,
                 bool owes) {
  gflow_backend(backend).load_bucket(
      number, BucketState{step, to_rust(residual), to_rust(velocity), to_rust(sizes)}, owes);
}

void set_momentum(const BackendPtr& backend, float factor, bool nesterov) {
  gflow_backend(backend).set_momentum(factor, nesterov);
}

void set_stepping(const BackendPtr& backend, const std::string& stepping,
                  const std::vector<uint32_t>& buckets) {
  gflow_backend(backend).set_stepping(stepping, buckets);
}

std::string chosen_method(const BackendPtr& backend) {
  return gflow_backend(backend).chosen_method();
}

void set_chosen_method(const BackendPtr& backend, const std::string& method) {
  gflow_backend(backend).set_chosen_method(method);
}

void keep_for_undo(const BackendPtr& backend, bool enabled) {
  gflow_backend(backend).keep_for_undo(enabled);
}

void keep_last_step(const BackendPtr& backend) { gflow_backend(backend).keep_last_step(); }

void add_layout(const BackendPtr& backend, size_t parameters, std::vector<uint32_t> buckets,
                std::vector<uint32_t> indices, std::vector<uint64_t> numels) {
  gflow_backend(backend).add_layout(
      {parameters, std::move(buckets), std::move(indices), std::move(numels)});
}

void record_step(const BackendPtr& backend, bool skipped, float factor) {
  gflow_backend(backend).record_step(skipped, factor);
}

void replace_broadcasts(const BackendPtr& backend, Tensors replacements) {
  gflow_backend(backend).replace_broadcasts(std::move(replacements));
}

}  // namespace

void bind_gradients(py::module_& module) {
  module.def("live_buckets", &live_buckets, WithGilReleased(), py::arg("backend"),
             "DDP's gradient buckets: number, bytes, and the address of a parameter of the model "
             "or 0.");
  module.def("shard_of", &shard_of, WithGilReleased(), py::arg("backend"), py::arg("bytes"),
             "The bytes of a bucket that this rank carries to other hosts.");
  module.def("bucket_state", &bucket_state, WithGilReleased(), py::arg("backend"),
             py::arg("number"), py::arg("step") = py::none(),
             "How often a bucket was exchanged, its residual, its velocity and the sizes of its "
             "elements. In a group that has failed: the newest state after at most `step` "
             "exchanges, all complete, or the state as it is if that is not remembered.");
  module.def(
      "load_bucket", &load_bucket, WithGilReleased(), py::arg("backend"), py::arg("number"),
      py::arg("step"), py::arg("residual"), py::arg("velocity"), py::arg("sizes"), py::arg("owes"),
      "Restores what bucket_state() returned. `owes` if some rank keeps a residual; all ranks "
      "say the same.");
  module.def("set_momentum", &set_momentum, WithGilReleased(), py::arg("backend"),
             py::arg("factor"), py::arg("nesterov"),
             "Takes the momentum over from the optimizer; a factor of 0 gives it back.");
  module.def("set_stepping", &set_stepping, WithGilReleased(), py::arg("backend"),
             py::arg("stepping"), py::arg("buckets"),
             "What the optimizer does with these buckets, or without any with all: 'normalized', "
             "'proportional', or '' if that is not known.");
  module.def("chosen_method", &chosen_method, WithGilReleased(), py::arg("backend"),
             "What the method 'auto' stands for now; '' with another method.");
  module.def("set_chosen_method", &set_chosen_method, WithGilReleased(), py::arg("backend"),
             py::arg("method"), "Continues with what chosen_method() returned.");
  module.def("keep_for_undo", &keep_for_undo, WithGilReleased(), py::arg("backend"),
             py::arg("enabled"), "Whether exchanges can be undone from now on.");
  module.def("keep_last_step", &keep_last_step, WithGilReleased(), py::arg("backend"),
             "From now on, the state of the last complete step is known even after a failure.");
  module.def("add_layout", &add_layout, WithGilReleased(), py::arg("backend"),
             py::arg("parameters"), py::arg("buckets"), py::arg("indices"), py::arg("numels"),
             "Where the parameters of a model are, whose steps may leave some unused: for each "
             "that is in a bucket, in their order, the bucket, its index and its elements.");
  module.def("record_step", &record_step, WithGilReleased(), py::arg("backend"), py::arg("skipped"),
             py::arg("factor"),
             "The optimizer made a step, or skipped it, and scaled the gradients by `factor`.");
  module.def("replace_broadcasts", &replace_broadcasts, WithGilReleased(), py::arg("backend"),
             py::arg("replacements"),
             "The next broadcasts from this rank that match in type and size send these instead.");
}

}  // namespace gflow
