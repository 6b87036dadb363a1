// The kernels for the host; see host_kernels.h. All of it is in this translation unit, so users
// compile a single file.
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

// Keep this order: each uses definitions of those before it.
// clang-format off
#include "cuda.h"
#include "../../../rust/cuda/kernels/kernels.cu"
#include "../../../rust/cuda/kernels/quantizer.cu"
// clang-format on

namespace gflow_host {
namespace {

constexpr std::size_t STACK_BYTES = 64 << 10;

[[noreturn]] void fatal(const char* why) {
  std::fprintf(stderr, "gflow: a kernel that no GPU would run: %s\n", why);
  std::abort();
}

}  // namespace

// --- fibers --------------------------------------------------------------------------------------

#if defined(__x86_64__)
// Saves the callee-saved registers on the current stack, stores its stack pointer, and restores
// those of the other context. (swapcontext makes a system call for the signal mask each time, which
// is fifty times slower.)
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
  // Lays out the stack as `gflow_host_switch` leaves it: six registers and the address to jump to.
  // Above that goes the return address that a function expects; it is null because `start` never
  // returns.
  auto** top = reinterpret_cast<void**>(stacks_ + (thread + 1) * STACK_BYTES);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(&Block::start);
  for (int i = 0; i < 6; ++i) {
    *--top = nullptr;
  }
  fibers_[thread] = {top, false};
}

void Block::resume(unsigned thread) {
  current_ = thread;
  thread_index_ = {thread % block_shape_.x, thread / block_shape_.x % block_shape_.y,
                   thread / block_shape_.x / block_shape_.y};
  gflow_host_switch(&scheduler_, fibers_[thread].context);
}

void Block::suspend() { gflow_host_switch(&fibers_[current_].context, scheduler_); }
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

void Block::resume(unsigned thread) {
  current_ = thread;
  thread_index_ = {thread % block_shape_.x, thread / block_shape_.x % block_shape_.y,
                   thread / block_shape_.x / block_shape_.y};
  swapcontext(&scheduler_, &fibers_[thread].context);
}

void Block::suspend() { swapcontext(&fibers_[current_].context, &scheduler_); }
#endif

// The entry point of a fiber. Never returns.
void Block::start() {
  Block& block = current();
  (*block.kernel_)();
  block.fibers_[block.current_].is_done = true;
  ++block.progress_;
  block.suspend();
  fatal("a thread that had ended went on");
}

Block& Block::current() {
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
      fatal("there is no memory for its stacks");
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
  block_rendezvous_ = {};
  for (Rendezvous& rendezvous : warp_rendezvous_) {
    rendezvous = {};
  }
  for (unsigned thread = 0; thread < threads_; ++thread) {
    begin(thread);
  }
  // The direction alternates between launches as well.
  const bool backwards = (block_index_.x + block_index_.y + block_index_.z + launches_) % 2;
  const unsigned warps = (threads_ + WARP - 1) / WARP;
  for (bool all_done = false; !all_done;) {
    const unsigned progress = progress_;
    all_done = true;
    for (unsigned turn = 0; turn < warps; ++turn) {
      all_done &= run_warp(backwards ? warps - 1 - turn : turn, backwards);
    }
    if (!all_done && progress == progress_) {
      fatal("some of its threads wait at a barrier that the others never come to");
    }
  }
  if (block_rendezvous_.arrived) {
    fatal("a thread ended while others waited for it");
  }
}

// Runs a warp until all its threads are finished or wait for other warps; returns whether it has
// finished.
bool Block::run_warp(unsigned warp, bool backwards) {
  const unsigned first = warp * WARP, count = std::min(WARP, threads_ - first);
  unsigned progress, done;
  do {
    progress = progress_;
    done = 0;
    for (unsigned turn = 0; turn < count; ++turn) {
      const unsigned thread = first + (backwards ? count - 1 - turn : turn);
      if (!fibers_[thread].is_done) {
        resume(thread);
      }
      done += fibers_[thread].is_done;
    }
  } while (progress != progress_);
  return done == count;
}

// --- rendezvous ----------------------------------------------------------------------------------

void Block::wait_while(const Rendezvous& rendezvous, unsigned number) {
  const unsigned self = current_;
  while (rendezvous.number == number) {
    suspend();
  }
  if (self != current_) {
    fatal("a thread was given the turn of another");
  }
}

bool Block::wait_for_all(bool mine) {
  const unsigned number = block_rendezvous_.number;
  block_rendezvous_.values[0] |= mine;
  if (++block_rendezvous_.arrived == threads_) {
    block_rendezvous_.results[number % 2][0] = std::exchange(block_rendezvous_.values[0], 0);
    block_rendezvous_.arrived = 0;
    ++block_rendezvous_.number;
    ++progress_;
  } else {
    wait_while(block_rendezvous_, number);
  }
  return block_rendezvous_.results[number % 2][0];
}

const unsigned* Block::exchange_in_warp(unsigned lanes, unsigned mine) {
  if (lanes != 0xffffffffu || threads_ % WARP != 0) {
    fatal("not all lanes of a warp take part");
  }
  Rendezvous& warp = warp_rendezvous_[current_ / WARP];
  const unsigned number = warp.number;
  warp.values[current_ % WARP] = mine;
  if (++warp.arrived == WARP) {
    std::memcpy(warp.results[number % 2], warp.values, sizeof(warp.values));
    warp.arrived = 0;
    ++warp.number;
    ++progress_;
  } else {
    wait_while(warp, number);
  }
  return warp.results[number % 2];
}

unsigned Block::ballot(unsigned lanes, bool mine) {
  const unsigned* all = exchange_in_warp(lanes, mine);
  unsigned bits = 0;
  for (unsigned lane = 0; lane < WARP; ++lane) {
    bits |= all[lane] << lane;
  }
  return bits;
}

unsigned Block::shuffle(unsigned lanes, unsigned mine, unsigned from) {
  return exchange_in_warp(lanes, mine)[from % WARP];
}

unsigned Block::shuffle_down(unsigned lanes, unsigned mine, unsigned distance) {
  const unsigned* all = exchange_in_warp(lanes, mine);
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

// A kernel, and how to call it with arguments given by address.
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
  EACH(gflow_rescale)            \
  EACH(gflow_send_f32)           \
  EACH(gflow_send_f16)           \
  EACH(gflow_send_bf16)          \
  EACH(gflow_sum_f32)            \
  EACH(gflow_sum_f16)            \
  EACH(gflow_sum_bf16)           \
  EACH(gflow_deliver_f32)        \
  EACH(gflow_deliver_f16)        \
  EACH(gflow_deliver_bf16)       \
  EACH(gflow_follow_f32)         \
  EACH(gflow_follow_f16)         \
  EACH(gflow_follow_bf16)        \
  EACH(gflow_scale_sizes)

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
      gflow_host::Block::current().run({grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]},
                                       call);
      return 0;
    }
  }
  return 1;
}
