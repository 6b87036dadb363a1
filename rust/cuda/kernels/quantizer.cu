// The CUDA kernels of the quantiser: rust/codec/quantizer for gradients in GPU memory, the same to
// the last bit. That folder says what each stage does and why; here is only what a GPU makes
// different.
//
// It is compiled behind kernels.cu, as one program with it, and uses its numbers and its sums over
// a warp. What kernels.cu says about fused products and subnormals holds here too.
//
// A warp has a block of 640 elements: lane l has the elements l, l + 32 and so on, 20 of them, in
// registers. The CPU adds up a block in 32 lanes in just that way, so its order of sums needs no
// shared memory here, and no barrier. The planes of a block's symbols begin at multiples of 32 too,
// so the symbols that share a byte are all in one lane.

// --- blocks --------------------------------------------------------------------------------------

typedef unsigned char Byte;

// Elements in a block of the quantiser, and how many of them a lane has.
const unsigned BLOCK = 640;
const unsigned ROWS = BLOCK / WARP;
const unsigned QUANTIZER_THREADS = 128;
const unsigned BLOCKS_AT_ONCE = QUANTIZER_THREADS / WARP;
// Bytes of a block's level, which come before its symbols.
const unsigned LEVEL_BYTES = 2;

// The elements of a block that this lane has, or something for each of them.
struct Row {
  float of[ROWS];
};

__device__ __forceinline__ unsigned lane_of_thread() { return threadIdx.x % WARP; }

// The index of one of this lane's elements in its block.
__device__ __forceinline__ unsigned element_at(unsigned row) {
  return row * WARP + lane_of_thread();
}

// Which of the blocks that the grid covers is this warp's.
__device__ __forceinline__ Elements block_of_warp() {
  return static_cast<Elements>(blockIdx.x) * BLOCKS_AT_ONCE + threadIdx.x / WARP;
}

__device__ __forceinline__ Elements blocks_of(Elements elements) {
  return (elements + BLOCK - 1) / BLOCK;
}

// As rust/codec/quantizer/ownership.rs. In memory the blocks of a shard come by owner.
const unsigned RUN = 16;

struct Ownership {
  unsigned hosts, host;
  Elements blocks;

  __device__ __forceinline__ unsigned owner(Elements block) const {
    return static_cast<unsigned>(block / RUN % hosts);
  }

  // The place of the first block of an owner. Whole runs, so that it is aligned for NCCL.
  __device__ __forceinline__ Elements first(unsigned owner) const {
    const Elements runs = (blocks + RUN - 1) / RUN, rest = runs % hosts;
    return (runs / hosts * owner + (owner < rest ? owner : rest)) * RUN;
  }

  // The place of a block among all, and the block that has a place among this host's.
  __device__ __forceinline__ Elements slot(Elements block) const {
    return first(owner(block)) + block / RUN / hosts * RUN + block % RUN;
  }
  __device__ __forceinline__ Elements own(Elements index) const {
    return (index / RUN * hosts + host) * RUN + index % RUN;
  }
};

// --- numbers -------------------------------------------------------------------------------------

// A NaN stays a NaN.
__device__ __forceinline__ float clamp(float number, float least, float most) {
  return number < least ? least : number > most ? most : number;
}

__device__ __forceinline__ float to_finite(float number) {
  const float largest = Type<float>::largest();
  return clamp(number, -largest, largest);
}

// A number as it is after it was stored as an element of this type.
template <class G>
__device__ __forceinline__ float rounded_to(float number) {
  return widen(Type<G>::narrow(number));
}

// The sum over the lanes of a warp, in all of them.
__device__ __forceinline__ float total_for_all(float number) {
  return __shfl_sync(ALL_LANES, total(number), 0);
}

// The sum of products over a block.
__device__ __forceinline__ float dot(const Row& left, const Row& right) {
  float chain = 0.0f;
#pragma unroll
  for (unsigned row = 0; row < ROWS; ++row) {
    chain += left.of[row] * right.of[row];
  }
  return total_for_all(chain);
}

// The largest magnitude of a block. A NaN counts as larger than infinity, and becomes the usual
// one.
__device__ __forceinline__ float largest_of(const Row& numbers) {
  unsigned most = 0;
#pragma unroll
  for (unsigned row = 0; row < ROWS; ++row) {
    const unsigned magnitude = __float_as_uint(numbers.of[row]) & 0x7fffffffu;
    most = magnitude > most ? magnitude : most;
  }
#pragma unroll
  for (unsigned count = WARP / 2; count > 0; count /= 2) {
    const unsigned other = __shfl_down_sync(ALL_LANES, most, count);
    most = other > most ? other : most;
  }
  const float largest = bits_to_float(__shfl_sync(ALL_LANES, most, 0));
  return is_nan(largest) ? nan_for_all() : largest;
}

// --- levels --------------------------------------------------------------------------------------

// The symbols of the elements that this lane has.
struct Symbols {
  unsigned of[ROWS];
};

// The nearest multiple of the level, and its symbol.
struct Nearest {
  float multiple;
  unsigned symbol;
};

// Adding this to a number below 2^22 rounds it to a whole number, ties to even, and leaves that in
// the lowest bits.
__device__ __forceinline__ float rounder() { return 12582912.0f; }

// Levels whose symbols stand for whole numbers.
template <unsigned LARGEST_SYMBOL>
struct Even {
  static const unsigned LARGEST = LARGEST_SYMBOL;

  static __device__ __forceinline__ float outermost() { return static_cast<float>(LARGEST); }

  static __device__ __forceinline__ Nearest nearest(float number) {
    const float limit = static_cast<float>(LARGEST);
    const float shifted = clamp(number, -limit, limit) + rounder();
    return Nearest{shifted - rounder(), (__float_as_uint(shifted) + LARGEST) & 0xffu};
  }

  static __device__ __forceinline__ float multiple(unsigned symbol) {
    return static_cast<float>(static_cast<int>(symbol) - static_cast<int>(LARGEST));
  }
};

// Levels whose symbols stand for multiples that grow faster: M::at says which, from the inside out.
template <class M>
struct Growing {
  static const unsigned LARGEST = M::COUNT;

  static __device__ __forceinline__ float outermost() { return M::at(LARGEST - 1); }

  static __device__ __forceinline__ Nearest nearest(float number) {
    float multiple = 0.0f, inner = 0.0f;
    int offset = 0;
#pragma unroll
    for (unsigned index = 0; index < LARGEST; ++index) {
      const float outer = M::at(index);
      const bool is_beyond = fabsf(number) > (inner + outer) * 0.5f;
      multiple = is_beyond ? outer : multiple;
      offset += is_beyond;
      inner = outer;
    }
    const bool is_negative = number < 0.0f;
    // Not negated, so that zero stays positive.
    multiple = is_negative ? 0.0f - multiple : multiple;
    offset = is_negative ? -offset : offset;
    return Nearest{multiple, static_cast<unsigned>(offset + static_cast<int>(LARGEST))};
  }

  static __device__ __forceinline__ float multiple(unsigned symbol) {
    const float whole = static_cast<float>(static_cast<int>(symbol) - static_cast<int>(LARGEST));
    float multiple = whole;
#pragma unroll
    for (unsigned index = 0; index < LARGEST; ++index) {
      const float outer = M::at(index);
      const bool is_beyond = fabsf(whole) > static_cast<float>(index) + 0.5f;
      multiple = is_beyond ? (whole < 0.0f ? -outer : outer) : multiple;
    }
    return multiple;
  }
};

struct SevenMultiples {
  static const unsigned COUNT = 3;
  static __device__ __forceinline__ float at(unsigned index) {
    return index == 0 ? 1.0f : index == 1 ? 2.25f : 4.5f;
  }
};

struct FiveMultiples {
  static const unsigned COUNT = 2;
  static __device__ __forceinline__ float at(unsigned index) { return index == 0 ? 1.0f : 2.5f; }
};

// Writes two words of 12 bits, the second one `half` words behind the first, as three bytes.
__device__ __forceinline__ void write_words(unsigned first, unsigned second, unsigned half,
                                            unsigned at, Byte* out) {
  out[at] = static_cast<Byte>(first);
  out[half + at] = static_cast<Byte>(first >> 8 | second << 4);
  out[2 * half + at] = static_cast<Byte>(second >> 4);
}

__device__ __forceinline__ unsigned read_word(const Byte* bytes, unsigned half, unsigned at) {
  const unsigned low = bytes[at], high = bytes[half + at];
  return at < half ? low | (high & 0xfu) << 8 : low >> 4 | high << 4;
}

struct Int8 : Even<127> {
  static const unsigned PACKED_BYTES = BLOCK;

  static __device__ __forceinline__ void pack(const Symbols& symbols, Byte* out) {
#pragma unroll
    for (unsigned row = 0; row < ROWS; ++row) {
      out[element_at(row)] = static_cast<Byte>(symbols.of[row]);
    }
  }

  static __device__ __forceinline__ void unpack(const Byte* bytes, Symbols& symbols) {
#pragma unroll
    for (unsigned row = 0; row < ROWS; ++row) {
      symbols.of[row] = bytes[element_at(row)];
    }
  }
};

struct Int4 : Even<7> {
  static const unsigned PACKED_BYTES = BLOCK / 2;
  static const unsigned PLANE = ROWS / 2;

  static __device__ __forceinline__ void pack(const Symbols& symbols, Byte* out) {
#pragma unroll
    for (unsigned row = 0; row < PLANE; ++row) {
      out[element_at(row)] = static_cast<Byte>(symbols.of[row] | symbols.of[row + PLANE] << 4);
    }
  }

  static __device__ __forceinline__ void unpack(const Byte* bytes, Symbols& symbols) {
#pragma unroll
    for (unsigned row = 0; row < PLANE; ++row) {
      const unsigned byte = bytes[element_at(row)];
      symbols.of[row] = byte & 0xfu;
      symbols.of[row + PLANE] = byte >> 4;
    }
  }
};

struct Int3 : Growing<SevenMultiples> {
  static const unsigned HALF = BLOCK / 8;
  static const unsigned PACKED_BYTES = 3 * HALF;
  static const unsigned PLANE = ROWS / 4;

  static __device__ __forceinline__ void pack(const Symbols& symbols, Byte* out) {
    unsigned words[PLANE];
#pragma unroll
    for (unsigned row = 0; row < PLANE; ++row) {
      words[row] = symbols.of[row] | symbols.of[row + PLANE] << 3 |
                   symbols.of[row + 2 * PLANE] << 6 | symbols.of[row + 3 * PLANE] << 9;
    }
    // The word `HALF` = 2 * 32 + 16 words on is 16 lanes away: two rows on for the lower lanes,
    // three for the upper ones.
    const unsigned lane = lane_of_thread();
#pragma unroll
    for (unsigned row = 0; row < 3; ++row) {
      const unsigned for_upper = row + 3 < PLANE ? words[row + 3] : 0;
      const unsigned offered = lane < WARP / 2 ? for_upper : words[row + 2];
      const unsigned second = __shfl_sync(ALL_LANES, offered, static_cast<int>(lane ^ (WARP / 2)));
      if (element_at(row) < HALF) {
        write_words(words[row], second, HALF, element_at(row), out);
      }
    }
  }

  static __device__ __forceinline__ void unpack(const Byte* bytes, Symbols& symbols) {
#pragma unroll
    for (unsigned row = 0; row < PLANE; ++row) {
      const unsigned word = read_word(bytes, HALF, element_at(row));
#pragma unroll
      for (unsigned plane = 0; plane < 4; ++plane) {
        symbols.of[row + plane * PLANE] = word >> (3 * plane) & 7u;
      }
    }
  }
};

// Five symbols as the digits of one number, the first one on top.
template <unsigned BASE>
__device__ __forceinline__ unsigned number_of_digits(const Symbols& symbols, unsigned row) {
  unsigned number = 0;
#pragma unroll
  for (unsigned plane = 0; plane < 5; ++plane) {
    number = number * BASE + symbols.of[row + plane * (ROWS / 5)];
  }
  return number;
}

// The digits of a fraction of 2^BITS.
template <unsigned BASE, unsigned BITS>
__device__ __forceinline__ void digits_of_fraction(unsigned fraction, unsigned row,
                                                   Symbols& symbols) {
#pragma unroll
  for (unsigned plane = 0; plane < 5; ++plane) {
    const unsigned product = fraction * BASE;
    symbols.of[row + plane * (ROWS / 5)] = product >> BITS;
    fraction = product & ((1u << BITS) - 1);
  }
}

struct Quinary : Growing<FiveMultiples> {
  static const unsigned HALF = BLOCK / 10;
  static const unsigned PACKED_BYTES = 3 * HALF;

  // The number of five digits, stretched to a fraction of 4096.
  static __device__ __forceinline__ unsigned word(const Symbols& symbols, unsigned row) {
    return (number_of_digits<5>(symbols, row) * 4096 + 3124) / 3125;
  }

  static __device__ __forceinline__ void pack(const Symbols& symbols, Byte* out) {
#pragma unroll
    for (unsigned row = 0; row < 2; ++row) {
      write_words(word(symbols, row), word(symbols, row + 2), HALF, element_at(row), out);
    }
  }

  static __device__ __forceinline__ void unpack(const Byte* bytes, Symbols& symbols) {
#pragma unroll
    for (unsigned row = 0; row < 4; ++row) {
      digits_of_fraction<5, 12>(read_word(bytes, HALF, element_at(row)), row, symbols);
    }
  }
};

struct Ternary : Even<1> {
  static const unsigned PACKED_BYTES = BLOCK / 5;

  static __device__ __forceinline__ void pack(const Symbols& symbols, Byte* out) {
#pragma unroll
    for (unsigned row = 0; row < 4; ++row) {
      const unsigned number = number_of_digits<3>(symbols, row);
      // Stretched to a fraction of 256.
      out[element_at(row)] = static_cast<Byte>(number + (number * 13 + 242) / 243);
    }
  }

  static __device__ __forceinline__ void unpack(const Byte* bytes, Symbols& symbols) {
#pragma unroll
    for (unsigned row = 0; row < 4; ++row) {
      digits_of_fraction<3, 8>(bytes[element_at(row)], row, symbols);
    }
  }
};

// Calls `work` with the packing of these levels: the order of rust/codec/quantizer/levels.rs.
template <class Work>
__device__ __forceinline__ void with_levels(unsigned levels, const Work& work) {
  switch (levels) {
    case 0:
      return work(Int8());
    case 1:
      return work(Int4());
    case 2:
      return work(Int3());
    case 3:
      return work(Quinary());
    default:
      return work(Ternary());
  }
}

__device__ __forceinline__ unsigned largest_symbol(unsigned levels) {
  unsigned largest = 0;
  with_levels(levels, [&](auto packing) { largest = decltype(packing)::LARGEST; });
  return largest;
}

// The bytes of a block, with its level.
__device__ __forceinline__ unsigned block_bytes(unsigned levels) {
  unsigned bytes = 0;
  with_levels(levels, [&](auto packing) { bytes = decltype(packing)::PACKED_BYTES; });
  return LEVEL_BYTES + bytes;
}

// --- sizes ---------------------------------------------------------------------------------------

// The least step of an element, as a fraction of the mean size of its block.
__device__ __forceinline__ float step_floor() { return 0.02f; }
// No size is larger, so that the squares of a block can be added up.
__device__ __forceinline__ float largest_size() { return 1e17f; }
__device__ __forceinline__ float smallest_normal() { return bits_to_float(0x00800000u); }

__device__ __forceinline__ float size_at(const unsigned short* sizes, unsigned index) {
  return widen(BF16{sizes[index]});
}

// What the level is multiplied by, for each element.
struct Steps {
  Row of;
  bool differ;
};

__device__ __forceinline__ void read_steps(const unsigned short* sizes, unsigned count,
                                           Steps& steps) {
  float chain = 0.0f;
#pragma unroll
  for (unsigned row = 0; row < ROWS; ++row) {
    const unsigned index = element_at(row);
    const float size = sizes && index < count ? size_at(sizes, index) : 0.0f;
    steps.of.of[row] = size;
    chain += size;
  }
  const float least = total_for_all(chain) / static_cast<float>(count) * step_floor();
  steps.differ = sizes && !(least < smallest_normal());
#pragma unroll
  for (unsigned row = 0; row < ROWS; ++row) {
    steps.of.of[row] = steps.differ ? steps.of.of[row] + least : 1.0f;
  }
}

// --- encoding and decoding -----------------------------------------------------------------------

// What a symbol stands for. Never infinite, so that no infinity is left in a residual.
__device__ __forceinline__ float value(float multiple, float level, float step) {
  return to_finite(multiple * level * step);
}

__device__ __forceinline__ float read_level(const Byte* bytes) {
  return bits_to_float((static_cast<unsigned>(bytes[1]) << 8 | bytes[0]) << 16);
}

// What tells how well the multiples of a block fit its numbers.
struct Fit {
  // The sum of the squares of the numbers over the step, each as far as it is within reach.
  float squares;
  // The sum of their products with the multiples.
  float products;
};

// Replaces the numbers by the multiples of a step that are nearest, and packs their symbols.
template <class P>
__device__ __forceinline__ Fit round_and_pack(Row& numbers, float inverse_step, float margin,
                                              Byte* packed) {
  Symbols symbols;
  const float reach = P::outermost() + margin;
  float squares = 0.0f, products = 0.0f;
#pragma unroll
  for (unsigned row = 0; row < ROWS; ++row) {
    const float number = numbers.of[row] * inverse_step;
    const Nearest nearest = P::nearest(number);
    const float within = clamp(number, -reach, reach);
    squares += within * within;
    products += within * nearest.multiple;
    numbers.of[row] = nearest.multiple;
    symbols.of[row] = nearest.symbol;
  }
  P::pack(symbols, packed);
  return Fit{total_for_all(squares), total_for_all(products)};
}

// Multiplies numbers that are very large or very small, so that their squares can be added. Returns
// the unit that they are in then. All that is due of the block is finite.
__device__ __forceinline__ float bring_to_ordinary(Row& numbers) {
#pragma unroll
  for (unsigned row = 0; row < ROWS; ++row) {
    numbers.of[row] = to_finite(numbers.of[row]);
  }
  const float largest = largest_of(numbers);
  const bool is_nothing = largest < smallest_normal();
  // A power of two, so that no number is rounded: its inverse is exact too.
  const float power = bits_to_float(__float_as_uint(largest) & 0x7f800000u);
  const float within = clamp(power, 1e-37f, 1e37f);
  const float unit = bits_to_float(__float_as_uint(within) & 0x7f800000u);
  const float inverse = 1.0f / unit;
#pragma unroll
  for (unsigned row = 0; row < ROWS; ++row) {
    numbers.of[row] = is_nothing ? 0.0f : numbers.of[row] * inverse;
  }
  return is_nothing ? 1.0f : unit;
}

// How numbers become symbols and a level. `numbers` is what is due over the steps.
struct Rounding {
  // In units of the root mean square of a block; 0 stands for Rounding::ToMaximum.
  float step;
  // In steps.
  float margin;
  unsigned levels;

  // What is known of a block before its numbers are rounded.
  struct Measured {
    // What the numbers are multiplied by to be multiples.
    float inverse;
    // Of Rounding::ToMaximum: the level. Of a block that is not finite: that.
    float level;
    // Of the others: the step in the unit of the numbers, 0 if they are all zero; and the unit.
    float width, unit;
  };

  // Measures a block. May change the unit of its numbers.
  __device__ __forceinline__ Measured measure(const Row& due, Row& numbers, unsigned count) const {
    Measured measured = {0.0f, 0.0f, 0.0f, 1.0f};
    if (step == 0.0f) {
      const float largest = largest_of(numbers);
      const float symbols = static_cast<float>(largest_symbol(levels));
      measured.level = is_finite(largest) ? rounded_to<BF16>(largest / symbols) : largest;
      // A level that is too small to be inverted stands for zeros.
      measured.inverse = measured.level > smallest_normal() ? 1.0f / measured.level : 0.0f;
      return measured;
    }
    float squares = dot(numbers, numbers);
    if (!(squares >= 1e-30f && squares <= 1e30f)) {
      const float poison = largest_of(due);
      if (!is_finite(poison)) {
        measured.level = poison;
        return measured;
      }
      measured.unit = bring_to_ordinary(numbers);
      squares = dot(numbers, numbers);
    }
    if (squares != 0.0f) {
      measured.width = step * sqrtf(squares / static_cast<float>(count));
      measured.inverse = 1.0f / measured.width;
    }
    return measured;
  }

  // The level of a block, whose multiples fit its numbers like this.
  __device__ __forceinline__ float level(const Measured& measured, const Fit& fit) const {
    if (step == 0.0f) {
      return measured.level;
    }
    if (measured.width == 0.0f) {
      return 0.0f;
    }
    const float level = fit.squares / fit.products * measured.width * measured.unit;
    return smaller(level, Type<BF16>::largest());
  }
};

__device__ __forceinline__ void write_level(float level, Byte* out) {
  const unsigned bits = Type<BF16>::narrow(level).bits;
  if (lane_of_thread() < LEVEL_BYTES) {
    out[lane_of_thread()] = static_cast<Byte>(bits >> (8 * lane_of_thread()));
  }
}

// Encodes what is due of a block. Returns whether that is numbers; `sent` is then what the bytes
// stand for.
__device__ __forceinline__ bool encode(const Row& due, const Steps& steps, unsigned count,
                                       Rounding rounding, Byte* out, Row& sent) {
  Row numbers = due;
  if (rounding.step != 0.0f && steps.differ) {
#pragma unroll
    for (unsigned row = 0; row < ROWS; ++row) {
      numbers.of[row] = due.of[row] / steps.of.of[row];
    }
  }
  const Rounding::Measured measured = rounding.measure(due, numbers, count);
  if (!is_finite(measured.level)) {
    write_level(measured.level, out);
    for (unsigned at = LEVEL_BYTES + lane_of_thread(); at < block_bytes(rounding.levels);
         at += WARP) {
      out[at] = 0;
    }
    return false;
  }
  Fit fit = {0.0f, 0.0f};
  with_levels(rounding.levels, [&](auto packing) {
    fit = round_and_pack<decltype(packing)>(numbers, measured.inverse, rounding.margin,
                                            out + LEVEL_BYTES);
  });
  const float level = rounding.level(measured, fit);
  write_level(level, out);
#pragma unroll
  for (unsigned row = 0; row < ROWS; ++row) {
    sent.of[row] = value(numbers.of[row], rounded_to<BF16>(level), steps.of.of[row]);
  }
  return true;
}

// Decodes the bytes of a block, whose level is finite.
__device__ __forceinline__ void decode(const Byte* bytes, float level, const Steps& steps,
                                       unsigned levels, Row& numbers) {
  with_levels(levels, [&](auto packing) {
    Symbols symbols;
    decltype(packing)::unpack(bytes + LEVEL_BYTES, symbols);
#pragma unroll
    for (unsigned row = 0; row < ROWS; ++row) {
      numbers.of[row] = decltype(packing)::multiple(symbols.of[row]);
    }
  });
#pragma unroll
  for (unsigned row = 0; row < ROWS; ++row) {
    numbers.of[row] = value(numbers.of[row], level, steps.of.of[row]);
  }
}

// --- the two legs --------------------------------------------------------------------------------

// A block of a shard: its gradient, what is kept of it, and its sizes (or null).
template <class G>
struct Block {
  G* gradient;
  float* residual;
  const unsigned short* sizes;
  unsigned count;

  __device__ __forceinline__ bool has(unsigned row) const { return element_at(row) < count; }

  // The gradient and a part of the residual, with zeros behind the block's end.
  __device__ __forceinline__ void read_due(float feedback, Row& due) const {
#pragma unroll
    for (unsigned row = 0; row < ROWS; ++row) {
      const unsigned index = element_at(row);
      due.of[row] = has(row) ? widen(gradient[index]) + feedback * residual[index] : 0.0f;
    }
  }
};

template <class G>
__device__ __forceinline__ Block<G> block_at(Elements block, G* gradient, float* residual,
                                             const unsigned short* sizes, Elements elements) {
  const Elements start = block * BLOCK, left = elements - start;
  return Block<G>{gradient + start, residual + start, sizes ? sizes + start : 0,
                  left < BLOCK ? static_cast<unsigned>(left) : BLOCK};
}

// Norms are taken of one block in this many: as in rust/gradients/two_legs/stages.rs.
const unsigned SAMPLED = 61;

// The sum of the magnitudes of the elements that are finite.
template <class T>
__device__ __forceinline__ float l1_norm(const T* numbers, unsigned count) {
  float chain = 0.0f;
#pragma unroll
  for (unsigned row = 0; row < ROWS; ++row) {
    const unsigned index = element_at(row);
    const float number = index < count ? widen(numbers[index]) : 0.0f;
    chain += is_finite(number) ? fabsf(number) : 0.0f;
  }
  return total(chain);
}

// Encodes the blocks that other hosts own, each for its owner, and leaves what is left in the
// residual. If a block is not finite, its residual stays as it was.
template <class G>
__device__ __forceinline__ void send(G* gradient, float* residual, const unsigned short* sizes,
                                     Elements elements, Rounding rounding, float feedback,
                                     Ownership ownership, Byte* parts, float* norms) {
  const Elements index = block_of_warp();
  if (index >= ownership.blocks) {
    return;
  }
  const bool is_own = ownership.owner(index) == ownership.host;
  const Block<G> block = block_at(index, gradient, residual, sizes, elements);
  if (!is_own) {
    Steps steps;
    Row due, sent;
    read_steps(block.sizes, block.count, steps);
    block.read_due(feedback, due);
    Byte* const out = parts + ownership.slot(index) * block_bytes(rounding.levels);
    if (encode(due, steps, block.count, rounding, out, sent)) {
#pragma unroll
      for (unsigned row = 0; row < ROWS; ++row) {
        if (block.has(row)) {
          block.residual[element_at(row)] = due.of[row] - sent.of[row];
        }
      }
    }
  }
  if (index % SAMPLED == 0) {
    const float of_gradient = is_own ? 0.0f : l1_norm(block.gradient, block.count);
    const float of_residual = is_own ? 0.0f : l1_norm(block.residual, block.count);
    if (lane_of_thread() == 0) {
      norms[2 * (index / SAMPLED)] = of_gradient;
      norms[2 * (index / SAMPLED) + 1] = of_residual;
    }
  }
}

// Adds up the blocks that this host owns, in the order of hosts: its own gradient, which is not
// rounded, and what the others sent. Encodes the sums for all hosts. The residual becomes what is
// left of a sum; if that is not finite, it stays as it was.
template <class G>
__device__ __forceinline__ void sum(G* gradient, float* residual, const unsigned short* sizes,
                                    Elements elements, Rounding rounding, float feedback,
                                    Ownership ownership, const Byte* received, Byte* sums) {
  const Elements bytes = block_bytes(rounding.levels);
  const Elements first = ownership.first(ownership.host);
  const Elements room = ownership.first(ownership.host + 1) - first;
  const Elements slot = block_of_warp();
  if (ownership.own(slot) >= ownership.blocks) {
    return;
  }
  const Block<G> block = block_at(ownership.own(slot), gradient, residual, sizes, elements);
  Steps steps;
  Row due, sent;
  read_steps(block.sizes, block.count, steps);
  block.read_due(feedback, due);
  for (unsigned other = 0; other < ownership.hosts - 1; ++other) {
    const Byte* const part = received + (other * room + slot) * bytes;
    const float level = read_level(part);
    if (is_finite(level)) {
      decode(part, level, steps, rounding.levels, sent);
    }
#pragma unroll
    for (unsigned row = 0; row < ROWS; ++row) {
      const float more = is_finite(level) ? sent.of[row] : level;
      due.of[row] = block.has(row) ? due.of[row] + more : 0.0f;
    }
  }
  if (!encode(due, steps, block.count, rounding, sums + (first + slot) * bytes, sent)) {
    return;
  }
#pragma unroll
  for (unsigned row = 0; row < ROWS; ++row) {
    // What the gradient's own type cannot express is left, too. What is too large for f16 is
    // delivered as infinity, and nothing of it is left.
    const float delivered = rounded_to<G>(sent.of[row]);
    const bool keeps = Type<G>::is_exact || is_finite(delivered);
    if (block.has(row)) {
      block.residual[element_at(row)] = keeps ? due.of[row] - delivered : 0.0f;
    }
  }
}

// Decodes the sums of all blocks into the gradient. For a block that another host owns and has not
// got finite, the residual takes back what was sent and not delivered.
template <class G>
__device__ __forceinline__ void deliver(G* gradient, float* residual, const unsigned short* sizes,
                                        Elements elements, unsigned levels, Ownership ownership,
                                        const Byte* parts, const Byte* sums) {
  const Elements index = block_of_warp();
  if (index >= ownership.blocks) {
    return;
  }
  const Block<G> block = block_at(index, gradient, residual, sizes, elements);
  const Elements start = ownership.slot(index) * block_bytes(levels);
  const float level = read_level(sums + start);
  const bool is_poisoned = !is_finite(level);
  const bool is_own = ownership.owner(index) == ownership.host;
  Steps steps;
  Row numbers;
  read_steps(block.sizes, block.count, steps);
  if (is_poisoned && !is_own) {
    const float own_level = read_level(parts + start);
    // If this host's own part was poisoned, its residual has not changed.
    if (is_finite(own_level)) {
      decode(parts + start, own_level, steps, levels, numbers);
#pragma unroll
      for (unsigned row = 0; row < ROWS; ++row) {
        const unsigned at = element_at(row);
        if (block.has(row)) {
          block.residual[at] = (block.residual[at] + numbers.of[row]) - widen(block.gradient[at]);
        }
      }
    }
  }
  if (!is_poisoned) {
    decode(sums + start, level, steps, levels, numbers);
  }
#pragma unroll
  for (unsigned row = 0; row < ROWS; ++row) {
    if (block.has(row)) {
      block.gradient[element_at(row)] = Type<G>::narrow(is_poisoned ? level : numbers.of[row]);
    }
  }
}

#define GFLOW_SEND(NAME, G)                                                                        \
  extern "C" __global__ void __launch_bounds__(QUANTIZER_THREADS)                                  \
      gflow_send_##NAME(G* __restrict__ gradient, float* __restrict__ residual,                    \
                        const unsigned short* __restrict__ sizes, Elements elements,               \
                        unsigned levels, float step, float margin, float feedback, unsigned hosts, \
                        unsigned host, Byte* __restrict__ parts, float* __restrict__ norms) {      \
    const Ownership ownership = {hosts, host, blocks_of(elements)};                                \
    send<G>(gradient, residual, sizes, elements, Rounding{step, margin, levels}, feedback,         \
            ownership, parts, norms);                                                              \
  }

GFLOW_SEND(f32, float)
GFLOW_SEND(f16, F16)
GFLOW_SEND(bf16, BF16)

#define GFLOW_SUM(NAME, G)                                                                      \
  extern "C" __global__ void __launch_bounds__(QUANTIZER_THREADS) gflow_sum_##NAME(             \
      G* __restrict__ gradient, float* __restrict__ residual,                                   \
      const unsigned short* __restrict__ sizes, Elements elements, unsigned levels, float step, \
      float margin, float feedback, unsigned hosts, unsigned host,                              \
      const Byte* __restrict__ received, Byte* __restrict__ sums) {                             \
    const Ownership ownership = {hosts, host, blocks_of(elements)};                             \
    sum<G>(gradient, residual, sizes, elements, Rounding{step, margin, levels}, feedback,       \
           ownership, received, sums);                                                          \
  }

GFLOW_SUM(f32, float)
GFLOW_SUM(f16, F16)
GFLOW_SUM(bf16, BF16)

#define GFLOW_DELIVER(NAME, G)                                                              \
  extern "C" __global__ void __launch_bounds__(QUANTIZER_THREADS)                           \
      gflow_deliver_##NAME(G* __restrict__ gradient, float* __restrict__ residual,          \
                           const unsigned short* __restrict__ sizes, Elements elements,     \
                           unsigned levels, unsigned hosts, unsigned host,                  \
                           const Byte* __restrict__ parts, const Byte* __restrict__ sums) { \
    const Ownership ownership = {hosts, host, blocks_of(elements)};                         \
    deliver<G>(gradient, residual, sizes, elements, levels, ownership, parts, sums);        \
  }

GFLOW_DELIVER(f32, float)
GFLOW_DELIVER(f16, F16)
GFLOW_DELIVER(bf16, BF16)

// --- following sizes -----------------------------------------------------------------------------

// A block is updated at one step in this many.
const unsigned TURNS = 8;

// What the first update of a block keeps of the mean square.
__device__ __forceinline__ float kept_at_first() { return 0.5f; }

// Updates the sizes of every `TURNS`th block from `first` on, from what was delivered. Blocks with
// infinity or NaN keep theirs.
template <class G>
__device__ __forceinline__ void follow(const G* delivered, unsigned short* sizes, Elements elements,
                                       unsigned first, float kept) {
  const Elements index = first + block_of_warp() * TURNS;
  if (index >= blocks_of(elements)) {
    return;
  }
  const Elements start = index * BLOCK, left = elements - start;
  const unsigned count = left < BLOCK ? static_cast<unsigned>(left) : BLOCK;
  delivered += start;
  sizes += start;
  Row numbers, before;
  unsigned any = 0;
#pragma unroll
  for (unsigned row = 0; row < ROWS; ++row) {
    const unsigned at = element_at(row);
    numbers.of[row] = at < count ? widen(delivered[at]) : 0.0f;
    before.of[row] = at < count ? size_at(sizes, at) : 0.0f;
    any |= at < count ? sizes[at] : 0u;
  }
  if (!is_finite(largest_of(numbers))) {
    return;
  }
#pragma unroll
  for (unsigned row = 0; row < ROWS; ++row) {
    numbers.of[row] = clamp(numbers.of[row], -largest_size(), largest_size());
  }
  const bool is_new = __ballot_sync(ALL_LANES, any != 0) == 0;
  const float mean = dot(numbers, numbers) / static_cast<float>(count);
  const float at_first = is_new ? mean : 0.0f;
  const float keeps = is_new ? kept_at_first() : kept;
#pragma unroll
  for (unsigned row = 0; row < ROWS; ++row) {
    const float square = before.of[row] * before.of[row] + at_first;
    const float number = numbers.of[row];
    const float squares = keeps * square + (1.0f - keeps) * (number * number);
    if (element_at(row) < count) {
      sizes[element_at(row)] = Type<BF16>::narrow(sqrtf(squares)).bits;
    }
  }
}

#define GFLOW_FOLLOW(NAME, G)                                                                  \
  extern "C" __global__ void __launch_bounds__(QUANTIZER_THREADS)                              \
      gflow_follow_##NAME(const G* __restrict__ delivered, unsigned short* __restrict__ sizes, \
                          Elements elements, unsigned first, float kept) {                     \
    follow<G>(delivered, sizes, elements, first, kept);                                        \
  }

GFLOW_FOLLOW(f32, float)
GFLOW_FOLLOW(f16, F16)
GFLOW_FOLLOW(bf16, BF16)

// Multiplies all sizes: the unit of the gradients has changed by this factor.
extern "C" __global__ void __launch_bounds__(STREAM_THREADS)
    gflow_scale_sizes(unsigned short* __restrict__ sizes, Elements elements, float factor) {
  const Elements stride = static_cast<Elements>(gridDim.x) * blockDim.x;
  Elements at = static_cast<Elements>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; at < elements; at += stride) {
    const float scaled = smaller(widen(BF16{sizes[at]}) * factor, largest_size());
    sizes[at] = Type<BF16>::narrow(scaled).bits;
  }
}
