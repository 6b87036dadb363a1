// Python bindings for what torch's own functions don't cover.
#include <torch/csrc/utils/pybind.h>

#include "collectives.h"
#include "on_stream.h"
#include "streams.h"

namespace standin_device {

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("device_count", [] { return static_cast<int>(device_count()); });
  m.def("current_device", [] { return static_cast<int>(current_device()); });
  m.def("set_device", [](int device) { set_device(static_cast<c10::DeviceIndex>(device)); });
  m.def("stop_kernels", &stop_kernels, pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def("make_collectives",
        [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
           const std::string& library) -> c10::intrusive_ptr<c10d::Backend> {
          return c10::make_intrusive<Collectives>(store, rank, size, library);
        });
}

}  // namespace standin_device
