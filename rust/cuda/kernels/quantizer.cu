// The kernels of the quantiser: rust/codec/quantizer for gradients in GPU memory, the same to the
// last bit. It continues kernels.cu, which has the numbers, the memory and the threads.
//
// A warp has a block of 640 elements: 20 rows of 32, and lane `l` has the elements `l`, `l + 32`,
// and so on, as the lanes of the CPU do. So sums over a block come in the CPU's order without any
// memory between the threads, and each row is moved in whole cache lines. The planes of a block's
// symbols begin at whole rows: a lane has all symbols of its bytes itself. All lanes of a warp
// take the same branches.
const unsigned QUANTIZED = 640;
const unsigned ROWS = QUANTIZED / WARP;
const unsigned QUANTIZER_THREADS = 128;
const unsigned LEVEL_BYTES = 2;

// As in rust/gradients/two_legs/ownership.rs.
const unsigned RUN = 16;

// As in rust/codec/quantizer/sizes.rs.
const unsigned TURNS = 8;

__device__ __forceinline__ unsigned this_lane() { return threadIdx.x % WARP; }

// The number of this warp in the launch. It has this block, or the block with this number among
// those that the launch is for.
__device__ __forceinline__ unsigned this_warp() {
  return blockIdx.x * (QUANTIZER_THREADS / WARP) + threadIdx.x / WARP;
}

// As `total`, in all lanes: the operands of an addition swap places, which changes nothing.
__device__ __forceinline__ float total_for_all(float number) {
#pragma unroll
  for (unsigned count = WARP / 2; count > 0; count /= 2) {
    number += __shfl_xor_sync(ALL_LANES, number, count);
  }
  return number;
}

// The elements of a block that this lane has, or something about each of them.
struct Column {
  float of[ROWS];
};

__device__ __forceinline__ Column filled_with(float number) {
  Column column;
#pragma unroll
  for (unsigned row = 0; row < ROWS; ++row) {
    column.of[row] = number;
  }
  return column;
}

// With zeros for elements beyond `count`.
template <class T>
__device__ __forceinline__ Column load_column(const T* from, unsigned count) {
  Column column;
#pragma unroll
  for (unsigned row = 0; row < ROWS; ++row) {
    const unsigned index = row * WARP + this_lane();
    column.of[row] = index < count ? widen(from[index]) : 0.0f;
  }
  return column;
}

template <class T>
__device__ __forceinline__ void store_column(T* to, unsigned count, const Column& column) {
#pragma unroll
  for (unsigned row = 0; row < ROWS; ++row) {
    const unsigned index = row * WARP + this_lane();
    if (index < count) {
      to[index] = Type<T>::narrow(column.of[row]);
    }
  }
}

// What a number is once it is stored as this type; a finite one stays finite.
template <class T>
__device__ __forceinline__ Column rounded_to(const Column& column) {
  Column rounded;
#pragma unroll
  for (unsigned row = 0; row < ROWS; ++row) {
    const float limit = Type<T>::largest(), number = widen(Type<T>::narrow(column.of[row]));
    rounded.of[row] = larger(smaller(number, limit), -limit);
  }
  return rounded;
}

// The element types of gradients, as numbers: a kernel for each would be three times as many, and
// the type is looked at once for a block.
const unsigned OF_F16 = 1;
const unsigned OF_BF16 = 2;

__device__ __forceinline__ Column load_gradient(const void* gradient, unsigned type, Elements start,
                                                unsigned count) {
  if (type == OF_F16) {
    return load_column(static_cast<const F16*>(gradient) + start, count);
  }
  if (type == OF_BF16) {
    return load_column(static_cast<const BF16*>(gradient) + start, count);
  }
  return load_column(static_cast<const float*>(gradient) + start, count);
}

__device__ __forceinline__ void store_gradient(void* gradient, unsigned type, Elements start,
                                               unsigned count, const Column& column) {
  if (type == OF_F16) {
    store_column(static_cast<F16*>(gradient) + start, count, column);
  } else if (type == OF_BF16) {
    store_column(static_cast<BF16*>(gradient) + start, count, column);
  } else {
    store_column(static_cast<float*>(gradient) + start, count, column);
  }
}

// Finite numbers as they are once they are stored in the gradient.
__device__ __forceinline__ Column rounded_to_type(unsigned type, const Column& column) {
  return type == OF_F16    ? rounded_to<F16>(column)
         : type == OF_BF16 ? rounded_to<BF16>(column)
                           : column;
}

// Fills in the step of each element: its size, with a floor. All are 1 if there are no sizes yet;
// then it returns false.
__device__ __forceinline__ bool load_steps(const BF16* sizes, unsigned count, Column& steps) {
  if (!sizes) {
    steps = filled_with(1.0f);
    return false;
  }
  steps = load_column(sizes, count);
  float lane = 0.0f;
#pragma unroll
  for (unsigned row = 0; row < ROWS; ++row) {
    lane += steps.of[row];
  }
  const float floor = total_for_all(lane) / static_cast<float>(count) * 0.02f;
  if (floor < least_normal()) {
    steps = filled_with(1.0f);
    return false;
  }
#pragma unroll
  for (unsigned row = 0; row < ROWS; ++row) {
    steps.of[row] += floor;
  }
  return true;
}

__device__ __forceinline__ float dot(const Column& left, const Column& right) {
  float lane = 0.0f;
#pragma unroll
  for (unsigned row = 0; row < ROWS; ++row) {
    lane += left.of[row] * right.of[row];
  }
  return total_for_all(lane);
}

// The largest magnitude in the block. A NaN counts as larger than infinity.
__device__ __forceinline__ float largest_of(const Column& column) {
  unsigned largest = 0;
#pragma unroll
  for (unsigned row = 0; row < ROWS; ++row) {
    const unsigned magnitude = __float_as_uint(column.of[row]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
#pragma unroll
  for (unsigned count = WARP / 2; count > 0; count /= 2) {
    const unsigned other = __shfl_xor_sync(ALL_LANES, largest, count);
    largest = other > largest ? other : largest;
  }
  const float number = bits_to_float(largest);
  return is_nan(number) ? nan_for_all() : number;
}

// How symbols are packed: each has `pack`, which gets the whole numbers that the symbols stand for,
// and `unpack`, which gives them back. `LARGEST` is the symbol of zero.
__device__ __forceinline__ unsigned symbol_of(float whole, unsigned largest) {
  return static_cast<unsigned>(static_cast<int>(whole) + static_cast<int>(largest));
}

__device__ __forceinline__ float whole_of(unsigned symbol, unsigned largest) {
  return static_cast<float>(static_cast<int>(symbol) - static_cast<int>(largest));
}

typedef unsigned char Byte;

struct Int8 {
  static const unsigned LARGEST = 127;
  static const unsigned PACKED_BYTES = QUANTIZED;

  static __device__ __forceinline__ void pack(const Column& wholes, Byte* out) {
#pragma unroll
    for (unsigned row = 0; row < ROWS; ++row) {
      out[row * WARP + this_lane()] = static_cast<Byte>(symbol_of(wholes.of[row], LARGEST));
    }
  }

  static __device__ __forceinline__ Column unpack(const Byte* bytes) {
    Column wholes;
#pragma unroll
    for (unsigned row = 0; row < ROWS; ++row) {
      wholes.of[row] = whole_of(bytes[row * WARP + this_lane()], LARGEST);
    }
    return wholes;
  }
};

struct Int4 {
  static const unsigned LARGEST = 7;
  static const unsigned PACKED_BYTES = QUANTIZED / 2;

  static __device__ __forceinline__ void pack(const Column& wholes, Byte* out) {
#pragma unroll
    for (unsigned row = 0; row < ROWS / 2; ++row) {
      const unsigned low = symbol_of(wholes.of[row], LARGEST);
      const unsigned high = symbol_of(wholes.of[row + ROWS / 2], LARGEST);
      out[row * WARP + this_lane()] = static_cast<Byte>(low | high << 4);
    }
  }

  static __device__ __forceinline__ Column unpack(const Byte* bytes) {
    Column wholes;
#pragma unroll
    for (unsigned row = 0; row < ROWS / 2; ++row) {
      const unsigned both = bytes[row * WARP + this_lane()];
      wholes.of[row] = whole_of(both & 0xf, LARGEST);
      wholes.of[row + ROWS / 2] = whole_of(both >> 4, LARGEST);
    }
    return wholes;
  }
};

// Words of 12 bits, two to three bytes: see `write_words` in rust/codec/quantizer/levels.rs. This
// lane has the words `lane`, `lane + 32`, and so on.
__device__ __forceinline__ void write_two(Byte* out, unsigned half, unsigned index, unsigned first,
                                          unsigned second) {
  out[index] = static_cast<Byte>(first);
  out[half + index] = static_cast<Byte>(first >> 8 | second << 4);
  out[2 * half + index] = static_cast<Byte>(second >> 4);
}

__device__ __forceinline__ unsigned read_word(const Byte* bytes, unsigned half, unsigned index) {
  if (index < half) {
    return bytes[index] | (bytes[half + index] & 0xfu) << 8;
  }
  return bytes[index] >> 4 | static_cast<unsigned>(bytes[half + index]) << 4;
}

struct Int3 {
  static const unsigned LARGEST = 3;
  static const unsigned WORD_ROWS = 5;
  static const unsigned HALF = WORD_ROWS * WARP / 2;
  static const unsigned PACKED_BYTES = 3 * HALF;

  static __device__ __forceinline__ void pack(const Column& wholes, Byte* out) {
    unsigned words[WORD_ROWS], others[WORD_ROWS];
#pragma unroll
    for (unsigned row = 0; row < WORD_ROWS; ++row) {
      words[row] = 0;
#pragma unroll
      for (unsigned plane = 0; plane < 4; ++plane) {
        words[row] |= symbol_of(wholes.of[plane * WORD_ROWS + row], LARGEST) << 3 * plane;
      }
      // Half of the words are two and a half rows.
      others[row] = __shfl_xor_sync(ALL_LANES, words[row], WARP / 2);
    }
    const bool is_left = this_lane() < WARP / 2;
#pragma unroll
    for (unsigned row = 0; row < 2; ++row) {
      const unsigned second = is_left ? others[row + 2] : others[row + 3];
      write_two(out, HALF, row * WARP + this_lane(), words[row], second);
    }
    if (is_left) {
      write_two(out, HALF, 2 * WARP + this_lane(), words[2], others[4]);
    }
  }

  static __device__ __forceinline__ Column unpack(const Byte* bytes) {
    Column wholes;
#pragma unroll
    for (unsigned row = 0; row < WORD_ROWS; ++row) {
      const unsigned word = read_word(bytes, HALF, row * WARP + this_lane());
#pragma unroll
      for (unsigned plane = 0; plane < 4; ++plane) {
        wholes.of[plane * WORD_ROWS + row] = whole_of(word >> 3 * plane & 7, LARGEST);
      }
    }
    return wholes;
  }
};

struct Quinary {
  static const unsigned LARGEST = 2;
  static const unsigned WORD_ROWS = 4;
  static const unsigned HALF = WORD_ROWS * WARP / 2;
  static const unsigned PACKED_BYTES = 3 * HALF;

  static __device__ __forceinline__ void pack(const Column& wholes, Byte* out) {
    unsigned words[WORD_ROWS];
#pragma unroll
    for (unsigned row = 0; row < WORD_ROWS; ++row) {
      unsigned number = 0;
#pragma unroll
      for (unsigned plane = 0; plane < 5; ++plane) {
        number = number * 5 + symbol_of(wholes.of[plane * WORD_ROWS + row], LARGEST);
      }
      words[row] = (number * 4096 + 3124) / 3125;
    }
#pragma unroll
    for (unsigned row = 0; row < WORD_ROWS / 2; ++row) {
      write_two(out, HALF, row * WARP + this_lane(), words[row], words[row + WORD_ROWS / 2]);
    }
  }

  static __device__ __forceinline__ Column unpack(const Byte* bytes) {
    Column wholes;
#pragma unroll
    for (unsigned row = 0; row < WORD_ROWS; ++row) {
      unsigned word = read_word(bytes, HALF, row * WARP + this_lane());
#pragma unroll
      for (unsigned plane = 0; plane < 5; ++plane) {
        wholes.of[plane * WORD_ROWS + row] = whole_of(word * 5 >> 12, LARGEST);
        word = word * 5 & 0xfff;
      }
    }
    return wholes;
  }
};

struct Ternary {
  static const unsigned LARGEST = 1;
  static const unsigned BYTE_ROWS = 4;
  static const unsigned PACKED_BYTES = BYTE_ROWS * WARP;

  static __device__ __forceinline__ void pack(const Column& wholes, Byte* out) {
#pragma unroll
    for (unsigned row = 0; row < BYTE_ROWS; ++row) {
      unsigned number = 0;
#pragma unroll
      for (unsigned plane = 0; plane < 5; ++plane) {
        number = number * 3 + symbol_of(wholes.of[plane * BYTE_ROWS + row], LARGEST);
      }
      out[row * WARP + this_lane()] = static_cast<Byte>(number + (number * 13 + 242) / 243);
    }
  }

  static __device__ __forceinline__ Column unpack(const Byte* bytes) {
    Column wholes;
#pragma unroll
    for (unsigned row = 0; row < BYTE_ROWS; ++row) {
      unsigned fraction = bytes[row * WARP + this_lane()];
#pragma unroll
      for (unsigned plane = 0; plane < 5; ++plane) {
        wholes.of[plane * BYTE_ROWS + row] = whole_of(fraction * 3 >> 8, LARGEST);
        fraction = fraction * 3 & 0xff;
      }
    }
    return wholes;
  }
};

// The kinds of levels, as the host numbers them. The kernels look at the kind only where a block is
// packed or unpacked: kernels for each kind took minutes to compile.
const unsigned INT8 = 0;
const unsigned INT4 = 1;
const unsigned INT3 = 2;
const unsigned QUINARY = 3;

struct Levels {
  unsigned kind;

  __device__ __forceinline__ unsigned largest() const {
    return kind == INT8      ? Int8::LARGEST
           : kind == INT4    ? Int4::LARGEST
           : kind == INT3    ? Int3::LARGEST
           : kind == QUINARY ? Quinary::LARGEST
                             : Ternary::LARGEST;
  }

  __device__ __forceinline__ unsigned block_bytes() const {
    return LEVEL_BYTES + (kind == INT8      ? Int8::PACKED_BYTES
                          : kind == INT4    ? Int4::PACKED_BYTES
                          : kind == INT3    ? Int3::PACKED_BYTES
                          : kind == QUINARY ? Quinary::PACKED_BYTES
                                            : Ternary::PACKED_BYTES);
  }

  __device__ __forceinline__ void pack(const Column& wholes, Byte* out) const {
    switch (kind) {
      case INT8:
        return Int8::pack(wholes, out);
      case INT4:
        return Int4::pack(wholes, out);
      case INT3:
        return Int3::pack(wholes, out);
      case QUINARY:
        return Quinary::pack(wholes, out);
      default:
        return Ternary::pack(wholes, out);
    }
  }

  __device__ __forceinline__ Column unpack(const Byte* bytes) const {
    switch (kind) {
      case INT8:
        return Int8::unpack(bytes);
      case INT4:
        return Int4::unpack(bytes);
      case INT3:
        return Int3::unpack(bytes);
      case QUINARY:
        return Quinary::unpack(bytes);
      default:
        return Ternary::unpack(bytes);
    }
  }
};

__device__ __forceinline__ float read_level(const Byte* bytes) {
  return bits_to_float(static_cast<unsigned>(bytes[0]) << 16 | static_cast<unsigned>(bytes[1])
                                                                   << 24);
}

// What whole numbers stand for. Never infinite, so that no infinity is left in a residual.
__device__ __forceinline__ Column times_level(const Column& wholes, float level,
                                              const Column& steps) {
  Column numbers;
#pragma unroll
  for (unsigned row = 0; row < ROWS; ++row) {
    const float most = Type<float>::largest(), number = (wholes.of[row] * level) * steps.of[row];
    numbers.of[row] = larger(smaller(number, most), -most);
  }
  return numbers;
}

__device__ __forceinline__ Column difference(const Column& from, const Column& taken) {
  Column rest;
#pragma unroll
  for (unsigned row = 0; row < ROWS; ++row) {
    rest.of[row] = from.of[row] - taken.of[row];
  }
  return rest;
}

// Replaces numbers by whole ones, at most the largest symbol. Returns the sum of the products of
// both.
__device__ __forceinline__ float round_all(float most, Column& numbers, float inverse_step) {
  const float rounder = 12582912.0f;
  float lane = 0.0f;
#pragma unroll
  for (unsigned row = 0; row < ROWS; ++row) {
    const float number = numbers.of[row];
    const float scaled = larger(smaller(number * inverse_step, most), -most);
    const float whole = (scaled + rounder) - rounder;
    lane += number * whole;
    numbers.of[row] = whole;
  }
  return total_for_all(lane);
}

__device__ __forceinline__ float round_to_maximum(float most, Column& numbers) {
  const float largest = largest_of(numbers);
  if (!is_finite(largest)) {
    return largest;
  }
  const float level = widen(Type<BF16>::narrow(largest / most));
  round_all(most, numbers, level > least_normal() ? 1.0f / level : 0.0f);
  return level;
}

// Brings numbers that are very large or very small to where their squares can be added. Returns
// the unit that they are in then, or what is not finite in the block.
__device__ __forceinline__ float bring_to_ordinary(const Column& due, Column& numbers) {
  const float poison = largest_of(due);
  if (!is_finite(poison)) {
    return poison;
  }
  const float limit = Type<float>::largest();
#pragma unroll
  for (unsigned row = 0; row < ROWS; ++row) {
    numbers.of[row] = larger(smaller(numbers.of[row], limit), -limit);
  }
  const float largest = largest_of(numbers);
  if (largest < least_normal()) {
    numbers = filled_with(0.0f);
    return 1.0f;
  }
  const unsigned exponent = 0x7f800000u;
  const float unit = bits_to_float(__float_as_uint(largest) & exponent);
  const float limited = larger(smaller(unit, 1e37f), 1e-37f);
  const float power = bits_to_float(__float_as_uint(limited) & exponent);
  const float inverse = 1.0f / power;
#pragma unroll
  for (unsigned row = 0; row < ROWS; ++row) {
    // As dividing: both are powers of two.
    numbers.of[row] = numbers.of[row] * inverse;
  }
  return power;
}

__device__ __forceinline__ float round_unbiased(float most, const Column& due, Column& numbers,
                                                unsigned count, float step) {
  float squares = dot(numbers, numbers), unit = 1.0f;
  if (!(squares >= 1e-30f && squares <= 1e30f)) {
    unit = bring_to_ordinary(due, numbers);
    if (!is_finite(unit)) {
      return unit;
    }
    squares = dot(numbers, numbers);
  }
  if (squares == 0.0f) {
    round_all(most, numbers, 0.0f);
    return 0.0f;
  }
  const float all = step * sqrtf(squares / static_cast<float>(count));
  const float projection = round_all(most, numbers, 1.0f / all);
  return smaller(squares / projection * unit, Type<BF16>::largest());
}

// Encodes what is due, and fills in what is sent of it. Returns whether it is finite.
__device__ __forceinline__ bool encode(Levels levels, const Column& due, const Column& steps,
                                       bool follows_sizes, unsigned count, float step, Byte* out,
                                       Column& sent) {
  Column numbers = due;
#pragma unroll
  for (unsigned row = 0; row < ROWS; ++row) {
    numbers.of[row] = follows_sizes ? due.of[row] / steps.of[row] : due.of[row];
  }
  const float most = static_cast<float>(levels.largest());
  const float exact = step == 0.0f ? round_to_maximum(most, numbers)
                                   : round_unbiased(most, due, numbers, count, step);
  const BF16 level = Type<BF16>::narrow(exact);
  if (this_lane() < LEVEL_BYTES) {
    out[this_lane()] = static_cast<Byte>(level.bits >> 8 * this_lane());
  }
  if (!is_finite(exact)) {
    for (unsigned index = this_lane(); index < levels.block_bytes() - LEVEL_BYTES; index += WARP) {
      out[LEVEL_BYTES + index] = 0;
    }
    return false;
  }
  levels.pack(numbers, out + LEVEL_BYTES);
  sent = times_level(numbers, widen(level), steps);
  return true;
}

// The numbers in a block's bytes, whose level is finite.
__device__ __forceinline__ Column decode(Levels levels, const Byte* bytes, float level,
                                         const Column& steps) {
  return times_level(levels.unpack(bytes + LEVEL_BYTES), level, steps);
}

__device__ __forceinline__ Column what_is_due(const void* gradient, unsigned type,
                                              const float* residual, Elements start, unsigned count,
                                              float feedback) {
  Column due = load_gradient(gradient, type, start, count);
  const Column kept = load_column(residual + start, count);
#pragma unroll
  for (unsigned row = 0; row < ROWS; ++row) {
    due.of[row] = due.of[row] + feedback * kept.of[row];
  }
  return due;
}

__device__ __forceinline__ unsigned blocks_in(Elements elements) {
  return static_cast<unsigned>((elements + QUANTIZED - 1) / QUANTIZED);
}

// Which host owns which block of a shard. On the wire, blocks are in the order of their owners, and
// those of an owner in their own order. `Ownership` on the host calculates the same.
struct Ownership {
  unsigned blocks, hosts;

  __device__ __forceinline__ unsigned owner(unsigned block) const { return block / RUN % hosts; }

  // The first place on the wire of a host's blocks.
  __device__ __forceinline__ unsigned first(unsigned host) const {
    const unsigned round = RUN * hosts, whole = blocks / round, rest = blocks % round;
    const unsigned before = RUN * host;
    return before * whole + (before < rest ? before : rest);
  }

  __device__ __forceinline__ unsigned owned(unsigned host) const {
    return first(host + 1) - first(host);
  }

  __device__ __forceinline__ unsigned place(unsigned block) const {
    return first(owner(block)) + block / (RUN * hosts) * RUN + block % RUN;
  }

  // The block at this place among those of a host.
  __device__ __forceinline__ unsigned block_of(unsigned host, unsigned index) const {
    return (index / RUN * hosts + host) * RUN + index % RUN;
  }
};

// Norms are taken of one block in this many: they are for the metrics only.
const unsigned SAMPLED = 61;

__device__ __forceinline__ float norm_of(const Column& column) {
  float lane = 0.0f;
#pragma unroll
  for (unsigned row = 0; row < ROWS; ++row) {
    lane += is_finite(column.of[row]) ? fabsf(column.of[row]) : 0.0f;
  }
  return total_for_all(lane);
}

// Encodes the blocks that other hosts own, each at its place in `parts`; what is left is the new
// residual. A warp for each block of the shard. `step` is 0 to round to the maximum.
extern "C" __global__ void __launch_bounds__(QUANTIZER_THREADS)
    gflow_quantize(const void* __restrict__ gradient, float* __restrict__ residual,
                   const BF16* __restrict__ sizes, Elements elements, unsigned type, unsigned kind,
                   float feedback, float step, unsigned hosts, unsigned host,
                   Byte* __restrict__ parts, float* __restrict__ norms,
                   float* __restrict__ gradient_norms) {
  const Levels levels = {kind};
  const unsigned block = this_warp(), blocks = blocks_in(elements);
  if (block >= blocks) {
    return;
  }
  const Ownership ownership = {blocks, hosts};
  const bool is_sampled = block % SAMPLED == 0, is_own = ownership.owner(block) == host;
  if (is_own) {
    if (is_sampled && this_lane() == 0) {
      norms[block / SAMPLED] = 0.0f;
      gradient_norms[block / SAMPLED] = 0.0f;
    }
    return;
  }
  const Chunk here = chunk_at(block, QUANTIZED, elements);
  Column steps;
  const bool follows_sizes = load_steps(sizes ? sizes + here.start : 0, here.count, steps);
  const Column due = what_is_due(gradient, type, residual, here.start, here.count, feedback);
  Byte* const out = parts + static_cast<Elements>(ownership.place(block)) * levels.block_bytes();
  Column sent;
  if (encode(levels, due, steps, follows_sizes, here.count, step, out, sent)) {
    store_column(residual + here.start, here.count, difference(due, sent));
  }
  if (is_sampled) {
    // Each lane reads what it has written itself.
    const float of_residual = norm_of(load_column(residual + here.start, here.count));
    const float of_gradient = norm_of(load_gradient(gradient, type, here.start, here.count));
    if (this_lane() == 0) {
      norms[block / SAMPLED] = of_residual;
      gradient_norms[block / SAMPLED] = of_gradient;
    }
  }
}

// Adds up the blocks that this host owns, its own part first and unrounded, then those of the other
// hosts in their order; encodes each sum at its place in `sums`, and keeps what is left of it. A
// warp for each of these blocks. `parts` has those of one host after those of another.
extern "C" __global__ void __launch_bounds__(QUANTIZER_THREADS)
    gflow_sum(const void* __restrict__ gradient, float* __restrict__ residual,
              const BF16* __restrict__ sizes, Elements elements, unsigned type, unsigned kind,
              float feedback, float step, unsigned hosts, unsigned host,
              const Byte* __restrict__ parts, Byte* __restrict__ sums) {
  const Levels levels = {kind};
  const Ownership ownership = {blocks_in(elements), hosts};
  const unsigned index = this_warp(), owned = ownership.owned(host);
  if (index >= owned) {
    return;
  }
  const Chunk here = chunk_at(ownership.block_of(host, index), QUANTIZED, elements);
  Column steps;
  const bool follows_sizes = load_steps(sizes ? sizes + here.start : 0, here.count, steps);
  Column sum = what_is_due(gradient, type, residual, here.start, here.count, feedback);
  for (unsigned other = 0; other + 1 < hosts; ++other) {
    const Elements place = static_cast<Elements>(other) * owned + index;
    const Byte* const part = parts + place * levels.block_bytes();
    const float level = read_level(part);
    const Column numbers =
        is_finite(level) ? decode(levels, part, level, steps) : filled_with(level);
#pragma unroll
    for (unsigned row = 0; row < ROWS; ++row) {
      // Elements beyond the end of the shard are zeros, whatever was sent for them.
      const bool is_there = row * WARP + this_lane() < here.count;
      sum.of[row] += is_there ? numbers.of[row] : 0.0f;
    }
  }
  const Elements place = static_cast<Elements>(ownership.first(host)) + index;
  Byte* const out = sums + place * levels.block_bytes();
  Column sent;
  if (encode(levels, sum, steps, follows_sizes, here.count, step, out, sent)) {
    // What the gradient's own type cannot express is left, too.
    const Column left = difference(sum, rounded_to_type(type, sent));
    store_column(residual + here.start, here.count, left);
  }
}

// Decodes the sums into the gradient. A warp for each block of the shard.
extern "C" __global__ void __launch_bounds__(QUANTIZER_THREADS)
    gflow_deliver(const Byte* __restrict__ sums, const Byte* __restrict__ parts,
                  float* __restrict__ residual, const BF16* __restrict__ sizes, Elements elements,
                  unsigned type, unsigned kind, unsigned hosts, unsigned host,
                  void* __restrict__ gradient) {
  const Levels levels = {kind};
  const unsigned block = this_warp(), blocks = blocks_in(elements);
  if (block >= blocks) {
    return;
  }
  const Ownership ownership = {blocks, hosts};
  const Elements at = static_cast<Elements>(ownership.place(block)) * levels.block_bytes();
  const Chunk here = chunk_at(block, QUANTIZED, elements);
  Column steps;
  load_steps(sizes ? sizes + here.start : 0, here.count, steps);
  const float level = read_level(sums + at);
  if (is_finite(level)) {
    const Column numbers = decode(levels, sums + at, level, steps);
    store_gradient(gradient, type, here.start, here.count, rounded_to_type(type, numbers));
    return;
  }
  const float own_level = ownership.owner(block) == host ? level : read_level(parts + at);
  if (is_finite(own_level)) {
    // Another host has poisoned the block: what was sent of it was not delivered.
    const Column sent = decode(levels, parts + at, own_level, steps);
    const Column own = load_gradient(gradient, type, here.start, here.count);
    Column kept = load_column(residual + here.start, here.count);
#pragma unroll
    for (unsigned row = 0; row < ROWS; ++row) {
      kept.of[row] = (kept.of[row] + sent.of[row]) - own.of[row];
    }
    store_column(residual + here.start, here.count, kept);
  }
  const Column filling = filled_with(is_nan(level) ? nan_for_all() : level);
  store_gradient(gradient, type, here.start, here.count, filling);
}

const float LARGEST_SIZE = 1e17f;
const float KEPT_AT_FIRST = 0.5f;

// Updates the sizes of every block whose turn it is, from what was delivered: a warp for each of
// them, from block `first` on. Blocks with infinity or NaN keep theirs.
extern "C" __global__ void __launch_bounds__(QUANTIZER_THREADS)
    gflow_follow_sizes(BF16* __restrict__ sizes, const void* __restrict__ delivered,
                       Elements elements, unsigned type, unsigned first, float kept_later) {
  const unsigned block = first + TURNS * this_warp();
  if (block >= blocks_in(elements)) {
    return;
  }
  const Chunk here = chunk_at(block, QUANTIZED, elements);
  Column numbers = load_gradient(delivered, type, here.start, here.count);
  bool finite = true;
#pragma unroll
  for (unsigned row = 0; row < ROWS; ++row) {
    finite = finite & is_finite(numbers.of[row]);
  }
  if (__ballot_sync(ALL_LANES, !finite)) {
    return;
  }
  Column all = load_column(sizes + here.start, here.count);
  bool has_sizes = false;
#pragma unroll
  for (unsigned row = 0; row < ROWS; ++row) {
    numbers.of[row] = larger(smaller(numbers.of[row], LARGEST_SIZE), -LARGEST_SIZE);
    has_sizes = has_sizes | (__float_as_uint(all.of[row]) != 0);
  }
  const bool is_new = !__ballot_sync(ALL_LANES, has_sizes);
  const float mean_square = dot(numbers, numbers) / static_cast<float>(here.count);
  const float first_square = is_new ? mean_square : 0.0f;
  const float kept = is_new ? KEPT_AT_FIRST : kept_later;
#pragma unroll
  for (unsigned row = 0; row < ROWS; ++row) {
    const float number = numbers.of[row];
    const float before = all.of[row] * all.of[row] + first_square;
    all.of[row] = sqrtf(kept * before + (1.0f - kept) * (number * number));
  }
  store_column(sizes + here.start, here.count, all);
}

// The scale of the gradients has changed.
extern "C" __global__ void __launch_bounds__(STREAM_THREADS)
    gflow_rescale_sizes(BF16* __restrict__ sizes, Elements elements, float factor) {
  for_each_quad(elements, [&](Elements first, unsigned count) {
    Quad numbers = load(sizes + first, is_aligned(sizes), 0, count);
#pragma unroll
    for (unsigned i = 0; i < QUAD; ++i) {
      numbers.of[i] = smaller(numbers.of[i] * factor, LARGEST_SIZE);
    }
    store(sizes + first, is_aligned(sizes), 0, count, numbers);
  });
}
