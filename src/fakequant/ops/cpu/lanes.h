// What the loop of register_loop.h asks of a processor. avx512.h, avx2.h and neon.h define by the same names:
//
// FAKEQUANT_TARGET, _LANES   what marks functions that are compiled for the instruction set, and those inlined in them
// kLanes                     how many float32 a register has
// Lanes, Words, Bits         a register of float32, on which + - * / work; one of int32; a bit for each lane
// load_lanes, store_lanes    from and to float32, float16 and bfloat16
// load_codes, store_codes    from codes of 8 bits, and to them
// kInPairs, Pairs, ...       types of which registers go by twos, the elements at even and at odd places
// kConvertsBFloat16          whether conversions of NormalBFloat16 may be used
// same, lower_of, ...        arithmetic and comparisons, see avx512.h; `same` fills a register with one number
//
// Each is included by one file. Its other functions are compiled for any processor.
#pragma once

#include <cstdint>

#include "convert.h"

namespace fakequant {
namespace {

struct AllLanes {};
// Stored past the caches, from the beginning of a line on.
struct StreamedLanes : AllLanes {};
// Those of the last elements of a run; the others are neither read nor written.
struct FirstLanes {
  int64_t count;
};

// As BFloat16, of numbers that are zero or normal alone.
struct NormalBFloat16 : BFloat16 {};

}  // namespace
}  // namespace fakequant
