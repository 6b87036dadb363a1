// The mesh: two connections between every pair of ranks, one for data and one to notice when the
// other is gone; and the bootstrap in which ranks find each other.

#pragma once

#include <nccl.h>

#include <cstdint>
#include <vector>

#include "alarm.h"
#include "socket.h"

namespace standin {

// The contents of a unique id: the address of the process that made it, and a token.
struct BootstrapId {
  uint64_t magic;
  uint64_t token;
  sockaddr_in address;
};

// What a rank says about itself.
struct Member {
  int32_t rank;
  int32_t ranks;
  int32_t device;
  // Equal for ranks in the same process.
  uint64_t process;
  sockaddr_in address;
};

// Indexed by rank; a rank's own entries are empty.
struct Mesh {
  std::vector<Socket> data;
  std::vector<Socket> control;
};

// Why ranks couldn't connect, as an NCCL error.
struct Refused {
  ncclResult_t code;
  std::string reason;
};

// Starts a bootstrap server in this process; it runs until all ranks have joined. Throws Lost.
BootstrapId start_bootstrap();
// Joins, and returns the members by rank once all have joined. Throws Refused, Lost or Interrupted.
std::vector<Member> join_bootstrap(const BootstrapId& bootstrap, const Member& self,
                                   const Alarm& alarm);
// Connects every pair of members; each listens at the address it announced.
Mesh connect(const std::vector<Member>& members, int rank, uint64_t token, const Socket& listener,
             const Alarm& alarm);

// A number unique to this process.
uint64_t process_number();

}  // namespace standin
