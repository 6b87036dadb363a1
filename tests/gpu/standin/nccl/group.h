// Group calls: the calls between ncclGroupStart and ncclGroupEnd take effect at the end, those of
// one communicator and stream as one batch.

#pragma once

#include <cuda.h>
#include <nccl.h>

#include <functional>
#include <memory>

#include "communicator.h"
#include "operation.h"

namespace standin {

void start_group();
ncclResult_t end_group();
bool is_in_group();

// Queues the operation on the stream, now or at the end of the group.
ncclResult_t call(std::shared_ptr<Communicator> communicator, CUstream stream, Operation operation);
// Runs `what` now, or at the end of the group concurrently with the others: for calls that wait for
// other ranks.
ncclResult_t call_concurrently(std::function<ncclResult_t()> what);

}  // namespace standin
