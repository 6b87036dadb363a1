#include "reduction.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace standin {

namespace {

struct Half {
  uint16_t bits;
};
struct BrainFloat {
  uint16_t bits;
};

constexpr uint32_t kSign = 0x80000000;
constexpr uint32_t kInfinity = 0x7f800000;

float widen(BrainFloat value) { return std::bit_cast<float>(uint32_t{value.bits} << 16); }

void narrow(float value, BrainFloat& stored) {
  auto bits = std::bit_cast<uint32_t>(value);
  bool is_nan = (bits & ~kSign) > kInfinity;
  // Rounds to nearest, ties to even.
  uint32_t rounded = is_nan ? bits | 0x00400000 : bits + 0x7fff + ((bits >> 16) & 1);
  stored.bits = static_cast<uint16_t>(rounded >> 16);
}

float widen(Half value) {
  uint32_t sign = uint32_t{value.bits & 0x8000u} << 16;
  uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude < 0x0400) {
    // A subnormal, in units of 2^-24.
    float number = static_cast<float>(magnitude) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(number) | sign);
  }
  uint32_t exponent_shift = magnitude >= 0x7c00 ? uint32_t{224} << 23 : uint32_t{112} << 23;
  return std::bit_cast<float>(sign | ((magnitude << 13) + exponent_shift));
}

void narrow(float value, Half& stored) {
  auto bits = std::bit_cast<uint32_t>(value);
  auto sign = static_cast<uint16_t>((bits & kSign) >> 16);
  uint32_t magnitude = bits & ~kSign;
  uint32_t half = 0;
  if (magnitude > kInfinity) {
    half = 0x7e00 | ((magnitude >> 13) & 0x01ff);
  } else if (magnitude >= 0x47800000) {
    half = 0x7c00;  // 65536 and more.
  } else if (magnitude < 0x38800000) {
    // Subnormal: adding 0.5 aligns the last bit with that of a subnormal half.
    float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    half = std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(0.5f);
  } else {
    // A carry correctly increments the exponent, up to infinity.
    half = (magnitude - (uint32_t{112} << 23) + 0x0fff + ((magnitude >> 13) & 1)) >> 13;
  }
  stored.bits = static_cast<uint16_t>(half | sign);
}

template <typename Number>
Number widen(Number value) {
  return value;
}

template <typename Number>
void narrow(Number value, Number& stored) {
  stored = value;
}

template <typename Stored>
using NumberOf = decltype(widen(Stored{}));

template <typename Number>
bool is_nan(Number value) {
  if constexpr (std::is_floating_point_v<Number>) {
    return std::isnan(value);
  }
  return false;
}

template <typename Number>
Number join(ncclRedOp_t operation, Number first, Number second) {
  switch (operation) {
    case ncclProd:
      if constexpr (std::is_integral_v<Number>) {
        using Unsigned = std::make_unsigned_t<Number>;
        return static_cast<Number>(uint64_t{static_cast<Unsigned>(first)} *
                                   static_cast<Unsigned>(second));
      } else {
        return first * second;
      }
    case ncclMax:
      return is_nan(first) || first > second ? first : second;
    case ncclMin:
      return is_nan(first) || first < second ? first : second;
    default:
      if constexpr (std::is_integral_v<Number>) {
        using Unsigned = std::make_unsigned_t<Number>;
        return static_cast<Number>(uint64_t{static_cast<Unsigned>(first)} +
                                   static_cast<Unsigned>(second));
      } else {
        return first + second;
      }
  }
}

template <typename Number>
Number finished(const Reduction& reduction, Number value) {
  return reduction.operation == ncclAvg
             ? static_cast<Number>(value / static_cast<Number>(reduction.ranks))
             : value;
}

template <typename Stored>
void combine_as(const Reduction& reduction, void* own, const void* incoming, size_t elements,
                bool finish) {
  auto* to = static_cast<Stored*>(own);
  const auto* from = static_cast<const Stored*>(incoming);
  for (size_t index = 0; index < elements; ++index) {
    auto joined = join(reduction.operation, widen(from[index]), widen(to[index]));
    narrow(finish ? finished(reduction, joined) : joined, to[index]);
  }
}

template <typename Stored>
void fold_as(const Reduction& reduction, void* result,
             const std::vector<const void*>& contributions, size_t elements) {
  using Number = NumberOf<Stored>;
  for (size_t index = 0; index < elements; ++index) {
    auto number = [&](size_t rank) {
      return widen(static_cast<const Stored*>(contributions[rank])[index]);
    };
    Number joined = number(0);
    for (size_t rank = 1; rank < contributions.size(); ++rank) {
      joined = join(reduction.operation, joined, number(rank));
    }
    narrow(finished(reduction, joined), static_cast<Stored*>(result)[index]);
  }
}

// Calls `what` with a value of the type.
template <typename What>
void for_type(ncclDataType_t type, What&& what) {
  switch (type) {
    case ncclInt8:
      return what(int8_t{});
    case ncclUint8:
      return what(uint8_t{});
    case ncclInt32:
      return what(int32_t{});
    case ncclUint32:
      return what(uint32_t{});
    case ncclInt64:
      return what(int64_t{});
    case ncclUint64:
      return what(uint64_t{});
    case ncclFloat16:
      return what(Half{});
    case ncclFloat32:
      return what(float{});
    case ncclFloat64:
      return what(double{});
    case ncclBfloat16:
      return what(BrainFloat{});
    default:
      return;
  }
}

}  // namespace

size_t element_bytes(ncclDataType_t type) {
  size_t bytes = 0;
  for_type(type, [&](auto element) { bytes = sizeof element; });
  return bytes;
}

bool is_known(ncclRedOp_t operation) { return operation >= ncclSum && operation < ncclNumOps; }

void Reduction::combine(void* own, const void* incoming, size_t elements, bool finish) const {
  for_type(type, [&](auto element) {
    combine_as<decltype(element)>(*this, own, incoming, elements, finish);
  });
}

void Reduction::fold(void* result, const std::vector<const void*>& contributions,
                     size_t elements) const {
  for_type(type, [&](auto element) {
    fold_as<decltype(element)>(*this, result, contributions, elements);
  });
}

}  // namespace standin
