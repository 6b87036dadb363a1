#include "torch_operation.h"

#include <c10/util/Exception.h>

namespace gflow {

void TorchOperation::run() const {
  at::ThreadLocalStateGuard as_caller(caller_);
  try {
    body_();
  } catch (const std::exception&) {
    std::lock_guard<std::mutex> lock(mutex_);
    thrown_ = std::current_exception();
    throw;
  } catch (...) {
    // Only a std::exception can cross into Rust; anything else would end the process.
    throw std::runtime_error("gflow: the collective failed with an exception of unknown type");
  }
}

bool TorchOperation::settle(rust::Str error, bool as_thrown) const {
  if (error.empty()) return work_->settle(nullptr);
  if (as_thrown) {
    std::exception_ptr thrown;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      thrown = thrown_;
    }
    if (thrown) return work_->settle(thrown);
  }
  const c10::SourceLocation here = {__func__, __FILE__, static_cast<uint32_t>(__LINE__)};
  return work_->settle(std::make_exception_ptr(
      c10::DistBackendError(here, std::string(error.data(), error.size()))));
}

}  // namespace gflow
