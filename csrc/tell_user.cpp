#include "tell_user.h"

#include <torch/csrc/utils/pybind.h>

namespace gflow {

void tell_user(const std::string& text) {
  if (!Py_IsInitialized()) return;
  py::gil_scoped_acquire gil;
  try {
    auto logger = py::module_::import("logging").attr("getLogger")("gflow");
    // A warning is seen where nobody has set up logging, and this must be seen.
    logger.attr("warning")("gflow: %s", text);
  } catch (const std::exception&) {
    // There is nowhere else to say it.
  }
}

}  // namespace gflow
