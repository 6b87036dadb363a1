// An operation of NCCL as it was called, what it touches, and how it is carried out.

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
  // As the call gives it: of the whole, or of one rank's block.
  size_t count = 0;
  ncclDataType_t type = ncclFloat32;
  ncclRedOp_t reduction = ncclSum;
  // Or the peer.
  int root = 0;

  std::string name() const;
  std::vector<Access> accesses(const Communicator& communicator) const;
};

// Carries out all of these, which are of one group call: collectives one after the other, then all
// messages between two ranks at once. On the thread of a stream.
void perform(Communicator& communicator, uint64_t number, const std::vector<Operation>& operations);

// Sums of up to so many bytes are made in the order of ranks.
void set_small(size_t bytes);

}  // namespace standin
