#include "python/log_warning.h"

#include <torch/csrc/utils/pybind.h>

namespace gflow {

void log_warning(const std::string& text) {
  if (!Py_IsInitialized()) return;
  py::gil_scoped_acquire gil;
  try {
    auto logger = py::module_::import("logging").attr("getLogger")("gflow");
    // Warnings show even where logging is not set up, and the user must see this.
    logger.attr("warning")("gflow: %s", text);
  } catch (const std::exception&) {
    // There is nowhere else to report it.
  }
}

}  // namespace gflow
