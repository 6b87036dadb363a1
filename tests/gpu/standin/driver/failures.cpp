#include "failures.h"

#include <atomic>
#include <map>
#include <mutex>

namespace standin {

namespace {

std::mutex mutex;
std::map<std::string, int>& ordered() {
  static auto* failures = new std::map<std::string, int>;
  return *failures;
}
// A fast path: every call checks for failures, and most processes inject none.
std::atomic<int> count{0};

}  // namespace

void order_failure(const std::string& function, int code) {
  std::lock_guard lock(mutex);
  ordered()[function] = code;
  count = static_cast<int>(ordered().size());
}

std::optional<int> take_failure(const std::string& function) {
  if (count == 0) {
    return std::nullopt;
  }
  std::lock_guard lock(mutex);
  auto found = ordered().find(function);
  if (found == ordered().end()) {
    return std::nullopt;
  }
  int code = found->second;
  ordered().erase(found);
  count = static_cast<int>(ordered().size());
  return code;
}

}  // namespace standin
