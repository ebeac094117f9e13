// The cross entropy of the histogram and what is left of it, for every threshold: a threshold takes as long as the format
// has codes, however many bins there are, because cumulative sums tell what every cell holds.
//
// The numbers equal those of the definition except for the last digits of logarithms and sums. The caller knows the
// largest difference, and uses the definition where it could decide.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "search.h"

namespace fakequant {
namespace {

// The natural logarithm of a normal positive number to 15 digits. The library's does not vectorise: it takes 8 ns.
FAKEQUANT_INLINE double logarithm(double x) {
  constexpr uint64_t kOne = 0x3FF0000000000000, kRootOfHalf = 0x3FE6A09E667F3BCD, kMantissa = 0x000FFFFFFFFFFFFF;
  constexpr uint64_t kBeyondMantissa = 0x4330000000000000;  // 2**52, whose last bits are whole numbers
  // The mantissa from sqrt(1/2) to sqrt(2), where the series of the inverse hyperbolic tangent is short.
  const uint64_t bits = std::bit_cast<uint64_t>(x) + (kOne - kRootOfHalf);
  const double exponent = std::bit_cast<double>((bits >> 52) | kBeyondMantissa) - (0x1p52 + 1023);
  const double m = std::bit_cast<double>((bits & kMantissa) + kRootOfHalf);
  const double s = (m - 1.0) / (m + 1.0), z = s * s;
  double series = 1.0 / 19;
  series = series * z + 1.0 / 17;
  series = series * z + 1.0 / 15;
  series = series * z + 1.0 / 13;
  series = series * z + 1.0 / 11;
  series = series * z + 1.0 / 9;
  series = series * z + 1.0 / 7;
  series = series * z + 1.0 / 5;
  series = series * z + 1.0 / 3;
  return exponent * 0.69314718055994530942 + (2.0 * s + 2.0 * s * z * series);
}

// The bins at which cells begin, as the definition finds them.
FAKEQUANT_CLONES void find_edges(const double* middles, int64_t n, double width, double span, double last,
                                 int32_t* edge) {
  for (int64_t i = 0; i < n; ++i) {
    double place = std::ceil(middles[i] * width / span - 0.5);
    place = place > 0.0 ? place : 0.0;
    edge[i] = static_cast<int32_t>(place < last ? place : last);
  }
}

// The sum of mass log(mass / bins that are not empty) over cells; log_q has a logarithm for every cell, and terms memory.
FAKEQUANT_CLONES double sum_cells(const double* mass, const double* filled, const int32_t* edge, int64_t cells,
                                  double* FAKEQUANT_RESTRICT log_q, double* FAKEQUANT_RESTRICT terms) {
  for (int64_t i = 0; i < cells; ++i) {
    const int32_t begin = edge[i], end = edge[i + 1];
    const double inside = mass[end] - mass[begin], spread = filled[end] - filled[begin];
    // Empty ones: of 1 the logarithm is 0.
    log_q[i] = logarithm(inside > 0.0 ? inside / spread : 1.0);
    terms[i] = inside * log_q[i];
  }
  return sum_of(terms, cells);
}

// For every threshold the sum of P log Q, float64 [lines, thresholds].
//
// Args:
//   mass, filled: of the first bins, the counts and how many are not empty, float64 [lines, bins + 1].
//   middles: between neighbouring codes, from 0 outwards, float64.
//   width: of the span in bins, float64 [lines, thresholds].
//   ends: bins kept, int64 [lines, thresholds].
//   clipped: counts beyond them, float64 [lines, thresholds].
Tensor cross_entropies(const Tensor mass, const Tensor filled, const Tensor middles, double span, const Tensor width,
                       const Tensor ends, const Tensor clipped) {
  STD_TORCH_CHECK(mass.dim() == 2 && ends.dim() == 2 && ends.size(0) == mass.size(0),
                  "fakequant_cpu: counts [lines, bins + 1] and thresholds [lines, thresholds] are expected");
  const int64_t lines = mass.size(0), entries = mass.size(1), n = ends.size(1), inner = middles.numel();
  const double *of_mass = doubles(mass, lines * entries), *of_filled = doubles(filled, lines * entries);
  const double *between = doubles(middles, inner), *widths = doubles(width, lines * n);
  const double* beyond = doubles(clipped, lines * n);
  const int64_t* kept = longs(ends, lines * n);
  check_bins(entries);
  STD_TORCH_CHECK(std::all_of(kept, kept + lines * n, [=](int64_t end) { return end >= 0 && end < entries; }),
                  "fakequant_cpu: thresholds that keep more bins than there are");
  Tensor sums = made_doubles({lines, n});
  auto* const found = static_cast<double*>(sums.data_ptr());
  parallel_for(0, lines * n, kGrain, [&](int64_t begin, int64_t end) {
    const int64_t cells = in_lanes(inner + 1);  // what is beyond the last is empty
    std::vector<int32_t> edge(cells + 1, 0);
    std::vector<double> log_q(cells), terms(cells);
    for (int64_t i = begin; i < end; ++i) {
      const double *m = of_mass + i / n * entries, *f = of_filled + i / n * entries;
      find_edges(between, inner, widths[i], span, static_cast<double>(kept[i]), edge.data() + 1);
      std::fill(edge.begin() + 1 + inner, edge.end(), static_cast<int32_t>(kept[i]));
      found[i] = sum_cells(m, f, edge.data(), cells, log_q.data(), terms.data());
      int64_t last = inner;
      while (last > 0 && m[edge[last]] == m[edge[last + 1]]) --last;
      found[i] += beyond[i] * log_q[last];
    }
  });
  return sums;
}

}  // namespace
}  // namespace fakequant

STABLE_TORCH_LIBRARY_FRAGMENT(fakequant_cpu, m) {
  m.def(
      "cross_entropies(Tensor mass, Tensor filled, Tensor middles, float span, Tensor width, Tensor ends, "
      "Tensor clipped) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(fakequant_cpu, CPU, m) { m.impl("cross_entropies", TORCH_BOX(&fakequant::cross_entropies)); }
