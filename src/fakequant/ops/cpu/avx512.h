// Registers of 16 float32, for processors with AVX-512: see lanes.h.
#pragma once

#include "call.h"

#ifdef FAKEQUANT_X86
#include <cstdint>
#include <type_traits>

#include "convert.h"
#include "lanes.h"

// avx512bf16 is there for its conversions alone, which run only where the processor has them.
#define FAKEQUANT_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))
#define FAKEQUANT_LANES FAKEQUANT_TARGET __attribute__((always_inline)) inline

namespace fakequant {
namespace {

constexpr int64_t kLanes = 16;

using Lanes = __m512;
using Words = __m512i;
using Bits = __mmask16;
struct Pairs {
  Lanes even, odd;
};

FAKEQUANT_LANES __mmask16 mask_of(FirstLanes lanes) { return static_cast<__mmask16>((1u << lanes.count) - 1); }

FAKEQUANT_LANES __m512 load_lanes(const float* x, AllLanes) { return _mm512_loadu_ps(x); }
FAKEQUANT_LANES __m512 load_lanes(const float* x, FirstLanes lanes) { return _mm512_maskz_loadu_ps(mask_of(lanes), x); }
FAKEQUANT_LANES void store_lanes(float* y, __m512 v, AllLanes) { _mm512_storeu_ps(y, v); }
FAKEQUANT_LANES void store_lanes(float* y, __m512 v, StreamedLanes) { _mm512_stream_ps(y, v); }
FAKEQUANT_LANES void store_lanes(float* y, __m512 v, FirstLanes lanes) { _mm512_mask_storeu_ps(y, mask_of(lanes), v); }

FAKEQUANT_LANES __m256i load_words(const void* x, AllLanes) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(x));
}
FAKEQUANT_LANES __m256i load_words(const void* x, FirstLanes lanes) {
  return _mm256_maskz_loadu_epi16(mask_of(lanes), x);
}
FAKEQUANT_LANES void store_words(void* y, __m256i v, AllLanes) { _mm256_storeu_si256(static_cast<__m256i*>(y), v); }
FAKEQUANT_LANES void store_words(void* y, __m256i v, StreamedLanes) {
  _mm256_stream_si256(static_cast<__m256i*>(y), v);
}
FAKEQUANT_LANES void store_words(void* y, __m256i v, FirstLanes lanes) {
  _mm256_mask_storeu_epi16(y, mask_of(lanes), v);
}

template <typename L>
FAKEQUANT_LANES __m512 load_lanes(const Half* x, L lanes) {
  return _mm512_cvtph_ps(load_words(x, lanes));
}
template <typename L>
FAKEQUANT_LANES void store_lanes(Half* y, __m512 v, L lanes) {
  store_words(y, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), lanes);
}
template <typename L>
FAKEQUANT_LANES __m512 load_lanes(const BFloat16* x, L lanes) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_words(x, lanes)), 16));
}
// As store_bfloat16, but that NaN keeps its bits: that of a bfloat16, and the one that the processor makes, have no low
// bits from which rounding could carry.
template <typename L>
FAKEQUANT_LANES void store_lanes(BFloat16* y, __m512 v, L lanes) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  store_words(y, _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, 16)), lanes);
}

// The processor's own conversion takes subnormal numbers for zeros.
const bool kConvertsBFloat16 = __builtin_cpu_supports("avx512bf16");
template <typename L>
FAKEQUANT_LANES void store_lanes(NormalBFloat16* y, __m512 v, L lanes) {
  store_words(y, reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v)), lanes);
}

// Two registers, of the words at even and at odd places: a shift and an AND spread 32 words where widening them takes a
// shuffle for each 16, and one conversion serves both.
template <typename T>
constexpr bool kInPairs = std::is_same_v<T, NormalBFloat16>;
FAKEQUANT_LANES Pairs load_pairs(const NormalBFloat16* x) {
  const __m512i words = _mm512_loadu_si512(x), high = _mm512_set1_epi32(INT32_MIN >> 15);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(words, 16)), _mm512_castsi512_ps(_mm512_and_si512(words, high))};
}
alignas(64) constexpr uint16_t kInterleaved[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                   8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
template <typename L>
FAKEQUANT_LANES void store_pairs(NormalBFloat16* y, const Pairs& v, L) {
  const __m512i pairs = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(v.odd, v.even));
  const __m512i words = _mm512_permutexvar_epi16(_mm512_load_si512(kInterleaved), pairs);
  if constexpr (std::is_same_v<L, StreamedLanes>)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(y), words);
  else
    _mm512_storeu_si512(y, words);
}

// Codes of 8 bits, signed or not: the lowest bits of the integers are theirs.
FAKEQUANT_LANES void store_codes(uint8_t* q, __m512 v, AllLanes) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(q), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
}
FAKEQUANT_LANES void store_codes(uint8_t* q, __m512 v, FirstLanes lanes) {
  _mm_mask_storeu_epi8(q, mask_of(lanes), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
}
FAKEQUANT_LANES __m128i load_8(const void* q, AllLanes) { return _mm_loadu_si128(static_cast<const __m128i*>(q)); }
FAKEQUANT_LANES __m128i load_8(const void* q, FirstLanes lanes) { return _mm_maskz_loadu_epi8(mask_of(lanes), q); }
template <typename L>
FAKEQUANT_LANES __m512 load_codes(const uint8_t* q, L lanes) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(load_8(q, lanes)));
}
template <typename L>
FAKEQUANT_LANES __m512 load_codes(const int8_t* q, L lanes) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_8(q, lanes)));
}

FAKEQUANT_LANES Lanes same(float v) { return _mm512_set1_ps(v); }
FAKEQUANT_LANES Words same(int32_t v) { return _mm512_set1_epi32(v); }
// Both return b where one is NaN, and where both are zeros.
FAKEQUANT_LANES Lanes lower_of(Lanes a, Lanes b) { return _mm512_min_ps(a, b); }
FAKEQUANT_LANES Lanes higher_of(Lanes a, Lanes b) { return _mm512_max_ps(a, b); }
FAKEQUANT_LANES Lanes magnitude_of(Lanes v) { return _mm512_abs_ps(v); }
FAKEQUANT_LANES __m512 with_sign_of(__m512 signed_one, __m512 magnitude) {
  constexpr int kSecondWhereFirst = 0xCA;  // of (a, b, c): a ? b : c
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_set1_epi32(INT32_MIN), _mm512_castps_si512(signed_one),
                                                       _mm512_castps_si512(magnitude), kSecondWhereFirst));
}
FAKEQUANT_LANES Lanes nearest(Lanes v) {
  return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// a b + c, rounded once.
FAKEQUANT_LANES Lanes fused(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a, b, c); }
// The powers of two at or below |v|, at least those of the bits `least`, times that of the bits `shift`.
FAKEQUANT_LANES Lanes power_below(Lanes v, Words least, Words shift) {
  const Words exponent = _mm512_and_si512(_mm512_castps_si512(v), same(0x7F800000));
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_max_epi32(exponent, least), shift));
}

// False where one is NaN, except `differ`.
FAKEQUANT_LANES Bits equal(Lanes a, Lanes b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
FAKEQUANT_LANES Bits differ(Lanes a, Lanes b) { return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ); }
FAKEQUANT_LANES Bits below(Lanes a, Lanes b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
FAKEQUANT_LANES Bits at_most(Lanes a, Lanes b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
FAKEQUANT_LANES Words eight_further(Lanes v) { return _mm512_add_epi32(_mm512_castps_si512(v), same(8)); }
// Whether no more than 8 steps of float32 away from a number whose lower 16 bits are zero; upper_half is that number.
FAKEQUANT_LANES Bits near_upper_half(Lanes v) {
  return _mm512_cmple_epu32_mask(_mm512_slli_epi32(eight_further(v), 16), same(16 << 16));
}
FAKEQUANT_LANES Lanes upper_half(Lanes v) {
  return _mm512_castsi512_ps(_mm512_and_si512(eight_further(v), same(INT32_MIN >> 15)));
}

}  // namespace
}  // namespace fakequant
#endif
