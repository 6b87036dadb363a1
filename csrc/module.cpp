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

BackendPtr join(PyDoor& door, const std::string& group, int rank,
                const std::vector<std::string>& labels, const std::vector<std::string>& addresses,
                const std::string& key, std::chrono::milliseconds connect_timeout,
                std::chrono::milliseconds timeout, const BackendPtr& gloo, const BackendPtr& cuda) {
  Membership membership{};
  membership.group = group;
  membership.rank = static_cast<uint32_t>(rank);
  for (const auto& label : labels) membership.labels.push_back(label);
  for (const auto& address : addresses) membership.addresses.push_back(address);
  for (const char byte : key) membership.key.push_back(static_cast<uint8_t>(byte));
  membership.timeout_ms = static_cast<uint64_t>(connect_timeout.count());
  return c10::make_intrusive<GflowBackend>(rank, static_cast<int>(labels.size()), timeout,
                                           join_group(door.take(), membership), gloo, cuda);
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
        py::arg("labels"), py::arg("addresses"), py::arg("key"), py::arg("connect_timeout"),
        py::arg("timeout"), py::arg("gloo"), py::arg("cuda"),
        "Connects to the other ranks and returns the backend of a new group.");
  m.def("metrics", &metrics, py::arg("backend"));
  m.def("close_all_groups", &close_all_groups, no_gil);
  m.def(
      "provoke", [](const std::string& what) { provoke(what); }, no_gil, py::arg("what"),
      "Fails on purpose, as \"error\" or \"panic\".");
}

}  // namespace gflow
