// gflow._C: the module itself, and what concerns the whole process.
#include <pthread.h>

#include "python/bindings.h"

namespace gflow {

GflowBackend& gflow_backend(const BackendPtr& backend) {
  auto* gflow = dynamic_cast<GflowBackend*>(backend.get());
  TORCH_CHECK_TYPE(gflow, "gflow: expected a gflow backend, got ", backend->getBackendName());
  return *gflow;
}

namespace {

std::vector<std::tuple<std::string, std::string, bool>> gpu_findings() {
  std::vector<std::tuple<std::string, std::string, bool>> findings;
  for (const auto& one : look_for_gpus()) {
    findings.emplace_back(std::string(one.what), std::string(one.found), one.is_there);
  }
  return findings;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The native half of gflow.";
  // A forked child, such as a DataLoader worker, must not keep anything of its parent's groups.
  pthread_atfork(&before_fork, &after_fork_in_parent, &after_fork_in_child);

  bind_group(m);
  bind_gradients(m);
  bind_metrics(m);
  bind_log(m);
  m.def("look_for_gpus", &gpu_findings, WithGilReleased(),
        "What the GPU path needs: its name, what was found or why not, whether it is there.");
  m.def("close_all_groups", &close_all_groups, WithGilReleased(),
        "Closes every group that is still open. For the end of the interpreter.");
  m.def(
      "provoke", [](const std::string& what) { provoke(what); }, WithGilReleased(), py::arg("what"),
      "Fails on purpose, as \"error\" or \"panic\".");
}

}  // namespace gflow
