// What processors with AVX-512 do in registers of 16 beyond sixteen_lanes.cpp: the largest magnitudes of short runs,
// and the positions of numbers in a histogram.

#include "avx512.h"

#ifdef FAKEQUANT_X86
#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "positions.h"
#include "ranges.h"
#include "registers.h"

namespace fakequant {
namespace {

constexpr int64_t kLongestMeasured = 128;  // from there on the last steps of a maximum take no time

FAKEQUANT_LANES __m512i load_patterns_of(const int32_t* x) { return _mm512_loadu_si512(x); }
FAKEQUANT_LANES __m512i load_patterns_of(const int16_t* x) {
  return _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
}
FAKEQUANT_LANES void store_patterns(int32_t* to, __m512i v) { _mm512_storeu_si512(to, v); }
FAKEQUANT_LANES void store_patterns(int16_t* to, __m512i v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(v));
}

// Maxima of the pairs within 64 bits, then within 128: of four registers a, b, c, d every 128 bits get a, b, c, d.
FAKEQUANT_LANES __m512i within_128(__m512i a, __m512i b, __m512i c, __m512i d) {
  const __m512i ab = _mm512_max_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const __m512i cd = _mm512_max_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  return _mm512_max_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}
// Maxima of the 128-bit quarters 0 and 1, 2 and 3 of each.
FAKEQUANT_LANES __m512i across_128(__m512i a, __m512i b) {
  return _mm512_max_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xDD));
}

// The largest finite magnitudes of 16 runs at a time, each of `length` / 16 registers, by a tree of shuffles.
template <typename I>
FAKEQUANT_TARGET void measure_16_runs(const I* x, int64_t count, int64_t length, I infinity, I* high) {
  const __m512i magnitude = _mm512_set1_epi32(std::numeric_limits<I>::max()), beyond = _mm512_set1_epi32(infinity);
  for (int64_t run = 0; run < count; run += kLanes) {
    __m512i maxima[kLanes];
    for (int64_t j = 0; j < kLanes; ++j, x += length) {
      maxima[j] = _mm512_setzero_si512();
      for (int64_t i = 0; i < length; i += kLanes) {
        const __m512i v = _mm512_and_si512(load_patterns_of(x + i), magnitude);
        maxima[j] = _mm512_mask_max_epi32(maxima[j], _mm512_cmplt_epi32_mask(v, beyond), maxima[j], v);
      }
    }
    __m512i of_4[4];
    for (int64_t j = 0; j < 4; ++j)
      of_4[j] = within_128(maxima[4 * j], maxima[4 * j + 1], maxima[4 * j + 2], maxima[4 * j + 3]);
    store_patterns(high + run, across_128(across_128(of_4[0], of_4[1]), across_128(of_4[2], of_4[3])));
  }
}

FAKEQUANT_TARGET int64_t place_but_zeros(const float* x, int32_t* position, int64_t n, float inverse, int32_t bins) {
  const __m512 factor = _mm512_set1_ps(inverse), last = _mm512_set1_ps(static_cast<float>(bins - 1));
  const __m512 zero = _mm512_setzero_ps();
  const __m512i behind = _mm512_set1_epi32(bins);
  int64_t placed = 0;
  for (int64_t i = 0; i < n; i += kLanes) {
    const __m512 v = load_lanes(x + i, FirstLanes{std::min(kLanes, n - i)});  // 0.0 behind the last
    // A minimum is its second operand where one is NaN.
    const __m512i bin = _mm512_cvttps_epi32(_mm512_min_ps(_mm512_mul_ps(_mm512_abs_ps(v), factor), last));
    const __m512i at = _mm512_mask_add_epi32(bin, _mm512_cmp_ps_mask(v, zero, _CMP_NLT_UQ), bin, behind);
    const __mmask16 others = _mm512_cmp_ps_mask(v, zero, _CMP_NEQ_UQ);
    _mm512_storeu_si512(position + placed, _mm512_maskz_compress_epi32(others, at));
    placed += std::popcount(static_cast<uint16_t>(others));
  }
  return placed;
}

template <typename I>
int64_t measure(const I* x, int64_t count, int64_t length, I infinity, I* high) {
  if (register_width() < kLanes || length % kLanes != 0 || length > kLongestMeasured) return 0;
  const int64_t whole = count / kLanes * kLanes;
  if (length == kLanes)  // a length known to the compiler
    measure_16_runs(x, whole, kLanes, infinity, high);
  else
    measure_16_runs(x, whole, length, infinity, high);
  return whole;
}

}  // namespace

int64_t measure_avx512(const int32_t* x, int64_t count, int64_t length, int32_t infinity, int32_t* high) {
  return measure(x, count, length, infinity, high);
}
int64_t measure_avx512(const int16_t* x, int64_t count, int64_t length, int16_t infinity, int16_t* high) {
  return measure(x, count, length, infinity, high);
}
int64_t place_but_zeros_avx512(const float* x, int32_t* position, int64_t n, float inverse, int32_t bins) {
  return register_width() < kLanes ? -1 : place_but_zeros(x, position, n, inverse, bins);
}

}  // namespace fakequant
#endif
