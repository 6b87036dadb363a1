// Reads the current Python frame and autograd's current node.
#include "gradients/caller.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/utils/pybind.h>

namespace gflow {

bool called_by_autograd_itself() {
  if (!Py_IsInitialized()) return true;
  py::gil_scoped_acquire gil;
  // A thread of autograd's engine has no Python frames.
  if (PyEval_GetFrame() == nullptr) return true;
  try {
    const auto frame = py::module_::import("sys").attr("_getframe")(0);
    const auto module = frame.attr("f_globals").attr("get")("__name__", "").cast<std::string>();
    // Where torch's Python code enters autograd's engine.
    return module.starts_with("torch.autograd");
  } catch (const std::exception&) {
    // If the caller can't be identified, treat it as user code.
    return false;
  }
}

bool backward_is_over() { return torch::autograd::get_current_node() == nullptr; }

const void* current_parameter() {
  const auto node = torch::autograd::get_current_node();
  const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(node.get());
  return leaf == nullptr ? nullptr : leaf->variable.unsafeGetTensorImpl();
}

}  // namespace gflow
