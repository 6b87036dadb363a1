// A communicator: one rank of several, and its connections to the others.
//
// What runs on streams goes through `take_part`: one after the other in the order in which it was
// called, and it hangs when a peer is gone, as with NCCL, until it is aborted.

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
  // One operation of the communicator, from when it is called until it is over.
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

  // Does it now; or, where calls do not wait, some time later on a thread of its own, and until
  // then the communicator is in progress.
  ncclResult_t do_call(std::function<ncclResult_t()> what);

  // Comes together with the others; what comes of it is in `error` too.
  ncclResult_t join(const Meeting& meeting);
  // Makes a communicator of those with the same color, in the order of their keys. None for those
  // without.
  ncclResult_t split(int color, int key, std::shared_ptr<Communicator>& made);

  std::shared_ptr<Turn> next_turn();
  // On a stream: does it when its turn has come, and catches what goes wrong.
  void take_part(const Turn& turn, const std::function<void()>& operation);
  Mesh& mesh() { return mesh_; }
  // Throws Lost if a peer that has not said goodbye is gone, in the middle of an operation.
  void look_after(int peer);
  // For poll, without those who have left.
  std::vector<int> watched() const;

  // Waits until all that was called is over, and tells the others that this one leaves.
  void leave();
  // Everything that waits returns, and nothing works any more.
  void abort();
  // Whether it has left.
  bool is_over() const { return is_over_; }

  // Of ncclCommGetAsyncError. Only the first one counts.
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
  std::atomic<bool> is_over_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t called_ = 0;
  uint64_t done_ = 0;
  std::string last_error_;
};

// How long calls that do not wait take at least to be done.
void delay_calls(int microseconds);

}  // namespace standin
