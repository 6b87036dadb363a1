#include "transfer.h"

#include <poll.h>

#include <cerrno>
#include <deque>
#include <map>

namespace standin {

namespace {

std::string describe(const Label& label) {
  return "operation " + std::to_string(label.number) + " of kind " + std::to_string(label.kind) +
         " with " + std::to_string(label.count) + " elements of type " +
         std::to_string(label.type) + ", reduction " + std::to_string(label.operation) + ", root " +
         std::to_string(label.root) + ", piece " + std::to_string(label.piece);
}

// A message, sent as its label and then its data; `moved` counts the bytes of both.
struct Leaving {
  Outgoing message;
  size_t moved = 0;
};

struct Arriving {
  Incoming message;
  Label label{};
  size_t moved = 0;
};

constexpr size_t kLabel = sizeof(Label);

// Sends what it can; returns whether the message is complete.
bool push(Leaving& leaving, const Socket& socket) {
  const Label& label = leaving.message.label;
  while (leaving.moved < kLabel + label.bytes) {
    bool is_label = leaving.moved < kLabel;
    const char* start =
        is_label ? reinterpret_cast<const char*>(&label) + leaving.moved
                 : static_cast<const char*>(leaving.message.data) + (leaving.moved - kLabel);
    size_t left = is_label ? kLabel - leaving.moved : kLabel + label.bytes - leaving.moved;
    size_t moved = socket.send_some(start, left);
    if (moved == 0) {
      return false;
    }
    leaving.moved += moved;
  }
  return true;
}

// Receives what it can; returns whether the message is complete.
bool pull(Arriving& arriving, const Socket& socket) {
  const Label& expected = arriving.message.label;
  while (arriving.moved < kLabel + expected.bytes) {
    bool is_label = arriving.moved < kLabel;
    char* start = is_label ? reinterpret_cast<char*>(&arriving.label) + arriving.moved
                           : static_cast<char*>(arriving.message.data) + (arriving.moved - kLabel);
    size_t left = is_label ? kLabel - arriving.moved : kLabel + expected.bytes - arriving.moved;
    size_t moved = socket.receive_some(start, left);
    if (moved == 0) {
      return false;
    }
    arriving.moved += moved;
    if (arriving.moved == kLabel && !(arriving.label == expected)) {
      throw Refused{ncclInvalidUsage, "rank " + std::to_string(arriving.message.peer) + " is at " +
                                          describe(arriving.label) + ", but this rank is at " +
                                          describe(expected)};
    }
  }
  return true;
}

// Transfers what it can with every peer, and removes the peers that are done.
template <typename Message>
void advance(std::map<int, std::deque<Message>>& by_peer, const std::vector<Socket>& sockets,
             bool (*move)(Message&, const Socket&)) {
  for (auto next = by_peer.begin(); next != by_peer.end();) {
    auto& [peer, messages] = *next;
    try {
      while (!messages.empty() && move(messages.front(), sockets[peer])) {
        messages.pop_front();
      }
    } catch (const Lost& lost) {
      throw Lost{"rank " + std::to_string(peer) + " is gone: " + lost.reason};
    }
    next = messages.empty() ? by_peer.erase(next) : std::next(next);
  }
}

}  // namespace

void transfer(Communicator& communicator, const std::vector<Outgoing>& outgoing,
              const std::vector<Incoming>& incoming) {
  std::map<int, std::deque<Leaving>> leaving;
  std::map<int, std::deque<Arriving>> arriving;
  for (const Outgoing& message : outgoing) {
    leaving[message.peer].push_back({message});
  }
  for (const Incoming& message : incoming) {
    arriving[message.peer].push_back({message});
  }
  auto& sockets = communicator.mesh().data;
  while (!leaving.empty() || !arriving.empty()) {
    advance(leaving, sockets, push);
    advance(arriving, sockets, pull);
    if (leaving.empty() && arriving.empty()) {
      return;
    }
    std::vector<pollfd> files{{communicator.alarm().file(), POLLIN, 0}};
    for (auto& [peer, messages] : leaving) {
      files.push_back({sockets[peer].file(), POLLOUT, 0});
    }
    for (auto& [peer, messages] : arriving) {
      files.push_back({sockets[peer].file(), POLLIN, 0});
    }
    // Watches all peers, not just those in this transfer: losing any rank stops everyone.
    std::vector<int> watched = communicator.watched();
    for (int peer : watched) {
      files.push_back({communicator.mesh().control[peer].file(), POLLRDHUP, 0});
    }
    if (poll(files.data(), files.size(), -1) < 0 && errno != EINTR) {
      throw Lost{"could not wait for sockets"};
    }
    if (files[0].revents != 0) {
      throw Interrupted{};
    }
    for (size_t index = 0; index < watched.size(); ++index) {
      if (files[files.size() - watched.size() + index].revents != 0) {
        communicator.check_peer(watched[index]);
      }
    }
  }
}

}  // namespace standin
