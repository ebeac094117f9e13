// Registers of 8 float32, for processors with AVX2, FMA and F16C: see lanes.h.
#pragma once

#include "call.h"

#ifdef FAKEQUANT_X86
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "convert.h"
#include "lanes.h"

#define FAKEQUANT_TARGET __attribute__((target("avx2,fma,f16c")))
#define FAKEQUANT_LANES FAKEQUANT_TARGET __attribute__((always_inline)) inline

namespace fakequant {
namespace {

constexpr int64_t kLanes = 8;

using Lanes = __m256;
using Words = __m256i;
using Bits = uint8_t;
struct Pairs {
  Lanes even, odd;
};

FAKEQUANT_LANES Lanes same(float v) { return _mm256_set1_ps(v); }
FAKEQUANT_LANES Words same(int32_t v) { return _mm256_set1_epi32(v); }
FAKEQUANT_LANES Words words_of(Lanes v) { return _mm256_castps_si256(v); }
FAKEQUANT_LANES Lanes lanes_of(Words v) { return _mm256_castsi256_ps(v); }

alignas(64) constexpr int32_t kOnesThenZeros[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
FAKEQUANT_LANES Words mask_of(FirstLanes lanes) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kOnesThenZeros + kLanes - lanes.count));
}

FAKEQUANT_LANES Lanes load_lanes(const float* x, AllLanes) { return _mm256_loadu_ps(x); }
FAKEQUANT_LANES Lanes load_lanes(const float* x, FirstLanes lanes) { return _mm256_maskload_ps(x, mask_of(lanes)); }
FAKEQUANT_LANES void store_lanes(float* y, Lanes v, AllLanes) { _mm256_storeu_ps(y, v); }
FAKEQUANT_LANES void store_lanes(float* y, Lanes v, StreamedLanes) { _mm256_stream_ps(y, v); }
FAKEQUANT_LANES void store_lanes(float* y, Lanes v, FirstLanes lanes) { _mm256_maskstore_ps(y, mask_of(lanes), v); }

// Numbers of 16 bits.
FAKEQUANT_LANES __m128i load_16(const void* x, AllLanes) { return _mm_loadu_si128(static_cast<const __m128i*>(x)); }
FAKEQUANT_LANES __m128i load_16(const void* x, FirstLanes lanes) {
  __m128i v = _mm_setzero_si128();
  std::memcpy(&v, x, 2 * lanes.count);
  return v;
}
FAKEQUANT_LANES void store_16(void* y, __m128i v, AllLanes) { _mm_storeu_si128(static_cast<__m128i*>(y), v); }
FAKEQUANT_LANES void store_16(void* y, __m128i v, StreamedLanes) { _mm_stream_si128(static_cast<__m128i*>(y), v); }
FAKEQUANT_LANES void store_16(void* y, __m128i v, FirstLanes lanes) { std::memcpy(y, &v, 2 * lanes.count); }

template <typename L>
FAKEQUANT_LANES Lanes load_lanes(const Half* x, L lanes) {
  return _mm256_cvtph_ps(load_16(x, lanes));
}
template <typename L>
FAKEQUANT_LANES void store_lanes(Half* y, Lanes v, L lanes) {
  store_16(y, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), lanes);
}

// The bits of float32 in whose upper half those of the bfloat16 lie; NaN as in avx512.h.
FAKEQUANT_LANES Words rounded_to_bfloat16(Lanes v) {
  const Words odd = _mm256_and_si256(_mm256_srli_epi32(words_of(v), 16), same(1));
  return _mm256_add_epi32(_mm256_add_epi32(words_of(v), same(0x7FFF)), odd);
}
template <typename L>
FAKEQUANT_LANES Lanes load_lanes(const BFloat16* x, L lanes) {
  return lanes_of(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_16(x, lanes)), 16));
}
template <typename L>
FAKEQUANT_LANES void store_lanes(BFloat16* y, Lanes v, L lanes) {
  const Words upper = _mm256_srli_epi32(rounded_to_bfloat16(v), 16);
  const __m128i low = _mm256_castsi256_si128(upper), high = _mm256_extracti128_si256(upper, 1);
  store_16(y, _mm_packus_epi32(low, high), lanes);
}
constexpr bool kConvertsBFloat16 = false;

// Shifts and ANDs spread 16 words and put them together again, where widening and narrowing take shuffles.
template <typename T>
constexpr bool kInPairs = std::is_same_v<T, BFloat16>;
FAKEQUANT_LANES Words upper_half() { return same(INT32_MIN >> 15); }
FAKEQUANT_LANES Pairs load_pairs(const BFloat16* x) {
  const Words both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  return {lanes_of(_mm256_slli_epi32(both, 16)), lanes_of(_mm256_and_si256(both, upper_half()))};
}
template <typename L>
FAKEQUANT_LANES void store_pairs(BFloat16* y, const Pairs& v, L) {
  const Words even = _mm256_srli_epi32(rounded_to_bfloat16(v.even), 16);
  const Words both = _mm256_or_si256(even, _mm256_and_si256(rounded_to_bfloat16(v.odd), upper_half()));
  if constexpr (std::is_same_v<L, StreamedLanes>)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(y), both);
  else
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(y), both);
}

FAKEQUANT_LANES int64_t coded(Lanes v) {
  const Words codes = _mm256_and_si256(_mm256_cvtps_epi32(v), same(0xFF));  // unsigned, as the packing takes them
  const __m128i in_16 = _mm_packus_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
  return _mm_cvtsi128_si64(_mm_packus_epi16(in_16, in_16));
}
FAKEQUANT_LANES void store_codes(uint8_t* q, Lanes v, AllLanes) {
  const int64_t codes = coded(v);
  std::memcpy(q, &codes, sizeof(codes));
}
FAKEQUANT_LANES void store_codes(uint8_t* q, Lanes v, FirstLanes lanes) {
  const int64_t codes = coded(v);
  std::memcpy(q, &codes, lanes.count);
}
FAKEQUANT_LANES __m128i load_8(const void* q, AllLanes) { return _mm_loadl_epi64(static_cast<const __m128i*>(q)); }
FAKEQUANT_LANES __m128i load_8(const void* q, FirstLanes lanes) {
  int64_t codes = 0;
  std::memcpy(&codes, q, lanes.count);
  return _mm_cvtsi64_si128(codes);
}
template <typename L>
FAKEQUANT_LANES Lanes load_codes(const uint8_t* q, L lanes) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load_8(q, lanes)));
}
template <typename L>
FAKEQUANT_LANES Lanes load_codes(const int8_t* q, L lanes) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_8(q, lanes)));
}

FAKEQUANT_LANES Lanes lower_of(Lanes a, Lanes b) { return _mm256_min_ps(a, b); }
FAKEQUANT_LANES Lanes higher_of(Lanes a, Lanes b) { return _mm256_max_ps(a, b); }
FAKEQUANT_LANES Lanes magnitude_of(Lanes v) { return _mm256_andnot_ps(same(-0.0f), v); }
FAKEQUANT_LANES Lanes with_sign_of(Lanes signed_one, Lanes magnitude) {
  return _mm256_or_ps(_mm256_and_ps(same(-0.0f), signed_one), magnitude_of(magnitude));
}
FAKEQUANT_LANES Lanes nearest(Lanes v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
FAKEQUANT_LANES Lanes fused(Lanes a, Lanes b, Lanes c) { return _mm256_fmadd_ps(a, b, c); }
FAKEQUANT_LANES Lanes power_below(Lanes v, Words least, Words shift) {
  const Words exponent = _mm256_and_si256(words_of(v), same(0x7F800000));
  return lanes_of(_mm256_add_epi32(_mm256_max_epi32(exponent, least), shift));
}

FAKEQUANT_LANES Bits bits_of(Lanes passed) { return static_cast<Bits>(_mm256_movemask_ps(passed)); }
FAKEQUANT_LANES Bits equal(Lanes a, Lanes b) { return bits_of(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)); }
FAKEQUANT_LANES Bits differ(Lanes a, Lanes b) { return bits_of(_mm256_cmp_ps(a, b, _CMP_NEQ_UQ)); }
FAKEQUANT_LANES Bits below(Lanes a, Lanes b) { return bits_of(_mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
FAKEQUANT_LANES Bits at_most(Lanes a, Lanes b) { return bits_of(_mm256_cmp_ps(a, b, _CMP_LE_OQ)); }
FAKEQUANT_LANES Words eight_further(Lanes v) { return _mm256_add_epi32(words_of(v), same(8)); }
FAKEQUANT_LANES Bits near_upper_half(Lanes v) {
  return bits_of(lanes_of(_mm256_cmpgt_epi32(same(17), _mm256_and_si256(eight_further(v), same(0xFFFF)))));
}
FAKEQUANT_LANES Lanes upper_half(Lanes v) { return lanes_of(_mm256_and_si256(eight_further(v), upper_half())); }

}  // namespace
}  // namespace fakequant
#endif
