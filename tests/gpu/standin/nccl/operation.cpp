#include "operation.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>

#include "../driver/inside.h"
#include "reduction.h"

namespace standin {

namespace {

// Up to this size, sums are made in rank order, as the engine does. Norms are always smaller.
constexpr size_t kSmall = 64 * 1024;
std::atomic<size_t> small{[] {
  const char* given = std::getenv("STANDIN_NCCL_SMALL");
  return given ? std::strtoull(given, nullptr, 10) : kSmall;
}()};

// Pieces of the ring start at multiples of this, as in rust/collective/ring.
constexpr size_t kPieceAlignment = 64;

uint64_t address_of(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

char* host(const void* pointer) { return static_cast<char*>(alias_of(address_of(pointer))); }

size_t piece_start(size_t bytes, size_t pieces, size_t index) {
  size_t units = (bytes + kPieceAlignment - 1) / kPieceAlignment;
  size_t before = units / pieces * index + std::min(units % pieces, index);
  return std::min(before * kPieceAlignment, bytes);
}

class Execution {
 public:
  Execution(Communicator& communicator, const Operation& operation, uint64_t number)
      : communicator_(communicator),
        operation_(operation),
        rank_(communicator.rank()),
        ranks_(communicator.ranks()),
        element_(element_bytes(operation.type)),
        reduction_{operation.type, operation.reduction, communicator.ranks()} {
    label_.number = number;
    label_.kind = static_cast<uint32_t>(operation.kind);
    label_.type = operation.type;
    label_.operation = operation.reduction;
    label_.root = operation.root;
    label_.count = operation.count;
  }

  void run() {
    switch (operation_.kind) {
      case Kind::AllReduce:
        return is_small() ? all_reduce_small() : all_reduce_by_ring();
      case Kind::ReduceScatter:
        return reduce_scatter();
      case Kind::AllGather:
        return all_gather();
      case Kind::Reduce:
        return reduce();
      case Kind::Broadcast:
        return broadcast();
      default:
        return;  // Sends and receives are run together elsewhere.
    }
  }

 private:
  // Sums of 16-bit floats are rounded at every hop of the ring, whatever their size.
  bool is_small() const { return element_ > 2 && operation_.count * element_ <= small; }

  Label label(size_t piece, size_t bytes) const {
    Label label = label_;
    label.piece = piece;
    label.bytes = bytes;
    return label;
  }

  // Sends `source(peer)` to every peer, and receives from it into `place(peer)`.
  template <typename Source, typename Place>
  void swap_with_all(Source source, Place place, size_t bytes) {
    std::vector<Outgoing> outgoing;
    std::vector<Incoming> incoming;
    for (int peer = 0; peer < ranks_; ++peer) {
      if (peer != rank_) {
        outgoing.push_back({peer, label(rank_, bytes), source(peer)});
        incoming.push_back({peer, label(peer, bytes), place(peer)});
      }
    }
    transfer(communicator_, outgoing, incoming);
  }

  void all_reduce_small() {
    size_t bytes = operation_.count * element_;
    std::vector<std::vector<char>> theirs(ranks_, std::vector<char>(bytes));
    std::memcpy(theirs[rank_].data(), host(operation_.from), bytes);
    swap_with_all([&](int) { return theirs[rank_].data(); },
                  [&](int peer) { return theirs[peer].data(); }, bytes);
    fold(theirs, host(operation_.to), operation_.count);
  }

  void fold(const std::vector<std::vector<char>>& contributions, char* result, size_t elements) {
    std::vector<const void*> in_order;
    for (const auto& contribution : contributions) {
      in_order.push_back(contribution.data());
    }
    reduction_.fold(result, in_order, elements);
  }

  // The ring of rust/collective/ring: at step s, position p sends piece p - s and receives piece p
  // - s - 1. In the first half it adds its own values to that piece; in the second half pieces
  // arrive complete.
  void all_reduce_by_ring() {
    size_t bytes = operation_.count * element_;
    char* data = host(operation_.to);
    std::memmove(data, host(operation_.from), bytes);
    if (ranks_ == 1) {
      fold({std::vector<char>(data, data + bytes)}, data, operation_.count);
      return;
    }
    std::vector<char> arrived(piece_start(bytes, ranks_, 1));
    for (int step = 0; step < 2 * (ranks_ - 1); ++step) {
      size_t sent = (rank_ - step + 2 * ranks_) % ranks_;
      size_t received = (rank_ - step - 1 + 2 * ranks_) % ranks_;
      size_t sent_start = piece_start(bytes, ranks_, sent);
      size_t start = piece_start(bytes, ranks_, received);
      size_t sent_bytes = piece_start(bytes, ranks_, sent + 1) - sent_start;
      size_t length = piece_start(bytes, ranks_, received + 1) - start;
      bool is_complete = step >= ranks_ - 1;
      char* place = is_complete ? data + start : arrived.data();
      transfer(communicator_, {{(rank_ + 1) % ranks_, label(sent, sent_bytes), data + sent_start}},
               {{(rank_ + ranks_ - 1) % ranks_, label(received, length), place}});
      if (!is_complete) {
        bool finish = step == ranks_ - 2;
        reduction_.combine(data + start, arrived.data(), length / element_, finish);
      }
    }
  }

  void reduce_scatter() {
    size_t bytes = operation_.count * element_;
    const char* from = host(operation_.from);
    std::vector<std::vector<char>> theirs(ranks_, std::vector<char>(bytes));
    std::memcpy(theirs[rank_].data(), from + rank_ * bytes, bytes);
    swap_with_all([&](int peer) { return from + peer * bytes; },
                  [&](int peer) { return theirs[peer].data(); }, bytes);
    fold(theirs, host(operation_.to), operation_.count);
  }

  void all_gather() {
    size_t bytes = operation_.count * element_;
    char* to = host(operation_.to);
    std::memmove(to + rank_ * bytes, host(operation_.from), bytes);
    swap_with_all([&](int) { return to + rank_ * bytes; },
                  [&](int peer) { return to + peer * bytes; }, bytes);
  }

  void reduce() {
    size_t bytes = operation_.count * element_;
    if (rank_ != operation_.root) {
      transfer(communicator_, {{operation_.root, label(rank_, bytes), host(operation_.from)}}, {});
      return;
    }
    std::vector<std::vector<char>> theirs(ranks_, std::vector<char>(bytes));
    std::memcpy(theirs[rank_].data(), host(operation_.from), bytes);
    std::vector<Incoming> incoming;
    for (int peer = 0; peer < ranks_; ++peer) {
      if (peer != rank_) {
        incoming.push_back({peer, label(peer, bytes), theirs[peer].data()});
      }
    }
    transfer(communicator_, {}, incoming);
    fold(theirs, host(operation_.to), operation_.count);
  }

  void broadcast() {
    size_t bytes = operation_.count * element_;
    if (rank_ != operation_.root) {
      transfer(communicator_, {}, {{operation_.root, label(0, bytes), host(operation_.to)}});
      return;
    }
    std::vector<Outgoing> outgoing;
    for (int peer = 0; peer < ranks_; ++peer) {
      if (peer != rank_) {
        outgoing.push_back({peer, label(0, bytes), host(operation_.from)});
      }
    }
    transfer(communicator_, outgoing, {});
    if (operation_.to != operation_.from) {
      std::memmove(host(operation_.to), host(operation_.from), bytes);
    }
  }

  Communicator& communicator_;
  const Operation& operation_;
  const int rank_;
  const int ranks_;
  const size_t element_;
  const Reduction reduction_;
  Label label_;
};

bool is_between_two(Kind kind) { return kind == Kind::Send || kind == Kind::Receive; }

void exchange_messages(Communicator& communicator, const std::vector<Operation>& operations) {
  std::vector<Outgoing> outgoing;
  std::vector<Incoming> incoming;
  std::deque<const Operation*> to_self;
  for (const Operation& operation : operations) {
    size_t bytes = operation.count * element_bytes(operation.type);
    Label label;
    label.kind = static_cast<uint32_t>(Kind::Send);
    label.type = operation.type;
    label.count = operation.count;
    label.bytes = bytes;
    bool is_self = operation.root == communicator.rank();
    if (operation.kind == Kind::Send) {
      if (is_self) {
        to_self.push_back(&operation);
      } else {
        outgoing.push_back({operation.root, label, host(operation.from)});
      }
    } else if (operation.kind == Kind::Receive && !is_self) {
      incoming.push_back({operation.root, label, host(operation.to)});
    }
  }
  for (const Operation& operation : operations) {
    if (operation.kind == Kind::Receive && operation.root == communicator.rank()) {
      if (to_self.empty() || to_self.front()->count != operation.count) {
        throw Refused{ncclInvalidUsage, "a rank receives from itself what it does not send"};
      }
      size_t bytes = operation.count * element_bytes(operation.type);
      std::memmove(host(operation.to), host(to_self.front()->from), bytes);
      to_self.pop_front();
    }
  }
  transfer(communicator, outgoing, incoming);
}

}  // namespace

void set_small(size_t bytes) { small = bytes; }

std::string Operation::name() const {
  switch (kind) {
    case Kind::AllReduce:
      return "ncclAllReduce";
    case Kind::ReduceScatter:
      return "ncclReduceScatter";
    case Kind::AllGather:
      return "ncclAllGather";
    case Kind::Reduce:
      return "ncclReduce";
    case Kind::Broadcast:
      return "ncclBroadcast";
    case Kind::Send:
      return "ncclSend";
    default:
      return "ncclRecv";
  }
}

std::vector<Access> Operation::accesses(const Communicator& communicator) const {
  size_t bytes = count * element_bytes(type);
  size_t of_all = bytes * communicator.ranks();
  bool is_root = communicator.rank() == root;
  uint64_t source = address_of(from);
  uint64_t target = address_of(to);
  switch (kind) {
    case Kind::AllReduce:
      return {reading(source, bytes), writing(target, bytes)};
    case Kind::ReduceScatter:
      return {reading(source, of_all), writing(target, bytes)};
    case Kind::AllGather:
      return {reading(source, bytes), writing(target, of_all)};
    case Kind::Reduce:
      return is_root ? std::vector{reading(source, bytes), writing(target, bytes)}
                     : std::vector{reading(source, bytes)};
    case Kind::Broadcast:
      if (!is_root) {
        return {writing(target, bytes)};
      }
      return source == target ? std::vector{reading(source, bytes)}
                              : std::vector{reading(source, bytes), writing(target, bytes)};
    case Kind::Send:
      return {reading(source, bytes)};
    default:
      return {writing(target, bytes)};
  }
}

void perform(Communicator& communicator, uint64_t number,
             const std::vector<Operation>& operations) {
  for (const Operation& operation : operations) {
    if (!is_between_two(operation.kind)) {
      Execution(communicator, operation, number).run();
    }
  }
  exchange_messages(communicator, operations);
}

}  // namespace standin
