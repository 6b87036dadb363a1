// An NCCL operation as it was called, the memory it touches, and how to run it.

#pragma once

#include <nccl.h>

#include <memory>
#include <string>
#include <vector>

#include "../driver/access.h"
#include "communicator.h"
#include "transfer.h"

namespace standin {

enum class Kind { AllReduce, ReduceScatter, AllGather, Reduce, Broadcast, Send, Receive };

struct Operation {
  Kind kind;
  const void* from = nullptr;
  void* to = nullptr;
  // The count in the call: of the whole tensor, or of one rank's block.
  size_t count = 0;
  ncclDataType_t type = ncclFloat32;
  ncclRedOp_t reduction = ncclSum;
  // The peer, for sends and receives.
  int root = 0;

  std::string name() const;
  std::vector<Access> accesses(const Communicator& communicator) const;
};

// Runs all operations of one group call on a stream's thread: collectives in sequence, then all
// sends and receives at once.
void perform(Communicator& communicator, uint64_t number, const std::vector<Operation>& operations);

// Sums of up to this many bytes are made in rank order.
void set_small(size_t bytes);

}  // namespace standin
