// ReLU of a chunk, and the packed mask of where its gradient passes.
#pragma once

#include <bit>
#include <cstdint>

#include "call.h"
#include "chunks.h"
#include "convert.h"

namespace fakequant {
// Not `inline`, for the reason given in convert.h.
namespace {

// As torch.relu: +0.0 for numbers below zero, while -0.0 and NaN stay. As integers, so that NaN is no special: the bits
// of numbers below zero lie between those of -0.0 and those of -infinity, those of NaN beyond.
template <typename T, typename U>
FAKEQUANT_INLINE void rectify_as(const T* x, T* y, U infinity, int64_t n) {
  constexpr U kSign = U(1) << (8 * sizeof(U) - 1);
  for (int64_t i = 0; i < n; ++i) {
    const U bits = std::bit_cast<U>(x[i]);
    y[i] = std::bit_cast<T>((bits > kSign) & (bits <= infinity) ? U(0) : bits);
  }
}
FAKEQUANT_CLONES void rectify(const float* x, float* y, int64_t n) { rectify_as(x, y, 0xFF800000u, n); }
FAKEQUANT_CLONES void rectify(const double* x, double* y, int64_t n) {
  rectify_as(x, y, uint64_t{0xFFF0000000000000u}, n);
}
FAKEQUANT_CLONES void rectify(const Half* x, Half* y, int64_t n) { rectify_as(x, y, uint16_t{0xFC00}, n); }
FAKEQUANT_CLONES void rectify(const BFloat16* x, BFloat16* y, int64_t n) { rectify_as(x, y, uint16_t{0xFF80}, n); }

// Where the gradient of a ReLU with these results passes, a byte each: not where one is zero, and where it is NaN.
template <typename U, typename T>
FAKEQUANT_INLINE void find_passes_as(const T* y, uint8_t* passes, int64_t n) {
  for (int64_t i = 0; i < n; ++i) passes[i] = static_cast<U>(std::bit_cast<U>(y[i]) << 1) != 0;
}
FAKEQUANT_CLONES void find_passes(const float* y, uint8_t* to, int64_t n) { find_passes_as<uint32_t>(y, to, n); }
FAKEQUANT_CLONES void find_passes(const double* y, uint8_t* to, int64_t n) { find_passes_as<uint64_t>(y, to, n); }
FAKEQUANT_CLONES void find_passes(const Half* y, uint8_t* to, int64_t n) { find_passes_as<uint16_t>(y, to, n); }
FAKEQUANT_CLONES void find_passes(const BFloat16* y, uint8_t* to, int64_t n) { find_passes_as<uint16_t>(y, to, n); }

// `quantize_span` of the ReLU of x. A mask tells where the gradient passes both; of a call without one, the ReLU.
template <typename T, typename C>
void quantize_rectified_span(const Call<C>& call, const T* x, T* y, uint8_t* mask, int64_t first, int64_t n) {
  for_each_chunk_of(0, n, [&](int64_t i, int64_t length) {
    alignas(64) T rectified[kChunk];
    rectify(x + i, rectified, length);
    uint8_t* to = call.mask == Mask::kNone ? nullptr : bits_from(mask, i);
    quantize_span(call, static_cast<const T*>(rectified), y + i, to, first + i, length);
    if (!mask) return;
    alignas(64) uint8_t passes[kChunk], bits[kChunk / 8];
    find_passes(rectified, passes, length);
    pack(passes, to ? bits : mask + i / 8, length);
    if (!to) return;
    for (int64_t j = 0; j < (length + 7) / 8; ++j) to[j] &= bits[j];
  });
}

}  // namespace
}  // namespace fakequant
