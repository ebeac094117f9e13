// Chunks of 1024 elements in three steps: to units of codes, rounded, to codes or values. Each step is a loop over the
// first-level cache. So an arithmetic, a rounding and a kind of result are compiled once each, instead of every
// combination of them: a seventh of the time to compile.

#include "chunks.h"

#include <algorithm>
#include <cstdint>

#include "call.h"
#include "rounding.h"
#include "runs.h"

namespace fakequant {
namespace {

template <typename C>
FAKEQUANT_INLINE void scale_as(const Call<C>& call, const C* x, C* y, int64_t first, int64_t n) {
  using enum Arithmetic;
  const bool lattice = call.shifted || call.exact;
  for_each_run(call, first, n, [&](int64_t i, int64_t piece, const auto& p) FAKEQUANT_INLINE_LAMBDA {
    switch (call.arithmetic) {
      case kDivide:
        if (lattice) return scale_run<kDivide, true>(call, x + i, y + i, piece, p);
        return scale_run<kDivide, false>(call, x + i, y + i, piece, p);
      case kReciprocal:
        if (lattice) return scale_run<kReciprocal, true>(call, x + i, y + i, piece, p);
        return scale_run<kReciprocal, false>(call, x + i, y + i, piece, p);
      case kMultiplier: return scale_run<kMultiplier, false>(call, x + i, y + i, piece, p);
    }
  });
}
FAKEQUANT_CLONES void scale_chunk(const Call<float>& call, const float* x, float* y, int64_t first, int64_t n) {
  scale_as(call, x, y, first, n);
}
FAKEQUANT_CLONES void scale_chunk(const Call<double>& call, const double* x, double* y, int64_t first, int64_t n) {
  scale_as(call, x, y, first, n);
}

template <typename Rounding, typename C>
FAKEQUANT_INLINE void round_by(const Grid& grid, C* y, int64_t n) {
  const Rounding rounding(grid);
  for (int64_t i = 0; i < n; ++i) y[i] = rounding.round(y[i]);
}
template <typename C>
FAKEQUANT_INLINE void round_as(const Grid& grid, C* y, int64_t n) {
  if (grid.is_integer()) return round_by<IntegerRounding<C>>(grid, y, n);
  if (!grid.table) return round_by<FloatRounding<C>>(grid, y, n);
  if (grid.table_size <= SmallTableRounding<C>::kSize) return round_by<SmallTableRounding<C>>(grid, y, n);
  round_by<TableRounding<C>>(grid, y, n);
}
FAKEQUANT_CLONES void round_chunk(const Grid& grid, float* y, int64_t n) { round_as(grid, y, n); }
FAKEQUANT_CLONES void round_chunk(const Grid& grid, double* y, int64_t n) { round_as(grid, y, n); }

template <Emit E, bool kMask, typename C>
FAKEQUANT_INLINE void finish_as(const Call<C>& call, C* y, uint8_t* inside, int64_t first, int64_t n) {
  const Bounds<C> bounds{static_cast<C>(call.grid.quant_min), static_cast<C>(call.grid.quant_max)};
  const bool multiplier = call.arithmetic == Arithmetic::kMultiplier, offset = call.grid.is_integer() && !multiplier;
  using enum Finish;
  for_each_run(call, first, n, [&](int64_t i, int64_t piece, const auto& p) FAKEQUANT_INLINE_LAMBDA {
    uint8_t* of_run = kMask ? inside + i : nullptr;
    if (call.shifted) return finish_run<kShifted, kMask, E>(y + i, of_run, piece, bounds, p);
    if (offset) return finish_run<kZeroPoint, kMask, E>(y + i, of_run, piece, bounds, p);
    if (multiplier) return finish_run<kMultiplier, kMask, E>(y + i, of_run, piece, bounds, p);
    if constexpr (E == Emit::kValue) finish_run<kPlain, kMask, E>(y + i, of_run, piece, bounds, p);
  });
}
template <Emit E, typename C>
FAKEQUANT_INLINE void finish_masked(const Call<C>& call, const C* x, C* y, uint8_t* inside, int64_t first, int64_t n) {
  if (call.mask == Mask::kCodeRange) return finish_as<E, true>(call, y, inside, first, n);
  if (call.mask == Mask::kEverywhere) std::fill_n(inside, n, uint8_t{1});
  if (call.mask == Mask::kInputRange || call.mask == Mask::kClip)
    for_each_run(call, first, n, [&](int64_t i, int64_t piece, const auto& p) FAKEQUANT_INLINE_LAMBDA {
      mask_run(call.mask, x + i, inside + i, piece, p);
    });
  finish_as<E, false>(call, y, inside, first, n);
}
FAKEQUANT_CLONES void finish_values(const Call<float>& call, const float* x, float* y, uint8_t* inside, int64_t first,
                                    int64_t n) {
  finish_masked<Emit::kValue>(call, x, y, inside, first, n);
}
FAKEQUANT_CLONES void finish_values(const Call<double>& call, const double* x, double* y, uint8_t* inside,
                                    int64_t first, int64_t n) {
  finish_masked<Emit::kValue>(call, x, y, inside, first, n);
}
FAKEQUANT_CLONES void finish_codes(const Call<float>& call, const float* x, float* y, uint8_t* inside, int64_t first,
                                   int64_t n) {
  finish_masked<Emit::kCode>(call, x, y, inside, first, n);
}
FAKEQUANT_CLONES void finish_codes(const Call<double>& call, const double* x, double* y, uint8_t* inside, int64_t first,
                                   int64_t n) {
  finish_masked<Emit::kCode>(call, x, y, inside, first, n);
}

template <typename C>
void scale_and_round(const Call<C>& call, const C* x, C* y, int64_t first, int64_t n) {
  scale_chunk(call, x, y, first, n);
  if (call.draw.on) return round_chunk_drawn(call, y, first, n);
  round_chunk(call.grid, y, n);
}

template <typename C>
FAKEQUANT_INLINE void decode_as(const Call<C>& call, const C* codes, C* y, int64_t first, int64_t n) {
  for_each_run(call, first, n, [&](int64_t i, int64_t piece, const auto& p) FAKEQUANT_INLINE_LAMBDA {
    decode_run(call, codes + i, y + i, piece, p);
  });
}
FAKEQUANT_CLONES void decode_f32(const Call<float>& call, const float* codes, float* y, int64_t first, int64_t n) {
  decode_as(call, codes, y, first, n);
}
FAKEQUANT_CLONES void decode_f64(const Call<double>& call, const double* codes, double* y, int64_t first, int64_t n) {
  decode_as(call, codes, y, first, n);
}

}  // namespace

void quantize_chunk(const Call<float>& call, const float* x, float* y, uint8_t* inside, int64_t first, int64_t n) {
  scale_and_round(call, x, y, first, n);
  finish_values(call, x, y, inside, first, n);
}
void quantize_chunk(const Call<double>& call, const double* x, double* y, uint8_t* inside, int64_t first, int64_t n) {
  scale_and_round(call, x, y, first, n);
  finish_values(call, x, y, inside, first, n);
}

void encode_chunk(const Call<float>& call, const float* x, float* codes, uint8_t* inside, int64_t first, int64_t n) {
  scale_and_round(call, x, codes, first, n);
  finish_codes(call, x, codes, inside, first, n);
}
void encode_chunk(const Call<double>& call, const double* x, double* codes, uint8_t* inside, int64_t first, int64_t n) {
  scale_and_round(call, x, codes, first, n);
  finish_codes(call, x, codes, inside, first, n);
}

void decode_chunk(const Call<float>& call, const float* codes, float* y, int64_t first, int64_t n) {
  decode_f32(call, codes, y, first, n);
}
void decode_chunk(const Call<double>& call, const double* codes, double* y, int64_t first, int64_t n) {
  decode_f64(call, codes, y, first, n);
}

}  // namespace fakequant
