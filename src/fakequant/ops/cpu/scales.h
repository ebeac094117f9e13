// From the range of every group to its scale and zero point: the formulas of numerics/qparams.py and scales.py.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "call.h"
#include "rounding.h"

namespace fakequant {

enum class ScaleKind : int64_t { kFloat = 0, kMultiplier = 1, kAsymmetric = 2, kPowerOfTwo = 3, kUnderAScale = 4 };

// The fields that a kind does not name are not read.
struct ScaleRule {
  ScaleKind kind;
  double bound;    // the code that amax is mapped to; asymmetric: the number of steps between the codes
  double limit;    // the largest scale with which every code stays finite; asymmetric: the largest number
  double divisor;  // powers of two: amax is divided by it; under a scale: the largest amax of all is
  // Powers of two: of amax / divisor = mantissa * 2**exponent, mantissa in [0.5, 1), the scale has the exponent
  // exponent + offset, plus 1 from the mantissa `up_from` on, less 1 at the mantissa `down_at`.
  int64_t offset;
  double up_from, down_at;
  int64_t lowest, highest;
  double smallest;  // under a scale: the smallest positive code
  Grid grid;        // under a scale: the format of the scales
};

// What quantization needs of every group. `lo` and `hi` are the range that gradients pass in.
template <typename C>
struct Chosen {
  C *scale, *zero_point, *lo, *hi;
};

template <typename C>
FAKEQUANT_INLINE C at_least(C bound, C v) {
  return v < bound ? bound : v;
}
template <typename C>
FAKEQUANT_INLINE C at_most(C bound, C v) {
  return v > bound ? bound : v;
}

template <typename C>
FAKEQUANT_INLINE void choose_power_of_two(const ScaleRule& rule, const C* amax, int64_t n, C* scale) {
  using Bits = FloatBits<C>;
  using Int = typename Bits::Int;
  constexpr C kNormal = std::numeric_limits<C>::min();
  constexpr int64_t kLift = Bits::kMantissa + 1;  // makes every subnormal a normal number
  constexpr C kLifting = static_cast<C>(int64_t(1) << kLift);
  const C divisor = static_cast<C>(rule.divisor);
  const C up_from = static_cast<C>(rule.up_from), down_at = static_cast<C>(rule.down_at);
  const int64_t offset = rule.offset, lowest = rule.lowest, highest = rule.highest;
  for (int64_t i = 0; i < n; ++i) {
    const C v = amax[i] / divisor;
    const bool lifted = v < kNormal;
    const Int bits = std::bit_cast<Int>(lifted ? v * kLifting : v);
    const Int fraction = bits & ((Int(1) << Bits::kMantissa) - 1);
    const C unit = std::bit_cast<C>(static_cast<Int>(fraction | (Int(Bits::kBias - 1) << Bits::kMantissa)));
    const C mantissa = v > C(0) ? unit : C(0);
    const int64_t field = static_cast<int64_t>(bits >> Bits::kMantissa) - (Bits::kBias - 1) - (lifted ? kLift : 0);
    int64_t exponent = field + offset + (mantissa >= up_from) - (mantissa == down_at);
    exponent = exponent < lowest ? lowest : exponent;
    exponent = exponent > highest ? highest : exponent;
    exponent = v > C(0) ? exponent : lowest;
    scale[i] = static_cast<C>(std::bit_cast<double>((exponent + 1023) << 52));
  }
}

template <typename C, typename Rounding>
FAKEQUANT_INLINE void choose_under_a_scale(const ScaleRule& rule, const Rounding& rounding, const C* amax, C whole,
                                           int64_t n, C* scale) {
  constexpr C kTiny = std::numeric_limits<C>::min();
  const C limit = static_cast<C>(rule.limit), smallest = static_cast<C>(rule.smallest);
  const C shared = at_least(kTiny, whole / static_cast<C>(rule.divisor));
  const C unit = static_cast<C>(rule.bound) * shared;
  for (int64_t i = 0; i < n; ++i) {
    const C code = at_most(rounding.hi, rounding.round(amax[i] / unit));
    scale[i] = at_most(limit, at_least(kTiny, (code > C(0) ? code : smallest) * shared));
  }
}

template <typename C>
FAKEQUANT_INLINE void choose_asymmetric(const ScaleRule& rule, const Grid& codes, const C* low, const C* high,
                                        int64_t n, const Chosen<C>& out) {
  constexpr C kTiny = std::numeric_limits<C>::min(), kMax = std::numeric_limits<C>::max();
  const C steps = static_cast<C>(rule.bound), largest = static_cast<C>(rule.limit);
  const C first = static_cast<C>(codes.quant_min), last = static_cast<C>(codes.quant_max);
  for (int64_t i = 0; i < n; ++i) {
    const C lo = -low[i];
    C scale = (high[i] * C(0.5) - lo * C(0.5)) / steps * C(2);
    scale = at_most(kMax, at_least(kTiny, scale));
    const C zero_point = at_most(last, at_least(first, first - std::rint(lo / scale)));
    const C below = zero_point - first, above = last - zero_point;
    out.scale[i] = at_most(largest / (below > above ? below : above), scale);
    out.zero_point[i] = zero_point;
    out.lo[i] = lo;
    out.hi[i] = high[i];
  }
}

// `low` and `high` are magnitudes; symmetric: `high` is amax. `whole`: the largest amax of all groups.
template <typename C>
FAKEQUANT_INLINE void choose_scales(const ScaleRule& rule, const Grid& codes, const C* low, const C* high, C whole,
                                    int64_t n, const Chosen<C>& out) {
  constexpr C kTiny = std::numeric_limits<C>::min();
  const C bound = static_cast<C>(rule.bound), limit = static_cast<C>(rule.limit);
  switch (rule.kind) {
    case ScaleKind::kAsymmetric: return choose_asymmetric(rule, codes, low, high, n, out);
    case ScaleKind::kFloat:
      for (int64_t i = 0; i < n; ++i) out.scale[i] = at_most(limit, at_least(kTiny, high[i] / bound));
      break;
    case ScaleKind::kMultiplier: {
      const C least = static_cast<C>(1 / rule.limit), most = static_cast<C>(1 / static_cast<double>(kTiny));
      for (int64_t i = 0; i < n; ++i) out.scale[i] = at_most(most, at_least(least, bound / high[i]));
      break;
    }
    case ScaleKind::kPowerOfTwo: choose_power_of_two(rule, high, n, out.scale); break;
    case ScaleKind::kUnderAScale:
      if (rule.grid.is_integer())
        choose_under_a_scale(rule, IntegerRounding<C>(rule.grid), high, whole, n, out.scale);
      else
        choose_under_a_scale(rule, FloatRounding<C>(rule.grid), high, whole, n, out.scale);
      break;
  }
  for (int64_t i = 0; i < n; ++i) out.lo[i] = -high[i], out.hi[i] = high[i];
}

}  // namespace fakequant
