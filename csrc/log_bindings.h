// The engine's log, as Python's half of it sees it (torch_plugin/logs.py).
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace gflow {

void bind_log(pybind11::module_& module);

}  // namespace gflow
