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

// The largest value that v reaches. Kept as arrays of a fixed size, filled up with infinity, so that the loop unrolls.
template <typename C, int N>
struct TableRounding {
  C lo, hi;
  C first;
  C values[N - 1], reached_from[N - 1];
  explicit TableRounding(const Grid& g)
      : lo(static_cast<C>(g.quant_min)), hi(static_cast<C>(g.quant_max)), first(static_cast<C>(g.table[0])) {
    for (int i = 0; i < N - 1; ++i) {
      const bool used = i + 1 < g.table_size;
      values[i] = used ? static_cast<C>(g.table[i + 1]) : hi;
      reached_from[i] = used ? static_cast<C>(g.table[g.table_size + i]) : std::numeric_limits<C>::infinity();
    }
  }
  // Beyond the ends there is no code to round to: v itself, which is out of range. NaN fails all comparisons.
  FAKEQUANT_INLINE C round(C v) const {
    C value = first;
    if constexpr (N <= 16) {
      for (int i = 0; i < N - 1; ++i) value = v >= reached_from[i] ? values[i] : value;
    } else {
      int reached = 0;
      for (int step = N / 2; step > 0; step /= 2) reached += v >= reached_from[reached + step - 1] ? step : 0;
      value = reached ? values[reached - 1] : first;
    }
    return v >= lo && v <= hi ? value : v;
  }
};

}  // namespace fakequant
