// Kernels that work in registers of vectors, written by hand where compilers fail: which of them this processor runs.
#pragma once

#include <cstdint>

#include "call.h"

namespace fakequant {

// How many float32 a register has of those in use: 16 with AVX-512, 8 with AVX2 or NEON, 0 where there are none.
int64_t register_width();

// Whether they serve a call.
bool serves_registers(const Call<float>& call);

// The elements [first, first + n) of the tiles, for one instruction set each: avx512.cpp and eight_lanes.cpp.
// x, y and the packed mask, where there is one, point to the first; T is float, Half or BFloat16.
template <typename T>
void quantize_avx512(const Call<float>& call, const T* x, T* y, uint8_t* mask, int64_t first, int64_t n);
template <typename T>
void quantize_eight(const Call<float>& call, const T* x, T* y, uint8_t* mask, int64_t first, int64_t n);

// The same, by the registers in use.
template <typename T>
void quantize_in_registers(const Call<float>& call, const T* x, T* y, uint8_t* mask, int64_t first, int64_t n) {
#ifdef FAKEQUANT_X86
  if (register_width() == 16) return quantize_avx512(call, x, y, mask, first, n);
#endif
#if defined(FAKEQUANT_X86) || defined(FAKEQUANT_NEON)
  quantize_eight(call, x, y, mask, first, n);
#endif
}

}  // namespace fakequant
