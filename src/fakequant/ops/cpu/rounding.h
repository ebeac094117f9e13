// Rounding to the grid of a format, ties to even, as if it had no bounds.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

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
  C lo, hi, limit;
  Int least, shift;
  explicit FloatRounding(const Grid& g)
      : lo(static_cast<C>(g.quant_min)),
        hi(static_cast<C>(g.quant_max)),
        limit(static_cast<C>(2 * g.quant_max)),
        least(static_cast<Int>(g.min_exponent + Bits::kBias) << Bits::kMantissa),
        shift(static_cast<Int>(Bits::kMantissa - g.mantissa_bits) << Bits::kMantissa) {}
  FAKEQUANT_INLINE C round(C v) const {
    const C magnitude = std::fabs(v);
    const C limited = magnitude > limit ? limit : magnitude;
    Int exponent = std::bit_cast<Int>(limited) & Bits::kExponentMask;
    exponent = exponent < least ? least : exponent;
    const C c = std::bit_cast<C>(static_cast<Int>(exponent + shift));
    return std::copysign((limited + c) - c, v);
  }
};

}  // namespace fakequant
