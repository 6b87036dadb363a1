// A communicator: one rank of several, and its connections to the others.
//
// Operations on streams go through `run_in_turn`. They run in the order in which they were called,
// and if a peer is gone they hang until aborted, as with NCCL.

#pragma once

#include <nccl.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "alarm.h"
#include "mesh.h"

namespace standin {

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  // One operation of the communicator, from the call to its completion.
  class Turn {
   public:
    Turn(std::shared_ptr<Communicator> owner, uint64_t number);
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    uint64_t number() const { return number_; }

   private:
    std::shared_ptr<Communicator> owner_;
    uint64_t number_;
  };

  Communicator(int rank, int ranks, int device, bool is_blocking = true)
      : rank_(rank), ranks_(ranks), device_(device), is_blocking_(is_blocking) {}

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  int device() const { return device_; }
  const Alarm& alarm() const { return alarm_; }
  bool is_blocking() const { return is_blocking_; }

  // Runs it now. If the communicator is non-blocking, runs it a little later on another thread; the
  // communicator is in progress until then.
  ncclResult_t do_call(std::function<ncclResult_t()> what);

  // Connects to the other ranks. The result is also in `error`.
  ncclResult_t join(const BootstrapId& bootstrap);
  // Makes a communicator of the ranks with the same color, ordered by key; null for ranks without a
  // color.
  ncclResult_t split(int color, int key, std::shared_ptr<Communicator>& made);

  std::shared_ptr<Turn> next_turn();
  // Runs on a stream: waits for its turn, runs the operation and handles its errors.
  void run_in_turn(const Turn& turn, const std::function<void()>& operation);
  Mesh& mesh() { return mesh_; }
  // Throws Lost if the peer is gone without a goodbye in the middle of an operation.
  void check_peer(int peer);
  // The peers to poll: those that haven't left.
  std::vector<int> watched() const;

  // Waits for all calls to complete, and tells the other ranks that this one is leaving.
  void leave();
  // Makes every wait return; the communicator is unusable afterwards.
  void abort();
  // Whether `leave` has completed.
  bool is_finalized() const { return is_finalized_; }

  // What ncclCommGetAsyncError returns. The first error wins.
  ncclResult_t error() const { return error_; }
  void fail(ncclResult_t code, const std::string& reason);
  void set_error(ncclResult_t code) { error_ = code; }
  std::string last_error();

 private:
  ncclResult_t connect(const std::function<void()>& how);
  void set_mesh(Mesh mesh);
  void finish(uint64_t turn);

  int rank_;
  int ranks_;
  const int device_;
  const bool is_blocking_;
  Alarm alarm_;
  Mesh mesh_;
  uint64_t token_ = 0;
  uint64_t splits_ = 0;
  std::vector<bool> has_left_;

  std::atomic<ncclResult_t> error_{ncclSuccess};
  std::atomic<bool> is_aborted_{false};
  std::atomic<bool> is_finalized_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t called_ = 0;
  uint64_t done_ = 0;
  std::string last_error_;
};

// The minimum delay of calls on non-blocking communicators.
void delay_calls(int microseconds);

}  // namespace standin
