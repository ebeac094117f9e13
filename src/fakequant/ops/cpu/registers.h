// Kernels that work in registers of vectors, written by hand where compilers fail: which of them this processor runs.
#pragma once

#include <cstdint>

#include "call.h"

namespace fakequant {

// How many float32 a register has of those in use: 16 with AVX-512, 8 with AVX2 or NEON, 0 where there are none.
int64_t register_width();

// Whether they serve a call for values. They serve calls for codes too where these are integers of 8 bits and the call
// has no ReLU. Of shifted and exact calls they serve division, to integers, of groups that are runs of a register or
// more.
bool serves_registers(const Call<float>& call);

// From numbers to their values or to codes, or from codes to values, by one instruction set each: sixteen_lanes.cpp
// and eight_lanes.cpp. Numbers and values are float, Half or BFloat16; codes are written as uint8_t of either sign, and
// read as what they are. `from`, `to` and the packed mask, where there is one, point to the first of the elements
// [first, first + n) of the tiles. Returns whether a number was NaN, of which there is no code.
template <typename From, typename To>
bool sixteen_at_once(const Call<float>& call, const From* from, To* to, uint8_t* mask, int64_t first, int64_t n);
template <typename From, typename To>
bool eight_at_once(const Call<float>& call, const From* from, To* to, uint8_t* mask, int64_t first, int64_t n);

// The same, by the registers in use.
template <typename From, typename To>
bool in_registers(const Call<float>& call, const From* from, To* to, uint8_t* mask, int64_t first, int64_t n) {
#ifdef FAKEQUANT_X86
  if (register_width() == 16) return sixteen_at_once(call, from, to, mask, first, n);
#endif
#if defined(FAKEQUANT_X86) || defined(FAKEQUANT_NEON)
  return eight_at_once(call, from, to, mask, first, n);
#else
  return false;
#endif
}

}  // namespace fakequant
