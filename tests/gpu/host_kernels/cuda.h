// The subset of CUDA C++ that the kernels in rust/cuda/kernels use, for a host compiler. Barriers
// and warp operations are in block.h; keywords, built-in variables and number conversions are here.
//
// Nothing here may be more lenient than a GPU. For example, a misaligned float4 access faults, as
// it does there.
#ifndef GFLOW_TESTS_HOST_KERNELS_CUDA_H
#define GFLOW_TESTS_HOST_KERNELS_CUDA_H

#include <bit>
#include <cmath>

#include "block.h"

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(THREADS)
// A host thread runs one block at a time, so shared memory can be thread-local. Inside a function,
// thread_local implies static.
#define __shared__ thread_local

#define threadIdx (gflow_host::Block::current().thread_index())
#define blockIdx (gflow_host::Block::current().block_index())
#define blockDim (gflow_host::Block::current().block_shape())
#define gridDim (gflow_host::Block::current().grid_shape())

struct alignas(16) float4 {
  float x, y, z, w;
};

struct alignas(8) uint2 {
  unsigned x, y;
};

inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float number) { return std::bit_cast<unsigned>(number); }
inline int __popc(unsigned bits) { return std::popcount(bits); }

inline void __syncthreads() { gflow_host::Block::current().wait_for_all(false); }
inline int __syncthreads_or(int mine) {
  return gflow_host::Block::current().wait_for_all(mine != 0);
}

inline unsigned __ballot_sync(unsigned lanes, int mine) {
  return gflow_host::Block::current().ballot(lanes, mine != 0);
}

inline unsigned __shfl_sync(unsigned lanes, unsigned mine, int from) {
  return gflow_host::Block::current().shuffle(lanes, mine, static_cast<unsigned>(from));
}

inline float __shfl_sync(unsigned lanes, float mine, int from) {
  return __uint_as_float(__shfl_sync(lanes, __float_as_uint(mine), from));
}

inline unsigned __shfl_down_sync(unsigned lanes, unsigned mine, unsigned distance) {
  return gflow_host::Block::current().shuffle_down(lanes, mine, distance);
}

inline float __shfl_down_sync(unsigned lanes, float mine, unsigned distance) {
  return __uint_as_float(__shfl_down_sync(lanes, __float_as_uint(mine), distance));
}

// Needs no atomic instruction: the threads of a block take turns and don't switch in here.
inline unsigned atomicAdd(unsigned* counter, unsigned more) {
  const unsigned before = *counter;
  *counter += more;
  return before;
}

// The two conversions that are single instructions on a GPU, in integer arithmetic. They round to
// nearest, ties to even; NaN stays NaN.
inline unsigned short float_to_half(float number) {
  const unsigned bits = __float_as_uint(number);
  const unsigned sign = bits >> 16 & 0x8000u;
  const unsigned magnitude = bits & 0x7fffffffu;
  unsigned half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {
    half = 0x7c00u;  // From 65520 on, values round to infinity.
  } else {
    // Below 2^-14 the result is subnormal: its exponent is fixed, so the mantissa is shifted
    // instead.
    const int exponent = static_cast<int>(magnitude >> 23) - 127;
    const bool subnormal = exponent < -14;
    const unsigned mantissa = magnitude >> 23 ? (magnitude & 0x7fffffu) | 0x800000u : 0;
    const int lost = subnormal ? 13 + (-14 - exponent) : 13;
    const unsigned long long wide = mantissa;
    const unsigned long long kept = lost < 40 ? wide >> lost : 0;
    const unsigned long long rest = lost < 40 ? wide - (kept << lost) : 0;
    const unsigned long long tie = lost < 40 ? 1ull << (lost - 1) : 1;
    const unsigned rounded = kept + (rest > tie || (rest == tie && (kept & 1)));
    // A carry out of the mantissa correctly increments the exponent.
    half = subnormal ? rounded : ((exponent + 14) << 10) + rounded;
  }
  return static_cast<unsigned short>(sign | half);
}

inline float half_to_float(unsigned short bits) {
  const int exponent = bits >> 10 & 0x1f;
  const unsigned mantissa = bits & 0x3ffu;
  float magnitude;
  if (exponent == 0x1f) {
    magnitude = mantissa ? NAN : INFINITY;
  } else if (exponent == 0) {
    magnitude = std::ldexp(static_cast<float>(mantissa), -24);
  } else {
    magnitude = std::ldexp(static_cast<float>(mantissa | 0x400u), exponent - 25);
  }
  return bits & 0x8000u ? -magnitude : magnitude;
}

#endif
