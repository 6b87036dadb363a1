#include "reports.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <deque>
#include <mutex>

namespace standin {

namespace {

struct Reports {
  std::mutex mutex;
  std::array<int, 2> counts{};
  std::array<const char*, 2> last{"", ""};
  // Never shrinks: callers keep pointers to the elements.
  std::deque<std::string> texts;
};

Reports& all() {
  // Never destroyed: streams outlive main.
  static auto* reports = new Reports;
  return *reports;
}

// Uses a single write, so that lines of several processes don't mix.
void put(int file, const std::string& line) {
  if (write(file, line.data(), line.size()) < 0) {
    return;  // Nothing can be done about it.
  }
}

}  // namespace

void report(Wrong what, const std::string& text) {
  Reports& reports = all();
  std::lock_guard lock(reports.mutex);
  auto index = static_cast<size_t>(what);
  ++reports.counts[index];
  reports.last[index] = reports.texts.emplace_back(text).c_str();
  std::string line = (what == Wrong::Race ? "standin: race: " : "standin: fault: ") + text + "\n";
  put(STDERR_FILENO, line);
  if (const char* path = std::getenv("STANDIN_REPORTS")) {
    int file = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    if (file >= 0) {
      put(file, line);
      close(file);
    }
  }
}

int reports(Wrong what) {
  std::lock_guard lock(all().mutex);
  return all().counts[static_cast<size_t>(what)];
}

const char* last_report(Wrong what) {
  std::lock_guard lock(all().mutex);
  return all().last[static_cast<size_t>(what)];
}

void clear_reports() {
  std::lock_guard lock(all().mutex);
  all().counts = {};
  all().last = {"", ""};
}

}  // namespace standin
