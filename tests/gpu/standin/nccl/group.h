// Group calls: what a thread calls between ncclGroupStart and ncclGroupEnd happens at the end, and
// what belongs together at once.

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

// Now, or at the end of the group: queues the operation on the stream.
ncclResult_t call(std::shared_ptr<Communicator> communicator, CUstream stream, Operation operation);
// Now, or at the end of the group, beside all others: for what waits for other ranks.
ncclResult_t call_beside(std::function<ncclResult_t()> what);

}  // namespace standin
