// The kernels for the host; see host_kernels.h. All of it is this one translation unit, so that
// whoever needs it only has to compile one file.
#include "host_kernels.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <type_traits>
#include <utility>

// In this order: the second is written in the words that the first has.
// clang-format off
#include "cuda.h"
#include "../../../rust/cuda/kernels/kernels.cu"
// clang-format on

namespace gflow_host {
namespace {

constexpr std::size_t STACK_BYTES = 64 << 10;

[[noreturn]] void give_up(const char* why) {
  std::fprintf(stderr, "gflow: a kernel that no GPU would run: %s\n", why);
  std::abort();
}

}  // namespace

// --- turns ---------------------------------------------------------------------------------------

#if defined(__x86_64__)
// Leaves the registers that a function must keep on the stack, remembers where that is, and takes
// those of the other context. (swapcontext asks the kernel for the signal mask each time, which
// takes fifty times as long.)
asm(R"(
.text
.p2align 4
.type gflow_host_switch, @function
gflow_host_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size gflow_host_switch, .-gflow_host_switch
)");
extern "C" void gflow_host_switch(void** from, void* to);

void Block::begin(unsigned thread) {
  // The stack as `gflow_host_switch` leaves it: six registers and where to go. A function begins
  // with a return address on the stack, of which there is none here.
  auto** top = reinterpret_cast<void**>(stacks_ + (thread + 1) * STACK_BYTES);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(&Block::start);
  for (int i = 0; i < 6; ++i) {
    *--top = nullptr;
  }
  fibers_[thread] = {top, false};
}

void Block::give_turn_to(unsigned thread) {
  current_ = thread;
  thread_index_ = {thread % block_shape_.x, thread / block_shape_.x % block_shape_.y,
                   thread / block_shape_.x / block_shape_.y};
  gflow_host_switch(&scheduler_, fibers_[thread].context);
}

void Block::give_turn_back() { gflow_host_switch(&fibers_[current_].context, scheduler_); }
#else
void Block::begin(unsigned thread) {
  Fiber& fiber = fibers_[thread];
  fiber.is_done = false;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = stacks_ + thread * STACK_BYTES;
  fiber.context.uc_stack.ss_size = STACK_BYTES;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, &Block::start, 0);
}

void Block::give_turn_to(unsigned thread) {
  current_ = thread;
  thread_index_ = {thread % block_shape_.x, thread / block_shape_.x % block_shape_.y,
                   thread / block_shape_.x / block_shape_.y};
  swapcontext(&scheduler_, &fibers_[thread].context);
}

void Block::give_turn_back() { swapcontext(&fibers_[current_].context, &scheduler_); }
#endif

// What a thread of the block does, on its own stack, from which there is no way back.
void Block::start() {
  Block& block = of_this_thread();
  (*block.kernel_)();
  block.fibers_[block.current_].is_done = true;
  ++block.changes_;
  block.give_turn_back();
  give_up("a thread that had ended went on");
}

Block& Block::of_this_thread() {
  static thread_local Block block;
  return block;
}

Block::~Block() {
  if (stacks_) {
    munmap(stacks_, MAX_THREADS * STACK_BYTES);
  }
}

void Block::run(const Shape& grid, const Shape& block, const std::function<void()>& kernel) {
  if (!stacks_) {
    void* memory = mmap(nullptr, MAX_THREADS * STACK_BYTES, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      give_up("there is no memory for its stacks");
    }
    stacks_ = static_cast<char*>(memory);
  }
  grid_shape_ = grid;
  block_shape_ = block;
  threads_ = block.x * block.y * block.z;
  kernel_ = &kernel;
  ++launches_;
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        block_index_ = {x, y, z};
        run_block();
      }
    }
  }
}

void Block::run_block() {
  of_block_ = {};
  for (Meeting& meeting : of_warps_) {
    meeting = {};
  }
  for (unsigned thread = 0; thread < threads_; ++thread) {
    begin(thread);
  }
  // Every other launch starts from the other end as well.
  const bool backwards = (block_index_.x + block_index_.y + block_index_.z + launches_) % 2;
  const unsigned warps = (threads_ + WARP - 1) / WARP;
  for (bool all_done = false; !all_done;) {
    const unsigned changes = changes_;
    all_done = true;
    for (unsigned turn = 0; turn < warps; ++turn) {
      all_done &= run_warp(backwards ? warps - 1 - turn : turn, backwards);
    }
    if (!all_done && changes == changes_) {
      give_up("some of its threads wait at a barrier that the others never come to");
    }
  }
  if (of_block_.arrived) {
    give_up("a thread ended while others waited for it");
  }
}

// Lets a warp go on until all of it waits for other warps, and says if it has ended.
bool Block::run_warp(unsigned warp, bool backwards) {
  const unsigned first = warp * WARP, count = std::min(WARP, threads_ - first);
  unsigned changes, done;
  do {
    changes = changes_;
    done = 0;
    for (unsigned turn = 0; turn < count; ++turn) {
      const unsigned thread = first + (backwards ? count - 1 - turn : turn);
      if (!fibers_[thread].is_done) {
        give_turn_to(thread);
      }
      done += fibers_[thread].is_done;
    }
  } while (changes != changes_);
  return done == count;
}

// --- meetings ------------------------------------------------------------------------------------

void Block::wait_until_not(const Meeting& meeting, unsigned number) {
  const unsigned self = current_;
  while (meeting.number == number) {
    give_turn_back();
  }
  if (self != current_) {
    give_up("a thread was given the turn of another");
  }
}

bool Block::wait_for_all(bool mine) {
  const unsigned number = of_block_.number;
  of_block_.brought[0] |= mine;
  if (++of_block_.arrived == threads_) {
    of_block_.taken[number % 2][0] = std::exchange(of_block_.brought[0], 0);
    of_block_.arrived = 0;
    ++of_block_.number;
    ++changes_;
  } else {
    wait_until_not(of_block_, number);
  }
  return of_block_.taken[number % 2][0];
}

const unsigned* Block::meet_in_warp(unsigned lanes, unsigned mine) {
  if (lanes != 0xffffffffu || threads_ % WARP != 0) {
    give_up("not all lanes of a warp take part");
  }
  Meeting& warp = of_warps_[current_ / WARP];
  const unsigned number = warp.number;
  warp.brought[current_ % WARP] = mine;
  if (++warp.arrived == WARP) {
    std::memcpy(warp.taken[number % 2], warp.brought, sizeof(warp.brought));
    warp.arrived = 0;
    ++warp.number;
    ++changes_;
  } else {
    wait_until_not(warp, number);
  }
  return warp.taken[number % 2];
}

unsigned Block::ballot(unsigned lanes, bool mine) {
  const unsigned* all = meet_in_warp(lanes, mine);
  unsigned bits = 0;
  for (unsigned lane = 0; lane < WARP; ++lane) {
    bits |= all[lane] << lane;
  }
  return bits;
}

unsigned Block::shuffle_down(unsigned lanes, unsigned mine, unsigned distance) {
  const unsigned* all = meet_in_warp(lanes, mine);
  const unsigned from = current_ % WARP + distance;
  return from < WARP ? all[from] : mine;
}

// --- the table -----------------------------------------------------------------------------------

namespace {

template <class T>
constexpr char letter() {
  if constexpr (std::is_pointer_v<T>) {
    return 'p';
  } else if constexpr (std::is_same_v<T, float>) {
    return 'f';
  } else if constexpr (std::is_same_v<T, unsigned>) {
    return 'u';
  } else {
    static_assert(std::is_same_v<T, unsigned long long>);
    return 'l';
  }
}

// A kernel, and how it is called with arguments that are given by their addresses.
template <auto KERNEL>
struct Caller;

template <class... A, void (*KERNEL)(A...)>
struct Caller<KERNEL> {
  static constexpr char letters[] = {letter<A>()..., '\0'};

  static void call(void** arguments) { call_with(arguments, std::index_sequence_for<A...>()); }

  template <std::size_t... I>
  static void call_with(void** arguments, std::index_sequence<I...>) {
    KERNEL(*static_cast<A*>(arguments[I])...);
  }
};

#define GFLOW_HOST_KERNELS(EACH) \
  EACH(gflow_accumulate_f32)     \
  EACH(gflow_accumulate_f16)     \
  EACH(gflow_accumulate_bf16)    \
  EACH(gflow_select)             \
  EACH(gflow_pack_f16)           \
  EACH(gflow_pack_bf16)          \
  EACH(gflow_pack_f32)           \
  EACH(gflow_unpack_f16_f32)     \
  EACH(gflow_unpack_f16_f16)     \
  EACH(gflow_unpack_f16_bf16)    \
  EACH(gflow_unpack_bf16_f32)    \
  EACH(gflow_unpack_bf16_f16)    \
  EACH(gflow_unpack_bf16_bf16)   \
  EACH(gflow_unpack_f32_f32)     \
  EACH(gflow_unpack_f32_f16)     \
  EACH(gflow_unpack_f32_bf16)    \
  EACH(gflow_add_velocity_f32)   \
  EACH(gflow_add_velocity_f16)   \
  EACH(gflow_add_velocity_bf16)  \
  EACH(gflow_rescale)

#define GFLOW_HOST_DESCRIBE(NAME) {#NAME, Caller<NAME>::letters},
#define GFLOW_HOST_CALL(NAME) &Caller<NAME>::call,

constexpr GflowHostKernel KERNELS[] = {GFLOW_HOST_KERNELS(GFLOW_HOST_DESCRIBE)};
constexpr void (*CALLS[])(void**) = {GFLOW_HOST_KERNELS(GFLOW_HOST_CALL)};

bool could_be_launched(const unsigned grid[3], const unsigned block[3], unsigned shared_bytes) {
  const unsigned grid_limits[] = {0x7fffffffu, 65535, 65535}, block_limits[] = {1024, 1024, 64};
  for (int i = 0; i < 3; ++i) {
    if (grid[i] == 0 || grid[i] > grid_limits[i] || block[i] == 0 || block[i] > block_limits[i]) {
      return false;
    }
  }
  return block[0] * block[1] * block[2] <= Block::MAX_THREADS && shared_bytes <= 48 << 10;
}

}  // namespace
}  // namespace gflow_host

const GflowHostKernel* gflow_host_kernels(unsigned* count) {
  *count = std::size(gflow_host::KERNELS);
  return gflow_host::KERNELS;
}

int gflow_host_launch(const char* name, const unsigned grid[3], const unsigned block[3],
                      unsigned shared_bytes, void** arguments) {
  for (std::size_t i = 0; i < std::size(gflow_host::KERNELS); ++i) {
    if (std::strcmp(gflow_host::KERNELS[i].name, name) == 0) {
      if (!gflow_host::could_be_launched(grid, block, shared_bytes)) {
        return 2;
      }
      const auto call = [i, arguments] { gflow_host::CALLS[i](arguments); };
      gflow_host::Block::of_this_thread().run({grid[0], grid[1], grid[2]},
                                              {block[0], block[1], block[2]}, call);
      return 0;
    }
  }
  return 1;
}
