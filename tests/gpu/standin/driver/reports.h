// Reports of a program's errors: on stderr, in the file that STANDIN_REPORTS names, and to tests
// that ask. A report never stops the program.

#pragma once

#include <string>

#include "exported.h"

namespace standin {

enum class Wrong { Race, Fault };

EXPORTED void report(Wrong what, const std::string& text);
int reports(Wrong what);
// The last report, or "". Never freed.
const char* last_report(Wrong what);
void clear_reports();

}  // namespace standin
