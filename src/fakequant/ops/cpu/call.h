// What one call says: the arithmetic, the format's grid, the tiles and the parameters of every group.
#pragma once

#include <cstdint>
#include <limits>

#if defined(__x86_64__) && defined(__GNUC__)
#define FAKEQUANT_X86
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__GNUC__)
#define FAKEQUANT_NEON
#include <arm_neon.h>
#endif
// Each marked function is compiled for three instruction sets; the processor's is chosen when the library loads.
#if defined(FAKEQUANT_X86) && !defined(__clang__)
#define FAKEQUANT_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FAKEQUANT_CLONES
#endif
#if defined(_MSC_VER)
#define FAKEQUANT_INLINE __forceinline
#define FAKEQUANT_INLINE_LAMBDA
#define FAKEQUANT_RESTRICT __restrict
#else
#define FAKEQUANT_INLINE inline __attribute__((always_inline))
#define FAKEQUANT_INLINE_LAMBDA __attribute__((always_inline))
#define FAKEQUANT_RESTRICT __restrict__
#endif

namespace fakequant {

constexpr int64_t kChunk = 1024;

enum class Arithmetic : int64_t { kDivide = 0, kReciprocal = 1, kMultiplier = 2 };
enum class Mask : int64_t { kNone = 0, kCodeRange = 1, kInputRange = 2, kClip = 3, kEverywhere = 4 };
enum class Emit { kValue, kCode };

struct Grid {
  double quant_min;
  double quant_max;
  int64_t mantissa_bits;  // negative: integers, or a table
  int64_t min_exponent;
  bool negative_zero;
  const double* table;  // table_size values, then from which number on each but the first is reached; or null
  int64_t table_size;
  bool is_integer() const { return mantissa_bits < 0 && table == nullptr; }
};

struct Tiles {
  int64_t g0, b0, g1, b1;
  int64_t elements() const { return g0 * b0 * g1 * b1; }
  int64_t groups() const { return g0 * g1; }
};

// What every element of a chunk needs, in the compute type C; null pointers mean "absent".
template <typename C>
struct Params {
  const C* scale;
  const C* zero_point;
  const C* lo;
  const C* hi;
};

// Where stochastic rounding takes the random words of the elements: given, or from a seed where the elements lie in
// row-major order.
struct Draw {
  bool on = false;
  uint64_t seed = 0;
  const uint32_t* words = nullptr;
  int64_t before = 0;  // how many elements of the tensor come before the first of the tiles
};

template <typename C>
struct Call {
  Tiles tiles;
  Grid grid;
  Arithmetic arithmetic;
  bool rectified;  // the ReLU of x is quantized, and the mask is where the gradient passes both
  bool shifted;    // the zero points are offsets in units of x: x + offset is rounded, and values are less the offset
  bool exact;      // scales may be negative or 0; under 0 all values are 0, whose codes are those by the largest scale
  Mask mask;
  Params<C> params;
  Draw draw;
  int64_t ahead = 0;  // prefetches what lies this number of elements further on, if it will be read next

  FAKEQUANT_INLINE C divisor(C scale) const {
    return exact && scale == C(0) ? std::numeric_limits<C>::max() : scale;
  }
  // What is added to x: adding -0.0 changes nothing.
  FAKEQUANT_INLINE C shift(C zero_point) const { return shifted ? zero_point : C(-0.0); }
};

}  // namespace fakequant
