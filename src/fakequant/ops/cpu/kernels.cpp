// CPU kernels on LibTorch's stable ABI: fake quantization, encoding, decoding and the masked gradient.
//
// They return the bits of numerics/reference.py. That rests on three compiler settings (pyproject.toml's build):
// -ffp-contract=off (no FMA contraction), true division, and no -ffast-math; NaN survives because every clamp is
// written as `bound > v ? bound : v`, which keeps v where the comparison is false.
//
// The tensor is a run of elements in memory, seen as tiles [g0, b0, g1, b1] with one scale per (g0, g1). Work is cut
// into chunks of 1024 elements: a chunk is converted to the compute type in a buffer that stays in the first-level
// cache, quantized there, and converted back. A chunk covers whole bytes of the packed mask, so threads never share one.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FAKEQUANT_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FAKEQUANT_CLONES
#endif
#define FAKEQUANT_INLINE inline __attribute__((always_inline))

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kChunk = 1024;
constexpr int64_t kGrainChunks = 32;   // 32,768 elements: below that a second thread costs more than it brings.
constexpr int64_t kShortRun = 16;      // Runs shorter than a vector register get a scale per element instead.

enum class Arithmetic : int64_t { kDivide = 0, kReciprocal = 1, kMultiplier = 2 };
enum class Mask : int64_t { kNone = 0, kCodeRange = 1, kInputRange = 2 };
enum class Emit { kValue, kCode };

struct Grid {
  double quant_min;
  double quant_max;
  int64_t mantissa_bits;  // negative: integers
  int64_t min_exponent;
  bool is_integer() const { return mantissa_bits < 0; }
};

struct Tiles {
  int64_t g0, b0, g1, b1;
  int64_t elements() const { return g0 * b0 * g1 * b1; }
};

// What every element of a chunk needs, in the compute type C; null pointers mean "absent".
template <typename C>
struct Params {
  const C* scale;
  const C* zero_point;
  const C* lo;
  const C* hi;
};

template <typename C>
struct Call {
  Tiles tiles;
  Grid grid;
  Arithmetic arithmetic;
  Mask mask;
  Params<C> params;
};

// ---- rounding -------------------------------------------------------------------------------------------------

template <typename C>
struct FloatBits;
template <>
struct FloatBits<float> {
  using Int = uint32_t;
  static constexpr int kMantissa = 23;
  static constexpr int kBias = 127;
  static constexpr Int kExponentMask = 0x7F800000u;
};
template <>
struct FloatBits<double> {
  using Int = uint64_t;
  static constexpr int kMantissa = 52;
  static constexpr int kBias = 1023;
  static constexpr Int kExponentMask = 0x7FF0000000000000ull;
};

template <typename C>
struct IntegerRounding {
  C lo, hi;
  explicit IntegerRounding(const Grid& g) : lo(static_cast<C>(g.quant_min)), hi(static_cast<C>(g.quant_max)) {}
  FAKEQUANT_INLINE C round(C v) const { return std::rint(v); }
};

// Adding and subtracting c = 2**(e + mantissa(C) - M) rounds |v| to a multiple of 2**(e - M), ties to even, because
// that is the spacing of C just above c. |v| is first limited to twice the largest value, so that c stays finite.
template <typename C>
struct FloatRounding {
  using Bits = FloatBits<C>;
  using Int = typename Bits::Int;
  C lo, hi, limit;
  Int least, shift;
  explicit FloatRounding(const Grid& g)
      : lo(static_cast<C>(g.quant_min)),
        hi(static_cast<C>(g.quant_max)),
        limit(static_cast<C>(2 * g.quant_max)),
        least(static_cast<Int>(g.min_exponent + Bits::kBias) << Bits::kMantissa),
        shift(static_cast<Int>(Bits::kMantissa - g.mantissa_bits) << Bits::kMantissa) {}
  FAKEQUANT_INLINE C round(C v) const {
    const C magnitude = std::fabs(v);
    const C limited = magnitude > limit ? limit : magnitude;
    Int exponent = __builtin_bit_cast(Int, limited) & Bits::kExponentMask;
    exponent = exponent < least ? least : exponent;
    const C c = __builtin_bit_cast(C, static_cast<Int>(exponent + shift));
    return std::copysign((limited + c) - c, v);
  }
};

// ---- one run of elements --------------------------------------------------------------------------------------

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

template <Arithmetic A, Mask M, Emit E, typename C, typename Rounding, typename P>
FAKEQUANT_INLINE void quantize_run(const C* x, C* y, uint8_t* inside, int64_t n, const Rounding& rounding, const P& p) {
  constexpr bool kInteger = std::is_same_v<Rounding, IntegerRounding<C>>;
  constexpr bool kOffset = kInteger && A != Arithmetic::kMultiplier;
  for (int64_t i = 0; i < n; ++i) {
    const C value = x[i];
    const C scale = p.s(i);
    const C scaled = A == Arithmetic::kDivide ? value / scale
                     : A == Arithmetic::kReciprocal ? value * (C(1) / scale)
                                                    : value * scale;
    C code = rounding.round(scaled);
    if constexpr (kOffset) code += p.z(i);
    if constexpr (M == Mask::kCodeRange) inside[i] = (code >= rounding.lo) & (code <= rounding.hi);
    if constexpr (M == Mask::kInputRange) inside[i] = (value >= p.low(i)) & (value <= p.high(i));
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

template <Emit E, typename C, typename Rounding, typename P>
FAKEQUANT_INLINE void quantize_run_as(const Call<C>& call, const C* x, C* y, uint8_t* inside, int64_t n,
                                      const Rounding& rounding, const P& p) {
#define FAKEQUANT_RUN(A, M)                                                 \
  if (call.arithmetic == A && (E == Emit::kCode || call.mask == M)) {       \
    quantize_run<A, E == Emit::kCode ? Mask::kNone : M, E>(x, y, inside, n, rounding, p); \
    return;                                                                 \
  }
#define FAKEQUANT_RUN_ARITHMETIC(A)   \
  FAKEQUANT_RUN(A, Mask::kNone)       \
  if constexpr (E == Emit::kValue) {  \
    FAKEQUANT_RUN(A, Mask::kCodeRange) \
    FAKEQUANT_RUN(A, Mask::kInputRange) \
  }
  FAKEQUANT_RUN_ARITHMETIC(Arithmetic::kDivide)
  FAKEQUANT_RUN_ARITHMETIC(Arithmetic::kReciprocal)
  FAKEQUANT_RUN_ARITHMETIC(Arithmetic::kMultiplier)
#undef FAKEQUANT_RUN_ARITHMETIC
#undef FAKEQUANT_RUN
}

template <typename C, typename P>
FAKEQUANT_INLINE void decode_run(const Call<C>& call, const C* codes, C* y, int64_t n, const P& p) {
  if (call.arithmetic == Arithmetic::kMultiplier) {
    for (int64_t i = 0; i < n; ++i) y[i] = codes[i] / p.s(i);
  } else {
    for (int64_t i = 0; i < n; ++i) y[i] = (codes[i] - p.z(i)) * p.s(i);
  }
}

// ---- a chunk: split into runs that share a scale --------------------------------------------------------------

// Calls `uniform(begin, length, Uniform)` or `varying(begin, length, PerElement)` for consecutive pieces of the
// elements [first, first + n), with begin counted from `first`.
template <typename C, typename F>
FAKEQUANT_INLINE void for_each_run(const Call<C>& call, int64_t first, int64_t n, const F& run) {
  const Tiles& t = call.tiles;
  const Params<C>& p = call.params;
  // b1 == 1 with several g1 is a row of scales; otherwise a run of `length` elements shares one.
  const bool one_axis = t.g1 == 1 && t.b1 == 1;
  const int64_t length = one_axis ? t.b0 : t.b1;
  const int64_t row = t.g1 * t.b1;  // elements of one (g0, b0) index
  const auto group = [&](int64_t element) {
    return one_axis ? element / t.b0 : element / (row * t.b0) * t.g1 + element % row / t.b1;
  };
  if (length >= kShortRun || length >= n) {
    for (int64_t i = 0; i < n;) {
      const int64_t g = group(first + i);
      const int64_t piece = std::min(length - (first + i) % length, n - i);
      const Uniform<C> uniform{p.scale[g], p.zero_point ? p.zero_point[g] : C(0), p.lo ? p.lo[g] : C(0),
                               p.hi ? p.hi[g] : C(0)};
      run(i, piece, uniform);
      i += piece;
    }
    return;
  }
  if (!one_axis && t.b1 == 1) {  // the scales of a row lie side by side already
    for (int64_t i = 0; i < n;) {
      const int64_t g = group(first + i);
      const int64_t piece = std::min(t.g1 - (first + i) % t.g1, n - i);
      const PerElement<C> row_params{p.scale + g, p.zero_point ? p.zero_point + g : nullptr, p.lo ? p.lo + g : nullptr,
                                     p.hi ? p.hi + g : nullptr};
      run(i, piece, row_params);
      i += piece;
    }
    return;
  }
  C scale[kChunk], zero_point[kChunk], lo[kChunk], hi[kChunk];
  int64_t within = (first % length), g = group(first);
  for (int64_t i = 0; i < n; ++i) {
    scale[i] = p.scale[g];
    if (p.zero_point) zero_point[i] = p.zero_point[g];
    if (p.lo) lo[i] = p.lo[g], hi[i] = p.hi[g];
    if (++within == length) within = 0, g = group(first + i + 1);
  }
  run(int64_t(0), n, PerElement<C>{scale, p.zero_point ? zero_point : nullptr, lo, hi});
}

template <Emit E, typename C, typename Rounding>
FAKEQUANT_INLINE void quantize_chunk(const Call<C>& call, const C* x, C* y, uint8_t* inside, int64_t first, int64_t n) {
  const Rounding rounding(call.grid);
  for_each_run(call, first, n, [&](int64_t i, int64_t piece, const auto& p) __attribute__((always_inline)) {
    quantize_run_as<E>(call, x + i, y + i, inside + i, piece, rounding, p);
  });
}

FAKEQUANT_CLONES void quantize_chunk_f32(const Call<float>& call, const float* x, float* y, uint8_t* inside,
                                         int64_t first, int64_t n) {
  if (call.grid.is_integer())
    quantize_chunk<Emit::kValue, float, IntegerRounding<float>>(call, x, y, inside, first, n);
  else
    quantize_chunk<Emit::kValue, float, FloatRounding<float>>(call, x, y, inside, first, n);
}

void quantize_chunk_f64(const Call<double>& call, const double* x, double* y, uint8_t* inside, int64_t first,
                        int64_t n) {
  if (call.grid.is_integer())
    quantize_chunk<Emit::kValue, double, IntegerRounding<double>>(call, x, y, inside, first, n);
  else
    quantize_chunk<Emit::kValue, double, FloatRounding<double>>(call, x, y, inside, first, n);
}

FAKEQUANT_CLONES void encode_chunk_f32(const Call<float>& call, const float* x, float* codes, int64_t first, int64_t n) {
  quantize_chunk<Emit::kCode, float, IntegerRounding<float>>(call, x, codes, nullptr, first, n);
}

void encode_chunk_f64(const Call<double>& call, const double* x, double* codes, int64_t first, int64_t n) {
  quantize_chunk<Emit::kCode, double, IntegerRounding<double>>(call, x, codes, nullptr, first, n);
}

FAKEQUANT_CLONES void decode_chunk_f32(const Call<float>& call, const float* codes, float* y, int64_t first, int64_t n) {
  for_each_run(call, first, n, [&](int64_t i, int64_t piece, const auto& p) __attribute__((always_inline)) {
    decode_run(call, codes + i, y + i, piece, p);
  });
}

void decode_chunk_f64(const Call<double>& call, const double* codes, double* y, int64_t first, int64_t n) {
  for_each_run(call, first, n, [&](int64_t i, int64_t piece, const auto& p) __attribute__((always_inline)) {
    decode_run(call, codes + i, y + i, piece, p);
  });
}

void quantize_chunk(const Call<float>& c, const float* x, float* y, uint8_t* m, int64_t first, int64_t n) {
  quantize_chunk_f32(c, x, y, m, first, n);
}
void quantize_chunk(const Call<double>& c, const double* x, double* y, uint8_t* m, int64_t first, int64_t n) {
  quantize_chunk_f64(c, x, y, m, first, n);
}
void encode_chunk(const Call<float>& c, const float* x, float* q, int64_t first, int64_t n) {
  encode_chunk_f32(c, x, q, first, n);
}
void encode_chunk(const Call<double>& c, const double* x, double* q, int64_t first, int64_t n) {
  encode_chunk_f64(c, x, q, first, n);
}
void decode_chunk(const Call<float>& c, const float* q, float* y, int64_t first, int64_t n) {
  decode_chunk_f32(c, q, y, first, n);
}
void decode_chunk(const Call<double>& c, const double* q, double* y, int64_t first, int64_t n) {
  decode_chunk_f64(c, q, y, first, n);
}

// ---- conversions between storage and compute types ------------------------------------------------------------

#ifdef __FLT16_MAX__
using Half = _Float16;  // vectorised by the compiler where the processor converts
#else
using Half = torch::headeronly::Half;
#endif
struct BFloat16 {
  uint16_t bits;
};

FAKEQUANT_CLONES void load_half(const Half* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<float>(from[i]);
}
FAKEQUANT_CLONES void store_half(const float* from, Half* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<Half>(from[i]);
}
FAKEQUANT_CLONES void load_bfloat16(const BFloat16* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = __builtin_bit_cast(float, static_cast<uint32_t>(from[i].bits) << 16);
}
FAKEQUANT_CLONES void store_bfloat16(const float* from, BFloat16* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, from[i]);
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
    to[i].bits = static_cast<uint16_t>(from[i] == from[i] ? rounded : 0x7FC0u);
  }
}
template <typename From, typename To>
FAKEQUANT_INLINE void convert_each(const From* from, To* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<To>(from[i]);
}

void load(const Half* from, float* to, int64_t n) { load_half(from, to, n); }
void load(const BFloat16* from, float* to, int64_t n) { load_bfloat16(from, to, n); }
template <typename From, typename To>
void load(const From* from, To* to, int64_t n) {
  convert_each(from, to, n);
}
void store(const float* from, Half* to, int64_t n) { store_half(from, to, n); }
void store(const float* from, BFloat16* to, int64_t n) { store_bfloat16(from, to, n); }
template <typename From, typename To>
void store(const From* from, To* to, int64_t n) {
  convert_each(from, to, n);
}

// One bit per element: bit i % 8 of byte i / 8. The multiplication gathers the low bits of eight bytes in the top one.
FAKEQUANT_CLONES void pack(const uint8_t* inside, uint8_t* bits, int64_t n) {
  const int64_t bytes = n / 8;
  for (int64_t i = 0; i < bytes; ++i) {
    uint64_t eight;
    std::memcpy(&eight, inside + 8 * i, 8);
    bits[i] = static_cast<uint8_t>((eight * 0x0102040810204080ull) >> 56);
  }
  if (n % 8) {
    uint8_t last = 0;
    for (int64_t i = 8 * bytes; i < n; ++i) last |= static_cast<uint8_t>(inside[i] << (i % 8));
    bits[bytes] = last;
  }
}

// ---- the loops over chunks ------------------------------------------------------------------------------------

template <typename F>
void for_each_chunk(int64_t elements, const F& body) {
  const int64_t chunks = (elements + kChunk - 1) / kChunk;
  torch::stable::parallel_for(0, chunks, kGrainChunks, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk)
      body(chunk * kChunk, std::min(kChunk, elements - chunk * kChunk));
  });
}

template <typename T, typename C>
void quantize_all(const Call<C>& call, const T* x, T* y, uint8_t* mask) {
  for_each_chunk(call.tiles.elements(), [&](int64_t first, int64_t n) {
    alignas(64) uint8_t inside[kChunk];
    if constexpr (std::is_same_v<T, C>) {
      quantize_chunk(call, x + first, y + first, inside, first, n);
    } else {
      alignas(64) C in[kChunk];
      alignas(64) C out[kChunk];
      load(x + first, in, n);
      quantize_chunk(call, in, out, inside, first, n);
      store(out, y + first, n);
    }
    if (call.mask != Mask::kNone) pack(inside, mask + first / 8, n);
  });
}

template <typename T, typename C, typename Q>
void encode_all(const Call<C>& call, const T* x, Q* codes) {
  for_each_chunk(call.tiles.elements(), [&](int64_t first, int64_t n) {
    alignas(64) C in[kChunk];
    alignas(64) C out[kChunk];
    load(x + first, in, n);
    encode_chunk(call, in, out, first, n);
    store(out, codes + first, n);
  });
}

template <typename Q, typename C, typename T>
void decode_all(const Call<C>& call, const Q* codes, T* y) {
  for_each_chunk(call.tiles.elements(), [&](int64_t first, int64_t n) {
    alignas(64) C in[kChunk];
    alignas(64) C out[kChunk];
    load(codes + first, in, n);
    decode_chunk(call, in, out, first, n);
    store(out, y + first, n);
  });
}

// dx = dy where the bit is set, else +0.0: eight elements per byte of the mask, as integers, so that NaN is no special.
template <typename U>
FAKEQUANT_INLINE void apply_mask(const U* dy, const uint8_t* mask, U* dx, int64_t n) {
  const int64_t bytes = n / 8;
  for (int64_t i = 0; i < bytes; ++i) {
    const U bits = mask[i];
    for (int j = 0; j < 8; ++j) dx[8 * i + j] = dy[8 * i + j] & static_cast<U>(-static_cast<U>((bits >> j) & 1));
  }
  for (int64_t i = 8 * bytes; i < n; ++i) dx[i] = (mask[bytes] >> (i % 8)) & 1 ? dy[i] : U(0);
}
FAKEQUANT_CLONES void apply_mask_16(const uint16_t* dy, const uint8_t* mask, uint16_t* dx, int64_t n) {
  apply_mask(dy, mask, dx, n);
}
FAKEQUANT_CLONES void apply_mask_32(const uint32_t* dy, const uint8_t* mask, uint32_t* dx, int64_t n) {
  apply_mask(dy, mask, dx, n);
}
FAKEQUANT_CLONES void apply_mask_64(const uint64_t* dy, const uint8_t* mask, uint64_t* dx, int64_t n) {
  apply_mask(dy, mask, dx, n);
}

// ---- operators ------------------------------------------------------------------------------------------------

template <typename C>
Params<C> params_of(const Tensor& scale, const std::optional<Tensor>& zero_point, const std::optional<Tensor>& lo,
                    const std::optional<Tensor>& hi) {
  const auto data = [](const std::optional<Tensor>& t) {
    return t.has_value() ? static_cast<const C*>(t->data_ptr()) : nullptr;
  };
  return {static_cast<const C*>(scale.data_ptr()), data(zero_point), data(lo), data(hi)};
}

// Calls `body` with a value of the element type of a floating tensor and one of its compute type.
template <typename F>
void with_float_type(const Tensor& t, const F& body) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return body(float{}, float{});
    case ScalarType::Double: return body(double{}, double{});
    case ScalarType::Half: return body(Half{}, float{});
    case ScalarType::BFloat16: return body(BFloat16{}, float{});
    default: STD_TORCH_CHECK(false, "fakequant_cpu: not a floating tensor");
  }
}
template <typename F>
void with_code_type(const Tensor& t, const F& body) {
  switch (t.scalar_type()) {
    case ScalarType::Char: return body(int8_t{});
    case ScalarType::Byte: return body(uint8_t{});
    case ScalarType::Short: return body(int16_t{});
    case ScalarType::UInt16: return body(uint16_t{});
    case ScalarType::Int: return body(int32_t{});
    default: STD_TORCH_CHECK(false, "fakequant_cpu: no integer dtype for codes");
  }
}

#define FAKEQUANT_TENSORS                                                                        \
  const Tensor &scale, const std::optional<Tensor>&zero_point, const std::optional<Tensor>&lo, \
      const std::optional<Tensor>&hi
#define FAKEQUANT_CALL                                                                                       \
  int64_t g0, int64_t b0, int64_t g1, int64_t b1, double quant_min, double quant_max, int64_t mantissa_bits, \
      int64_t min_exponent, int64_t arithmetic

template <typename C>
Call<C> make_call(FAKEQUANT_TENSORS, FAKEQUANT_CALL, int64_t mask) {
  return {{g0, b0, g1, b1},
          {quant_min, quant_max, mantissa_bits, min_exponent},
          static_cast<Arithmetic>(arithmetic),
          static_cast<Mask>(mask),
          params_of<C>(scale, zero_point, lo, hi)};
}
#define FAKEQUANT_MAKE_CALL(C, mask)                                                                               \
  make_call<C>(scale, zero_point, lo, hi, g0, b0, g1, b1, quant_min, quant_max, mantissa_bits, min_exponent, \
               arithmetic, mask)

void fake_quantize(const Tensor& x, FAKEQUANT_TENSORS, Tensor y, std::optional<Tensor> mask, FAKEQUANT_CALL,
                   int64_t mask_kind) {
  with_float_type(x, [&](auto t, auto c) {
    using T = decltype(t);
    using C = decltype(c);
    quantize_all(FAKEQUANT_MAKE_CALL(C, mask_kind), static_cast<const T*>(x.data_ptr()), static_cast<T*>(y.data_ptr()),
                 mask.has_value() ? static_cast<uint8_t*>(mask->data_ptr()) : nullptr);
  });
}

void quantize(const Tensor& x, FAKEQUANT_TENSORS, Tensor codes, FAKEQUANT_CALL) {
  with_float_type(x, [&](auto t, auto c) {
    using T = decltype(t);
    using C = decltype(c);
    with_code_type(codes, [&](auto q) {
      encode_all(FAKEQUANT_MAKE_CALL(C, 0), static_cast<const T*>(x.data_ptr()),
                 static_cast<decltype(q)*>(codes.data_ptr()));
    });
  });
}

void dequantize(const Tensor& codes, FAKEQUANT_TENSORS, Tensor y, FAKEQUANT_CALL) {
  with_float_type(y, [&](auto t, auto c) {
    using T = decltype(t);
    using C = decltype(c);
    with_code_type(codes, [&](auto q) {
      decode_all(FAKEQUANT_MAKE_CALL(C, 0), static_cast<const decltype(q)*>(codes.data_ptr()),
                 static_cast<T*>(y.data_ptr()));
    });
  });
}

void mask_gradient(const Tensor& dy, const Tensor& mask, Tensor dx) {
  const auto* bits = static_cast<const uint8_t*>(mask.data_ptr());
  const auto run = [&](auto u, const auto& apply) {
    using U = decltype(u);
    const auto* in = static_cast<const U*>(dy.data_ptr());
    auto* out = static_cast<U*>(dx.data_ptr());
    for_each_chunk(dy.numel(), [&](int64_t first, int64_t n) { apply(in + first, bits + first / 8, out + first, n); });
  };
  switch (dy.element_size()) {
    case 2: return run(uint16_t{}, apply_mask_16);
    case 4: return run(uint32_t{}, apply_mask_32);
    case 8: return run(uint64_t{}, apply_mask_64);
    default: STD_TORCH_CHECK(false, "fakequant_cpu::mask_gradient: elements of 2, 4 or 8 bytes only");
  }
}

}  // namespace

#define FAKEQUANT_SCHEMA_PARAMS "Tensor scale, Tensor? zero_point, Tensor? lo, Tensor? hi, "
#define FAKEQUANT_SCHEMA_CALL                                                              \
  "int g0, int b0, int g1, int b1, float quant_min, float quant_max, int mantissa_bits, " \
  "int min_exponent, int arithmetic"

STABLE_TORCH_LIBRARY(fakequant_cpu, m) {
  m.def("fake_quantize(Tensor x, " FAKEQUANT_SCHEMA_PARAMS "Tensor(a!) y, Tensor(b!)? mask, " FAKEQUANT_SCHEMA_CALL
        ", int mask_kind) -> ()");
  m.def("quantize(Tensor x, " FAKEQUANT_SCHEMA_PARAMS "Tensor(a!) codes, " FAKEQUANT_SCHEMA_CALL ") -> ()");
  m.def("dequantize(Tensor codes, " FAKEQUANT_SCHEMA_PARAMS "Tensor(a!) y, " FAKEQUANT_SCHEMA_CALL ") -> ()");
  m.def("mask_gradient(Tensor dy, Tensor mask, Tensor(a!) dx) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fakequant_cpu, CPU, m) {
  m.impl("fake_quantize", TORCH_BOX(&fake_quantize));
  m.impl("quantize", TORCH_BOX(&quantize));
  m.impl("dequantize", TORCH_BOX(&dequantize));
  m.impl("mask_gradient", TORCH_BOX(&mask_gradient));
}
