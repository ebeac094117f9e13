// The inner loops: runs of elements that share a scale or have one each, and the split of a chunk into them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "call.h"
#include "rounding.h"

namespace fakequant {

// Runs shorter than two vector registers get a scale per element instead.
constexpr int64_t kShortRun = 32;

template <typename C>
struct Uniform {
  C scale, zero_point, lo, hi;
  FAKEQUANT_INLINE C s(int64_t) const { return scale; }
  FAKEQUANT_INLINE C z(int64_t) const { return zero_point; }
  FAKEQUANT_INLINE C low(int64_t) const { return lo; }
  FAKEQUANT_INLINE C high(int64_t) const { return hi; }
};

template <typename C>
struct PerElement {
  const C *scale, *zero_point, *lo, *hi;
  FAKEQUANT_INLINE C s(int64_t i) const { return scale[i]; }
  FAKEQUANT_INLINE C z(int64_t i) const { return zero_point ? zero_point[i] : C(0); }
  FAKEQUANT_INLINE C low(int64_t i) const { return lo[i]; }
  FAKEQUANT_INLINE C high(int64_t i) const { return hi[i]; }
};

// `kMask`: whether to write to `inside` where the code before clamping is in range.
template <Arithmetic A, bool kMask, Emit E, typename C, typename Rounding, typename P>
FAKEQUANT_INLINE void quantize_run(const C* x, C* y, uint8_t* inside, int64_t n, const Rounding& rounding, const P& p) {
  constexpr bool kOffset = Rounding::kInteger && A != Arithmetic::kMultiplier;
  for (int64_t i = 0; i < n; ++i) {
    const C value = x[i];
    const C scale = p.s(i);
    const C scaled = A == Arithmetic::kDivide ? value / scale
                     : A == Arithmetic::kReciprocal ? value * (C(1) / scale)
                                                    : value * scale;
    C code = rounding.round(scaled, i);
    if constexpr (kOffset) code += p.z(i);
    if constexpr (kMask) inside[i] = (code >= rounding.lo) & (code <= rounding.hi);
    code = rounding.lo > code ? rounding.lo : code;
    code = rounding.hi < code ? rounding.hi : code;
    if constexpr (E == Emit::kCode) {
      y[i] = code == code ? code : rounding.lo;
    } else if constexpr (A == Arithmetic::kMultiplier) {
      y[i] = code / scale;
    } else {
      if constexpr (kOffset) code -= p.z(i);
      y[i] = code * scale;
    }
  }
}

template <Arithmetic A, Emit E, typename C, typename Rounding, typename P>
FAKEQUANT_INLINE void quantize_run_by(Mask mask, const C* x, C* y, uint8_t* inside, int64_t n, const Rounding& rounding,
                                      const P& p) {
  if (mask == Mask::kCodeRange) return quantize_run<A, true, E>(x, y, inside, n, rounding, p);
  if (mask == Mask::kInputRange)
    for (int64_t i = 0; i < n; ++i) inside[i] = (x[i] >= p.low(i)) & (x[i] <= p.high(i));
  if (mask == Mask::kClip)
    for (int64_t i = 0; i < n; ++i) inside[i] = (x[i] > p.low(i)) & (x[i] < p.high(i));
  if (mask == Mask::kEverywhere) std::fill_n(inside, n, uint8_t{1});
  quantize_run<A, false, E>(x, y, inside, n, rounding, p);
}

template <Emit E, typename C, typename Rounding, typename P>
FAKEQUANT_INLINE void quantize_run_as(const Call<C>& call, const C* x, C* y, uint8_t* inside, int64_t n,
                                      const Rounding& rounding, const P& p) {
  switch (call.arithmetic) {
    case Arithmetic::kDivide:
      return quantize_run_by<Arithmetic::kDivide, E>(call.mask, x, y, inside, n, rounding, p);
    case Arithmetic::kReciprocal:
      return quantize_run_by<Arithmetic::kReciprocal, E>(call.mask, x, y, inside, n, rounding, p);
    case Arithmetic::kMultiplier:
      return quantize_run_by<Arithmetic::kMultiplier, E>(call.mask, x, y, inside, n, rounding, p);
  }
}

template <typename C, typename P>
FAKEQUANT_INLINE void decode_run(const Call<C>& call, const C* codes, C* y, int64_t n, const P& p) {
  if (call.arithmetic == Arithmetic::kMultiplier) {
    for (int64_t i = 0; i < n; ++i) y[i] = codes[i] / p.s(i);
  } else {
    for (int64_t i = 0; i < n; ++i) y[i] = (codes[i] - p.z(i)) * p.s(i);
  }
}

// Where an element lies among the tiles. Counted up from run to run rather than divided: two divisions would take as
// long as a run of 32.
struct Cursor {
  int64_t length, columns, rows;  // elements of a run, runs with a scale each in a row, rows of the same scales
  int64_t within, column, in_rows, group;
  FAKEQUANT_INLINE Cursor(const Tiles& t, int64_t element) {
    // b1 == 1 with several g1 is a row of scales; otherwise a run of `length` elements shares one.
    const bool one_axis = t.g1 == 1 && t.b1 == 1;
    length = one_axis ? t.b0 : t.b1;
    columns = one_axis ? 1 : t.g1, rows = one_axis ? 1 : t.b0;
    within = element % length;
    const int64_t run = element / length;
    column = run % columns, in_rows = run / columns % rows, group = run / (columns * rows) * columns + column;
  }
  FAKEQUANT_INLINE void next_run() {
    within = 0, ++group;
    if (++column < columns) return;
    column = 0;
    if (++in_rows < rows)
      group -= columns;
    else
      in_rows = 0;
  }
};

template <typename C>
FAKEQUANT_INLINE void spread_16(const C* groups, C* elements, int64_t n) {
  for (int64_t g = 0; g < n; ++g)
    for (int64_t i = 0; i < 16; ++i) elements[16 * g + i] = groups[g];
}

// The parameters of every element of a chunk.
template <typename C>
struct Spread {
  C scale[kChunk], zero_point[kChunk], lo[kChunk], hi[kChunk];

  FAKEQUANT_INLINE PerElement<C> fill(const Call<C>& call, int64_t first, int64_t n) {
    const Params<C>& p = call.params;
    Cursor at(call.tiles, first);
    if (at.columns * at.rows == 1 && at.length == 16 && at.within == 0 && n % 16 == 0) {  // NVFP4
      spread_16(p.scale + at.group, scale, n / 16);
      if (p.zero_point) spread_16(p.zero_point + at.group, zero_point, n / 16);
      if (p.lo) spread_16(p.lo + at.group, lo, n / 16), spread_16(p.hi + at.group, hi, n / 16);
    } else {
      for (int64_t i = 0; i < n; ++i) {
        scale[i] = p.scale[at.group];
        if (p.zero_point) zero_point[i] = p.zero_point[at.group];
        if (p.lo) lo[i] = p.lo[at.group], hi[i] = p.hi[at.group];
        if (++at.within == at.length) at.next_run();
      }
    }
    return {scale, p.zero_point ? zero_point : nullptr, p.lo ? lo : nullptr, p.hi ? hi : nullptr};
  }
};

template <typename C>
FAKEQUANT_INLINE Uniform<C> uniform_of(const Params<C>& p, int64_t g) {
  return {p.scale[g], p.zero_point ? p.zero_point[g] : C(0), p.lo ? p.lo[g] : C(0), p.hi ? p.hi[g] : C(0)};
}

// Runs of a length known to the compiler, those of MX: a loop of a few registers, 0.75 of the time of any length.
template <typename C, typename F>
FAKEQUANT_INLINE void for_each_run_of_32(const Params<C>& p, int64_t first, int64_t n, const F& run) {
  for (int64_t i = 0, g = first / 32; i < n; i += 32, ++g) run(i, int64_t(32), uniform_of(p, g));
}

// Calls `run(begin, length, parameters)` for consecutive pieces of the elements [first, first + n), with begin counted
// from `first`; the parameters of a piece are Uniform or PerElement.
template <typename C, typename F>
FAKEQUANT_INLINE void for_each_run(const Call<C>& call, int64_t first, int64_t n, const F& run) {
  const Params<C>& p = call.params;
  Cursor at(call.tiles, first);
  if (at.columns * at.rows == 1 && at.length == 32 && first % 32 == 0 && n % 32 == 0)
    return for_each_run_of_32(p, first, n, run);
  if (at.length >= kShortRun || at.length >= n) {
    for (int64_t i = 0; i < n; at.next_run()) {
      const int64_t piece = std::min(at.length - at.within, n - i);
      run(i, piece, uniform_of(p, at.group));
      i += piece;
    }
    return;
  }
  if (at.length == 1 && at.columns >= kShortRun) {  // the scales of a row lie side by side already
    for (int64_t i = 0; i < n;) {
      const Cursor from(call.tiles, first + i);
      const int64_t piece = std::min(from.columns - from.column, n - i), g = from.group;
      run(i, piece, PerElement<C>{p.scale + g, p.zero_point ? p.zero_point + g : nullptr, p.lo ? p.lo + g : nullptr,
                                  p.hi ? p.hi + g : nullptr});
      i += piece;
    }
    return;
  }
  Spread<C> spread;
  run(int64_t(0), n, spread.fill(call, first, n));
}

}  // namespace fakequant
