// Rounding to the grid of a format, ties to even, as if it had no bounds.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "call.h"

namespace fakequant {

template <typename C>
struct FloatBits;
template <>
struct FloatBits<float> {
  using Int = uint32_t;
  static constexpr int kMantissa = 23;
  static constexpr int kBias = 127;
  static constexpr Int kExponentMask = 0x7F800000u;
};
template <>
struct FloatBits<double> {
  using Int = uint64_t;
  static constexpr int kMantissa = 52;
  static constexpr int kBias = 1023;
  static constexpr Int kExponentMask = 0x7FF0000000000000ull;
};

template <typename C>
struct IntegerRounding {
  static constexpr bool kInteger = true;
  C lo, hi;
  explicit IntegerRounding(const Grid& g) : lo(static_cast<C>(g.quant_min)), hi(static_cast<C>(g.quant_max)) {}
  FAKEQUANT_INLINE C round(C v) const { return std::rint(v); }
};

// Adding and subtracting c = 2**(e + mantissa(C) - M) rounds |v| to a multiple of 2**(e - M), ties to even, because
// that is the spacing of C just above c. |v| is first limited to twice the largest value, so that c stays finite.
template <typename C>
struct FloatRounding {
  using Bits = FloatBits<C>;
  using Int = typename Bits::Int;
  static constexpr bool kInteger = false;
  C lo, hi, limit, zero;
  Int least, shift;
  explicit FloatRounding(const Grid& g)
      : lo(static_cast<C>(g.quant_min)),
        hi(static_cast<C>(g.quant_max)),
        limit(static_cast<C>(2 * g.quant_max)),
        zero(g.negative_zero ? C(-0.0) : C(0.0)),
        least(static_cast<Int>(g.min_exponent + Bits::kBias) << Bits::kMantissa),
        shift(static_cast<Int>(Bits::kMantissa - g.mantissa_bits) << Bits::kMantissa) {}
  FAKEQUANT_INLINE C round(C v) const {
    const C magnitude = std::fabs(v);
    const C limited = magnitude > limit ? limit : magnitude;
    Int exponent = std::bit_cast<Int>(limited) & Bits::kExponentMask;
    exponent = exponent < least ? least : exponent;
    const C c = std::bit_cast<C>(static_cast<Int>(exponent + shift));
    // Adding -0.0 changes nothing, adding +0.0 takes the sign of a zero away.
    return std::copysign((limited + c) - c, v) + zero;
  }
};

// The largest value that v reaches, found by halving. Kept as arrays of one size, filled up with infinity.
template <typename C>
struct TableRounding {
  static constexpr bool kInteger = false;
  static constexpr int kSize = 256;
  C lo, hi;
  C values[kSize], reached_from[kSize - 1];
  int half;
  explicit TableRounding(const Grid& g)
      : lo(static_cast<C>(g.quant_min)),
        hi(static_cast<C>(g.quant_max)),
        half(static_cast<int>(std::bit_ceil(static_cast<uint64_t>(g.table_size))) / 2) {
    for (int i = 0; i < 2 * half; ++i) values[i] = i < g.table_size ? static_cast<C>(g.table[i]) : hi;
    for (int i = 0; i < 2 * half - 1; ++i)
      reached_from[i] = i + 1 < g.table_size ? static_cast<C>(g.table[g.table_size + i])
                                             : std::numeric_limits<C>::infinity();
  }
  // Beyond the ends there is no code to round to: v itself, which is out of range. NaN fails all comparisons.
  FAKEQUANT_INLINE C round(C v) const {
    int reached = 0;
    for (int step = half; step > 0; step /= 2) reached += v >= reached_from[reached + step - 1] ? step : 0;
    return v >= lo && v <= hi ? values[reached] : v;
  }
};

// The same for few values, each compared in turn: no load depends on a comparison, so that registers of numbers go
// through together. 40 us instead of 370 us for 65,536 elements in NF4.
template <typename C>
struct SmallTableRounding {
  static constexpr bool kInteger = false;
  static constexpr int kSize = 16;
  C lo, hi;
  C values[kSize], reached_from[kSize];
  explicit SmallTableRounding(const Grid& g) : lo(static_cast<C>(g.quant_min)), hi(static_cast<C>(g.quant_max)) {
    for (int i = 0; i < kSize; ++i) {
      values[i] = i < g.table_size ? static_cast<C>(g.table[i]) : hi;
      reached_from[i] = i > 0 && i < g.table_size ? static_cast<C>(g.table[g.table_size + i - 1])
                                                  : std::numeric_limits<C>::infinity();
    }
  }
  FAKEQUANT_INLINE C round(C v) const {
    C value = values[0];
    for (int i = 1; i < kSize; ++i) value = v >= reached_from[i] ? values[i] : value;
    return v >= lo && v <= hi ? value : v;
  }
};

}  // namespace fakequant
