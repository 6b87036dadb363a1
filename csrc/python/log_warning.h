// Tells the person who runs the job something, through Python's logging.
#pragma once

#include <string>

namespace gflow {

// Logs a warning as "gflow". Call it without the GIL. It never throws: a failure to log must not
// end a backward pass.
void log_warning(const std::string& text);

}  // namespace gflow
