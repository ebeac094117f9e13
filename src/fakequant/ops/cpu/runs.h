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

// Numbers in units of codes. kLattice: whether the call is shifted or exact.
template <Arithmetic A, bool kLattice, typename C, typename P>
FAKEQUANT_INLINE void scale_run(const Call<C>& call, const C* x, C* scaled, int64_t n, const P& p) {
  for (int64_t i = 0; i < n; ++i) {
    const C scale = kLattice ? call.divisor(p.s(i)) : p.s(i);
    const C v = kLattice ? x[i] + call.shift(p.z(i)) : x[i];
    scaled[i] = A == Arithmetic::kDivide       ? v / scale
                : A == Arithmetic::kReciprocal ? v * (C(1) / scale)
                                               : v * scale;
  }
}

// What rounded numbers become: the codes of a format that lie between lo and hi, or their values.
template <typename C>
struct Bounds {
  C lo, hi;
};

// What follows rounding: a format without a zero point, one with it, a shift of x, the multiplier.
enum class Finish { kPlain, kZeroPoint, kShifted, kMultiplier };

// kMask: whether to write to `inside` where the code is within the bounds.
template <Finish F, bool kMask, Emit E, typename C, typename P>
FAKEQUANT_INLINE void finish_run(C* y, uint8_t* FAKEQUANT_RESTRICT inside, int64_t n, const Bounds<C>& bounds,
                                 const P& p) {
  for (int64_t i = 0; i < n; ++i) {
    C code = y[i];
    if constexpr (F == Finish::kZeroPoint) code += p.z(i);
    if constexpr (kMask) inside[i] = (code >= bounds.lo) & (code <= bounds.hi);
    code = bounds.lo > code ? bounds.lo : code;
    code = bounds.hi < code ? bounds.hi : code;
    if constexpr (E == Emit::kCode) {
      y[i] = code == code ? code : bounds.lo;
    } else if constexpr (F == Finish::kMultiplier) {
      y[i] = code / p.s(i);
    } else if constexpr (F == Finish::kShifted) {
      y[i] = (code + C(0)) * p.s(i) - p.z(i);  // integers have no -0.0
    } else {
      if constexpr (F == Finish::kZeroPoint) code -= p.z(i);
      y[i] = code * p.s(i);
    }
  }
}

// Where x is in the range that gradients pass, for the kinds of masks that ask x itself.
template <typename C, typename P>
FAKEQUANT_INLINE void mask_run(Mask mask, const C* x, uint8_t* FAKEQUANT_RESTRICT inside, int64_t n, const P& p) {
  if (mask == Mask::kInputRange)
    for (int64_t i = 0; i < n; ++i) inside[i] = (x[i] >= p.low(i)) & (x[i] <= p.high(i));
  if (mask == Mask::kClip)
    for (int64_t i = 0; i < n; ++i) inside[i] = (x[i] > p.low(i)) & (x[i] < p.high(i));
}

template <typename C, typename P>
FAKEQUANT_INLINE void decode_run(const Call<C>& call, const C* codes, C* y, int64_t n, const P& p) {
  if (call.arithmetic == Arithmetic::kMultiplier) {
    for (int64_t i = 0; i < n; ++i) y[i] = codes[i] / p.s(i);
  } else {
    for (int64_t i = 0; i < n; ++i) y[i] = (codes[i] - p.z(i)) * p.s(i);
  }
}

// Where an element lies among the tiles. It is counted up from run to run: two divisions would take as long as a run of
// 32.
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
  const bool rows = at.length == 1 && at.columns >= kShortRun;  // the scales of a row lie in the order of its elements
  Spread<C> spread;
  for (int64_t i = 0, piece = n; i < n; i += piece) {
    const Cursor from(call.tiles, first + i);
    const int64_t g = from.group;
    if (rows) piece = std::min(from.columns - from.column, n - i);
    run(i, piece, rows ? PerElement<C>{p.scale + g, p.zero_point ? p.zero_point + g : nullptr,
                                       p.lo ? p.lo + g : nullptr, p.hi ? p.hi + g : nullptr}
                       : spread.fill(call, first, n));
  }
}

}  // namespace fakequant
