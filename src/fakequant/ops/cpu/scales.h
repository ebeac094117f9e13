// From the range of every group to its scale and zero point: the formulas of numerics/qparams.py and scales.py.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "call.h"
#include "rounding.h"

namespace fakequant {

enum class ScaleKind : int64_t {
  kFloat = 0, kMultiplier = 1, kAsymmetric = 2, kPowerOfTwo = 3, kUnderAScale = 4, kExact = 5
};

// The fields that a kind does not name are not read.
struct ScaleRule {
  ScaleKind kind;
  double bound;    // the code that amax is mapped to; asymmetric: the number of steps between the codes
  double limit;    // the largest scale with which every code stays finite; asymmetric: the largest number
  double divisor;  // powers of two: amax is divided by it; under a scale, exact: the largest amax of all, of `together`
  // Powers of two: of amax / divisor = mantissa * 2**exponent, mantissa in [0.5, 1), the scale has the exponent
  // exponent + offset, plus 1 from the mantissa `up_from` on, less 1 at the mantissa `down_at`.
  int64_t offset;
  double up_from, down_at;
  int64_t lowest, highest;
  double smallest;  // under a scale, exact: the smallest positive code
  Grid grid;        // under a scale, exact: the format of the scales
  // Exact: the largest code; whether small codes become the smallest; whether the lowest value counts where it is
  // farther from 0 than the highest; how many groups in turn have one shared scale, 0 without; its format.
  double most;
  bool keeps_small, is_signed;
  int64_t together;
  double shared_smallest, shared_most;
  Grid shared;
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

// The nearest number of a format up to a limit; 0 for 0 alone if small numbers are kept.
template <typename C, typename Rounding>
FAKEQUANT_INLINE C stored(const Rounding& rounding, C v, C smallest, C most, bool keeps_small) {
  const C code = rounding.round(at_most(rounding.hi, at_least(rounding.lo, v)));
  const C limited = std::fabs(code) > most ? std::copysign(most, code) : code;
  const C small = (v != C(0)) & keeps_small ? std::copysign(smallest, v) : C(0);
  return std::fabs(limited) < smallest ? small : limited;
}

// In every block of groups the extent that is farthest from 0.
template <typename C>
FAKEQUANT_INLINE void find_farthest(const C* extent, int64_t n, int64_t together, C* farthest) {
  for (int64_t first = 0; first < n; first += together) {
    C low = extent[first], high = low;
    for (int64_t i = first + 1; i < first + together; ++i) {
      low = extent[i] < low ? extent[i] : low;
      high = extent[i] > high ? extent[i] : high;
    }
    std::fill_n(farthest + first, together, -low > high ? low : high);
  }
}

// code * d of every group, over its extent; `shared` is room for n numbers.
template <typename C, typename Rounding>
FAKEQUANT_INLINE void choose_exact_by(const ScaleRule& rule, const Rounding& rounding, C* extent, C* shared, int64_t n) {
  const C bound = static_cast<C>(rule.bound), smallest = static_cast<C>(rule.smallest);
  const C most = static_cast<C>(rule.most), limit = static_cast<C>(rule.limit), divisor = static_cast<C>(rule.divisor);
  const bool keeps_small = rule.keeps_small;
  if (!rule.together) {
    for (int64_t i = 0; i < n; ++i) extent[i] = stored(rounding, extent[i] / bound, smallest, most, keeps_small);
    return;
  }
  const FloatRounding<C> shared_rounding(rule.shared);
  const C shared_smallest = static_cast<C>(rule.shared_smallest), shared_most = static_cast<C>(rule.shared_most);
  find_farthest(extent, n, rule.together, shared);
  for (int64_t i = 0; i < n; ++i) {
    const C d = stored(shared_rounding, shared[i] / divisor, shared_smallest, shared_most, true);
    const C some = d == C(0) ? C(1) : d;
    const C most_codes = std::floor(limit / std::fabs(some));
    extent[i] = stored(rounding, extent[i] / (bound * some), smallest, most_codes, keeps_small) * d;
  }
}
template <typename C>
FAKEQUANT_INLINE void choose_exact(const ScaleRule& rule, C* extent, C* shared, int64_t n) {
  if (rule.grid.is_integer()) return choose_exact_by(rule, IntegerRounding<C>(rule.grid), extent, shared, n);
  choose_exact_by(rule, FloatRounding<C>(rule.grid), extent, shared, n);
}

// `offsets`: how offsets are stored that shift the lowest values to 0, or null. Both rules are exact or kFloat.
template <typename C>
FAKEQUANT_INLINE void choose_on_lattice(const ScaleRule& rule, const ScaleRule* offsets, const C* low, const C* high,
                                        int64_t n, const Chosen<C>& out) {
  constexpr C kTiny = std::numeric_limits<C>::min();
  const C bound = static_cast<C>(rule.bound), limit = static_cast<C>(rule.limit);
  if (offsets) {
    std::copy_n(low, n, out.zero_point);
    if (offsets->kind == ScaleKind::kExact) choose_exact(*offsets, out.zero_point, out.lo, n);
    for (int64_t i = 0; i < n; ++i) out.scale[i] = high[i] + out.zero_point[i];
  } else if (rule.is_signed) {
    for (int64_t i = 0; i < n; ++i) out.scale[i] = low[i] > high[i] ? -low[i] : high[i];
  } else {
    std::copy_n(high, n, out.scale);
  }
  if (rule.kind == ScaleKind::kExact)
    choose_exact(rule, out.scale, out.lo, n);
  else
    for (int64_t i = 0; i < n; ++i) out.scale[i] = at_most(limit, at_least(kTiny, out.scale[i] / bound));
  for (int64_t i = 0; i < n; ++i) {
    const C amax = rule.is_signed && low[i] > high[i] ? low[i] : high[i];
    out.lo[i] = offsets ? -low[i] : -amax;
    out.hi[i] = amax;
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
    case ScaleKind::kExact: return;  // see choose_on_lattice
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
