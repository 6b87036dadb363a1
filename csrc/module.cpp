// gflow._C: what the Python half of the package calls. Everything that a user calls is in
// Python; this module only makes backends and reads their counters.
#include <pthread.h>
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "gflow_backend.h"

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

using PyDoor = UsedOnce<Door>;
using PyGroup = UsedOnce<Group>;

using Strings = std::vector<std::string>;

rust::Vec<rust::String> to_rust(const Strings& strings) {
  rust::Vec<rust::String> copies;
  for (const auto& string : strings) copies.push_back(string);
  return copies;
}

PyGroup join(PyDoor& door, const std::string& group, int rank, const Strings& labels,
             const Strings& addresses, const Strings& hosts, const Strings& entrances,
             const std::string& key, std::chrono::milliseconds timeout) {
  Membership membership{};
  membership.group = group;
  membership.rank = static_cast<uint32_t>(rank);
  membership.labels = to_rust(labels);
  membership.addresses = to_rust(addresses);
  membership.hosts = to_rust(hosts);
  membership.entrances = to_rust(entrances);
  for (const char byte : key) membership.key.push_back(static_cast<uint8_t>(byte));
  membership.timeout_ms = static_cast<uint64_t>(timeout.count());
  return PyGroup(join_group(door.take(), membership));
}

BackendPtr make_backend(PyGroup& group, int rank, int size, std::chrono::milliseconds timeout,
                        const BackendPtr& gloo, const BackendPtr& cuda) {
  return c10::make_intrusive<GflowBackend>(rank, size, timeout, group.take(), gloo, cuda);
}

py::dict metrics(const BackendPtr& backend) {
  const auto* gflow = dynamic_cast<const GflowBackend*>(backend.get());
  TORCH_CHECK_TYPE(gflow, "gflow: expected a gflow backend, got ", backend->getBackendName());
  const auto snapshot = gflow->metrics();
  py::dict by_kind;
  for (const auto& entry : snapshot.by_kind)
    by_kind[py::str(std::string(entry.name))] = entry.count;
  return py::dict(py::arg("hosts") = snapshot.hosts, py::arg("ranks_here") = snapshot.ranks_here,
                  py::arg("gradient_buckets") = snapshot.gradient_buckets,
                  py::arg("gradient_bytes") = snapshot.gradient_bytes,
                  py::arg("exact_tensors") = snapshot.exact_tensors,
                  py::arg("exact_bytes") = snapshot.exact_bytes, py::arg("collectives") = by_kind);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The native half of gflow.";
  // A forked child, such as a worker of a DataLoader, keeps nothing of its parent's groups.
  pthread_atfork(&before_fork, &after_fork_in_parent, &after_fork_in_child);
  const auto no_gil = py::call_guard<py::gil_scoped_release>();

  py::class_<PyDoor>(m, "Door", "A listening socket for a group that is being made.")
      .def(py::init([](const std::string& address) { return PyDoor(open_door(address)); }),
           py::arg("address"))
      .def_property_readonly("address",
                             [](const PyDoor& door) { return std::string(door.look().address()); })
      .def_property_readonly(
          "entrance", [](const PyDoor& door) { return std::string(door.look().entrance()); });
  m.def("join", &join, no_gil, py::arg("door"), py::arg("group"), py::arg("rank"),
        py::arg("labels"), py::arg("addresses"), py::arg("hosts"), py::arg("entrances"),
        py::arg("key"), py::arg("timeout"), "Connects to the other ranks of a new group.");
  py::class_<PyGroup>(m, "Group", "This rank's place in a group.")
      .def_property_readonly(
          "notice", [](const PyGroup& group) { return std::string(group.look().notice()); });
  m.def("make_backend", &make_backend, no_gil, py::arg("group"), py::arg("rank"), py::arg("size"),
        py::arg("timeout"), py::arg("gloo"), py::arg("cuda"));
  m.def("metrics", &metrics, py::arg("backend"));
  m.def("close_all_groups", &close_all_groups, no_gil);
  m.def(
      "provoke", [](const std::string& what) { provoke(what); }, no_gil, py::arg("what"),
      "Fails on purpose, as \"error\" or \"panic\".");
}

}  // namespace gflow
