// Warnings that the C++ half gives to Python's logging.
#include "python/log_warning.h"

#include <torch/csrc/utils/pybind.h>

namespace gflow {

void log_warning(const std::string& group, int rank, const std::string& text) {
  if (!Py_IsInitialized()) return;
  py::gil_scoped_acquire gil;
  try {
    // Warnings show even where logging is not set up, and the user must see this.
    py::module_::import("gflow.logs").attr("warn")(group, rank, text);
  } catch (const std::exception&) {
    // There is nowhere else to report it.
  }
}

}  // namespace gflow
