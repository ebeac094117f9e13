// Rounding to one of the two neighbours on the grid of a format, as if it had no bounds, by a random word each.
//
// Formats say where a number lies between its neighbours (`share`), and the far one is taken by rint(share * 2**31) of
// all 2**31 upper parts of a word: numerics/formats/format.py, `round_stochastically`.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "call.h"
#include "rounding.h"

namespace fakequant {

// NaN, of inf and of NaN itself, reaches nothing. A share of 1 would be no int32; float32 has none below the far end.
FAKEQUANT_INLINE bool reaches(float share, uint32_t word) {
  const float reached_by = std::rint((share > 0.0f ? share : 0.0f) * 0x1p31f);
  return static_cast<int32_t>(word >> 1) < static_cast<int32_t>(reached_by);
}
FAKEQUANT_INLINE bool reaches(double share, uint32_t word) {
  return static_cast<double>(static_cast<int32_t>(word >> 1)) < std::rint(share * 0x1p31);
}

template <typename C>
struct StochasticInteger {
  static constexpr bool kInteger = true;
  C lo, hi;
  explicit StochasticInteger(const Grid& g) : lo(static_cast<C>(g.quant_min)), hi(static_cast<C>(g.quant_max)) {}
  FAKEQUANT_INLINE C round(C v, uint32_t word) const {
    const C magnitude = std::fabs(v);
    const C below = std::floor(magnitude);
    return std::copysign(reaches(magnitude - below, word) ? below + C(1) : below, v);
  }
};

// Counted in steps of 2**(e - M), numbers below 2**(M + 1) have their neighbours at whole numbers. |v| is first limited
// to twice the largest value, so that steps stay finite.
template <typename C>
struct StochasticFloat {
  using Bits = FloatBits<C>;
  using Int = typename Bits::Int;
  static constexpr bool kInteger = false;
  static constexpr Int kTwiceBias = static_cast<Int>(2 * Bits::kBias) << Bits::kMantissa;
  C lo, hi, limit, zero;
  Int least, mantissa;
  explicit StochasticFloat(const Grid& g)
      : lo(static_cast<C>(g.quant_min)),
        hi(static_cast<C>(g.quant_max)),
        limit(static_cast<C>(2 * g.quant_max)),
        zero(g.negative_zero ? C(-0.0) : C(0.0)),
        least(static_cast<Int>(g.min_exponent + Bits::kBias) << Bits::kMantissa),
        mantissa(static_cast<Int>(g.mantissa_bits) << Bits::kMantissa) {}
  FAKEQUANT_INLINE C round(C v, uint32_t word) const {
    const C magnitude = std::fabs(v);
    const C limited = magnitude > limit ? limit : magnitude;
    Int exponent = std::bit_cast<Int>(limited) & Bits::kExponentMask;
    exponent = exponent < least ? least : exponent;
    const C step = std::bit_cast<C>(static_cast<Int>(exponent - mantissa));
    const C steps = limited * std::bit_cast<C>(static_cast<Int>(kTwiceBias - exponent + mantissa));
    const C below = std::floor(steps);
    const C code = (reaches(steps - below, word) ? below + C(1) : below) * step;
    // Adding -0.0 changes nothing, adding +0.0 takes the sign of a zero away.
    return std::copysign(code, v) + zero;
  }
};

// Chooses one of two neighbours in a table. The share is found in double, in which every float32 is exact.
template <typename C>
FAKEQUANT_INLINE C choose_value(C v, C below, C above, uint32_t word) {
  const double lower = static_cast<double>(below), step = static_cast<double>(above) - lower;
  return reaches((static_cast<double>(v) - lower) / step, word) ? above : below;
}

// The largest value that v is not below, found by halving, and the next. Filled up with the largest.
template <typename C>
struct StochasticTable {
  static constexpr bool kInteger = false;
  static constexpr int kSize = 256;
  C lo, hi;
  C values[kSize];
  int half, last;
  explicit StochasticTable(const Grid& g)
      : lo(static_cast<C>(g.quant_min)),
        hi(static_cast<C>(g.quant_max)),
        half(static_cast<int>(std::bit_ceil(static_cast<uint64_t>(g.table_size))) / 2),
        last(static_cast<int>(g.table_size) - 2) {
    for (int i = 0; i < 2 * half; ++i) values[i] = i < g.table_size ? static_cast<C>(g.table[i]) : hi;
  }
  // Beyond the ends there is no code to round to: v itself, which is out of range. NaN fails all comparisons.
  FAKEQUANT_INLINE C round(C v, uint32_t word) const {
    int at = 0;
    for (int step = half; step > 0; step /= 2) at += v >= values[at + step] ? step : 0;
    at = at > last ? last : at;
    return v >= lo && v <= hi ? choose_value(v, values[at], values[at + 1], word) : v;
  }
};

// The same for few values, each compared in turn, as in SmallTableRounding. The last is no lower neighbour.
template <typename C>
struct StochasticSmallTable {
  static constexpr bool kInteger = false;
  static constexpr int kSize = 16;
  C lo, hi;
  C values[kSize], reached_from[kSize];
  explicit StochasticSmallTable(const Grid& g) : lo(static_cast<C>(g.quant_min)), hi(static_cast<C>(g.quant_max)) {
    for (int i = 0; i < kSize; ++i) {
      values[i] = i < g.table_size ? static_cast<C>(g.table[i]) : hi;
      reached_from[i] = i + 1 < g.table_size ? values[i] : std::numeric_limits<C>::infinity();
    }
  }
  FAKEQUANT_INLINE C round(C v, uint32_t word) const {
    C below = values[0], above = values[1];
    for (int i = 1; i + 1 < kSize; ++i) {
      below = v >= reached_from[i] ? values[i] : below;
      above = v >= reached_from[i] ? values[i + 1] : above;
    }
    return v >= lo && v <= hi ? choose_value(v, below, above, word) : v;
  }
};

}  // namespace fakequant
