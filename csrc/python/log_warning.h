// Tells the person who runs the job something, through Python's logging.
#pragma once

#include <string>

namespace gflow {

// Logs a warning of rank `rank` in group `group`. Call it without the GIL. It never throws: a
// failure to log must not end a backward pass.
void log_warning(const std::string& group, int rank, const std::string& text);

}  // namespace gflow
