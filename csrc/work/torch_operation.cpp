// Runs each step with the caller's thread state, and keeps what it throws for the caller.
#include "work/torch_operation.h"

#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>
#include <cxxabi.h>

#include <string_view>
#include <typeinfo>

namespace gflow {
namespace {

// Gloo's headers are not in torch's wheel, so go by the name of its exception.
bool is_connection_error(const std::exception& error) {
  const std::string_view name = typeid(error).name();
  return name.find("gloo") != name.npos && name.find("IoException") != name.npos;
}

}  // namespace

void TorchOperation::run(const std::function<void()>& step) const {
  std::optional<at::ThreadLocalStateGuard> as_caller;
  if (caller_) as_caller.emplace(*caller_);
  const c10::OptionalStreamGuard on_stream(steps_.stream);
  try {
    step();
  } catch (const std::exception& error) {
    std::lock_guard<std::mutex> lock(mutex_);
    thrown_ = std::current_exception();
    broke_connection_ = is_connection_error(error);
    throw;
  } catch (const abi::__forced_unwind&) {
    // The thread is being cancelled; do not stop that.
    throw;
  } catch (...) {
    // Only a std::exception can cross into Rust; anything else would end the process.
    throw std::runtime_error("gflow: the operation failed with an exception of unknown type");
  }
}

void TorchOperation::prepare() const { run(steps_.prepare); }

TensorSpans TorchOperation::open() const {
  TensorSpans spans;
  run([&] { spans = steps_.spans(); });
  return spans;
}

void TorchOperation::start(rust::Box<Done> done) const {
  run([&] {
    inner_ = steps_.begin();
    c10::intrusive_ptr<c10::ivalue::Future> future;
    try {
      future = inner_->getFuture();
    } catch (const c10::Error&) {
      // Gloo's reduce_scatter has no Future. The worker then waits in finish(), and notices a lost
      // peer only when Gloo does.
      return done->raise();
    }
    auto shared = std::make_shared<rust::Box<Done>>(std::move(done));
    future->addCallback([shared](c10::ivalue::Future&) { (*shared)->raise(); },
                        /*uses_future=*/false);
  });
}

void TorchOperation::finish() const {
  run([&] {
    if (inner_) inner_->wait();
    steps_.end();
  });
}

bool TorchOperation::broke_connection() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return broke_connection_;
}

bool TorchOperation::complete(rust::Str error, bool as_thrown) const {
  if (error.empty()) return work_->complete(nullptr);
  if (as_thrown) {
    std::exception_ptr thrown;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      thrown = thrown_;
    }
    if (thrown) return work_->complete(thrown);
  }
  const c10::SourceLocation here = {__func__, __FILE__, static_cast<uint32_t>(__LINE__)};
  return work_->complete(std::make_exception_ptr(
      c10::DistBackendError(here, std::string(error.data(), error.size()))));
}

}  // namespace gflow
