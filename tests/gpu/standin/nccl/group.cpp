#include "group.h"

#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

#include "../driver/inside.h"

namespace standin {

namespace {

// Operations of one communicator on one stream, which run together.
struct Batch {
  std::shared_ptr<Communicator> communicator;
  CUstream stream;
  std::vector<Operation> operations;
};

thread_local int depth = 0;
thread_local std::vector<Batch> batches;
thread_local std::vector<std::function<ncclResult_t()>> concurrent;

ncclResult_t queue_now(Batch batch) {
  Work work;
  auto communicator = batch.communicator;
  for (const Operation& operation : batch.operations) {
    work.name += (work.name.empty() ? "" : " and ") + operation.name();
    auto accesses = operation.accesses(*communicator);
    work.accesses.insert(work.accesses.end(), accesses.begin(), accesses.end());
  }
  constexpr size_t kLongName = 120;
  if (work.name.size() > kLongName) {
    work.name = work.name.substr(0, kLongName) + " …";
  }
  auto turn = communicator->next_turn();
  work.run = [communicator, turn, operations = std::move(batch.operations)] {
    communicator->run_in_turn(*turn,
                              [&] { perform(*communicator, turn->number() + 1, operations); });
  };
  return queue_on(batch.stream, std::move(work)) == CUDA_SUCCESS ? ncclSuccess
                                                                 : ncclUnhandledCudaError;
}

ncclResult_t queue(Batch batch) {
  auto communicator = batch.communicator;
  return communicator->do_call([batch = std::move(batch)] { return queue_now(batch); });
}

}  // namespace

void start_group() { ++depth; }
bool is_in_group() { return depth > 0; }

ncclResult_t end_group() {
  if (depth == 0) {
    return ncclInvalidUsage;
  }
  if (--depth > 0) {
    return ncclSuccess;
  }
  ncclResult_t outcome = ncclSuccess;
  auto keep = [&](ncclResult_t one) {
    bool is_well = outcome == ncclSuccess || outcome == ncclInProgress;
    outcome = is_well && one != ncclSuccess ? one : outcome;
  };
  auto waiting = std::exchange(concurrent, {});
  std::vector<ncclResult_t> outcomes(waiting.size());
  std::vector<std::thread> threads;
  for (size_t index = 0; index < waiting.size(); ++index) {
    threads.emplace_back([&, index] { outcomes[index] = waiting[index](); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  std::ranges::for_each(outcomes, keep);
  for (Batch& batch : std::exchange(batches, {})) {
    keep(queue(std::move(batch)));
  }
  return outcome;
}

ncclResult_t call(std::shared_ptr<Communicator> communicator, CUstream stream,
                  Operation operation) {
  if (!is_in_group()) {
    return queue({std::move(communicator), stream, {operation}});
  }
  auto same = std::ranges::find_if(batches, [&](const Batch& batch) {
    return batch.communicator == communicator && batch.stream == stream;
  });
  if (same == batches.end()) {
    batches.push_back({std::move(communicator), stream, {operation}});
  } else {
    same->operations.push_back(operation);
  }
  return ncclSuccess;
}

ncclResult_t call_concurrently(std::function<ncclResult_t()> what) {
  if (!is_in_group()) {
    return what();
  }
  concurrent.push_back(std::move(what));
  return ncclSuccess;
}

}  // namespace standin
