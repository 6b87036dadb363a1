#include "mesh.h"

#include <poll.h>

#include <cstring>
#include <random>
#include <thread>

namespace standin {

namespace {

constexpr uint64_t kMagic = 0x73746e6463636c31;

// The bootstrap server's answer, followed by the members on success.
struct Answer {
  int32_t code;
  char reason[124];
};

struct Greeting {
  uint64_t token;
  int32_t rank;
  int32_t is_control;
};

uint64_t random_number() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

struct Guest {
  Socket socket;
  Member member;
};

std::string problem_with(const std::vector<Guest>& guests, const Member& next) {
  if (next.rank < 0 || next.rank >= next.ranks) {
    return "rank " + std::to_string(next.rank) + " of " + std::to_string(next.ranks);
  }
  for (const Guest& guest : guests) {
    if (guest.member.ranks != next.ranks) {
      return "ranks disagree on how many they are";
    }
    if (guest.member.rank == next.rank) {
      return "rank " + std::to_string(next.rank) + " is there twice";
    }
    if (guest.member.process == next.process && guest.member.device == next.device) {
      return "two ranks of one process use device " + std::to_string(next.device);
    }
  }
  return "";
}

void serve_bootstrap(const Socket& listener, uint64_t token) {
  Alarm never;
  std::vector<Guest> guests;
  Answer answer{};
  while (guests.empty() || guests.size() < static_cast<size_t>(guests[0].member.ranks)) {
    try {
      Guest guest{listener.accept(never), {}};
      uint64_t their_token = 0;
      guest.socket.receive_all(&their_token, sizeof their_token, never);
      guest.socket.receive_all(&guest.member, sizeof guest.member, never);
      if (their_token != token) {
        continue;
      }
      std::string problem = problem_with(guests, guest.member);
      guests.push_back(std::move(guest));
      if (!problem.empty()) {
        answer.code = ncclInvalidUsage;
        std::strncpy(answer.reason, problem.c_str(), sizeof answer.reason - 1);
        break;
      }
    } catch (const Lost&) {
      // A stray connection, or a rank that died. The others keep waiting, as with NCCL.
    }
  }
  std::vector<Member> members(answer.code == ncclSuccess ? guests.size() : 0);
  for (const Guest& guest : guests) {
    if (answer.code == ncclSuccess) {
      members[guest.member.rank] = guest.member;
    }
  }
  for (const Guest& guest : guests) {
    try {
      guest.socket.send_all(&answer, sizeof answer, never);
      guest.socket.send_all(members.data(), members.size() * sizeof(Member), never);
    } catch (const Lost&) {
      // The other ranks will notice when they connect the mesh.
    }
  }
}

}  // namespace

uint64_t process_number() {
  static uint64_t number = random_number();
  return number;
}

BootstrapId start_bootstrap() {
  auto listener = Socket::listen(own_address());
  BootstrapId bootstrap{kMagic, random_number(), listener.address()};
  // Runs until all ranks have joined, or until the process exits.
  std::thread([listener = std::move(listener), token = bootstrap.token] {
    serve_bootstrap(listener, token);
  }).detach();
  return bootstrap;
}

std::vector<Member> join_bootstrap(const BootstrapId& bootstrap, const Member& self,
                                   const Alarm& alarm) {
  if (bootstrap.magic != kMagic) {
    throw Refused{ncclInvalidArgument, "this is no unique id of the stand-in"};
  }
  Socket socket = Socket::connect(bootstrap.address, alarm);
  socket.send_all(&bootstrap.token, sizeof bootstrap.token, alarm);
  socket.send_all(&self, sizeof self, alarm);
  Answer answer;
  socket.receive_all(&answer, sizeof answer, alarm);
  if (answer.code != ncclSuccess) {
    throw Refused{static_cast<ncclResult_t>(answer.code), answer.reason};
  }
  std::vector<Member> members(self.ranks);
  socket.receive_all(members.data(), members.size() * sizeof(Member), alarm);
  return members;
}

Mesh connect(const std::vector<Member>& members, int rank, uint64_t token, const Socket& listener,
             const Alarm& alarm) {
  Mesh mesh;
  mesh.data.resize(members.size());
  mesh.control.resize(members.size());
  for (int lower = 0; lower < rank; ++lower) {
    for (int is_control : {0, 1}) {
      Socket socket = Socket::connect(members[lower].address, alarm);
      Greeting greeting{token, rank, is_control};
      socket.send_all(&greeting, sizeof greeting, alarm);
      (is_control ? mesh.control : mesh.data)[lower] = std::move(socket);
    }
  }
  size_t expected = 2 * (members.size() - rank - 1);
  while (expected > 0) {
    Socket socket = listener.accept(alarm);
    Greeting greeting{};
    socket.receive_all(&greeting, sizeof greeting, alarm);
    bool is_from_higher = greeting.rank > rank && greeting.rank < static_cast<int>(members.size());
    if (greeting.token != token || !is_from_higher) {
      continue;
    }
    (greeting.is_control ? mesh.control : mesh.data)[greeting.rank] = std::move(socket);
    --expected;
  }
  return mesh;
}

}  // namespace standin
