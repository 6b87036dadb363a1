// Failures that a test injects into the next call of a function.

#pragma once

#include <optional>
#include <string>

#include "exported.h"

namespace standin {

void order_failure(const std::string& function, int code);
// The injected error for this function, if any; returned only once.
EXPORTED std::optional<int> take_failure(const std::string& function);

}  // namespace standin
