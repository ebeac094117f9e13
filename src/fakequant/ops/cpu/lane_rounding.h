// The roundings of rounding.h in registers, and whether a code was within the bounds of its format. Included behind the
// header of an instruction set, see lanes.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "call.h"
#include "lanes.h"
#include "rounding.h"

namespace fakequant {
namespace {

// A code within the bounds of its format, and whether it was before it was brought there.
struct Rounded {
  Lanes code;
  Bits inside;
};

// Rounds quotients that, of floats, have the sign of x. Adding `zero` gives a zero the sign that the format wants: -0.0
// changes nothing, +0.0 takes a sign away.
template <bool kWithOffset>
struct IntegerLanes {
  static constexpr bool kOffset = kWithOffset, kInteger = true, kLattice = false;
  const float first, last, smallest = 1.0f;
  Lanes lo, hi, zero;
  FAKEQUANT_LANES explicit IntegerLanes(const Grid& grid)
      : first(static_cast<float>(grid.quant_min)),
        last(static_cast<float>(grid.quant_max)),
        lo(same(first)),
        hi(same(last)),
        zero(same(0.0f)) {}
  // How many middles between integers decide a code, or whether it is inside, on the side of zero that has more.
  float middles(float zero_point) const { return std::max(zero_point - first, last - zero_point) + 1; }
  FAKEQUANT_LANES Rounded round(Lanes v, Lanes, Lanes offset) const {
    Lanes code = nearest(v);
    if constexpr (kOffset) code = code + offset;
    const Lanes clamped = lower_of(hi, higher_of(lo, code));
    return {clamped, equal(code, clamped)};
  }
};

// The same where x is shifted or scales may be negative or 0.
template <bool kWithOffset>
struct LatticeLanes : IntegerLanes<kWithOffset> {
  static constexpr bool kLattice = true;
  FAKEQUANT_LANES explicit LatticeLanes(const Grid& grid) : IntegerLanes<kWithOffset>(grid) {}
};

// For formats whose least value is the negative of the largest.
struct FloatLanes {
  static constexpr bool kOffset = false, kInteger = false, kLattice = false;
  Lanes hi, reaches_hi, zero;
  Words least, shift;
  float smallest;
  FAKEQUANT_LANES explicit FloatLanes(const Grid& grid) {
    const FloatRounding<float> rounding(grid);
    const int mantissa_bits = static_cast<int>(grid.mantissa_bits);
    hi = same(rounding.hi), zero = same(rounding.zero);
    least = same(static_cast<int32_t>(rounding.least)), shift = same(static_cast<int32_t>(rounding.shift));
    smallest = std::ldexp(1.0f, static_cast<int>(grid.min_exponent) - mantissa_bits);
    // The middle between the largest value and the next that the format would have, or the number before it.
    const float middle = rounding.hi + std::ldexp(0.5f, std::ilogb(rounding.hi) - mantissa_bits);
    reaches_hi = same(rounding.round(middle) > rounding.hi ? std::nextafter(middle, 0.0f) : middle);
  }
  FAKEQUANT_LANES Rounded round(Lanes v, Lanes x, Lanes) const {
    const Lanes magnitude = magnitude_of(v);
    const Lanes limited = lower_of(hi, magnitude);  // NaN stays
    const Lanes c = power_below(limited, least, shift);
    return {with_sign_of(x, (limited + c) - c), at_most(magnitude, reaches_hi)};
  }
};

}  // namespace
}  // namespace fakequant
