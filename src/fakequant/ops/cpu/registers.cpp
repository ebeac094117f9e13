// The choice of the registers, see registers.h.

#include "registers.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "positions.h"
#include "ranges.h"
#include "runs.h"

namespace fakequant {
namespace {

int64_t lanes_here() {
#if defined(FAKEQUANT_X86)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return 16;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 8;  // and F16C, see convert.h
#elif defined(FAKEQUANT_NEON)
  return 8;
#endif
  return 0;
}

const int64_t kLanesHere = lanes_here();
std::atomic<int64_t> lanes{kLanesHere};

// For tests, which compare all ways: limits registers to `most` float32. Returns how many they have from now on.
int64_t limit_lanes(int64_t most) {
  lanes = most < 8 ? 0 : most < 16 ? std::min(int64_t{8}, kLanesHere) : kLanesHere;
  return lanes;
}

}  // namespace

int64_t register_width() { return lanes; }

bool serves_registers(const Call<float>& call) {
  const bool rounds = call.grid.is_integer() || (!call.grid.table && call.grid.quant_min == -call.grid.quant_max);
  // The loops with a ReLU, and those of lattices, are compiled for division alone, which is the default.
  const bool lattice = call.shifted || call.exact;
  if (!lanes || !rounds || call.draw.on || ((call.rectified || lattice) && call.arithmetic != Arithmetic::kDivide))
    return false;
  // Floats have the sign of x here, which is not that of a code under a negative scale.
  return !lattice || (call.grid.is_integer() && Cursor(call.tiles, 0).length >= lanes);
}

#ifndef FAKEQUANT_X86  // else in avx512.cpp
int64_t measure_avx512(const int32_t*, int64_t, int64_t, int32_t, int32_t*) { return 0; }
int64_t measure_avx512(const int16_t*, int64_t, int64_t, int16_t, int16_t*) { return 0; }
int64_t place_but_zeros_avx512(const float*, int32_t*, int64_t, float, int32_t) { return -1; }
#endif

}  // namespace fakequant

STABLE_TORCH_LIBRARY_FRAGMENT(fakequant_cpu, m) { m.def("limit_lanes(int most) -> int"); }

STABLE_TORCH_LIBRARY_IMPL(fakequant_cpu, CompositeExplicitAutograd, m) {
  m.impl("limit_lanes", TORCH_BOX(&fakequant::limit_lanes));
}
