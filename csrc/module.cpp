// gflow._C: what the Python half of the package calls. Everything that a user calls is in
// Python; this module only makes backends and reads their counters.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "gflow_backend.h"

namespace gflow {
namespace {

namespace py = pybind11;

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// A listening socket that is used up by joining a group.
class PyDoor {
 public:
  explicit PyDoor(const std::string& address) : door_(open_door(address)) {}

  std::string address() const {
    TORCH_CHECK(door_, "gflow: this door was used to join a group");
    return std::string((*door_)->address());
  }

  rust::Box<Door> take() {
    TORCH_CHECK(door_, "gflow: this door was used to join a group");
    auto door = std::move(*door_);
    door_.reset();
    return door;
  }

 private:
  std::optional<rust::Box<Door>> door_;
};

// This rank's place in a group, until a backend takes it over.
class PyGroup {
 public:
  explicit PyGroup(rust::Box<Group> group) : group_(std::move(group)) {}

  rust::Box<Group> take() {
    TORCH_CHECK(group_, "gflow: this group already has its backend");
    auto group = std::move(*group_);
    group_.reset();
    return group;
  }

 private:
  std::optional<rust::Box<Group>> group_;
};

PyGroup join(PyDoor& door, const std::string& group, int rank,
             const std::vector<std::string>& labels, const std::vector<std::string>& addresses,
             const std::string& key, std::chrono::milliseconds timeout) {
  Membership membership{};
  membership.group = group;
  membership.rank = static_cast<uint32_t>(rank);
  for (const auto& label : labels) membership.labels.push_back(label);
  for (const auto& address : addresses) membership.addresses.push_back(address);
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
  return py::dict(py::arg("gradient_buckets") = snapshot.gradient_buckets,
                  py::arg("gradient_bytes") = snapshot.gradient_bytes,
                  py::arg("exact_tensors") = snapshot.exact_tensors,
                  py::arg("exact_bytes") = snapshot.exact_bytes, py::arg("collectives") = by_kind);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The native half of gflow.";
  const auto no_gil = py::call_guard<py::gil_scoped_release>();

  py::class_<PyDoor>(m, "Door", "A listening socket for a group that is being made.")
      .def(py::init<const std::string&>(), py::arg("address"))
      .def_property_readonly("address", &PyDoor::address);
  m.def("join", &join, no_gil, py::arg("door"), py::arg("group"), py::arg("rank"),
        py::arg("labels"), py::arg("addresses"), py::arg("key"), py::arg("timeout"),
        "Connects to the other ranks of a new group.");
  py::class_<PyGroup>(m, "Group", "This rank's place in a group.");
  m.def("make_backend", &make_backend, no_gil, py::arg("group"), py::arg("rank"), py::arg("size"),
        py::arg("timeout"), py::arg("gloo"), py::arg("cuda"));
  m.def("metrics", &metrics, py::arg("backend"));
  m.def("close_all_groups", &close_all_groups, no_gil);
  m.def(
      "provoke", [](const std::string& what) { provoke(what); }, no_gil, py::arg("what"),
      "Fails on purpose, as \"error\" or \"panic\".");
}

}  // namespace gflow
