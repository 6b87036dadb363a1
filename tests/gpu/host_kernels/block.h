// A block of threads of a GPU on one thread of the host: each has a stack of its own, and they take
// turns where they wait for each other.
//
// In which order they run between two barriers must make no difference. So each warp runs as far
// ahead of the others as barriers let it, and every other block starts with the last warp: a
// missing barrier changes the outcome of one or the other. What cannot be right on a GPU (a barrier
// that some threads do not come to, a warp of which not all lanes take part) ends the process with
// a message.
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

// A place to go on from.
#if defined(__x86_64__)
using Context = void*;
#else
using Context = ucontext_t;
#endif

class Block {
 public:
  static constexpr unsigned MAX_THREADS = 1024;
  static constexpr unsigned WARP = 32;

  // The block that runs on this thread of the host.
  static Block& of_this_thread();

  // Runs `kernel` for every block of a grid, one after the other.
  void run(const Shape& grid, const Shape& block, const std::function<void()>& kernel);

  const Shape& thread_index() const { return thread_index_; }
  const Shape& block_index() const { return block_index_; }
  const Shape& block_shape() const { return block_shape_; }
  const Shape& grid_shape() const { return grid_shape_; }

  // Waits for all threads of the block; whether any of them said yes.
  bool wait_for_all(bool mine);

  // One bit for each lane of this thread's warp.
  unsigned ballot(unsigned lanes, bool mine);

  // What the lane so far above this one has, or this one's own if there is none.
  unsigned shuffle_down(unsigned lanes, unsigned mine, unsigned distance);

  ~Block();

 private:
  Block() = default;

  // Where some threads wait for each other. What they brought is kept until the next but one
  // meeting, because none of them can be late by more than one.
  struct Meeting {
    unsigned arrived = 0;
    unsigned number = 0;
    unsigned brought[WARP] = {};
    unsigned taken[2][WARP] = {};
  };

  // One thread of the block.
  struct Fiber {
    Context context;
    bool is_done;
  };

  void run_block();
  bool run_warp(unsigned warp, bool backwards);
  void begin(unsigned thread);
  void give_turn_to(unsigned thread);
  void give_turn_back();
  void wait_until_not(const Meeting& meeting, unsigned number);
  const unsigned* meet_in_warp(unsigned lanes, unsigned mine);
  static void start();

  Shape thread_index_{}, block_index_{}, block_shape_{}, grid_shape_{};
  const std::function<void()>* kernel_ = nullptr;
  unsigned threads_ = 0;
  unsigned current_ = 0;
  unsigned launches_ = 0;
  unsigned changes_ = 0;  // Meetings that took place and threads that ended.
  Meeting of_block_;
  Meeting of_warps_[MAX_THREADS / WARP];
  Fiber fibers_[MAX_THREADS];
  Context scheduler_{};
  char* stacks_ = nullptr;
};

}  // namespace gflow_host

#endif
