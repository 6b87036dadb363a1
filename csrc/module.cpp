// gflow._C: what the Python half of the package calls. Everything that a user calls is in
// Python; this module makes backends, reads their counters, and hands over what they keep.
#include <pthread.h>
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "gflow_backend.h"
#include "log_bindings.h"

namespace gflow {
namespace {

namespace py = pybind11;

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// Something of Rust's that Python holds until it is used up.
template <typename T>
class UsedOnce {
 public:
  explicit UsedOnce(rust::Box<T> box) : box_(std::move(box)) {}

  const T& look() const {
    TORCH_CHECK(box_, "gflow: this was used up in making a group");
    return **box_;
  }

  rust::Box<T> take() {
    look();
    auto box = std::move(*box_);
    box_.reset();
    return box;
  }

 private:
  std::optional<rust::Box<T>> box_;
};

using PyEndpoint = UsedOnce<Endpoint>;
using PyGroup = UsedOnce<Group>;

using Strings = std::vector<std::string>;

rust::Vec<rust::String> to_rust(const Strings& strings) {
  rust::Vec<rust::String> copies;
  for (const auto& string : strings) copies.push_back(string);
  return copies;
}

PyGroup join(PyEndpoint& door, const std::string& group, int rank, const Strings& labels,
             const Strings& addresses, const Strings& hosts, const Strings& entrances,
             const std::string& key, std::chrono::milliseconds timeout, bool compress,
             double density, uint64_t chunk, uint64_t warmup_steps, uint64_t ramp_steps,
             const std::string& wire, uint64_t fusion_bytes, float momentum) {
  GroupConfig config{};
  config.compression =
      Compression{compress, density, chunk, warmup_steps, ramp_steps, wire, fusion_bytes, momentum};
  config.name = group;
  config.rank = static_cast<uint32_t>(rank);
  config.labels = to_rust(labels);
  config.addresses = to_rust(addresses);
  config.hosts = to_rust(hosts);
  config.fd_sockets = to_rust(entrances);
  for (const char byte : key) config.key.push_back(static_cast<uint8_t>(byte));
  config.timeout_ms = static_cast<uint64_t>(timeout.count());
  return PyGroup(join_group(door.take(), config));
}

BackendPtr make_backend(PyGroup& group, int rank, int size, std::chrono::milliseconds timeout,
                        const BackendPtr& gloo, const std::optional<std::string>& accelerator,
                        const BackendPtr& inner, bool known_to_engine) {
  std::optional<GflowBackend::Accelerator> served;
  if (accelerator) {
    served = GflowBackend::Accelerator{c10::Device(*accelerator).type(), inner, known_to_engine};
  }
  return c10::make_intrusive<GflowBackend>(rank, size, timeout, group.take(), gloo, served);
}

GflowBackend& gflow_backend(const BackendPtr& backend) {
  auto* gflow = dynamic_cast<GflowBackend*>(backend.get());
  TORCH_CHECK_TYPE(gflow, "gflow: expected a gflow backend, got ", backend->getBackendName());
  return *gflow;
}

py::dict metrics(const BackendPtr& backend) {
  const auto snapshot = gflow_backend(backend).metrics();
  py::dict by_kind;
  for (const auto& entry : snapshot.by_kind)
    by_kind[py::str(std::string(entry.name))] = entry.count;
  py::list buckets;
  for (const auto& one : snapshot.buckets) {
    buckets.append(py::dict(
        py::arg("number") = one.number, py::arg("steps") = one.steps,
        py::arg("gradient_bytes") = one.gradient_bytes,
        py::arg("carried_bytes") = one.carried_bytes, py::arg("wire_bytes") = one.wire_bytes,
        py::arg("density") = one.density, py::arg("residual_ratio") = one.residual_ratio));
  }
  py::dict stages;
  for (const auto& stage : snapshot.stages)
    stages[py::str(std::string(stage.name))] = stage.seconds;
  return py::dict(py::arg("hosts") = snapshot.hosts, py::arg("ranks_here") = snapshot.ranks_here,
                  py::arg("compresses") = snapshot.compresses, py::arg("buckets") = buckets,
                  py::arg("other_carried_bytes") = snapshot.other_carried_bytes,
                  py::arg("other_wire_bytes") = snapshot.other_wire_bytes,
                  py::arg("stage_seconds") = stages,
                  py::arg("hidden_seconds") = snapshot.hidden_seconds,
                  py::arg("exposed_seconds") = snapshot.exposed_seconds,
                  py::arg("gradient_buckets") = snapshot.gradient_buckets,
                  py::arg("gradient_bytes") = snapshot.gradient_bytes,
                  py::arg("exact_tensors") = snapshot.exact_tensors,
                  py::arg("exact_bytes") = snapshot.exact_bytes, py::arg("collectives") = by_kind);
}

std::vector<std::tuple<std::string, std::string, bool>> gpu_findings() {
  std::vector<std::tuple<std::string, std::string, bool>> findings;
  for (const auto& one : look_for_gpus()) {
    findings.emplace_back(std::string(one.what), std::string(one.found), one.is_there);
  }
  return findings;
}

using LiveBucket = std::tuple<uint32_t, size_t, size_t>;

std::vector<LiveBucket> live_buckets(const BackendPtr& backend) {
  std::vector<LiveBucket> live;
  for (const auto& one : gflow_backend(backend).buckets()) {
    live.emplace_back(one.number, one.nbytes, reinterpret_cast<size_t>(one.parameter));
  }
  return live;
}

std::tuple<size_t, size_t, size_t, size_t> topology(const BackendPtr& backend) {
  const auto position = gflow_backend(backend).position();
  return {position.hosts, position.carriers, position.host, position.local_rank};
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

std::tuple<uint64_t, at::Tensor, at::Tensor> bucket_state(const BackendPtr& backend,
                                                          uint32_t number) {
  const auto state = gflow_backend(backend).bucket_state(number);
  return {state.step, to_tensor(state.residual), to_tensor(state.velocity)};
}

void load_bucket(const BackendPtr& backend, uint32_t number, uint64_t step,
                 const at::Tensor& residual, const at::Tensor& velocity) {
  gflow_backend(backend).load_bucket(number,
                                     BucketState{step, to_rust(residual), to_rust(velocity)});
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The native half of gflow.";
  // A forked child, such as a worker of a DataLoader, keeps nothing of its parent's groups.
  pthread_atfork(&before_fork, &after_fork_in_parent, &after_fork_in_child);
  const auto no_gil = py::call_guard<py::gil_scoped_release>();

  py::class_<PyEndpoint>(m, "Door", "A listening socket for a group that is being made.")
      .def(py::init([](const std::string& address) { return PyEndpoint(open_endpoint(address)); }),
           py::arg("address"))
      .def_property_readonly("address",
                             [](const PyEndpoint& door) { return std::string(door.look().address()); })
      .def_property_readonly(
          "entrance", [](const PyEndpoint& door) { return std::string(door.look().fd_socket()); });
  m.def("join", &join, no_gil, py::arg("door"), py::arg("group"), py::arg("rank"),
        py::arg("labels"), py::arg("addresses"), py::arg("hosts"), py::arg("entrances"),
        py::arg("key"), py::arg("timeout"), py::arg("compress"), py::arg("density"),
        py::arg("chunk"), py::arg("warmup_steps"), py::arg("ramp_steps"), py::arg("wire"),
        py::arg("fusion_bytes"), py::arg("momentum"),
        "Connects to the other ranks of a new group.");
  py::class_<PyGroup>(m, "Group", "This rank's place in a group.")
      .def_property_readonly(
          "notice", [](const PyGroup& group) { return std::string(group.look().notice()); });
  m.def("make_backend", &make_backend, no_gil, py::arg("group"), py::arg("rank"), py::arg("size"),
        py::arg("timeout"), py::arg("gloo"), py::arg("accelerator") = py::none(),
        py::arg("inner") = py::none(), py::arg("known_to_engine") = false,
        "`accelerator` is the type of the devices that are served beside the CPU, `inner` their "
        "own backend; `known_to_engine`, whether their streams are CUDA's.");
  m.def("metrics", &metrics, py::arg("backend"));
  m.def("live_buckets", &live_buckets, no_gil, py::arg("backend"),
        "Number, bytes and the address of a parameter of the model, or 0, of DDP's gradient "
        "buckets.");
  m.def("topology", &topology, no_gil, py::arg("backend"),
        "The number of hosts, of carriers on each, this rank's host and its place there.");
  m.def("shard_of", &shard_of, no_gil, py::arg("backend"), py::arg("bytes"),
        "The bytes of a bucket that this rank carries to other hosts.");
  m.def("bucket_state", &bucket_state, no_gil, py::arg("backend"), py::arg("number"),
        "How often a bucket was exchanged, its residual and its velocity.");
  m.def("load_bucket", &load_bucket, no_gil, py::arg("backend"), py::arg("number"), py::arg("step"),
        py::arg("residual"), py::arg("velocity"));
  m.def(
      "set_momentum",
      [](const BackendPtr& backend, float factor, bool nesterov) {
        gflow_backend(backend).set_momentum(factor, nesterov);
      },
      no_gil, py::arg("backend"), py::arg("factor"), py::arg("nesterov"));
  m.def(
      "keep_for_undo",
      [](const BackendPtr& backend, bool is_wanted) {
        gflow_backend(backend).keep_for_undo(is_wanted);
      },
      no_gil, py::arg("backend"), py::arg("is_wanted"));
  m.def(
      "take_note_of_step",
      [](const BackendPtr& backend, bool skipped, float factor) {
        gflow_backend(backend).take_note_of_step(skipped, factor);
      },
      no_gil, py::arg("backend"), py::arg("skipped"), py::arg("factor"));
  m.def(
      "replace_broadcasts",
      [](const BackendPtr& backend, std::vector<at::Tensor> replacements) {
        gflow_backend(backend).replace_broadcasts(std::move(replacements));
      },
      no_gil, py::arg("backend"), py::arg("replacements"));
  m.def("look_for_gpus", &gpu_findings, no_gil,
        "What the GPU path needs: its name, what was found or why not, whether it is there.");
  bind_log(m);
  m.def("close_all_groups", &close_all_groups, no_gil);
  m.def(
      "provoke", [](const std::string& what) { provoke(what); }, no_gil, py::arg("what"),
      "Fails on purpose, as \"error\" or \"panic\".");
}

}  // namespace gflow
