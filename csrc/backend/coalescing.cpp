// Keeps the coalesced calls of each thread, and the work that stands for all of them.
#include "backend/coalescing.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <algorithm>

namespace gflow {
namespace {

// Several works as one: complete when all are, and failed if one is.
class CoalescedWork : public c10d::Work {
 public:
  explicit CoalescedWork(std::vector<Coalescing::WorkPtr> works)
      : Work(-1, c10d::OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override {
    return std::ranges::all_of(works_, [](const auto& work) { return work->isCompleted(); });
  }

  bool isSuccess() const override {
    return std::ranges::all_of(works_, [](const auto& work) { return work->isSuccess(); });
  }

  bool wait(std::chrono::milliseconds timeout) override {
    using std::chrono::steady_clock;
    const auto start = steady_clock::now();
    bool done = true;
    for (const auto& work : works_) {
      auto left = timeout;
      if (timeout != kNoTimeout) {
        left -= std::chrono::duration_cast<std::chrono::milliseconds>(steady_clock::now() - start);
        left = std::max(left, std::chrono::milliseconds(1));
      }
      done = work->wait(left) && done;
    }
    return done;
  }

  void synchronize() override {
    for (const auto& work : works_) work->synchronize();
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(
        c10::FutureType::create(c10::AnyType::get()));
    for (const auto& work : works_) futures.push_back(work->getFuture());
    return c10::collectAll(futures);
  }

 private:
  const std::vector<Coalescing::WorkPtr> works_;
};

}  // namespace

void Coalescing::start(bool group_is_healthy) {
  const auto stale = take();
  if (stale && stale->inner && group_is_healthy) {
    try {
      stale->inner->endCoalescing();
    } catch (const std::exception&) {
      // The caller has already seen an error.
    }
  }
  std::lock_guard<std::mutex> lock(mutex_);
  calls_[std::this_thread::get_id()] = {};
}

bool Coalescing::is_active() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return calls_.contains(std::this_thread::get_id());
}

void Coalescing::enter(const BackendPtr& inner) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto calls = calls_.find(std::this_thread::get_id());
  if (calls == calls_.end() || calls->second.inner) return;
  inner->startCoalescing();
  calls->second.inner = inner;
}

Coalescing::WorkPtr Coalescing::note(WorkPtr work) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto calls = calls_.find(std::this_thread::get_id());
  if (calls != calls_.end()) calls->second.works.push_back(work);
  return work;
}

Coalescing::WorkPtr Coalescing::end() {
  auto calls = take();
  if (!calls) return nullptr;
  auto works = std::move(calls->works);
  if (calls->inner) {
    if (auto device_work = calls->inner->endCoalescing()) works.push_back(std::move(device_work));
  }
  if (works.size() > 1) return c10::make_intrusive<CoalescedWork>(std::move(works));
  return works.empty() ? nullptr : works.front();
}

std::optional<Coalescing::Calls> Coalescing::take() {
  std::lock_guard<std::mutex> lock(mutex_);
  auto calls = calls_.extract(std::this_thread::get_id());
  return calls ? std::make_optional(std::move(calls.mapped())) : std::nullopt;
}

}  // namespace gflow
