// gflow._C: joining a group and making its backend.
#include <pybind11/chrono.h>

#include "python/bindings.h"

namespace gflow {
namespace {

using Strings = std::vector<std::string>;

// A Rust object that Python holds until it is used up.
template <typename T>
class UsedOnce {
 public:
  explicit UsedOnce(rust::Box<T> box) : box_(std::move(box)) {}

  const T& get() const {
    TORCH_CHECK(box_, "gflow: this was used up in making a group");
    return **box_;
  }

  rust::Box<T> take() {
    get();
    auto box = std::move(*box_);
    box_.reset();
    return box;
  }

 private:
  std::optional<rust::Box<T>> box_;
};

using PyEndpoint = UsedOnce<Endpoint>;
using PyGroup = UsedOnce<Group>;

rust::Vec<rust::String> to_rust(const Strings& strings) {
  rust::Vec<rust::String> copies;
  for (const auto& string : strings) copies.push_back(string);
  return copies;
}

// Python calls this and make_config by keyword.
Compression make_compression(bool enabled, const std::string& method, double density, uint64_t chunk, uint64_t warmup_steps,
                             uint64_t ramp_steps, const std::string& wire, uint64_t fusion_bytes,
                             float momentum, const std::string& max_noise, uint64_t audit_steps,
                             bool cores_are_busy) {
  return {enabled, method, density, chunk, warmup_steps, ramp_steps, wire, fusion_bytes, momentum, max_noise, audit_steps, cores_are_busy};
}

GroupConfig make_config(const std::string& name, uint32_t rank, const Strings& labels,
                        const Strings& addresses, const Strings& hosts, const Strings& fd_sockets,
                        const std::string& key, std::chrono::milliseconds timeout,
                        const Compression& compression) {
  GroupConfig config{};
  config.name = name;
  config.rank = rank;
  config.labels = to_rust(labels);
  config.addresses = to_rust(addresses);
  config.hosts = to_rust(hosts);
  config.fd_sockets = to_rust(fd_sockets);
  for (const char byte : key) config.key.push_back(static_cast<uint8_t>(byte));
  config.timeout_ms = static_cast<uint64_t>(timeout.count());
  config.compression = compression;
  return config;
}

PyGroup join(PyEndpoint& endpoint, const GroupConfig& config) {
  return PyGroup(join_group(endpoint.take(), config));
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

std::tuple<size_t, size_t, size_t, size_t> topology(const BackendPtr& backend) {
  const auto position = gflow_backend(backend).position();
  return {position.hosts, position.carriers, position.host, position.local_rank};
}

}  // namespace

void bind_group(py::module_& module) {
  py::class_<PyEndpoint>(module, "Endpoint",
                         "Where the other ranks of a group that is being made reach this one.")
      .def(py::init([](const std::string& address) { return PyEndpoint(open_endpoint(address)); }),
           py::arg("address"))
      .def_property_readonly(
          "address",
          [](const PyEndpoint& endpoint) { return std::string(endpoint.get().address()); },
          "Its TCP address, \"address:port\".")
      .def_property_readonly(
          "fd_socket",
          [](const PyEndpoint& endpoint) { return std::string(endpoint.get().fd_socket()); },
          "The name of its Unix socket for passing memory; empty if it has none.");
  py::class_<Compression>(module, "Compression", "How gradients are exchanged.")
      .def(py::init(&make_compression), py::arg("enabled"), py::arg("method"), py::arg("density"), py::arg("chunk"),
           py::arg("warmup_steps"), py::arg("ramp_steps"), py::arg("wire"), py::arg("fusion_bytes"),
           py::arg("momentum"), py::arg("max_noise"), py::arg("audit_steps"),
           py::arg("cores_are_busy"));
  py::class_<GroupConfig>(module, "GroupConfig", "What a rank has to know to join a group.")
      .def(py::init(&make_config), py::arg("name"), py::arg("rank"), py::arg("labels"),
           py::arg("addresses"), py::arg("hosts"), py::arg("fd_sockets"), py::arg("key"),
           py::arg("timeout"), py::arg("compression"));
  py::class_<PyGroup>(module, "Group", "This rank's membership in a group.")
      .def_property_readonly(
          "notice", [](const PyGroup& group) { return std::string(group.get().notice()); },
          "What the user should know about how the group was made; empty if all went well.");
  module.def("join", &join, WithGilReleased(), py::arg("endpoint"), py::arg("config"),
             "Connects to the other ranks of a new group.");
  module.def("make_backend", &make_backend, WithGilReleased(), py::arg("group"), py::arg("rank"),
             py::arg("size"), py::arg("timeout"), py::arg("gloo"),
             py::arg("accelerator") = py::none(), py::arg("inner") = py::none(),
             py::arg("known_to_engine") = false,
             "`accelerator` is the type of the devices served besides the CPU, `inner` their own "
             "backend; `known_to_engine` says whether their streams are CUDA's.");
  module.def("topology", &topology, WithGilReleased(), py::arg("backend"),
             "The number of hosts, of carriers on each, this rank's host and its index there.");
}

}  // namespace gflow
