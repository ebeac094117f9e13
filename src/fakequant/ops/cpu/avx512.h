// Registers of 16 float32 for processors with AVX-512: loading, quotients, rounding, and masks of one bit per element.
#pragma once

#include "call.h"

#ifdef FAKEQUANT_X86
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "convert.h"
#include "rounding.h"

// avx512bf16 is there for its conversions alone, which run only where the processor has them.
#define FAKEQUANT_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))
#define FAKEQUANT_LANES FAKEQUANT_AVX512 __attribute__((always_inline)) inline

namespace fakequant {
namespace {

constexpr int64_t kLanes = 16;

// All lanes, or those of the last elements of a run, of which the others are neither read nor written.
struct AllLanes {
  static constexpr int64_t count = kLanes;
};
// Stored past the caches, from the beginning of a line on.
struct StreamedLanes : AllLanes {};
struct FirstLanes {
  int64_t count;
  FAKEQUANT_LANES __mmask16 mask() const { return static_cast<__mmask16>((1u << count) - 1); }
};

FAKEQUANT_LANES __m512 load_lanes(const float* x, AllLanes) { return _mm512_loadu_ps(x); }
FAKEQUANT_LANES __m512 load_lanes(const float* x, FirstLanes lanes) { return _mm512_maskz_loadu_ps(lanes.mask(), x); }
FAKEQUANT_LANES void store_lanes(float* y, __m512 v, AllLanes) { _mm512_storeu_ps(y, v); }
FAKEQUANT_LANES void store_lanes(float* y, __m512 v, StreamedLanes) { _mm512_stream_ps(y, v); }
FAKEQUANT_LANES void store_lanes(float* y, __m512 v, FirstLanes lanes) { _mm512_mask_storeu_ps(y, lanes.mask(), v); }

FAKEQUANT_LANES __m256i load_words(const void* x, AllLanes) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(x));
}
FAKEQUANT_LANES __m256i load_words(const void* x, FirstLanes lanes) {
  return _mm256_maskz_loadu_epi16(lanes.mask(), x);
}
FAKEQUANT_LANES void store_words(void* y, __m256i v, AllLanes) { _mm256_storeu_si256(static_cast<__m256i*>(y), v); }
FAKEQUANT_LANES void store_words(void* y, __m256i v, StreamedLanes) {
  _mm256_stream_si256(static_cast<__m256i*>(y), v);
}
FAKEQUANT_LANES void store_words(void* y, __m256i v, FirstLanes lanes) {
  _mm256_mask_storeu_epi16(y, lanes.mask(), v);
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
// As store_bfloat16. NaN needs no care here: that of a bfloat16, and the one that the processor makes, have no low bits
// from which rounding could carry.
template <typename L>
FAKEQUANT_LANES void store_lanes(BFloat16* y, __m512 v, L lanes) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  store_words(y, _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, 16)), lanes);
}

FAKEQUANT_LANES __m512 with_sign_of(__m512 signed_one, __m512 magnitude) {
  constexpr int kSecondWhereFirst = 0xCA;  // of (a, b, c): a ? b : c
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_set1_epi32(INT32_MIN), _mm512_castps_si512(signed_one),
                                                       _mm512_castps_si512(magnitude), kSecondWhereFirst));
}

// The processor's own conversion takes subnormal numbers for zeros: for numbers that are zero or normal.
struct NormalBFloat16 : BFloat16 {};
template <typename L>
FAKEQUANT_LANES void store_lanes(NormalBFloat16* y, __m512 v, L lanes) {
  store_words(y, reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v)), lanes);
}

// Two registers, of the words at even and at odd places: a shift and an AND spread 32 words where widening them takes a
// shuffle for each 16, and one conversion serves both.
struct BFloat16Pairs {
  __m512 even, odd;
};
FAKEQUANT_LANES BFloat16Pairs load_pairs(const NormalBFloat16* x) {
  const __m512i words = _mm512_loadu_si512(x), high = _mm512_set1_epi32(INT32_MIN >> 15);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(words, 16)), _mm512_castsi512_ps(_mm512_and_si512(words, high))};
}
alignas(64) constexpr uint16_t kInterleaved[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                   8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
template <typename L>
FAKEQUANT_LANES void store_pairs(NormalBFloat16* y, const BFloat16Pairs& v, L) {
  const __m512i pairs = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(v.odd, v.even));
  const __m512i words = _mm512_permutexvar_epi16(_mm512_load_si512(kInterleaved), pairs);
  if constexpr (std::is_same_v<L, StreamedLanes>)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(y), words);
  else
    _mm512_storeu_si512(y, words);
}

// A code within the bounds of its format, and whether it was before it was brought there.
struct Rounded {
  __m512 code;
  __mmask16 inside;
};

// The roundings of rounding.h, of quotients with the sign of x. A zero gets the sign that the format gives it by adding
// `zero`: -0.0 changes nothing, +0.0 takes a sign away.
template <bool kWithOffset>
struct IntegerLanes {
  static constexpr bool kOffset = kWithOffset;
  __m512 lo, hi, zero;
  float smallest = 1.0f;
  FAKEQUANT_LANES explicit IntegerLanes(const Grid& grid)
      : lo(_mm512_set1_ps(static_cast<float>(grid.quant_min))),
        hi(_mm512_set1_ps(static_cast<float>(grid.quant_max))),
        zero(_mm512_setzero_ps()) {}
  FAKEQUANT_LANES Rounded round(__m512 v, __m512, __m512 offset) const {
    __m512 code = _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    if constexpr (kOffset) code = _mm512_add_ps(code, offset);
    // Both return their second operand where one is NaN.
    const __m512 clamped = _mm512_min_ps(hi, _mm512_max_ps(lo, code));
    return {clamped, _mm512_cmp_ps_mask(code, clamped, _CMP_EQ_OQ)};
  }
};

// For formats whose least value is the negative of the largest.
struct FloatLanes {
  static constexpr bool kOffset = false;
  __m512 hi, reaches_hi, zero;
  __m512i least, shift;
  float smallest;
  FAKEQUANT_LANES explicit FloatLanes(const Grid& grid) {
    const FloatRounding<float> same(grid);
    const int mantissa_bits = static_cast<int>(grid.mantissa_bits);
    hi = _mm512_set1_ps(same.hi), zero = _mm512_set1_ps(same.zero);
    least = _mm512_set1_epi32(static_cast<int>(same.least)), shift = _mm512_set1_epi32(static_cast<int>(same.shift));
    smallest = std::ldexp(1.0f, static_cast<int>(grid.min_exponent) - mantissa_bits);
    // The middle between the largest value and the next that the format would have, or the number before it.
    const float middle = same.hi + std::ldexp(0.5f, std::ilogb(same.hi) - mantissa_bits);
    reaches_hi = _mm512_set1_ps(same.round(middle) > same.hi ? std::nextafter(middle, 0.0f) : middle);
  }
  FAKEQUANT_LANES Rounded round(__m512 v, __m512 x, __m512) const {
    const __m512 magnitude = _mm512_abs_ps(v);
    const __m512 limited = _mm512_min_ps(hi, magnitude);  // NaN stays: the second operand is returned
    const __m512i exponent = _mm512_and_si512(_mm512_castps_si512(limited), _mm512_set1_epi32(0x7F800000));
    const __m512 c = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_max_epi32(exponent, least), shift));
    return {with_sign_of(x, _mm512_sub_ps(_mm512_add_ps(limited, c), c)),
            _mm512_cmp_ps_mask(magnitude, reaches_hi, _CMP_LE_OQ)};
  }
};

// Bits in the order of the elements, bit i % 8 of byte i / 8, where runs end anywhere within a byte.
struct BitWriter {
  uint8_t* to;
  uint32_t pending = 0;  // bits of a byte that is not full yet
  int64_t count = 0;
  FAKEQUANT_LANES void append(__mmask16 bits, AllLanes) {
    if (count == 0) {
      const auto all = static_cast<uint16_t>(bits);
      std::memcpy(to, &all, 2);
      to += 2;
      return;
    }
    pending |= static_cast<uint32_t>(bits) << count;
    const auto full = static_cast<uint16_t>(pending);
    std::memcpy(to, &full, 2);
    to += 2, pending >>= 16;
  }
  FAKEQUANT_LANES void append(__mmask16 bits, FirstLanes lanes) {
    pending |= static_cast<uint32_t>(bits & lanes.mask()) << count;
    for (count += lanes.count; count >= 8; count -= 8, pending >>= 8) *to++ = static_cast<uint8_t>(pending);
  }
  void finish() const {
    if (count) *to = static_cast<uint8_t>(pending);
  }
};

}  // namespace
}  // namespace fakequant
#endif
