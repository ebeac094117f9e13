// The squared error of every threshold: a threshold takes as long as the format has codes, however many bins there are,
// because cumulative sums tell what every code costs.
//
// The numbers equal those of the definition except for the order of sums. The caller knows the largest difference, and
// uses the definition where it could decide.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "search.h"

namespace fakequant {
namespace {

constexpr int64_t kSegments = kChunk / 2;  // two middles of each are rounded, all in one chunk

// Middles of bins, rising at nearly equal distances, and of their weights w the sums of w, w x and w x**2 over the first
// bins: entry k is about the bins 0 to k - 1.
struct Line {
  const float* x;
  int64_t bins;
  const double *count, *first, *second;
  double origin() const { return x[0]; }
  double per_width() const { return bins > 1 ? (bins - 1) / (double(x[bins - 1]) - double(x[0])) : 1.0; }
};

// The bin before which each boundary lies. A boundary that rounding puts one bin off does no harm: `sum_gains` leaves
// such segments to `gain_of_bins`.
FAKEQUANT_CLONES void find_starts(const double* middles, int64_t n, double step, double origin, double per_width,
                                  int64_t bins, int32_t* start) {
  const double last = static_cast<double>(bins);
  for (int64_t i = 0; i < n; ++i) {
    double place = std::ceil((middles[i] * step - origin) * per_width);
    place = place > 0.0 ? place : 0.0;
    start[i] = static_cast<int32_t>(place < last ? place : last);
  }
}

// The middles of the first bins of all segments, then of the last bins. An empty segment gets any middle.
FAKEQUANT_CLONES void gather_ends(const float* x, int32_t bins, const int32_t* start, int64_t n, float* ends) {
  for (int64_t i = 0; i < n; ++i) {
    const int32_t first = start[i] < bins ? start[i] : bins - 1, last = start[i + 1] > 0 ? start[i + 1] - 1 : 0;
    ends[i] = x[first];
    ends[n + i] = x[last];
  }
}

// Over all segments the sum of w (2 x y - y**2), by which w (x - y)**2 falls short of w x**2. Rounding never falls as x
// rises, so that a segment whose ends have one value has it everywhere; others are left out, and `apart` says so.
FAKEQUANT_CLONES double sum_gains(const double* count, const double* first, const int32_t* start, int64_t n,
                                  const float* value, bool* apart) {
  alignas(64) double gains[kSegments];
  int found = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t begin = start[i], end = start[i + 1];
    const double y = value[i];
    const double gain = y * (2.0 * (first[end] - first[begin]) - y * (count[end] - count[begin]));
    const int alike = (value[i] == value[n + i]) | (begin >= end);
    found |= 1 - alike;
    gains[i] = alike ? gain : 0.0;
  }
  *apart = found != 0;
  return sum_of(gains, n);
}

// The same for a segment with several values, bin by bin.
double gain_of_bins(const Line& line, const Call<float>& call, int64_t begin, int64_t end) {
  float y[kChunk];
  double sum = 0;
  for (int64_t i = begin; i < end; i += kChunk) {
    const int64_t n = std::min(kChunk, end - i);
    quantize_span(call, line.x + i, y, nullptr, 0, n);
    for (int64_t k = 0; k < n; ++k) {
      const double w = line.count[i + k + 1] - line.count[i + k];
      sum += w * y[k] * (2.0 * line.x[i + k] - y[k]);
    }
  }
  return sum;
}

// The sum of w (x - y)**2 where y is x rounded by `call`.
//
// Args:
//   middles: between neighbouring codes, before the zero point is added, in rising order. If some are missing it takes
//     longer.
//   call: with one group, and the parameters of one threshold.
double squared_error(const Line& line, const double* middles, int64_t n, Call<float>& call) {
  const double scale = *call.params.scale, step = call.arithmetic == Arithmetic::kMultiplier ? 1.0 / scale : scale;
  alignas(64) int32_t start[kSegments + 1];
  alignas(64) float ends[kChunk];
  alignas(64) float value[kChunk];
  double gain = 0;
  call.tiles = {1, kChunk, 1, 1};
  start[0] = 0;
  // n boundaries make n + 1 segments.
  for (int64_t done = 0; done <= n; done += kSegments) {
    const int64_t inner = std::min(kSegments, n - done), segments = std::min(kSegments, in_lanes(n + 1 - done));
    find_starts(middles + done, inner, step, line.origin(), line.per_width(), line.bins, start + 1);
    std::fill(start + 1 + inner, start + 1 + segments, static_cast<int32_t>(line.bins));
    gather_ends(line.x, static_cast<int32_t>(line.bins), start, segments, ends);
    quantize_span(call, ends, value, nullptr, 0, 2 * segments);
    bool apart = false;
    gain += sum_gains(line.count, line.first, start, segments, value, &apart);
    for (int64_t i = 0; apart && i < segments; ++i)
      if (start[i] < start[i + 1] && value[i] != value[segments + i])
        gain += gain_of_bins(line, call, start[i], start[i + 1]);
    start[0] = start[segments];
  }
  return line.second[line.bins] - gain;
}

// The sums of w, w x and w x**2 over the first bins, [3, bins + 1], of counts w.
void sum_moments(const float* x, const int64_t* w, int64_t bins, double* sums) {
  double *count = sums, *first = count + (bins + 1), *second = first + (bins + 1);
  double moments[3] = {};
  count[0] = first[0] = second[0] = 0;
  for (int64_t i = 0; i < bins; ++i) {
    const auto weight = static_cast<double>(w[i]);
    const double weighted = weight * x[i];
    count[i + 1] = moments[0] += weight;
    first[i + 1] = moments[1] += weighted;
    second[i + 1] = moments[2] += weighted * x[i];
  }
}

Line line_of(const float* x, int64_t bins, const double* sums) {
  return {x, bins, sums, sums + (bins + 1), sums + 2 * (bins + 1)};
}

// The same for groups, float64 [groups, 3, bins + 1], of int64 [groups, bins].
Tensor cumulative_moments(const Tensor x, const Tensor counts) {
  STD_TORCH_CHECK(counts.dim() == 2, "fakequant_cpu: counts [groups, bins] are expected");
  const int64_t bins = x.numel(), groups = counts.size(0);
  check_bins(bins);
  const float* centers = floats(x, bins);
  const int64_t* w = longs(counts, groups * bins);
  Tensor sums = made_doubles({groups, 3, bins + 1});
  auto* const totals = static_cast<double*>(sums.data_ptr());
  for (int64_t group = 0; group < groups; ++group)
    sum_moments(centers, w + group * bins, bins, totals + group * 3 * (bins + 1));
  return sums;
}

// For every group and threshold the sum of w (x - y)**2, float64 [groups, thresholds].
//
// Args:
//   x: the middles of bins, float32 [bins].
//   sums: of w, w x and w x**2 over the first bins, float64 [groups, 3, bins + 1].
//   middles: see `squared_error`, float64.
//   scale, zero_point: of every group and threshold, float32.
//   form: of the specification, for x.
Tensor squared_errors(const Tensor x, const Tensor sums, const Tensor middles, const Tensor scale,
                      const std::optional<Tensor> zero_point, const Tensor form) {
  const int64_t bins = x.numel(), groups = sums.size(0), n = middles.numel(), all = scale.numel();
  check_bins(bins);
  STD_TORCH_CHECK(groups > 0 && all % groups == 0, "fakequant_cpu: scales for every group");
  const float *centers = floats(x, bins), *scales = floats(scale, all);
  const float* zero_points = zero_point.has_value() ? floats(*zero_point, all) : nullptr;
  const double *totals = doubles(sums, groups * 3 * (bins + 1)), *between = doubles(middles, n);
  Tensor errors = made_doubles({groups, all / groups});
  auto* const found = static_cast<double*>(errors.data_ptr());
  parallel_for(0, all, kGrain, [&](int64_t begin, int64_t end) {
    Call<float> call = call_of<float>(form, bins);
    for (int64_t i = begin; i < end; ++i) {
      const Line line = line_of(centers, bins, totals + i / (all / groups) * 3 * (bins + 1));
      call.params = {scales + i, zero_points == nullptr ? nullptr : zero_points + i, nullptr, nullptr};
      found[i] = squared_error(line, between, n, call);
    }
  });
  return errors;
}

// Finds the thresholds amax, given in rising order, whose error may be the least when squares are summed in float32.
//
// The error in real numbers, less the sum of w x**2 and divided by amax**2, is the smallest of functions that are linear
// in 1 / amax, one for every way to round. It is therefore concave in 1 / amax, and two errors bound all that lie
// between them from below: thresholds between two others are computed only where this bound does not rule them out.
class Nearly {
 public:
  Nearly(const Line& line, const float* amax, int64_t n) : line_(line), amax_(amax), n_(n), error_(n, kUnknown) {
    const double largest = line.x[line.bins - 1], total = line.count[line.bins];
    second_ = line.second[line.bins];
    rounding_ = total * largest * largest * 0x1p-34;
    moved_ = kMoved * std::sqrt(second_);
    // Smaller thresholds have rules of their own; squares beyond the range of float32 are inf.
    bounded_ = amax[0] > 0x1p-24 && total * largest * largest < 1e37;
  }

  template <typename F>
  std::vector<int64_t> find(const F& error_of) {
    std::vector<int64_t> tried, found;
    for (int64_t i = 0; i < n_; i += bounded_ ? kCoarse : 1) tried.push_back(i);
    if (tried.back() != n_ - 1) tried.push_back(n_ - 1);
    if (!bounded_) return tried;
    for (const int64_t i : tried) try_at(i, error_of);
    for (int64_t stride = kCoarse; stride > 1; tried.swap(found), found.clear()) {
      stride = std::max<int64_t>(1, stride / kFiner);
      const double limit = limit_;
      for (size_t k = 0; k + 1 < tried.size(); ++k) {
        found.push_back(tried[k]);
        if (stride >= tried[k + 1] - tried[k] || at_least(lowest_between(tried[k], tried[k + 1])) > limit) continue;
        for (int64_t i = tried[k] + stride; i < tried[k + 1]; i += stride) try_at(i, error_of), found.push_back(i);
      }
      found.push_back(tried.back());
    }
    for (const int64_t i : tried)
      if (!((error_[i] - rounding_) * (1 - kSummed) > limit_)) found.push_back(i);
    return found;
  }

 private:
  static constexpr int64_t kCoarse = 128, kFiner = 2;  // strides of 128, 64, ... 1
  static constexpr double kUnknown = std::numeric_limits<double>::infinity();
  // Relative to the middles: how far rounding in float32 moves a value, and the place where it becomes the next.
  static constexpr double kMoved = 0x1p-21;
  // Relative: what sums of float32 differ by from sums of real numbers: five roundings of every term, and no more than
  // 128 additions when torch sums up to 2**17 of them, in a tree of four levels (aten/src/ATen/native/cpu/SumKernel.cpp).
  static constexpr double kSummed = 0x1p-16;

  template <typename F>
  void try_at(int64_t i, const F& error_of) {
    error_[i] = error_of(i);
    limit_ = std::min(limit_, (std::max(error_[i], 0.0) + rounding_) * (1 + kSummed));
  }
  // What rounding in another arithmetic leaves of an error.
  double less_moved(double error) const {
    const double root = std::max(std::sqrt(std::max(error - rounding_, 0.0)) - moved_, 0.0);
    return root * root;
  }
  double at_least(double error) const { return less_moved(error) * (1 - kSummed); }

  // The least error in real numbers that there can be between two: on the chord, where it is lowest.
  double lowest_between(int64_t i, int64_t j) const {
    const double a = amax_[i], b = amax_[j], at_a = less_moved(error_[i]), at_b = less_moved(error_[j]);
    const double concave_a = (at_a - second_) / (a * a), concave_b = (at_b - second_) / (b * b);
    const double slope = (concave_b - concave_a) / (1 / b - 1 / a), rest = concave_a - slope / a;
    const double bottom = -slope / (2 * rest), ends = std::min(at_a, at_b);
    // error(t) = second + t**2 (rest + slope / t)
    return bottom > a && bottom < b ? std::min(ends, second_ + bottom * (bottom * rest + slope)) : ends;
  }

  Line line_;
  const float* amax_;
  int64_t n_;
  std::vector<double> error_;
  double second_, rounding_, moved_, limit_ = kUnknown;
  bool bounded_;
};

// The indices of the thresholds amax [n] that `Nearly` finds, int64.
//
// Args:
//   x, middles, scale, form: as for `squared_errors`.
//   counts: the weights, int64 [bins].
Tensor nearly_least(const Tensor x, const Tensor counts, const Tensor middles, const Tensor amax, const Tensor scale,
                    const Tensor form) {
  const int64_t bins = x.numel(), n = amax.numel(), inner = middles.numel();
  check_bins(bins);
  STD_TORCH_CHECK(n > 0, "fakequant_cpu: no thresholds");
  std::vector<double> sums(3 * (bins + 1));
  sum_moments(floats(x, bins), longs(counts, bins), bins, sums.data());
  const Line line = line_of(floats(x, bins), bins, sums.data());
  const double* between = doubles(middles, inner);
  const float* scales = floats(scale, n);
  Call<float> call = call_of<float>(form, bins);
  const std::vector<int64_t> found = Nearly(line, floats(amax, n), n).find([&](int64_t i) {
    call.params = {scales + i, nullptr, nullptr, nullptr};
    return squared_error(line, between, inner, call);
  });
  const int64_t size = static_cast<int64_t>(found.size()), stride = 1;
  Tensor indices = made(1, &size, &stride, aoti_torch_dtype_int64());
  std::copy(found.begin(), found.end(), static_cast<int64_t*>(indices.data_ptr()));
  return indices;
}

}  // namespace
}  // namespace fakequant

STABLE_TORCH_LIBRARY_FRAGMENT(fakequant_cpu, m) {
  m.def("cumulative_moments(Tensor x, Tensor counts) -> Tensor");
  m.def("squared_errors(Tensor x, Tensor sums, Tensor middles, Tensor scale, Tensor? zero_point, Tensor form) -> Tensor");
  m.def("nearly_least(Tensor x, Tensor counts, Tensor middles, Tensor amax, Tensor scale, Tensor form) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(fakequant_cpu, CPU, m) {
  m.impl("cumulative_moments", TORCH_BOX(&fakequant::cumulative_moments));
  m.impl("squared_errors", TORCH_BOX(&fakequant::squared_errors));
  m.impl("nearly_least", TORCH_BOX(&fakequant::nearly_least));
}
