// The parts of gflow._C, one function for each file that binds some. Everything that users call is
// in Python (torch_plugin/); this module is for that code alone.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "backend/gflow_backend.h"

namespace gflow {

namespace py = pybind11;

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using WithGilReleased = py::call_guard<py::gil_scoped_release>;

// The backend as ours; throws a TypeError if it is another.
GflowBackend& gflow_backend(const BackendPtr& backend);

// Joining a group and making its backend.
void bind_group(py::module_& module);

// Gradient buckets, and what is kept of them between steps.
void bind_gradients(py::module_& module);

// Counters.
void bind_metrics(py::module_& module);

// The engine's log, for torch_plugin/logs.py.
void bind_log(py::module_& module);

}  // namespace gflow
