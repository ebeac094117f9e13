// Where the numbers of a chunk are counted, by processors with AVX-512: avx512.cpp.
#pragma once

#include <cstdint>

#include "call.h"

namespace fakequant {

// A chunk's positions, and what a register writes beyond the last.
constexpr int64_t kPositions = kChunk + 16;

// The positions of the numbers other than 0.0, in their order, see `positions` in histogram.cpp; returns how many these
// are, or -1 where the processor cannot do it. n <= kChunk.
int64_t place_but_zeros_avx512(const float* x, int32_t* position, int64_t n, float inverse, int32_t bins);

}  // namespace fakequant
