// gflow._C: the engine's log.
#include "python/bindings.h"

namespace gflow {

namespace {

std::vector<LogRecord> records() {
  const auto records = next_log_records();
  return {records.begin(), records.end()};
}

std::string to_string(const rust::String& text) { return std::string(text); }

}  // namespace

void bind_log(py::module_& module) {
  py::class_<LogRecord>(module, "LogRecord", "A record of the engine's log.")
      .def_readonly("level", &LogRecord::level)
      .def_property_readonly("module", [](const LogRecord& one) { return to_string(one.module); })
      .def_property_readonly("group", [](const LogRecord& one) { return to_string(one.group); })
      .def_readonly("rank", &LogRecord::rank)
      .def_property_readonly("text", [](const LogRecord& one) { return to_string(one.text); })
      .def_readonly("created", &LogRecord::created);
  module.def("start_log", &start_log, py::arg("level"),
             "Starts the engine's log, or changes its level: 0 is off, 1 errors, 4 debug.");
  module.def("next_log_records", &records, WithGilReleased(),
             "Waits for records; an empty list means that the log was stopped.");
  module.def("stop_log", &stop_log, "Stops the log and wakes whoever waits for its records.");
}

}  // namespace gflow
