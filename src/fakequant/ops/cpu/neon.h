// Registers of 8 float32, each two of NEON's, for 64-bit Arm processors: see lanes.h.
#pragma once

#include "call.h"

#ifdef FAKEQUANT_NEON
#include <cstdint>
#include <cstring>

#include "convert.h"
#include "lanes.h"

#define FAKEQUANT_TARGET
#define FAKEQUANT_LANES __attribute__((always_inline)) inline

namespace fakequant {
namespace {

constexpr int64_t kLanes = 8;

struct Lanes {
  float32x4_t low, high;
};
struct Words {
  int32x4_t low, high;
};
using Bits = uint8_t;

FAKEQUANT_LANES Lanes operator+(Lanes a, Lanes b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
FAKEQUANT_LANES Lanes operator-(Lanes a, Lanes b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
FAKEQUANT_LANES Lanes operator*(Lanes a, Lanes b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
FAKEQUANT_LANES Lanes operator/(Lanes a, Lanes b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }

FAKEQUANT_LANES Lanes same(float v) { return {vdupq_n_f32(v), vdupq_n_f32(v)}; }
FAKEQUANT_LANES Words same(int32_t v) { return {vdupq_n_s32(v), vdupq_n_s32(v)}; }

FAKEQUANT_LANES Lanes load_lanes(const float* x, AllLanes) { return {vld1q_f32(x), vld1q_f32(x + 4)}; }
FAKEQUANT_LANES void store_lanes(float* y, Lanes v, AllLanes) { vst1q_f32(y, v.low), vst1q_f32(y + 4, v.high); }

FAKEQUANT_LANES Lanes load_lanes(const Half* x, AllLanes) {
  const float16x8_t v = vld1q_f16(x);
  return {vcvt_f32_f16(vget_low_f16(v)), vcvt_high_f32_f16(v)};
}
FAKEQUANT_LANES void store_lanes(Half* y, Lanes v, AllLanes) {
  vst1q_f16(y, vcvt_high_f16_f32(vcvt_f16_f32(v.low), v.high));
}

// The upper halves are bfloat16, as in avx512.h.
FAKEQUANT_LANES uint32x4_t rounded_to_bfloat16(float32x4_t v) {
  const uint32x4_t bits = vreinterpretq_u32_f32(v);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  return vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7FFF)), odd);
}
FAKEQUANT_LANES Lanes load_lanes(const BFloat16* x, AllLanes) {
  const uint16x8_t v = vld1q_u16(&x->bits);
  return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(v), 16)), vreinterpretq_f32_u32(vshll_high_n_u16(v, 16))};
}
FAKEQUANT_LANES void store_lanes(BFloat16* y, Lanes v, AllLanes) {
  const uint16x8_t odd_halves = vuzp2q_u16(vreinterpretq_u16_u32(rounded_to_bfloat16(v.low)),
                                           vreinterpretq_u16_u32(rounded_to_bfloat16(v.high)));
  vst1q_u16(&y->bits, odd_halves);
}
constexpr bool kConvertsBFloat16 = false;

// Codes of 8 bits, see avx512.h.
FAKEQUANT_LANES void store_codes(uint8_t* q, Lanes v, AllLanes) {
  const int16x8_t codes = vcombine_s16(vmovn_s32(vcvtnq_s32_f32(v.low)), vmovn_s32(vcvtnq_s32_f32(v.high)));
  vst1_u8(q, vreinterpret_u8_s8(vmovn_s16(codes)));
}
FAKEQUANT_LANES Lanes load_codes(const uint8_t* q, AllLanes) {
  const uint16x8_t codes = vmovl_u8(vld1_u8(q));
  return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(codes))), vcvtq_f32_u32(vmovl_high_u16(codes))};
}
FAKEQUANT_LANES Lanes load_codes(const int8_t* q, AllLanes) {
  const int16x8_t codes = vmovl_s8(vld1_s8(q));
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(codes))), vcvtq_f32_s32(vmovl_high_s16(codes))};
}

template <typename T>
FAKEQUANT_LANES Lanes load_lanes(const T* x, FirstLanes lanes) {
  T all[kLanes] = {};
  std::memcpy(all, x, lanes.count * sizeof(T));
  return load_lanes(all, AllLanes{});
}
template <typename T>
FAKEQUANT_LANES void store_lanes(T* y, Lanes v, FirstLanes lanes) {
  T all[kLanes];
  store_lanes(all, v, AllLanes{});
  std::memcpy(y, all, lanes.count * sizeof(T));
}
template <typename Q>
FAKEQUANT_LANES Lanes load_codes(const Q* q, FirstLanes lanes) {
  Q all[kLanes] = {};
  std::memcpy(all, q, lanes.count);
  return load_codes(all, AllLanes{});
}
FAKEQUANT_LANES void store_codes(uint8_t* q, Lanes v, FirstLanes lanes) {
  uint8_t all[kLanes];
  store_codes(all, v, AllLanes{});
  std::memcpy(q, all, lanes.count);
}

struct Pairs {
  Lanes even, odd;
};
template <typename T>
constexpr bool kInPairs = false;

FAKEQUANT_LANES float32x4_t chosen(uint32x4_t first, float32x4_t a, float32x4_t b) { return vbslq_f32(first, a, b); }
// NEON's own minimum and maximum tell zeros apart, and return NaN wherever one is.
FAKEQUANT_LANES Lanes lower_of(Lanes a, Lanes b) {
  return {chosen(vcltq_f32(a.low, b.low), a.low, b.low), chosen(vcltq_f32(a.high, b.high), a.high, b.high)};
}
FAKEQUANT_LANES Lanes higher_of(Lanes a, Lanes b) {
  return {chosen(vcgtq_f32(a.low, b.low), a.low, b.low), chosen(vcgtq_f32(a.high, b.high), a.high, b.high)};
}
FAKEQUANT_LANES Lanes magnitude_of(Lanes v) { return {vabsq_f32(v.low), vabsq_f32(v.high)}; }
FAKEQUANT_LANES Lanes with_sign_of(Lanes signed_one, Lanes magnitude) {
  const uint32x4_t sign = vdupq_n_u32(0x80000000u);
  return {chosen(sign, signed_one.low, magnitude.low), chosen(sign, signed_one.high, magnitude.high)};
}
FAKEQUANT_LANES Lanes nearest(Lanes v) { return {vrndnq_f32(v.low), vrndnq_f32(v.high)}; }
FAKEQUANT_LANES Lanes fused(Lanes a, Lanes b, Lanes c) {
  return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
}
FAKEQUANT_LANES float32x4_t power_below(float32x4_t v, int32x4_t least, int32x4_t shift) {
  const int32x4_t exponent = vandq_s32(vreinterpretq_s32_f32(v), vdupq_n_s32(0x7F800000));
  return vreinterpretq_f32_s32(vaddq_s32(vmaxq_s32(exponent, least), shift));
}
FAKEQUANT_LANES Lanes power_below(Lanes v, Words least, Words shift) {
  return {power_below(v.low, least.low, shift.low), power_below(v.high, least.high, shift.high)};
}

// One bit for each lane, of lanes whose bits are all alike.
FAKEQUANT_LANES Bits bits_of(uint32x4_t low, uint32x4_t high) {
  alignas(16) static constexpr uint16_t kPlaces[8] = {1, 2, 4, 8, 16, 32, 64, 128};
  const uint16x8_t all = vuzp1q_u16(vreinterpretq_u16_u32(low), vreinterpretq_u16_u32(high));
  return static_cast<Bits>(vaddvq_u16(vandq_u16(all, vld1q_u16(kPlaces))));
}
FAKEQUANT_LANES Bits equal(Lanes a, Lanes b) { return bits_of(vceqq_f32(a.low, b.low), vceqq_f32(a.high, b.high)); }
FAKEQUANT_LANES Bits differ(Lanes a, Lanes b) { return static_cast<Bits>(~equal(a, b)); }
FAKEQUANT_LANES Bits below(Lanes a, Lanes b) { return bits_of(vcltq_f32(a.low, b.low), vcltq_f32(a.high, b.high)); }
FAKEQUANT_LANES Bits at_most(Lanes a, Lanes b) { return bits_of(vcleq_f32(a.low, b.low), vcleq_f32(a.high, b.high)); }
FAKEQUANT_LANES uint32x4_t eight_further(float32x4_t v) {
  return vaddq_u32(vreinterpretq_u32_f32(v), vdupq_n_u32(8));
}
FAKEQUANT_LANES uint32x4_t near_upper_half(float32x4_t v) {
  return vcleq_u32(vshlq_n_u32(eight_further(v), 16), vdupq_n_u32(16u << 16));
}
FAKEQUANT_LANES float32x4_t upper_half(float32x4_t v) {
  return vreinterpretq_f32_u32(vandq_u32(eight_further(v), vdupq_n_u32(0xFFFF0000u)));
}
FAKEQUANT_LANES Bits near_upper_half(Lanes v) { return bits_of(near_upper_half(v.low), near_upper_half(v.high)); }
FAKEQUANT_LANES Lanes upper_half(Lanes v) { return {upper_half(v.low), upper_half(v.high)}; }

}  // namespace
}  // namespace fakequant
#endif
