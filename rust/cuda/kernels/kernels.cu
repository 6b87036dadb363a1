// The CUDA kernels: rust/codec for gradients in GPU memory, the same to the last bit.
//
// rust/codec says what each stage does and why; here is only what a GPU makes different. All
// kernels are bound by memory bandwidth, so each byte should cross between DRAM and the chip once,
// in whole cache lines.
//
// NVRTC compiles this file for the device (compile.rs), and tests/gpu/host_kernels compiles it for
// the CPU. So it must include nothing, and may use only the CUDA features that the shim there has.
// A product and a sum must never be fused, nor a subnormal flushed to zero: the CPU does neither.
// Launch shapes are in launch.rs, and the kernels rely on them where they say so.

typedef unsigned long long Elements;

// --- numbers -------------------------------------------------------------------------------------

struct F16 {
  unsigned short bits;
};

// The upper half of a float.
struct BF16 {
  unsigned short bits;
};

#ifdef __CUDACC_RTC__
// One instruction each. cuda_fp16.h would have them too, but is not installed wherever NVRTC is.
// They round to nearest, ties to even, and handle subnormals.
__device__ __forceinline__ unsigned short float_to_half(float number) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(number));
  return bits;
}

__device__ __forceinline__ float half_to_float(unsigned short bits) {
  float number;
  asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"(bits));
  return number;
}
#endif

__device__ __forceinline__ float bits_to_float(unsigned bits) { return __uint_as_float(bits); }

__device__ __forceinline__ float widen(float number) { return number; }
__device__ __forceinline__ float widen(F16 number) { return half_to_float(number.bits); }
__device__ __forceinline__ float widen(BF16 number) {
  return bits_to_float(static_cast<unsigned>(number.bits) << 16);
}

__device__ __forceinline__ bool is_finite(float number) {
  return (__float_as_uint(number) & 0x7fffffffu) < 0x7f800000u;
}

__device__ __forceinline__ bool is_nan(float number) {
  return (__float_as_uint(number) & 0x7fffffffu) > 0x7f800000u;
}

// What differs between element types in memory.
template <class T>
struct Type;

template <>
struct Type<float> {
  static const bool is_exact = true;
  static __device__ __forceinline__ float narrow(float number) { return number; }
  static __device__ __forceinline__ float largest() { return bits_to_float(0x7f7fffffu); }
};

template <>
struct Type<F16> {
  static const bool is_exact = false;
  static __device__ __forceinline__ F16 narrow(float number) { return F16{float_to_half(number)}; }
  static __device__ __forceinline__ float largest() { return 65504.0f; }
};

template <>
struct Type<BF16> {
  static const bool is_exact = false;
  // In integer arithmetic: the instruction exists only since sm_80.
  static __device__ __forceinline__ BF16 narrow(float number) {
    const unsigned bits = __float_as_uint(number);
    // Adding just under half a unit in the last place, plus that place's bit, rounds ties to even.
    // A NaN must not be rounded: the carry could run through its exponent.
    const unsigned rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    const unsigned quiet = bits | 0x00400000u;
    return BF16{static_cast<unsigned short>((is_nan(number) ? quiet : rounded) >> 16)};
  }
  static __device__ __forceinline__ float largest() { return bits_to_float(0x7f7f0000u); }
};

// The NaN that is delivered to all ranks. GPUs and CPUs generate different ones.
__device__ __forceinline__ float nan_for_all() { return bits_to_float(0x7fc00000u); }
__device__ __forceinline__ float infinity() { return bits_to_float(0x7f800000u); }

__device__ __forceinline__ float smaller(float a, float b) { return a < b ? a : b; }
__device__ __forceinline__ float larger(float a, float b) { return a > b ? a : b; }

// --- memory --------------------------------------------------------------------------------------

// A thread moves four elements at a time. Of f32 that is 16 bytes, the most that one instruction
// can move. Of 16-bit elements it is 8, but a warp still covers whole cache lines. Eight of those
// at a time would split the accesses to the f32 data beside them, which is larger.
const unsigned QUAD = 4;

// Whether the quads of this memory, counted from its start, can each be moved at once.
template <class T>
__device__ __forceinline__ bool is_aligned(const T* memory) {
  return reinterpret_cast<Elements>(memory) % (QUAD * sizeof(T)) == 0;
}

struct Quad {
  float of[QUAD];
};

__device__ __forceinline__ Quad zeros() { return Quad{{0.0f, 0.0f, 0.0f, 0.0f}}; }

__device__ __forceinline__ Quad load_whole(const float* from) {
  const float4 quad = *reinterpret_cast<const float4*>(from);
  return Quad{{quad.x, quad.y, quad.z, quad.w}};
}

template <class T>
__device__ __forceinline__ T from_bits(unsigned bits) {
  return T{static_cast<unsigned short>(bits)};
}

template <class T>
__device__ __forceinline__ Quad load_whole(const T* from) {
  const uint2 quad = *reinterpret_cast<const uint2*>(from);
  return Quad{{widen(from_bits<T>(quad.x)), widen(from_bits<T>(quad.x >> 16)),
               widen(from_bits<T>(quad.y)), widen(from_bits<T>(quad.y >> 16))}};
}

__device__ __forceinline__ void store_whole(float* to, const Quad& quad) {
  *reinterpret_cast<float4*>(to) = make_float4(quad.of[0], quad.of[1], quad.of[2], quad.of[3]);
}

template <class T>
__device__ __forceinline__ unsigned two_bits(float first, float second) {
  return Type<T>::narrow(first).bits | static_cast<unsigned>(Type<T>::narrow(second).bits) << 16;
}

template <class T>
__device__ __forceinline__ void store_whole(T* to, const Quad& quad) {
  *reinterpret_cast<uint2*>(to) =
      make_uint2(two_bits<T>(quad.of[0], quad.of[1]), two_bits<T>(quad.of[2], quad.of[3]));
}

// Loads four elements from `first` on, with zeros for those beyond `count`.
template <class T>
__device__ __forceinline__ Quad load(const T* from, bool aligned, unsigned first, unsigned count) {
  if (aligned && first + QUAD <= count) {
    return load_whole(from + first);
  }
  Quad quad = zeros();
#pragma unroll
  for (unsigned i = 0; i < QUAD; ++i) {
    if (first + i < count) {
      quad.of[i] = widen(from[first + i]);
    }
  }
  return quad;
}

// Stores those of the four that are not beyond `count`.
template <class T>
__device__ __forceinline__ void store(T* to, bool aligned, unsigned first, unsigned count,
                                      const Quad& quad) {
  if (aligned && first + QUAD <= count) {
    store_whole(to + first, quad);
    return;
  }
#pragma unroll
  for (unsigned i = 0; i < QUAD; ++i) {
    if (first + i < count) {
      to[first + i] = Type<T>::narrow(quad.of[i]);
    }
  }
}

// --- threads -------------------------------------------------------------------------------------

const unsigned WARP = 32;
const unsigned ALL_LANES = 0xffffffffu;

// The sum over the lanes of a warp, in lane 0. It halves the lanes at each step, in the order of
// `total` in rust/simd/lanes.rs.
__device__ __forceinline__ float total(float number) {
#pragma unroll
  for (unsigned count = WARP / 2; count > 0; count /= 2) {
    number += __shfl_down_sync(ALL_LANES, number, count);
  }
  return number;
}

// The elements of one chunk.
struct Chunk {
  Elements start;
  unsigned count;
};

__device__ __forceinline__ Chunk chunk_at(unsigned index, unsigned chunk, Elements elements) {
  const Elements start = static_cast<Elements>(index) * chunk;
  const Elements left = elements - start;
  return Chunk{start, left < chunk ? static_cast<unsigned>(left) : chunk};
}

// --- momentum ------------------------------------------------------------------------------------

__device__ __forceinline__ float moved(float factor, float velocity, float gradient) {
  return factor * velocity + gradient;
}

// What replaces the gradient, given the new velocity.
__device__ __forceinline__ float corrected(float factor, bool nesterov, float velocity,
                                           float gradient) {
  return nesterov ? gradient + factor * velocity : velocity;
}

// --- accumulate ----------------------------------------------------------------------------------

// A norm is a sum of 32 partial sums: the CPU has 32 lanes, and each adds every 32nd element in
// order. To get the same bits, these 32 chains of additions must be kept, so one warp adds up a
// whole chunk, one chain per lane. That costs nothing: the block goes through its chunk in tiles.
// All threads compute, and leave the magnitudes of a tile in shared memory; the first warp adds up
// those of the residual and the second those of the gradient, while the loads for the next tile are
// in flight. Adding up a tile takes less than 1000 cycles (4096 / 32 dependent additions), and
// loading one takes more than 2000 on every GPU in the table in docs/gpu.md when all
// multiprocessors load at once.
//
// If anything in the chunk is infinite or NaN, residual and velocity must stay as they were, and
// that is known only at the end of the chunk. So they are written only then, and the new values
// wait in registers: 16 quads per thread, which for a block of 512 threads is 32768 elements, the
// default chunk. (A larger block has no more registers, only more threads that need some for
// themselves.) What does not fit is read and computed a second time: in larger chunks the elements
// beyond those; with momentum the residual, because the registers hold the new velocity; with
// Nesterov also the gradient. The block has read them last, so they should still be in the L2
// cache. Partial tiles and unaligned chunks are computed twice as well: they are too small, or too
// rare, to be worth more code.
//
// The block has one size whatever the chunk, so that every offset is a constant and needs no
// register. With offsets from blockDim the compiler spilled 30 registers.
const unsigned ACCUMULATE_THREADS = 512;
const unsigned QUADS_IN_TILE = 2;
const unsigned TILE = ACCUMULATE_THREADS * QUAD * QUADS_IN_TILE;
const unsigned KEPT_TILES = 8;
static_assert(QUADS_IN_TILE == 2, "two are copied by name below");

// Shared memory of a block: the magnitudes of a tile of residual and gradient, and at the end the
// sums of both.
struct alignas(QUAD * sizeof(float)) Shared {
  float magnitudes[2][TILE];
  float sums[2];
};

template <class G, bool MOVES>
struct Accumulation {
  G* gradient;
  float* residual;
  float* velocity;
  unsigned count;
  bool gradient_aligned, residual_aligned, velocity_aligned;
  float factor;
  bool nesterov;

  // What is loaded for four elements. The velocity is unused without momentum.
  struct Reading {
    Quad gradient, residual, velocity;
  };

  // The offset in a tile of this thread's quad with this number.
  static __device__ __forceinline__ unsigned place(unsigned quad) {
    return (quad * ACCUMULATE_THREADS + threadIdx.x) * QUAD;
  }

  __device__ __forceinline__ bool is_aligned_here() const {
    return gradient_aligned && residual_aligned && velocity_aligned;
  }

  // Whether the gradient of kept tiles is read a second time.
  __device__ __forceinline__ bool needs_gradient_again() const { return MOVES && nesterov; }

  __device__ __forceinline__ Reading read(unsigned first) const {
    Reading reading;
    reading.gradient = load(gradient, gradient_aligned, first, count);
    reading.residual = load(residual, residual_aligned, first, count);
    reading.velocity = MOVES ? load(velocity, velocity_aligned, first, count) : zeros();
    return reading;
  }

  __device__ __forceinline__ Quad new_velocity(const Reading& reading) const {
    Quad quad = zeros();
#pragma unroll
    for (unsigned i = 0; MOVES && i < QUAD; ++i) {
      quad.of[i] = moved(factor, reading.velocity.of[i], reading.gradient.of[i]);
    }
    return quad;
  }

  __device__ __forceinline__ Quad new_residual(const Reading& reading, const Quad& velocity) const {
    Quad quad;
#pragma unroll
    for (unsigned i = 0; i < QUAD; ++i) {
      const float gradient = reading.gradient.of[i];
      quad.of[i] = reading.residual.of[i] +
                   (MOVES ? corrected(factor, nesterov, velocity.of[i], gradient) : gradient);
    }
    return quad;
  }

  // Leaves the magnitudes for the warps that add up. Returns whether all of the residual is finite.
  static __device__ __forceinline__ bool leave(Shared& shared, unsigned place, const Quad& gradient,
                                               const Quad& residual) {
    Quad of_residual, of_gradient;
    bool finite = true;
#pragma unroll
    for (unsigned i = 0; i < QUAD; ++i) {
      of_residual.of[i] = fabsf(residual.of[i]);
      of_gradient.of[i] = fabsf(gradient.of[i]);
      finite = finite & is_finite(residual.of[i]);
    }
    store_whole(shared.magnitudes[0] + place, of_residual);
    store_whole(shared.magnitudes[1] + place, of_gradient);
    return finite;
  }

  // Adds the first `count` elements of a tile to the chains: of the residual in the first warp, of
  // the gradient in the second. The other warps wait, with their next loads in flight.
  static __device__ __forceinline__ void add_up(const Shared& shared, unsigned count,
                                                float& chain) {
    const unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    __syncthreads();
    if (warp < 2) {
      const unsigned rows = (count + WARP - 1) / WARP;
#pragma unroll 16
      for (unsigned row = 0; row < rows; ++row) {
        chain += shared.magnitudes[warp][row * WARP + lane];
      }
    }
    __syncthreads();
  }
};

// One block of 512 threads per chunk.
template <class G, bool MOVES>
__device__ __forceinline__ void accumulate(Shared& shared, G* gradient, float* residual,
                                           float* velocity, Elements elements, unsigned chunk,
                                           float factor, bool nesterov, float clamp, float* norms,
                                           float* gradient_norms) {
  typedef Accumulation<G, MOVES> Work;
  const Chunk here = chunk_at(blockIdx.x, chunk, elements);
  gradient += here.start;
  residual += here.start;
  velocity = MOVES ? velocity + here.start : 0;
  const Work work = {gradient,
                     residual,
                     velocity,
                     here.count,
                     is_aligned(gradient),
                     is_aligned(residual),
                     is_aligned(velocity),
                     factor,
                     nesterov};
  const unsigned whole_tiles = work.is_aligned_here() ? here.count / TILE : 0;
  const unsigned kept_tiles = whole_tiles < KEPT_TILES ? whole_tiles : KEPT_TILES;
  const unsigned not_kept = kept_tiles * TILE;
  float chain = 0.0f;
  bool finite = true;

  // Issue all loads that the registers will hold at once.
  Quad kept[KEPT_TILES][QUADS_IN_TILE];
  const float* const kept_of = MOVES ? velocity : residual;
#pragma unroll
  for (unsigned index = 0; index < KEPT_TILES; ++index) {
#pragma unroll
    for (unsigned quad = 0; quad < QUADS_IN_TILE && index < kept_tiles; ++quad) {
      kept[index][quad] = load_whole(kept_of + index * TILE + Work::place(quad));
    }
  }
  // The rest of a tile is loaded one tile ahead.
  Quad gradients[QUADS_IN_TILE], residuals[QUADS_IN_TILE];
  const auto read_ahead = [&](unsigned index, bool needs_gradient) {
#pragma unroll
    for (unsigned quad = 0; quad < QUADS_IN_TILE && index < kept_tiles; ++quad) {
      const unsigned first = index * TILE + Work::place(quad);
      gradients[quad] = needs_gradient ? load_whole(gradient + first) : zeros();
      residuals[quad] = MOVES ? load_whole(residual + first) : zeros();
    }
  };
  read_ahead(0, true);
#pragma unroll
  for (unsigned index = 0; index < KEPT_TILES; ++index) {
    if (index < kept_tiles) {
#pragma unroll
      for (unsigned quad = 0; quad < QUADS_IN_TILE; ++quad) {
        Quad& held = kept[index][quad];
        const typename Work::Reading reading = {gradients[quad], MOVES ? residuals[quad] : held,
                                                held};
        const Quad new_velocity = work.new_velocity(reading);
        const Quad new_residual = work.new_residual(reading, new_velocity);
        finite = finite & Work::leave(shared, Work::place(quad), reading.gradient, new_residual);
        held = MOVES ? new_velocity : new_residual;
        if (!work.needs_gradient_again()) {
          store_whole(gradient + index * TILE + Work::place(quad), zeros());
        }
      }
      read_ahead(index + 1, true);
      Work::add_up(shared, TILE, chain);
    }
  }
  for (unsigned first = not_kept; first < here.count; first += TILE) {
#pragma unroll
    for (unsigned quad = 0; quad < QUADS_IN_TILE; ++quad) {
      const typename Work::Reading reading = work.read(first + Work::place(quad));
      const Quad new_residual = work.new_residual(reading, work.new_velocity(reading));
      finite = finite & Work::leave(shared, Work::place(quad), reading.gradient, new_residual);
    }
    const unsigned left = here.count - first;
    Work::add_up(shared, left < TILE ? left : TILE, chain);
  }

  if (threadIdx.x < 2 * WARP) {
    chain = total(chain);
    if (threadIdx.x % WARP == 0) {
      shared.sums[threadIdx.x / WARP] = chain;
    }
  }
  const bool poisoned = __syncthreads_or(!finite);
  if (threadIdx.x == 0) {
    // A sum of finite magnitudes may still be infinite; a NaN sum has a NaN in it.
    const float sum = shared.sums[0], gradient_sum = shared.sums[1];
    if (poisoned) {
      norms[blockIdx.x] = is_nan(sum) ? nan_for_all() : infinity();
      gradient_norms[blockIdx.x] = is_nan(gradient_sum) ? nan_for_all() : gradient_sum;
    } else {
      norms[blockIdx.x] = smaller(sum, clamp);
      gradient_norms[blockIdx.x] = smaller(gradient_sum, Type<float>::largest());
    }
  }

  const bool reads_again = MOVES && !poisoned;
  if (reads_again) {
    read_ahead(0, work.needs_gradient_again());
  }
#pragma unroll
  for (unsigned index = 0; index < KEPT_TILES; ++index) {
    if (index < kept_tiles) {
      const Quad gradients_here[] = {gradients[0], gradients[1]};
      const Quad residuals_here[] = {residuals[0], residuals[1]};
      if (reads_again) {
        read_ahead(index + 1, work.needs_gradient_again());
      }
#pragma unroll
      for (unsigned quad = 0; quad < QUADS_IN_TILE; ++quad) {
        const unsigned first = index * TILE + Work::place(quad);
        const Quad& held = kept[index][quad];
        if (work.needs_gradient_again()) {
          store_whole(gradient + first, zeros());
        }
        if (reads_again) {
          const typename Work::Reading reading = {gradients_here[quad], residuals_here[quad], held};
          store_whole(residual + first, work.new_residual(reading, held));
          store_whole(velocity + first, held);
        } else if (!poisoned) {
          store_whole(residual + first, held);
        }
      }
    }
  }
  for (unsigned start = not_kept; start < here.count; start += TILE) {
#pragma unroll
    for (unsigned quad = 0; quad < QUADS_IN_TILE; ++quad) {
      const unsigned first = start + Work::place(quad);
      if (!poisoned) {
        const typename Work::Reading reading = work.read(first);
        const Quad new_velocity = work.new_velocity(reading);
        const Quad new_residual = work.new_residual(reading, new_velocity);
        store(residual, work.residual_aligned, first, here.count, new_residual);
        if (MOVES) {
          store(velocity, work.velocity_aligned, first, here.count, new_velocity);
        }
      }
      store(gradient, work.gradient_aligned, first, here.count, zeros());
    }
  }
}

#define GFLOW_ACCUMULATE(NAME, G)                                                                  \
  extern "C" __global__ void __launch_bounds__(ACCUMULATE_THREADS) gflow_accumulate_##NAME(        \
      G* __restrict__ gradient, float* __restrict__ residual, float* __restrict__ velocity,        \
      Elements elements, unsigned chunk, float factor, unsigned nesterov, float clamp,             \
      float* __restrict__ norms, float* __restrict__ gradient_norms) {                             \
    __shared__ Shared shared;                                                                      \
    if (velocity) {                                                                                \
      accumulate<G, true>(shared, gradient, residual, velocity, elements, chunk, factor, nesterov, \
                          clamp, norms, gradient_norms);                                           \
    } else {                                                                                       \
      accumulate<G, false>(shared, gradient, residual, velocity, elements, chunk, factor,          \
                           nesterov, clamp, norms, gradient_norms);                                \
    }                                                                                              \
  }

GFLOW_ACCUMULATE(f32, float)
GFLOW_ACCUMULATE(f16, F16)
GFLOW_ACCUMULATE(bf16, BF16)

// --- select --------------------------------------------------------------------------------------

const unsigned SELECT_THREADS = 1024;
const unsigned DIGIT_BITS = 8;
const unsigned DIGITS = 1u << DIGIT_BITS;
const unsigned NOT_SELECTED = 0xffffffffu;

// An integer that orders like the sums, with 0 for infinity and NaN.
__device__ __forceinline__ unsigned rank_of(float sum) {
  // Both zeros must have the same rank.
  const unsigned bits = __float_as_uint(sum + 0.0f);
  if (!is_finite(sum)) {
    return 0;
  }
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// One block of 1024 threads. A radix select finds the least rank that is selected, from the top
// digit down; the counters are integers, so the order of the additions does not matter. A second
// pass goes through the chunks in order, where the counts so far say whether each is selected, and
// its slot.
extern "C" __global__ void __launch_bounds__(SELECT_THREADS)
    gflow_select(const float* __restrict__ sums, unsigned chunks, unsigned count,
                 unsigned* __restrict__ selected, unsigned* __restrict__ slot_of_chunk) {
  __shared__ unsigned counters[DIGITS];
  __shared__ unsigned of_warps[SELECT_THREADS / WARP];
  __shared__ unsigned found_digit, found_wanted;
  const unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;

  // Among the ranks that share their upper digits with `least`, find the `wanted`-th largest.
  unsigned least = 0, wanted = count < chunks ? count : chunks;
  if (wanted == 0) {
    for (unsigned index = threadIdx.x; index < chunks; index += blockDim.x) {
      slot_of_chunk[index] = NOT_SELECTED;
    }
    return;
  }
  for (unsigned above_bits = 0; above_bits < 32; above_bits += DIGIT_BITS) {
    const unsigned shift = 32 - DIGIT_BITS - above_bits;
    for (unsigned digit = threadIdx.x; digit < DIGITS; digit += blockDim.x) {
      counters[digit] = 0;
    }
    __syncthreads();
    for (unsigned index = threadIdx.x; index < chunks; index += blockDim.x) {
      const unsigned rank = rank_of(sums[index]);
      if (above_bits == 0 || (rank ^ least) >> (shift + DIGIT_BITS) == 0) {
        atomicAdd(&counters[rank >> shift & (DIGITS - 1)], 1u);
      }
    }
    __syncthreads();
    if (warp == 0) {
      // Each lane has some adjacent digits, and counts how many ranks are in the digits above
      // those.
      const unsigned each = DIGITS / WARP;
      unsigned own = 0;
#pragma unroll
      for (unsigned i = 0; i < each; ++i) {
        own += counters[lane * each + i];
      }
      unsigned from_here = own;
#pragma unroll
      for (unsigned distance = 1; distance < WARP; distance *= 2) {
        const unsigned more = __shfl_down_sync(ALL_LANES, from_here, distance);
        from_here += lane + distance < WARP ? more : 0;
      }
      unsigned above = from_here - own;
      for (unsigned i = each; i-- > 0;) {
        const unsigned here = counters[lane * each + i];
        if (above < wanted && wanted <= above + here) {
          found_digit = lane * each + i;
          found_wanted = wanted - above;
        }
        above += here;
      }
    }
    __syncthreads();
    least |= found_digit << shift;
    wanted = found_wanted;
  }

  // Select all greater ranks, and the first `wanted` equal ones.
  unsigned greater_before = 0, equal_before = 0;
  for (unsigned start = 0; start < chunks; start += blockDim.x) {
    const unsigned index = start + threadIdx.x;
    const unsigned rank = index < chunks ? rank_of(sums[index]) : 0;
    const bool is_greater = index < chunks && rank > least;
    const bool is_equal = index < chunks && rank == least;
    const unsigned greater = __ballot_sync(ALL_LANES, is_greater);
    const unsigned equal = __ballot_sync(ALL_LANES, is_equal);
    if (lane == 0) {
      // Both counts in one word: neither exceeds 1024.
      of_warps[warp] = __popc(greater) | __popc(equal) << 16;
    }
    __syncthreads();
    unsigned before = 0, all = 0;
    for (unsigned other = 0; other < blockDim.x / WARP; ++other) {
      before += other < warp ? of_warps[other] : 0;
      all += of_warps[other];
    }
    __syncthreads();
    const unsigned lower_lanes = (1u << lane) - 1;
    const unsigned greater_there =
        greater_before + (before & 0xffffu) + __popc(greater & lower_lanes);
    const unsigned equal_there = equal_before + (before >> 16) + __popc(equal & lower_lanes);
    const bool is_selected = is_greater || (is_equal && equal_there < wanted);
    const unsigned slot = greater_there + (equal_there < wanted ? equal_there : wanted);
    if (index < chunks) {
      slot_of_chunk[index] = is_selected ? slot : NOT_SELECTED;
    }
    if (is_selected) {
      selected[slot] = index;
    }
    greater_before += all & 0xffffu;
    equal_before += all >> 16;
  }
}

// --- scale ---------------------------------------------------------------------------------------

// A power of two and its inverse, both normal numbers.
struct Scale {
  float factor, inverse;
};

__device__ __forceinline__ Scale scale_of_exponent(int exponent) {
  return Scale{bits_to_float(static_cast<unsigned>(127 + exponent) << 23),
               bits_to_float(static_cast<unsigned>(127 - exponent) << 23)};
}

// As rust/codec/chunks/scale.rs, with one difference: with several hosts, each norm was capped at
// `clamp`, which is less than the largest float. A sum of at least `clamp` bounds nothing, so it
// gets the least scale.
template <class W>
__device__ __forceinline__ Scale scale_for(float, float) {
  return scale_of_exponent(0);
}

template <>
__device__ __forceinline__ Scale scale_for<F16>(float sum, float clamp) {
  const int limit = 126;
  if (!is_finite(sum) || sum <= 0.0f) {
    return scale_of_exponent(0);
  }
  if (sum >= clamp) {
    return scale_of_exponent(-limit);
  }
  const unsigned bits = __float_as_uint(sum);
  const int rounded_up = static_cast<int>(bits >> 23) - 127 + ((bits & 0x7fffffu) != 0);
  const int exponent = 15 - rounded_up;
  return scale_of_exponent(exponent < -limit ? -limit : exponent > limit ? limit : exponent);
}

// --- pack ----------------------------------------------------------------------------------------

const unsigned STREAM_THREADS = 256;

// The most that is sent of a number: a 16-bit wire would round larger ones up beyond f32.
template <class W>
__device__ __forceinline__ float largest_sent() {
  return bits_to_float(Type<W>::is_exact ? 0x7f7fffffu : 0x7f7f0000u);
}

// blockIdx.x is the slot on the wire, blockIdx.y the part of the chunk.
template <class W>
__device__ __forceinline__ void pack(float* residual, float* velocity, Elements elements,
                                     unsigned chunk, const float* sums, const unsigned* selected,
                                     bool clear_velocity, float clamp, W* wire) {
  const unsigned slot = blockIdx.x, index = selected[slot];
  const Chunk here = chunk_at(index, chunk, elements);
  const float sum = sums[index];
  // A poisoned chunk that is selected for lack of others is sent as zeros, and the last chunk is
  // padded with zeros: the host already knows how much is sent, so that must not depend on the
  // data.
  const unsigned sent = is_finite(sum) ? here.count : 0;
  const Scale scale = scale_for<W>(sum, clamp);
  const float limit = largest_sent<W>();
  residual += here.start;
  velocity = velocity && clear_velocity ? velocity + here.start : 0;
  wire += static_cast<Elements>(slot) * chunk;
  const bool residual_aligned = is_aligned(residual);
  const bool velocity_aligned = is_aligned(velocity);
  const bool wire_aligned = is_aligned(wire);

  const unsigned stride = gridDim.y * blockDim.x * QUAD;
#pragma unroll 2
  for (unsigned first = (blockIdx.y * blockDim.x + threadIdx.x) * QUAD; first < chunk;
       first += stride) {
    Quad numbers = load(residual, residual_aligned, first, sent);
    Quad scaled;
#pragma unroll
    for (unsigned i = 0; i < QUAD; ++i) {
      const float number = numbers.of[i];
      const float limited = larger(smaller(number, limit), -limit);
      // Rounded here, so that storing it is exact.
      scaled.of[i] = widen(Type<W>::narrow(limited * scale.factor));
      numbers.of[i] = number - scaled.of[i] * scale.inverse;
    }
    store(wire, wire_aligned, first, chunk, scaled);
    store(residual, residual_aligned, first, sent, numbers);
    if (velocity) {
      store(velocity, velocity_aligned, first, sent, zeros());
    }
  }
}

#define GFLOW_PACK(NAME, W)                                                                      \
  extern "C" __global__ void __launch_bounds__(STREAM_THREADS) gflow_pack_##NAME(                \
      float* __restrict__ residual, float* __restrict__ velocity, Elements elements,             \
      unsigned chunk, const float* __restrict__ sums, const unsigned* __restrict__ selected,     \
      unsigned count, unsigned clear_velocity, float clamp, W* __restrict__ wire) {              \
    if (blockIdx.x < count) {                                                                    \
      pack<W>(residual, velocity, elements, chunk, sums, selected, clear_velocity, clamp, wire); \
    }                                                                                            \
  }

GFLOW_PACK(f16, F16)
GFLOW_PACK(bf16, BF16)
GFLOW_PACK(f32, float)

// --- unpack --------------------------------------------------------------------------------------

// blockIdx.x is the chunk, blockIdx.y the part of it. Most chunks were not sent, and their gradient
// is already zero: those blocks return at once.
template <class W, class G>
__device__ __forceinline__ void unpack(const W* wire, float* residual, Elements elements,
                                       unsigned chunk, const float* sums,
                                       const unsigned* slot_of_chunk, float clamp, G* gradient) {
  const unsigned index = blockIdx.x;
  const float sum = sums[index];
  const bool poisoned = !is_finite(sum);
  const unsigned slot = slot_of_chunk[index];
  if (!poisoned && slot == NOT_SELECTED) {
    return;
  }
  const Chunk here = chunk_at(index, chunk, elements);
  const Scale scale = scale_for<W>(sum, clamp);
  const float filling = is_nan(sum) ? nan_for_all() : sum;
  const bool keeps = !Type<G>::is_exact && residual && !poisoned;
  gradient += here.start;
  residual = keeps ? residual + here.start : 0;
  wire += poisoned ? 0 : static_cast<Elements>(slot) * chunk;
  const bool gradient_aligned = is_aligned(gradient);
  const bool residual_aligned = is_aligned(residual);
  const bool wire_aligned = is_aligned(wire);

  const unsigned stride = gridDim.y * blockDim.x * QUAD;
#pragma unroll 2
  for (unsigned first = (blockIdx.y * blockDim.x + threadIdx.x) * QUAD; first < here.count;
       first += stride) {
    if (poisoned) {
      store(gradient, gradient_aligned, first, here.count,
            Quad{{filling, filling, filling, filling}});
      continue;
    }
    Quad numbers = load(wire, wire_aligned, first, here.count);
    // Adding -0 changes nothing, not even the sign of a zero.
    Quad rest{{-0.0f, -0.0f, -0.0f, -0.0f}};
#pragma unroll
    for (unsigned i = 0; i < QUAD; ++i) {
      const float exact = numbers.of[i] * scale.inverse;
      numbers.of[i] = exact;
      if (!Type<G>::is_exact && is_finite(exact)) {
        // As `return_unpack_error` of rust/codec/chunks/kernels/residual.rs.
        const float largest = Type<G>::largest();
        const float rounded = widen(Type<G>::narrow(exact));
        numbers.of[i] = larger(smaller(rounded, largest), -largest);
        rest.of[i] = exact - numbers.of[i];
      }
    }
    store(gradient, gradient_aligned, first, here.count, numbers);
    if (keeps) {
      Quad residuals = load(residual, residual_aligned, first, here.count);
#pragma unroll
      for (unsigned i = 0; i < QUAD; ++i) {
        residuals.of[i] += rest.of[i];
      }
      store(residual, residual_aligned, first, here.count, residuals);
    }
  }
}

#define GFLOW_UNPACK(NAME, W, G)                                                                   \
  extern "C" __global__ void __launch_bounds__(STREAM_THREADS) gflow_unpack_##NAME(                \
      const W* __restrict__ wire, float* __restrict__ residual, Elements elements, unsigned chunk, \
      const float* __restrict__ sums, const unsigned* __restrict__ slot_of_chunk, float clamp,     \
      G* __restrict__ gradient) {                                                                  \
    unpack<W, G>(wire, residual, elements, chunk, sums, slot_of_chunk, clamp, gradient);           \
  }

GFLOW_UNPACK(f16_f32, F16, float)
GFLOW_UNPACK(f16_f16, F16, F16)
GFLOW_UNPACK(f16_bf16, F16, BF16)
GFLOW_UNPACK(bf16_f32, BF16, float)
GFLOW_UNPACK(bf16_f16, BF16, F16)
GFLOW_UNPACK(bf16_bf16, BF16, BF16)
GFLOW_UNPACK(f32_f32, float, float)
GFLOW_UNPACK(f32_f16, float, F16)
GFLOW_UNPACK(f32_bf16, float, BF16)

// --- whole tensors -------------------------------------------------------------------------------

// Calls `each` for every quad of this thread, with its first element and how many elements it has:
// four, or fewer at the end.
template <class Each>
__device__ __forceinline__ void for_each_quad(Elements elements, const Each& each) {
  const Elements stride = static_cast<Elements>(gridDim.x) * blockDim.x * QUAD;
  Elements first = (static_cast<Elements>(blockIdx.x) * blockDim.x + threadIdx.x) * QUAD;
#pragma unroll 2
  for (; first < elements; first += stride) {
    const Elements left = elements - first;
    each(first, left < QUAD ? static_cast<unsigned>(left) : QUAD);
  }
}

template <class G>
__device__ __forceinline__ void add_velocity(G* gradient, float* velocity, Elements elements,
                                             float factor, bool nesterov) {
  const bool gradient_aligned = is_aligned(gradient), velocity_aligned = is_aligned(velocity);
  for_each_quad(elements, [&](Elements first, unsigned count) {
    Quad gradients = load(gradient + first, gradient_aligned, 0, count);
    Quad velocities = load(velocity + first, velocity_aligned, 0, count);
#pragma unroll
    for (unsigned i = 0; i < QUAD; ++i) {
      const float before = velocities.of[i];
      const float after = moved(factor, before, gradients.of[i]);
      gradients.of[i] = corrected(factor, nesterov, after, gradients.of[i]);
      velocities.of[i] = is_finite(gradients.of[i]) ? after : before;
    }
    store(gradient + first, gradient_aligned, 0, count, gradients);
    store(velocity + first, velocity_aligned, 0, count, velocities);
  });
}

#define GFLOW_ADD_VELOCITY(NAME, G)                                                     \
  extern "C" __global__ void __launch_bounds__(STREAM_THREADS)                          \
      gflow_add_velocity_##NAME(G* __restrict__ gradient, float* __restrict__ velocity, \
                                Elements elements, float factor, unsigned nesterov) {   \
    add_velocity<G>(gradient, velocity, elements, factor, nesterov);                    \
  }

GFLOW_ADD_VELOCITY(f32, float)
GFLOW_ADD_VELOCITY(f16, F16)
GFLOW_ADD_VELOCITY(bf16, BF16)

// As `rescale` in rust/gradients: the scale of the gradients has changed.
extern "C" __global__ void __launch_bounds__(STREAM_THREADS)
    gflow_rescale(float* __restrict__ values, Elements elements, float factor) {
  const bool aligned = is_aligned(values);
  const float largest = Type<float>::largest();
  for_each_quad(elements, [&](Elements first, unsigned count) {
    Quad numbers = load(values + first, aligned, 0, count);
#pragma unroll
    for (unsigned i = 0; i < QUAD; ++i) {
      numbers.of[i] = larger(smaller(numbers.of[i] * factor, largest), -largest);
    }
    store(values + first, aligned, 0, count, numbers);
  });
}
