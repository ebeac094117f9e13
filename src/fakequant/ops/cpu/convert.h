// Conversions between the types that tensors store and those that kernels compute in, and packing of masks.
#pragma once

#include <torch/headeronly/util/Half.h>

#include <bit>
#include <cstdint>
#include <cstring>

#include "call.h"

namespace fakequant {

#if defined(FAKEQUANT_NEON)
using Half = __fp16;  // GCC 12 has no _Float16 there
#elif defined(__FLT16_MAX__)
using Half = _Float16;
#else
using Half = torch::headeronly::Half;
#endif
struct BFloat16 {
  uint16_t bits;
};

// Not `inline`: every file has its own copy, because functions with clones must not be merged across files.
namespace {

void load_half_portable(const Half* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<float>(from[i]);
}
void store_half_portable(const float* from, Half* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<Half>(from[i]);
}
#ifdef FAKEQUANT_X86
// GCC 12 converts _Float16 one element at a time, which costs 13 copies of the tensor; these cost two.
__attribute__((target("avx,f16c"))) void load_half_f16c(const Half* from, float* to, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  load_half_portable(from + i, to + i, n - i);
}
__attribute__((target("avx,f16c"))) void store_half_f16c(const float* from, Half* to, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  store_half_portable(from + i, to + i, n - i);
}
const bool kHasF16C = __builtin_cpu_supports("avx2");  // later than F16C, for which clang 14 cannot ask
#endif
void load_half(const Half* from, float* to, int64_t n) {
#ifdef FAKEQUANT_X86
  if (kHasF16C) return load_half_f16c(from, to, n);
#endif
  load_half_portable(from, to, n);
}
void store_half(const float* from, Half* to, int64_t n) {
#ifdef FAKEQUANT_X86
  if (kHasF16C) return store_half_f16c(from, to, n);
#endif
  store_half_portable(from, to, n);
}
FAKEQUANT_CLONES void load_bfloat16(const BFloat16* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = std::bit_cast<float>(static_cast<uint32_t>(from[i].bits) << 16);
}
FAKEQUANT_CLONES void store_bfloat16(const float* from, BFloat16* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(from[i]);
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
    to[i].bits = static_cast<uint16_t>(from[i] == from[i] ? rounded : 0x7FC0u);
  }
}
template <typename From, typename To>
FAKEQUANT_INLINE void convert_each(const From* from, To* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<To>(from[i]);
}

// Through int32, for which vectors have an instruction: 0.7 of the time.
FAKEQUANT_CLONES void store_int8(const float* from, int8_t* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<int8_t>(static_cast<int32_t>(from[i]));
}
FAKEQUANT_CLONES void store_uint8(const float* from, uint8_t* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<uint8_t>(static_cast<int32_t>(from[i]));
}

inline void load(const Half* from, float* to, int64_t n) { load_half(from, to, n); }
inline void load(const BFloat16* from, float* to, int64_t n) { load_bfloat16(from, to, n); }
template <typename From, typename To>
inline void load(const From* from, To* to, int64_t n) {
  convert_each(from, to, n);
}
inline void store(const float* from, int8_t* to, int64_t n) { store_int8(from, to, n); }
inline void store(const float* from, uint8_t* to, int64_t n) { store_uint8(from, to, n); }
inline void store(const float* from, Half* to, int64_t n) { store_half(from, to, n); }
inline void store(const float* from, BFloat16* to, int64_t n) { store_bfloat16(from, to, n); }
template <typename From, typename To>
inline void store(const From* from, To* to, int64_t n) {
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

}  // namespace
}  // namespace fakequant
