// Runs a GPU thread block on one host thread: each GPU thread is a fiber with its own stack, and
// they switch where they wait for each other.
//
// The result must not depend on the order in which they run between two barriers. So each warp runs
// as far ahead as barriers allow, and every second block starts with its last warp: with a barrier
// missing, one of the two orders gives a wrong result. A kernel that would be invalid on a GPU (a
// barrier that not all threads reach, a warp operation without all lanes) ends the process with a
// message.
#ifndef GFLOW_TESTS_HOST_KERNELS_BLOCK_H
#define GFLOW_TESTS_HOST_KERNELS_BLOCK_H

#include <functional>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace gflow_host {

struct Shape {
  unsigned x, y, z;
};

// A saved point of execution.
#if defined(__x86_64__)
using Context = void*;
#else
using Context = ucontext_t;
#endif

class Block {
 public:
  static constexpr unsigned MAX_THREADS = 1024;
  static constexpr unsigned WARP = 32;

  // The block that is running on this host thread.
  static Block& current();

  // Runs `kernel` for every block of a grid in turn.
  void run(const Shape& grid, const Shape& block, const std::function<void()>& kernel);

  const Shape& thread_index() const { return thread_index_; }
  const Shape& block_index() const { return block_index_; }
  const Shape& block_shape() const { return block_shape_; }
  const Shape& grid_shape() const { return grid_shape_; }

  // Barrier for all threads of the block; returns whether any of them passed true.
  bool wait_for_all(bool mine);

  // Returns one bit per lane of this thread's warp.
  unsigned ballot(unsigned lanes, bool mine);

  // Returns the value of this lane, modulo 32.
  unsigned shuffle(unsigned lanes, unsigned mine, unsigned from);

  // Returns the value of the lane `distance` above this one, or `mine` if there is no such lane.
  unsigned shuffle_down(unsigned lanes, unsigned mine, unsigned distance);

  ~Block();

 private:
  Block() = default;

  // A point where some threads wait for each other. Each result is kept for one more round, because
  // no thread can be more than one round behind.
  struct Rendezvous {
    unsigned arrived = 0;
    unsigned number = 0;
    unsigned values[WARP] = {};
    unsigned results[2][WARP] = {};
  };

  // One thread of the block.
  struct Fiber {
    Context context;
    bool is_done;
  };

  void run_block();
  bool run_warp(unsigned warp, bool backwards);
  void begin(unsigned thread);
  void resume(unsigned thread);
  void suspend();
  void wait_while(const Rendezvous& rendezvous, unsigned number);
  const unsigned* exchange_in_warp(unsigned lanes, unsigned mine);
  static void start();

  Shape thread_index_{}, block_index_{}, block_shape_{}, grid_shape_{};
  const std::function<void()>* kernel_ = nullptr;
  unsigned threads_ = 0;
  unsigned current_ = 0;
  unsigned launches_ = 0;
  unsigned progress_ = 0;  // Counts completed rendezvous and finished threads.
  Rendezvous block_rendezvous_;
  Rendezvous warp_rendezvous_[MAX_THREADS / WARP];
  Fiber fibers_[MAX_THREADS];
  Context scheduler_{};
  char* stacks_ = nullptr;
};

}  // namespace gflow_host

#endif
