// Fake quantization of float32, float16 and bfloat16 to integers and small floats in one pass over registers of 16, for
// processors with AVX-512: nothing in between goes through memory, and the packed mask comes from the comparisons.
//
// The bits are those of the portable loops in runs.h, which serve everywhere else.

#include "avx512.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "call.h"
#include "chunks.h"
#include "positions.h"
#include "ranges.h"
#include "runs.h"
#include "streaming.h"

namespace fakequant {
namespace {

constexpr int64_t kLongestMeasured = 128;  // from there on the last steps of a maximum take no time

std::atomic<bool> allowed{true};

#ifdef FAKEQUANT_X86
const bool kSupported = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
const bool kSupported = false;
#endif

// For tests, which compare both ways. Returns whether the kernels of this file serve from now on.
bool allow_avx512(bool allow) {
  allowed = allow;
  return kSupported && allow;
}

#ifdef FAKEQUANT_X86
const bool kConvertsBFloat16 = __builtin_cpu_supports("avx512bf16");

// The parameters of 16 elements; `at` gives those of the elements from one on, here the same for all.
struct Uniform {
  __m512 scale, reciprocal, zero_point, lo, hi;
  template <typename L>
  FAKEQUANT_LANES const Uniform& at(int64_t, L) const {
    return *this;
  }
};

FAKEQUANT_LANES __m512 reciprocal_of(__m512 scale) { return _mm512_div_ps(_mm512_set1_ps(1.0f), scale); }

Params<float> after(const Params<float>& p, int64_t groups) {
  const auto moved = [groups](const float* from) { return from ? from + groups : nullptr; };
  return {p.scale + groups, moved(p.zero_point), moved(p.lo), moved(p.hi)};
}

template <typename L>
FAKEQUANT_LANES __m512 load_present(const float* from, int64_t i, L lanes) {
  return from ? load_lanes(from + i, lanes) : _mm512_setzero_ps();
}
FAKEQUANT_LANES __m512 one_of(const float* from, int64_t i) { return _mm512_set1_ps(from ? from[i] : 0.0f); }

// Parameters that lie in memory as the elements do.
template <bool kWithReciprocal>
struct ElementLanes {
  const Params<float>& p;
  template <typename L>
  FAKEQUANT_LANES Uniform at(int64_t i, L lanes) const {
    const __m512 scale = load_lanes(p.scale + i, lanes);
    return {scale, kWithReciprocal ? reciprocal_of(scale) : scale, load_present(p.zero_point, i, lanes),
            load_present(p.lo, i, lanes), load_present(p.hi, i, lanes)};
  }
};

// What a loop is made for: `mask` is asked in every turn, and foretold.
template <Arithmetic A, bool kRectified, bool kMasked, typename Rounding>
struct Loop {
  static constexpr bool kWithReciprocal = A == Arithmetic::kReciprocal;
  const Rounding rounding;
  const Mask mask;
  const bool streamed;
  BitWriter bits;

  FAKEQUANT_LANES Loop(const Call<float>& call, bool streamed, uint8_t* to)
      : rounding(call.grid), mask(call.mask), streamed(streamed), bits{to} {}

  // x, or its ReLU: a maximum is its second operand where one is NaN, and where both are zeros.
  FAKEQUANT_LANES __m512 rectified(__m512 x) const { return kRectified ? _mm512_max_ps(_mm512_setzero_ps(), x) : x; }

  FAKEQUANT_LANES __mmask16 passes(__m512 x, const Rounded& rounded, const Uniform& p) const {
    const __mmask16 within = inside(x, rounded, p);
    return kRectified ? _mm512_mask_cmp_ps_mask(within, x, _mm512_setzero_ps(), _CMP_NEQ_UQ) : within;
  }

  FAKEQUANT_LANES __mmask16 inside(__m512 x, const Rounded& rounded, const Uniform& p) const {
    if (mask == Mask::kCodeRange) return rounded.inside;
    if (mask == Mask::kEverywhere) return static_cast<__mmask16>(-1);
    if (mask == Mask::kInputRange)
      return _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(x, p.lo, _CMP_GE_OQ), x, p.hi, _CMP_LE_OQ);
    return _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(x, p.lo, _CMP_GT_OQ), x, p.hi, _CMP_LT_OQ);
  }

  FAKEQUANT_LANES __m512 value(__m512 code, const Uniform& p) const {
    if constexpr (A == Arithmetic::kMultiplier) {
      if constexpr (std::is_same_v<Rounding, FloatLanes>) code = _mm512_add_ps(code, rounding.zero);
      return _mm512_div_ps(code, p.scale);
    }
    if constexpr (Rounding::kOffset) return _mm512_mul_ps(_mm512_sub_ps(code, p.zero_point), p.scale);
    // Rounded once, like the product: adding a zero changes zeros alone.
    return _mm512_fmadd_ps(code, p.scale, rounding.zero);
  }

  // Division it is: on a Zen 5, x r and two FMA that correct it (Markstein 1990) take as long.
  FAKEQUANT_LANES Rounded rounded(__m512 x, const Uniform& p) const {
    const __m512 scaled = A == Arithmetic::kDivide       ? _mm512_div_ps(x, p.scale)
                          : A == Arithmetic::kReciprocal ? _mm512_mul_ps(x, p.reciprocal)
                                                         : _mm512_mul_ps(x, p.scale);
    return rounding.round(scaled, x, p.zero_point);
  }

  template <typename T, typename L>
  FAKEQUANT_LANES void step(const T* from, T* to, const Uniform& p, L lanes) {
    const __m512 x = rectified(load_lanes(from, lanes));
    const Rounded found = rounded(x, p);
    if constexpr (kMasked) bits.append(passes(x, found, p), lanes);
    store_lanes(to, value(found.code, p), lanes);
  }

  template <typename T, typename P>
  FAKEQUANT_LANES void run(const T* x, T* y, int64_t n, const P& p) {
    if (streamed && begins_line(y)) return run_by(x, y, n, p, StreamedLanes{});
    run_by(x, y, n, p, AllLanes{});
  }

  template <typename T, typename P, typename L>
  FAKEQUANT_LANES void run_by(const T* x, T* y, int64_t n, const P& p, L all) {
    int64_t i = 0;
    if constexpr (!kMasked && std::is_same_v<T, NormalBFloat16> && std::is_same_v<P, Uniform>) {
      for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
        const BFloat16Pairs v = load_pairs(x + i);
        const __m512 even = rectified(v.even), odd = rectified(v.odd);
        store_pairs(y + i, {value(rounded(even, p).code, p), value(rounded(odd, p).code, p)}, all);
      }
    }
    for (; i + kLanes <= n; i += kLanes) step(x + i, y + i, p.at(i, all), all);
    if (i < n) step(x + i, y + i, p.at(i, FirstLanes{n - i}), FirstLanes{n - i});
  }

  // Whether no result but zero is subnormal.
  bool gives_normal(float scale) const {
    const float least = A == Arithmetic::kMultiplier ? rounding.smallest / scale : rounding.smallest * scale;
    return least >= std::numeric_limits<float>::min();
  }

  // Runs of `length` elements, the last of which may end sooner, with the parameters of one group each.
  template <typename T>
  FAKEQUANT_LANES void runs(const T* x, T* y, int64_t n, int64_t length, const Params<float>& p) {
    for (int64_t i = 0, g = 0; i < n; i += length, ++g) {
      const int64_t piece = std::min(length, n - i);
      const __m512 scale = _mm512_set1_ps(p.scale[g]);
      const Uniform uniform{scale, kWithReciprocal ? reciprocal_of(scale) : scale, one_of(p.zero_point, g),
                            one_of(p.lo, g), one_of(p.hi, g)};
      if constexpr (std::is_same_v<T, BFloat16>) {
        if (kConvertsBFloat16 && gives_normal(p.scale[g])) {
          run(static_cast<const NormalBFloat16*>(x) + i, static_cast<NormalBFloat16*>(y) + i, piece, uniform);
          continue;
        }
      }
      run(x + i, y + i, piece, uniform);
    }
  }
};

// The elements [first, first + n) of the tiles; x, y and mask point to the first.
template <typename T, Arithmetic A, bool kRectified, bool kMasked, typename Rounding>
FAKEQUANT_AVX512 void quantize_by(const Call<float>& call, const T* x, T* y, uint8_t* mask, int64_t first, int64_t n) {
  // What is written over itself is in the caches already.
  const bool streamed = x != y && streams(call.tiles.elements() * static_cast<int64_t>(sizeof(T)));
  Loop<A, kRectified, kMasked, Rounding> loop(call, streamed, mask);
  for (int64_t i = 0, piece; i < n; i += piece) {
    const Cursor at(call.tiles, first + i);
    const Params<float> p = after(call.params, at.group);
    const int64_t columns = at.columns * at.rows == 1 ? n : at.columns - at.column;  // groups side by side from here
    if (at.within || at.length >= kLanes) {
      piece = std::min(n - i, at.within ? at.length - at.within : columns * at.length);
      loop.runs(x + i, y + i, piece, at.within ? piece : at.length, p);
    } else if (at.length == 1 && at.columns >= 2 * kLanes) {
      piece = std::min(n - i, columns);
      loop.run(x + i, y + i, piece, ElementLanes<loop.kWithReciprocal>{p});
    } else {
      Spread<float> spread;
      piece = std::min(n - i, kChunk);
      const PerElement<float> e = spread.fill(call, first + i, piece);
      const Params<float> of_elements{e.scale, e.zero_point, e.lo, e.hi};
      loop.run(x + i, y + i, piece, ElementLanes<loop.kWithReciprocal>{of_elements});
    }
  }
  loop.bits.finish();
  if (loop.streamed) finish_streaming();
}

// Calls `body` with a value that the compiler knows.
template <typename F>
void with_known(bool value, const F& body) {
  if (value) return body(std::true_type{});
  body(std::false_type{});
}

template <typename T, Arithmetic A>
void quantize_as(const Call<float>& call, const T* x, T* y, uint8_t* mask, int64_t first, int64_t n) {
  with_known(call.rectified, [&](auto rectified) {
    with_known(mask != nullptr, [&](auto masked) {
      const auto by = [&](auto type) {
        using Rounding = typename decltype(type)::type;
        quantize_by<T, A, rectified, masked, Rounding>(call, x, y, mask, first, n);
      };
      if (!call.grid.is_integer()) return by(std::type_identity<FloatLanes>{});
      if constexpr (A != Arithmetic::kMultiplier) {
        if (call.params.zero_point) return by(std::type_identity<IntegerLanes<true>>{});
      }
      by(std::type_identity<IntegerLanes<false>>{});
    });
  });
}

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
FAKEQUANT_AVX512 void measure_16_runs(const I* x, int64_t count, int64_t length, I infinity, I* high) {
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

FAKEQUANT_AVX512 int64_t place_but_zeros(const float* x, int32_t* position, int64_t n, float inverse, int32_t bins) {
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
#endif

template <typename T>
void quantize(const Call<float>& call, const T* x, T* y, uint8_t* mask, int64_t first, int64_t n) {
#ifdef FAKEQUANT_X86
  switch (call.arithmetic) {
    case Arithmetic::kDivide: return quantize_as<T, Arithmetic::kDivide>(call, x, y, mask, first, n);
    case Arithmetic::kReciprocal: return quantize_as<T, Arithmetic::kReciprocal>(call, x, y, mask, first, n);
    case Arithmetic::kMultiplier: return quantize_as<T, Arithmetic::kMultiplier>(call, x, y, mask, first, n);
  }
#endif
}

template <typename I>
int64_t measure(const I* x, int64_t count, int64_t length, I infinity, I* high) {
  if (!kSupported || !allowed || length % 16 != 0 || length > kLongestMeasured) return 0;
  const int64_t whole = count / 16 * 16;
#ifdef FAKEQUANT_X86
  if (length == 16)  // a length known to the compiler
    measure_16_runs(x, whole, 16, infinity, high);
  else
    measure_16_runs(x, whole, length, infinity, high);
#endif
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
#ifdef FAKEQUANT_X86
  if (kSupported && allowed) return place_but_zeros(x, position, n, inverse, bins);
#endif
  return -1;
}

bool serves_avx512(const Call<float>& call) {
  const bool rounds = call.grid.is_integer() || (!call.grid.table && call.grid.quant_min == -call.grid.quant_max);
  return kSupported && allowed && rounds && !call.draw.on;
}

void quantize_avx512(const Call<float>& call, const float* x, float* y, uint8_t* mask, int64_t first, int64_t n) {
  quantize(call, x, y, mask, first, n);
}
void quantize_avx512(const Call<float>& call, const Half* x, Half* y, uint8_t* mask, int64_t first, int64_t n) {
  quantize(call, x, y, mask, first, n);
}
void quantize_avx512(const Call<float>& call, const BFloat16* x, BFloat16* y, uint8_t* mask, int64_t first, int64_t n) {
  quantize(call, x, y, mask, first, n);
}

}  // namespace fakequant

STABLE_TORCH_LIBRARY_FRAGMENT(fakequant_cpu, m) {
  m.def("allow_avx512(bool allow) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(fakequant_cpu, CompositeExplicitAutograd, m) {
  m.impl("allow_avx512", TORCH_BOX(&fakequant::allow_avx512));
}
