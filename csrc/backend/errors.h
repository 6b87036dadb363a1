// Turns the engine's errors into those of torch.distributed.
#pragma once

#include <c10/util/Exception.h>

#include "rust/cxx.h"

namespace gflow {

// Calls the engine; an error that it returns is thrown as a DistBackendError.
template <typename Call>
auto as_backend_error(Call call) {
  try {
    return call();
  } catch (const rust::Error& error) {
    C10_THROW_ERROR(DistBackendError, error.what());
  }
}

}  // namespace gflow
