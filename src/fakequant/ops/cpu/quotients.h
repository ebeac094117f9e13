// Where x times a number has the codes of x / scale, for bfloat16: 1M elements in the caches of a Zen 4 take 91 us on
// one thread instead of 134. Included behind the header of an instruction set, see lanes.h.
#pragma once

#include <bit>
#include <cstdint>

#include "lanes.h"

namespace fakequant {
namespace {

constexpr int64_t kWorthAsking = 512;  // elements of a run
constexpr float kMostMiddles = 256;    // enough for codes of 8 bits with any zero point

// The float32 `steps` steps further from zero.
inline float beside(float v, int32_t steps) { return std::bit_cast<float>(std::bit_cast<int32_t>(v) + steps); }

// An r with which rounding x r gives the integers that rounding x / scale gives, up to `middles`, for every x of 8
// significant bits, those of bfloat16: RN(1 / scale) or the number after or before it; 0 where none is.
//
// RN(x r) and RN(x / scale) lie within 4.5 2^-24 of the quotient, relatively. So they are rounded to two integers only
// where the quotient is that close to a middle k + 1/2 between two, x that close to (k + 1/2) scale, and the float32
// product of these within 6 steps of x, a number whose lower 16 bits are zero. One in 4,000 products is so by chance,
// and amax / 127 always has one, 63.5 scale, where amax is a bfloat16; with such an x both are computed. With the 129
// middles of int8, RN(1 / scale) serves 0.9995 of scales of 24 bits, and 0.81 of those amax / 127; one of the three
// serves 0.99998, and all of those.
FAKEQUANT_LANES float reciprocal_for_integers(float scale, float middles) {
  alignas(64) constexpr float kFirst[16] = {0.5f, 1.5f, 2.5f,  3.5f,  4.5f,  5.5f,  6.5f,  7.5f,
                                            8.5f, 9.5f, 10.5f, 11.5f, 12.5f, 13.5f, 14.5f, 15.5f};
  if (!(scale >= 0x1p-100f && scale <= 0x1p100f && middles <= kMostMiddles)) return 0;
  const float r = 1 / scale, after = beside(r, 1), before = beside(r, -1);
  const Lanes scales = same(scale), first = load_lanes(kFirst, AllLanes{});
  Bits wrong = 0, wrong_after = 0, wrong_before = 0;
  for (int k = 0; k < static_cast<int>(middles); k += kLanes) {
    const Lanes limits = (first + same(static_cast<float>(k))) * scales;
    if (!near_upper_half(limits)) continue;
    const Lanes x = upper_half(limits), integers = nearest(x / scales);
    wrong |= differ(integers, nearest(x * same(r)));
    wrong_after |= differ(integers, nearest(x * same(after)));
    wrong_before |= differ(integers, nearest(x * same(before)));
  }
  return !wrong ? r : !wrong_after ? after : !wrong_before ? before : 0;
}

}  // namespace
}  // namespace fakequant
