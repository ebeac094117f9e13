// ReLU of a chunk, and where its gradient passes.
#pragma once

#include <bit>
#include <cstdint>

#include "call.h"

namespace fakequant {
// Not `inline`, for the reason given in convert.h.
namespace {

// As torch.relu: +0.0 for numbers below zero, while -0.0 and NaN stay. As integers, so that NaN is no special: the bits
// of numbers below zero lie between those of -0.0 and those of -infinity, those of NaN beyond.
template <typename C, typename U>
FAKEQUANT_INLINE void rectify_as(const C* x, C* y, U infinity, int64_t n) {
  constexpr U kSign = U(1) << (8 * sizeof(U) - 1);
  for (int64_t i = 0; i < n; ++i) {
    const U bits = std::bit_cast<U>(x[i]);
    y[i] = std::bit_cast<C>((bits > kSign) & (bits <= infinity) ? U(0) : bits);
  }
}
FAKEQUANT_CLONES void rectify(const float* x, float* y, int64_t n) { rectify_as(x, y, 0xFF800000u, n); }
FAKEQUANT_CLONES void rectify(const double* x, double* y, int64_t n) {
  rectify_as(x, y, uint64_t{0xFFF0000000000000u}, n);
}

// Takes away where the gradient of a ReLU with these results does not pass: where one is zero. It passes at NaN.
template <typename U, typename C>
FAKEQUANT_INLINE void keep_passes_as(const C* y, uint8_t* passes, int64_t n) {
  for (int64_t i = 0; i < n; ++i) passes[i] &= static_cast<U>(std::bit_cast<U>(y[i]) << 1) != 0;
}
FAKEQUANT_CLONES void keep_passes(const float* y, uint8_t* passes, int64_t n) {
  keep_passes_as<uint32_t>(y, passes, n);
}
FAKEQUANT_CLONES void keep_passes(const double* y, uint8_t* passes, int64_t n) {
  keep_passes_as<uint64_t>(y, passes, n);
}

}  // namespace
}  // namespace fakequant
