// gflow._C: the counters of a group.
#include "python/bindings.h"

namespace gflow {
namespace {

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
  py::list certificates;
  for (const auto& one : snapshot.certificates) {
    certificates.append(py::dict(
        py::arg("bucket") = one.bucket, py::arg("step") = one.step, py::arg("steps") = one.steps,
        py::arg("method") = std::string(one.method), py::arg("cosine") = one.cosine,
        py::arg("relative_error") = one.relative_error, py::arg("noise") = one.noise,
        py::arg("window_cosine") = one.window_cosine,
        py::arg("window_relative_error") = one.window_relative_error));
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
                  py::arg("method") = std::string(snapshot.method),
                  py::arg("certificates") = certificates,
                  py::arg("gradient_buckets") = snapshot.gradient_buckets,
                  py::arg("gradient_bytes") = snapshot.gradient_bytes,
                  py::arg("exact_tensors") = snapshot.exact_tensors,
                  py::arg("exact_bytes") = snapshot.exact_bytes, py::arg("collectives") = by_kind);
}

}  // namespace

void bind_metrics(py::module_& module) {
  module.def("metrics", &metrics, py::arg("backend"),
             "The counters of a group, for gflow.metrics().");
}

}  // namespace gflow
