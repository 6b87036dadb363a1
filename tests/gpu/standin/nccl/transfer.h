// Transfers: messages to and from several peers at once, over the mesh, on the thread of a stream.

#pragma once

#include <cstdint>
#include <vector>

#include "communicator.h"

namespace standin {

// What both ends of a message must agree on. NCCL does not look; here it is told.
struct Label {
  // The number of the operation on its communicator; 0 for a message between two ranks only.
  uint64_t number = 0;
  uint32_t kind = 0;
  uint32_t type = 0;
  uint32_t operation = 0;
  int32_t root = 0;
  uint64_t count = 0;
  // Which piece of the operation it is.
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

// All messages to a peer leave, and all from a peer arrive, in the order given. The labels say how
// long they are. Throws Lost, Refused or Interrupted.
void transfer(Communicator& communicator, const std::vector<Outgoing>& outgoing,
              const std::vector<Incoming>& incoming);

}  // namespace standin
