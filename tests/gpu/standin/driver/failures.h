// Failures that a test has ordered for the next call of a function.

#pragma once

#include <optional>
#include <string>

#include "exported.h"

namespace standin {

void order_failure(const std::string& function, int code);
// The code, once, if a failure was ordered for this function.
EXPORTED std::optional<int> take_failure(const std::string& function);

}  // namespace standin
