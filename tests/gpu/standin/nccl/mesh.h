// The mesh: two connections between every two ranks, one for data and one to see whether the
// other is still there; and how ranks find each other to make it.

#pragma once

#include <nccl.h>

#include <cstdint>
#include <vector>

#include "alarm.h"
#include "socket.h"

namespace standin {

// What a unique id holds: where the process that made it listens, and a number to know it by.
struct Meeting {
  uint64_t magic;
  uint64_t token;
  sockaddr_in address;
};

// A rank as it introduces itself.
struct Member {
  int32_t rank;
  int32_t ranks;
  int32_t device;
  // Equal for ranks of one process.
  uint64_t process;
  sockaddr_in address;
};

// By rank; the own places are empty.
struct Mesh {
  std::vector<Socket> data;
  std::vector<Socket> control;
};

// Why ranks could not come together, as NCCL would call it.
struct Refused {
  ncclResult_t code;
  std::string reason;
};

// Opens a meeting that this process holds, as long as it takes. Throws Lost.
Meeting open_meeting();
// Comes to the meeting, and returns when all have: the members by rank. Throws Refused, Lost or
// Interrupted.
std::vector<Member> meet(const Meeting& meeting, const Member& self, const Alarm& alarm);
// Connects every two members, of which each listens at the address that it gave.
Mesh connect(const std::vector<Member>& members, int rank, uint64_t token, const Socket& listener,
             const Alarm& alarm);

// A number that no other process has.
uint64_t process_number();

}  // namespace standin
