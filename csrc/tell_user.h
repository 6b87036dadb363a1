// Says something to the person who runs the job, through Python's logging.
#pragma once

#include <string>

namespace gflow {

// Logs a line as "gflow" on a thread that does not hold Python's lock. It never throws: a log that
// cannot be written must not end a backward pass.
void tell_user(const std::string& text);

}  // namespace gflow
