// The masked gradient: a mask of one bit per element applied to a tensor of elements of any size.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "call.h"
#include "registers.h"
#include "streaming.h"

namespace fakequant {
// Not `inline`, for the reason given in convert.h.
namespace {

// dx = dy where the bit is set, else +0.0: as integers, so that NaN is no special.
template <typename U>
FAKEQUANT_INLINE void apply_byte(const U* dy, uint8_t byte, U* dx) {
#ifdef __GNUC__
  // GCC 12 turns the loop below into a transposition of 2 KiB at a time, which costs two copies of the tensor.
  if constexpr (sizeof(U) == 2 || sizeof(U) == 4) {
    typedef U Eight __attribute__((vector_size(8 * sizeof(U))));
    constexpr Eight kBits = {1, 2, 4, 8, 16, 32, 64, 128};
    Eight values;
    std::memcpy(&values, dy, sizeof(values));
    values &= static_cast<Eight>((kBits & static_cast<U>(byte)) != 0);
    std::memcpy(dx, &values, sizeof(values));
    return;
  }
#endif
  const U bits = byte;
  for (int j = 0; j < 8; ++j) dx[j] = dy[j] & static_cast<U>(-static_cast<U>((bits >> j) & 1));
}
template <typename U>
FAKEQUANT_INLINE void apply_bytes(const U* dy, const uint8_t* mask, U* dx, int64_t n) {
  const int64_t bytes = n / 8;
  for (int64_t i = 0; i < bytes; ++i) apply_byte(dy + 8 * i, mask[i], dx + 8 * i);
  for (int64_t i = 8 * bytes; i < n; ++i) dx[i] = (mask[bytes] >> (i % 8)) & 1 ? dy[i] : U(0);
}
FAKEQUANT_CLONES void apply_portable(const uint8_t* dy, const uint8_t* mask, uint8_t* dx, int64_t n) {
  apply_bytes(dy, mask, dx, n);
}
FAKEQUANT_CLONES void apply_portable(const uint16_t* dy, const uint8_t* mask, uint16_t* dx, int64_t n) {
  apply_bytes(dy, mask, dx, n);
}
FAKEQUANT_CLONES void apply_portable(const uint32_t* dy, const uint8_t* mask, uint32_t* dx, int64_t n) {
  apply_bytes(dy, mask, dx, n);
}
FAKEQUANT_CLONES void apply_portable(const uint64_t* dy, const uint8_t* mask, uint64_t* dx, int64_t n) {
  apply_bytes(dy, mask, dx, n);
}

#ifdef FAKEQUANT_X86
#define FAKEQUANT_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq")))
FAKEQUANT_AVX512 inline __m512i widened(uint64_t bits, uint8_t) { return _mm512_movm_epi8(bits); }
FAKEQUANT_AVX512 inline __m512i widened(uint32_t bits, uint16_t) { return _mm512_movm_epi16(bits); }
FAKEQUANT_AVX512 inline __m512i widened(uint16_t bits, uint32_t) { return _mm512_movm_epi32(bits); }
FAKEQUANT_AVX512 inline __m512i widened(uint8_t bits, uint64_t) { return _mm512_movm_epi64(bits); }

// Loads under a mask would be one instruction less, but take twice as long where dy comes from memory.
template <bool kStreamed, typename Bits, typename U>
FAKEQUANT_AVX512 void apply_avx512(const U* dy, const uint8_t* mask, U* dx, int64_t n) {
  constexpr int64_t kLanes = 64 / sizeof(U);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Bits bits;
    std::memcpy(&bits, mask + i / 8, sizeof(bits));
    const __m512i passed = _mm512_and_si512(_mm512_loadu_si512(dy + i), widened(bits, U{}));
    if constexpr (kStreamed)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(dx + i), passed);
    else
      _mm512_storeu_si512(dx + i, passed);
  }
  if constexpr (kStreamed) finish_streaming();
  apply_portable(dy + i, mask + i / 8, dx + i, n - i);
}
#undef FAKEQUANT_AVX512
#endif

template <typename U>
void apply_mask(const U* dy, const uint8_t* mask, U* dx, int64_t n, bool streamed) {
#ifdef FAKEQUANT_X86
  using Bits = std::conditional_t<
      sizeof(U) == 1, uint64_t,
      std::conditional_t<sizeof(U) == 2, uint32_t, std::conditional_t<sizeof(U) == 4, uint16_t, uint8_t>>>;
  if (register_width() == 16 && streamed && begins_line(dx)) return apply_avx512<true, Bits>(dy, mask, dx, n);
  if (register_width() == 16) return apply_avx512<false, Bits>(dy, mask, dx, n);
#endif
  apply_portable(dy, mask, dx, n);
}

}  // namespace
}  // namespace fakequant
