#include "communicator.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <thread>

#include "../driver/inside.h"
#include "../driver/reports.h"

namespace standin {

namespace {

// A message on a control connection.
struct Notice {
  enum Kind : uint64_t { kSplit = 1, kGoodbye = 2 };

  Kind kind;
  uint64_t number;
  int32_t color;
  int32_t key;
  Member member;
};

constexpr size_t kMaxNotices = 64;

std::atomic<int> call_delay{0};

}  // namespace

Communicator::Turn::Turn(std::shared_ptr<Communicator> owner, uint64_t number)
    : owner_(std::move(owner)), number_(number) {}

Communicator::Turn::~Turn() { owner_->finish(number_); }

std::shared_ptr<Communicator::Turn> Communicator::next_turn() {
  std::lock_guard lock(mutex_);
  return std::make_shared<Turn>(shared_from_this(), called_++);
}

void Communicator::finish(uint64_t turn) {
  std::lock_guard lock(mutex_);
  done_ = std::max(done_, turn + 1);
  changed_.notify_all();
}

void delay_calls(int microseconds) { call_delay = microseconds; }

ncclResult_t Communicator::do_call(std::function<ncclResult_t()> what) {
  if (is_blocking_) {
    return what();
  }
  error_ = ncclInProgress;
  auto later = [self = shared_from_this(), what = std::move(what),
                knowledge = knowledge_of_this_thread()] {
    std::this_thread::sleep_for(std::chrono::microseconds(call_delay));
    take_over(knowledge);
    ncclResult_t outcome = what();
    // Keep any other error that has occurred meanwhile.
    auto in_progress = ncclInProgress;
    self->error_.compare_exchange_strong(in_progress, outcome);
  };
  std::thread(later).detach();
  return ncclInProgress;
}

ncclResult_t Communicator::connect(const std::function<void()>& how) {
  try {
    how();
    error_ = ncclSuccess;
    return ncclSuccess;
  } catch (const Refused& refused) {
    error_ = refused.code;
    fail(refused.code, refused.reason);
  } catch (const Lost& lost) {
    error_ = ncclRemoteError;
    fail(ncclRemoteError, lost.reason);
  } catch (const Interrupted&) {
    error_ = ncclInternalError;
    fail(ncclInternalError, "aborted");
  }
  return error_;
}

void Communicator::set_mesh(Mesh mesh) {
  std::lock_guard lock(mutex_);
  mesh_ = std::move(mesh);
  has_left_.assign(ranks_, false);
}

ncclResult_t Communicator::join(const BootstrapId& bootstrap) {
  return connect([&] {
    Socket listener = Socket::listen(own_address());
    Member self{rank_, ranks_, device_, process_number(), listener.address()};
    auto members = join_bootstrap(bootstrap, self, alarm_);
    token_ = bootstrap.token;
    set_mesh(standin::connect(members, rank_, token_, listener, alarm_));
  });
}

ncclResult_t Communicator::split(int color, int key, std::shared_ptr<Communicator>& made) {
  made = nullptr;
  std::vector<Notice> notices(ranks_);
  uint64_t number = ++splits_;
  Socket listener;
  ncclResult_t outcome = connect([&] {
    listener = Socket::listen(own_address());
    Member self{rank_, ranks_, device_, process_number(), listener.address()};
    notices[rank_] = {Notice::kSplit, number, color, key, self};
    for (int peer = 0; peer < ranks_; ++peer) {
      if (peer != rank_) {
        mesh_.control[peer].send_all(&notices[rank_], sizeof(Notice), alarm_);
      }
    }
    for (int peer = 0; peer < ranks_; ++peer) {
      if (peer != rank_) {
        mesh_.control[peer].receive_all(&notices[peer], sizeof(Notice), alarm_);
        if (notices[peer].kind != Notice::kSplit || notices[peer].number != number) {
          throw Lost{"rank " + std::to_string(peer) + " does not split with the others"};
        }
      }
    }
  });
  if (outcome != ncclSuccess || color < 0) {
    return outcome;
  }
  std::erase_if(notices, [&](const Notice& notice) { return notice.color != color; });
  std::ranges::stable_sort(notices, {}, [](const Notice& notice) { return notice.key; });
  std::vector<Member> members;
  int rank = 0;
  for (const Notice& notice : notices) {
    if (notice.member.rank == rank_) {
      rank = static_cast<int>(members.size());
    }
    members.push_back(notice.member);
  }
  made = std::make_shared<Communicator>(rank, static_cast<int>(members.size()), device_);
  made->token_ = token_ * 31 + number * 1009 + static_cast<uint64_t>(color);
  return made->connect([&] {
    made->set_mesh(standin::connect(members, rank, made->token_, listener, made->alarm_));
  });
}

void Communicator::run_in_turn(const Turn& turn, const std::function<void()>& operation) {
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_ >= turn.number() || is_aborted_; });
  }
  if (is_aborted_) {
    return;
  }
  try {
    operation();
    return;
  } catch (const Lost& lost) {
    fail(ncclRemoteError, lost.reason);
  } catch (const Refused& refused) {
    report(Wrong::Fault, "NCCL: " + refused.reason);
    fail(refused.code, refused.reason);
  } catch (const Interrupted&) {
    return;
  }
  // As with NCCL, the operation hangs until it is aborted.
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return is_aborted_.load(); });
}

void Communicator::check_peer(int peer) {
  if (has_left_[peer]) {
    return;
  }
  pollfd file{mesh_.control[peer].file(), POLLRDHUP, 0};
  if (poll(&file, 1, 0) <= 0) {
    return;
  }
  // The peer is gone; if it left in order, its last notice is a goodbye.
  Notice notices[kMaxNotices];
  ssize_t bytes = recv(file.fd, notices, sizeof notices, MSG_PEEK | MSG_DONTWAIT);
  size_t count = bytes > 0 ? bytes / sizeof(Notice) : 0;
  if (count > 0 && notices[count - 1].kind == Notice::kGoodbye) {
    has_left_[peer] = true;
    return;
  }
  throw Lost{"rank " + std::to_string(peer) + " is gone"};
}

std::vector<int> Communicator::watched() const {
  std::vector<int> peers;
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer != rank_ && !has_left_[peer]) {
      peers.push_back(peer);
    }
  }
  return peers;
}

void Communicator::leave() {
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_ >= called_ || is_aborted_; });
  }
  if (is_aborted_) {
    return;
  }
  Notice goodbye{};
  goodbye.kind = Notice::kGoodbye;
  for (int peer = 0; peer < static_cast<int>(mesh_.control.size()); ++peer) {
    if (peer == rank_) {
      continue;
    }
    try {
      mesh_.control[peer].send_all(&goodbye, sizeof goodbye, alarm_);
    } catch (const Lost&) {
      // It has already left.
    } catch (const Interrupted&) {
      return;
    }
  }
  std::lock_guard lock(mutex_);
  mesh_ = {};
  is_finalized_ = true;
}

void Communicator::abort() {
  std::unique_lock lock(mutex_);
  is_aborted_ = true;
  alarm_.ring();
  // Other ranks must notice at once; the sockets are closed once they are no longer in use.
  for (auto* sockets : {&mesh_.data, &mesh_.control}) {
    for (Socket& socket : *sockets) {
      if (socket.is_open()) {
        shutdown(socket.file(), SHUT_RDWR);
      }
    }
  }
  changed_.notify_all();
  // NCCL waits for its kernels, which may be queued behind other work.
  changed_.wait(lock, [&] { return done_ >= called_; });
}

void Communicator::fail(ncclResult_t code, const std::string& reason) {
  std::lock_guard lock(mutex_);
  if (error_ == ncclSuccess || error_ == ncclInProgress) {
    error_ = code;
  }
  if (last_error_.empty()) {
    last_error_ = reason;
  }
}

std::string Communicator::last_error() {
  std::lock_guard lock(mutex_);
  return last_error_;
}

}  // namespace standin
