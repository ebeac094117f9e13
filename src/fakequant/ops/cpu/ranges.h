// The range of the finite values of runs of elements, extended to contain 0, by maxima of their bit patterns.
//
// Without its sign bit, a float is an integer that rises with the magnitude. Maxima of integers vectorise, and come out
// the same in any order, so that the number of threads changes nothing. inf and NaN count as 0.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "call.h"
#include "convert.h"

// GCC unrolls a loop of 16 before it looks for vectors, and then finds none: four times slower.
#if defined(__GNUC__) && !defined(__clang__)
#define FAKEQUANT_KEEP_LOOP _Pragma("GCC unroll 1")
#else
#define FAKEQUANT_KEEP_LOOP
#endif

namespace fakequant {

// The largest magnitudes of the first runs, where the processor has AVX-512 and the runs are short and of whole
// registers: avx512.cpp. Returns of how many runs.
int64_t measure_avx512(const int32_t* x, int64_t count, int64_t length, int32_t infinity, int32_t* high);
int64_t measure_avx512(const int16_t* x, int64_t count, int64_t length, int16_t infinity, int16_t* high);

namespace {

template <typename T>
struct Pattern;
template <>
struct Pattern<Half> {
  using Int = int16_t;
  static constexpr Int kInfinity = 0x7C00;
};
template <>
struct Pattern<BFloat16> {
  using Int = int16_t;
  static constexpr Int kInfinity = 0x7F80;
};
template <>
struct Pattern<float> {
  using Int = int32_t;
  static constexpr Int kInfinity = 0x7F800000;
};
template <>
struct Pattern<double> {
  using Int = int64_t;
  static constexpr Int kInfinity = 0x7FF0000000000000;
};

// Consecutive runs of one length. `high` gets the magnitude of the largest value of each or, if `low` is null, the
// largest magnitude; `low` the magnitude of the lowest.
template <typename I>
struct Runs {
  const I* x;
  int64_t count;
  int64_t length;
  I infinity;
  I* low;
  I* high;
};

template <int64_t kLength, typename I>
FAKEQUANT_INLINE void measure_runs_of(const Runs<I>& runs) {
  const int64_t length = kLength ? kLength : runs.length;
  const I infinity = runs.infinity;
  for (int64_t run = 0; run < runs.count; ++run) {
    const I* x = runs.x + run * length;
    I low = 0, high = 0;
    if (!runs.low) {
      FAKEQUANT_KEEP_LOOP
      for (int64_t i = 0; i < length; ++i) {
        const I magnitude = x[i] & std::numeric_limits<I>::max();
        const I finite = magnitude < infinity ? magnitude : I(0);
        high = high > finite ? high : finite;
      }
    } else {
      FAKEQUANT_KEEP_LOOP
      for (int64_t i = 0; i < length; ++i) {
        const I magnitude = x[i] & std::numeric_limits<I>::max();
        const I finite = magnitude < infinity ? magnitude : I(0);
        const I below = x[i] < 0 ? finite : I(0);
        const I above = x[i] < 0 ? I(0) : finite;
        low = low > below ? low : below;
        high = high > above ? high : above;
      }
      runs.low[run] = low;
    }
    runs.high[run] = high;
  }
}

template <typename I>
FAKEQUANT_INLINE void measure_elements(const Runs<I>& runs) {
  for (int64_t i = 0; i < runs.count; ++i) {
    const I magnitude = runs.x[i] & std::numeric_limits<I>::max();
    const I finite = magnitude < runs.infinity ? magnitude : I(0);
    runs.high[i] = runs.low && runs.x[i] < 0 ? I(0) : finite;
  }
  for (int64_t i = 0; runs.low && i < runs.count; ++i) {
    const I magnitude = runs.x[i] & std::numeric_limits<I>::max();
    runs.low[i] = runs.x[i] < 0 && magnitude < runs.infinity ? magnitude : I(0);
  }
}

// Lengths known to the compiler: MX and NVFP4 blocks, which are a few registers.
template <typename I>
FAKEQUANT_INLINE void measure_runs_by_length(const Runs<I>& runs) {
  if (runs.length == 1) return measure_elements(runs);
  if (runs.length == 16) return measure_runs_of<16>(runs);
  if (runs.length == 32) return measure_runs_of<32>(runs);
  measure_runs_of<0>(runs);
}

FAKEQUANT_CLONES void measure_runs_16(const Runs<int16_t>& runs) { measure_runs_by_length(runs); }
FAKEQUANT_CLONES void measure_runs_32(const Runs<int32_t>& runs) { measure_runs_by_length(runs); }
FAKEQUANT_CLONES void measure_runs_64(const Runs<int64_t>& runs) { measure_runs_by_length(runs); }

template <typename T>
using PatternOf = typename Pattern<T>::Int;

template <typename I>
void measure_runs(const I* x, int64_t count, int64_t length, I infinity, I* low, I* high) {
  int64_t measured = 0;
  if constexpr (sizeof(I) <= 4) measured = low ? 0 : measure_avx512(x, count, length, infinity, high);
  const Runs<I> runs{x + measured * length, count - measured, length, infinity, low, high + measured};
  if constexpr (sizeof(I) == 2) return measure_runs_16(runs);
  if constexpr (sizeof(I) == 4) return measure_runs_32(runs);
  if constexpr (sizeof(I) == 8) return measure_runs_64(runs);
}
template <typename T>
void measure_runs(const T* x, int64_t count, int64_t length, PatternOf<T>* low, PatternOf<T>* high) {
  measure_runs(reinterpret_cast<const PatternOf<T>*>(x), count, length, Pattern<T>::kInfinity, low, high);
}

// The largest of maxima in runs of one length.
template <typename T>
void merge_runs(const std::vector<PatternOf<T>>& maxima, int64_t count, int64_t length, PatternOf<T>* largest) {
  measure_runs<PatternOf<T>>(maxima.data(), count, length, Pattern<T>::kInfinity, nullptr, largest);
}

template <typename I>
void merge_maxima(const I* from, I* into, int64_t n) {
  for (int64_t i = 0; i < n; ++i) into[i] = std::max(into[i], from[i]);
}

// Patterns as the numbers that they are.
template <typename T, typename C>
void load_patterns(const PatternOf<T>* from, C* to, int64_t n) {
  constexpr int64_t kBatch = 64;
  T numbers[kBatch];
  for (int64_t i = 0; i < n; i += kBatch) {
    const int64_t count = std::min(kBatch, n - i);
    std::memcpy(numbers, from + i, count * sizeof(T));
    load(numbers, to + i, count);
  }
}

}  // namespace
}  // namespace fakequant
