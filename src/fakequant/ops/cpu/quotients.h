// Where x times 1 / scale has the codes of x / scale, for bfloat16: 1M elements in the caches of a Zen 4 take 91 us on
// one thread instead of 134. Included behind the header of an instruction set, see lanes.h.
#pragma once

#include <cstdint>

#include "lanes.h"

namespace fakequant {
namespace {

constexpr int64_t kWorthAsking = 512;  // elements of a run
constexpr float kMostMiddles = 256;    // those of codes of 8 bits with any zero point

// Whether rounding x r, r = RN(1 / scale), gives the integers that rounding x / scale gives, up to `middles`, for every
// x of 8 significant bits, those of bfloat16. `reciprocals` is a register of r.
//
// RN(x r) and RN(x / scale) lie within 2^-22 of the quotient, relatively. So they are rounded to two integers only
// where the quotient is that close to a middle k + 1/2 between two, x that close to (k + 1/2) scale, and the float32
// product of these within 5 steps of x, a number whose lower 16 bits are zero. One in 4,000 products is so by chance,
// and amax / 127 always has one, 63.5 scale, where amax is a bfloat16; with such an x both are computed. True for
// 0.9996 of scales of 24 bits with the 129 middles of int8, and for 0.81 of those amax / 127.
FAKEQUANT_LANES bool divides_by_product(float scale, Lanes reciprocals, float middles) {
  alignas(64) constexpr float kFirst[16] = {0.5f, 1.5f, 2.5f,  3.5f,  4.5f,  5.5f,  6.5f,  7.5f,
                                            8.5f, 9.5f, 10.5f, 11.5f, 12.5f, 13.5f, 14.5f, 15.5f};
  if (!(scale >= 0x1p-100f && scale <= 0x1p100f && middles <= kMostMiddles)) return false;
  const Lanes scales = same(scale), first = load_lanes(kFirst, AllLanes{});
  for (int k = 0; k < static_cast<int>(middles); k += kLanes) {
    const Lanes limits = (first + same(static_cast<float>(k))) * scales;
    if (!near_upper_half(limits)) continue;
    const Lanes x = upper_half(limits);
    if (differ(nearest(x / scales), nearest(x * reciprocals))) return false;
  }
  return true;
}

}  // namespace
}  // namespace fakequant
