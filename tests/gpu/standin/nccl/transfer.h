// Transfers: messages to and from several peers at once over the mesh, on a stream's thread.

#pragma once

#include <cstdint>
#include <vector>

#include "communicator.h"

namespace standin {

// What both ends of a message must agree on. NCCL doesn't check this; the stand-in does.
struct Label {
  // The number of the operation on its communicator; 0 for sends and receives.
  uint64_t number = 0;
  uint32_t kind = 0;
  uint32_t type = 0;
  uint32_t operation = 0;
  int32_t root = 0;
  uint64_t count = 0;
  // The index of the piece within the operation.
  uint64_t piece = 0;
  uint64_t bytes = 0;

  bool operator==(const Label&) const = default;
};

struct Outgoing {
  int peer;
  Label label;
  const void* data;
};

struct Incoming {
  int peer;
  Label label;
  void* data;
};

// Messages to each peer are sent, and those from each peer received, in the given order; the labels
// give their lengths. Throws Lost, Refused or Interrupted.
void transfer(Communicator& communicator, const std::vector<Outgoing>& outgoing,
              const std::vector<Incoming>& incoming);

}  // namespace standin
