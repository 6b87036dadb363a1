/* The limit of memory: an allreduce whose tensors are all in memory that the ranks share.
 *
 * Each rank sums its shard over all tensors and writes it to all, between two barriers. Ranks spin
 * in them, each on its own core; with too few cores they sleep instead. Nothing is copied and no
 * library called, so no allreduce of tensors in memory can be much faster. For measuring only: if a
 * rank dies, the others spin forever.
 */
#define _GNU_SOURCE
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { LINE = 64, BLOCK = 128, SPINS = 100 };

/* How many barriers a rank has reached, in a cache line of its own. */
struct flag {
  _Atomic uint32_t barriers;
  char padding[LINE - sizeof(uint32_t)];
};

static void pause_core(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

static void meet(struct flag* flags, int rank, int world, int crowded) {
  uint32_t now = atomic_load_explicit(&flags[rank].barriers, memory_order_relaxed) + 1;
  atomic_store_explicit(&flags[rank].barriers, now, memory_order_release);
  if (crowded) syscall(SYS_futex, &flags[rank].barriers, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
  int tries = 0;
  for (int peer = 0; peer < world; peer++) {
    _Atomic uint32_t* barriers = &flags[peer].barriers;
    uint32_t seen;
    while ((int32_t)((seen = atomic_load_explicit(barriers, memory_order_acquire)) - now) < 0) {
      if (crowded && ++tries > SPINS) {
        /* The rank that is late may need this core. */
        syscall(SYS_futex, barriers, FUTEX_WAIT, seen, NULL, NULL, 0);
      } else {
        pause_core();
      }
    }
  }
}

static void sum_two(float* restrict one, float* restrict other, size_t count) {
  for (size_t i = 0; i < count; i++) {
    float sum = one[i] + other[i];
    one[i] = sum;
    other[i] = sum;
  }
}

static void sum_block(float* tensors, size_t stride, int world, size_t length) {
  float sum[BLOCK];
  for (size_t i = 0; i < length; i++) sum[i] = tensors[i];
  for (int rank = 1; rank < world; rank++) {
    const float* tensor = tensors + (size_t)rank * stride;
    for (size_t i = 0; i < length; i++) sum[i] += tensor[i];
  }
  for (int rank = 0; rank < world; rank++) {
    float* tensor = tensors + (size_t)rank * stride;
    for (size_t i = 0; i < length; i++) tensor[i] = sum[i];
  }
}

static void sum_many(float* tensors, size_t stride, int world, size_t count) {
  size_t start = 0;
  /* With a constant length, the compiler keeps the sums in registers. */
  for (; start + BLOCK <= count; start += BLOCK) sum_block(tensors + start, stride, world, BLOCK);
  sum_block(tensors + start, stride, world, count - start);
}

static void all_reduce(struct flag* flags, float* tensors, size_t stride, int rank, int world,
                       int crowded, size_t count) {
  /* Shards start at cache lines: no two ranks write to the same one. */
  size_t line = LINE / sizeof(float);
  size_t shard = ((count + world - 1) / world + line - 1) / line * line;
  size_t start = shard * rank < count ? shard * rank : count;
  size_t length = count - start < shard ? count - start : shard;
  meet(flags, rank, world, crowded);
  if (world == 2) {
    sum_two(tensors + start, tensors + stride + start, length);
  } else {
    sum_many(tensors + start, stride, world, length);
  }
  meet(flags, rank, world, crowded);
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + time.tv_nsec * 1e-9;
}

/* Bind to an allowed core that no other rank uses, if there are enough. */
static int has_own_core(const cpu_set_t* allowed, int rank, int world) {
  if (CPU_COUNT(allowed) < world) return 0;
  int core = 0;
  for (int left = rank; left > 0 || !CPU_ISSET(core, allowed); core++) {
    if (CPU_ISSET(core, allowed)) left--;
  }
  cpu_set_t own;
  CPU_ZERO(&own);
  CPU_SET(core, &own);
  return sched_setaffinity(0, sizeof own, &own) == 0;
}

/* Make `skipped` calls, then `counted` more, and write the time of each to `seconds`. */
void take_turn(void* flags, float* tensors, size_t stride, int rank, int world, size_t count,
               int skipped, int counted, double* seconds) {
  cpu_set_t allowed;
  sched_getaffinity(0, sizeof allowed, &allowed);
  /* Ranks that spin on the same core would measure the scheduler, not the memory. */
  int crowded = !has_own_core(&allowed, rank, world);
  for (int call = 0; call < skipped; call++) {
    all_reduce(flags, tensors, stride, rank, world, crowded, count);
  }
  for (int call = 0; call < counted; call++) {
    double start = now();
    all_reduce(flags, tensors, stride, rank, world, crowded, count);
    seconds[call] = now() - start;
  }
  sched_setaffinity(0, sizeof allowed, &allowed);
}
