#include "coalescing.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <algorithm>

namespace gflow {
namespace {

// Several works as one: it is over when all are, and has failed with the first that has.
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

void Coalescing::start(bool is_well) {
  const auto stale = take();
  if (stale && stale->inner && is_well) {
    try {
      stale->inner->endCoalescing();
    } catch (const std::exception&) {
      // Whoever made those calls has had an error already.
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
  const auto own = calls_.find(std::this_thread::get_id());
  if (own == calls_.end() || own->second.inner) return;
  inner->startCoalescing();
  own->second.inner = inner;
}

Coalescing::WorkPtr Coalescing::note(WorkPtr work) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto own = calls_.find(std::this_thread::get_id());
  if (own != calls_.end()) own->second.works.push_back(work);
  return work;
}

Coalescing::WorkPtr Coalescing::end() {
  auto calls = take();
  if (!calls) return nullptr;
  auto works = std::move(calls->works);
  if (calls->inner) {
    if (auto of_device = calls->inner->endCoalescing()) works.push_back(std::move(of_device));
  }
  if (works.size() > 1) return c10::make_intrusive<CoalescedWork>(std::move(works));
  return works.empty() ? nullptr : works.front();
}

std::optional<Coalescing::Calls> Coalescing::take() {
  std::lock_guard<std::mutex> lock(mutex_);
  auto own = calls_.extract(std::this_thread::get_id());
  return own ? std::make_optional(std::move(own.mapped())) : std::nullopt;
}

}  // namespace gflow
