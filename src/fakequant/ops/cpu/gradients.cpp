// The gradients of scale and zero point in one pass over memory, without temporaries of the tensor's size.
//
// The tensor is cut into parts, which threads work on; chunk by chunk, slopes are found, multiplied by dy and added to
// the partial sums of the part. The bits are those of numerics/reference.py, because the sums do not depend on order.

#include "gradients.h"

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "chunks.h"
#include "convert.h"
#include "rounding.h"
#include "runs.h"
#include "sums.h"

namespace fakequant {
namespace {

using torch::stable::Tensor;

constexpr int64_t kPartElements = 128 * kChunk;
constexpr int64_t kRowElements = 4 * kChunk;  // of a part of several rows: their sums fit a second-level cache
constexpr int64_t kGrainGroups = 4096;
static_assert(kPartElements <= kMostAddends);

// dy/dscale and dy/dzero_point of the elements of a chunk.
template <typename C>
struct Slopes {
  alignas(64) C scale[kChunk];
  alignas(64) C zero_point[kChunk];
};

// dy/dm of y = q / m, from -dy/ds of y = q * s; see reference.py.
template <typename C>
FAKEQUANT_INLINE C by_multiplier(C slope, C scale) {
  constexpr C kLargest = std::numeric_limits<C>::max();
  const C quotient = -slope / scale / scale;
  const C limited = quotient > kLargest ? kLargest : quotient;  // NaN stays
  return limited < -kLargest ? -kLargest : limited;
}

// As in reference.py: the rounding error where the code is in range, its distance from the zero point elsewhere.
template <Arithmetic A, typename C, typename Rounding, typename P>
FAKEQUANT_INLINE void slope_run(const C* x, C* by_scale, C* by_zero_point, int64_t n, const Rounding& rounding,
                                const P& p) {
  constexpr bool kOffset = std::is_same_v<Rounding, IntegerRounding<C>> && A != Arithmetic::kMultiplier;
  for (int64_t i = 0; i < n; ++i) {
    const C scale = p.s(i);
    const C offset = kOffset ? p.z(i) : C(0);
    const C scaled = A == Arithmetic::kDivide ? x[i] / scale
                     : A == Arithmetic::kReciprocal ? x[i] * (C(1) / scale)
                                                    : x[i] * scale;
    const C code = rounding.round(scaled) + offset;
    const bool inside = (code >= rounding.lo) & (code <= rounding.hi);
    C clamped = rounding.lo > code ? rounding.lo : code;
    clamped = rounding.hi < clamped ? rounding.hi : clamped;
    const C slope = inside ? code - offset - scaled : clamped - offset;
    by_scale[i] = A == Arithmetic::kMultiplier ? by_multiplier(slope, scale) : slope;
    by_zero_point[i] = inside ? C(0) : -scale;
  }
}

// Where x is at or beyond an end, that code's distance from the zero point; zero between them, and for NaN.
template <bool kMultiplier, typename C, typename P>
FAKEQUANT_INLINE void clip_run(const Grid& grid, const C* x, C* by_scale, C* by_zero_point, int64_t n, const P& p) {
  const C lowest = static_cast<C>(grid.quant_min), highest = static_cast<C>(grid.quant_max);
  for (int64_t i = 0; i < n; ++i) {
    const C scale = p.s(i);
    const C offset = kMultiplier ? C(0) : p.z(i);
    const bool low = x[i] <= p.low(i), high = x[i] >= p.high(i);
    const C slope = low ? lowest - offset : high ? highest - offset : C(0);
    by_scale[i] = kMultiplier ? by_multiplier(slope, scale) : slope;
    by_zero_point[i] = low | high ? -scale : C(0);
  }
}

template <typename C, typename Rounding>
FAKEQUANT_INLINE void slopes_by(const Call<C>& call, const C* x, Slopes<C>& slopes, int64_t first, int64_t n) {
  const Rounding rounding(call.grid);
  for_each_run(call, first, n, [&](int64_t i, int64_t piece, const auto& p) FAKEQUANT_INLINE_LAMBDA {
    C *by_scale = slopes.scale + i, *by_zero_point = slopes.zero_point + i;
    switch (call.arithmetic) {
      case Arithmetic::kDivide:
        return slope_run<Arithmetic::kDivide>(x + i, by_scale, by_zero_point, piece, rounding, p);
      case Arithmetic::kReciprocal:
        return slope_run<Arithmetic::kReciprocal>(x + i, by_scale, by_zero_point, piece, rounding, p);
      case Arithmetic::kMultiplier:
        return slope_run<Arithmetic::kMultiplier>(x + i, by_scale, by_zero_point, piece, rounding, p);
    }
  });
}

template <typename C>
FAKEQUANT_INLINE void slopes_as(const Call<C>& call, const C* x, Slopes<C>& slopes, int64_t first, int64_t n) {
  if (call.mask == Mask::kClip)
    return for_each_run(call, first, n, [&](int64_t i, int64_t piece, const auto& p) FAKEQUANT_INLINE_LAMBDA {
      C *by_scale = slopes.scale + i, *by_zero_point = slopes.zero_point + i;
      if (call.arithmetic == Arithmetic::kMultiplier)
        return clip_run<true>(call.grid, x + i, by_scale, by_zero_point, piece, p);
      clip_run<false>(call.grid, x + i, by_scale, by_zero_point, piece, p);
    });
  if (call.grid.is_integer()) return slopes_by<C, IntegerRounding<C>>(call, x, slopes, first, n);
  if (!call.grid.table) return slopes_by<C, FloatRounding<C>>(call, x, slopes, first, n);
  slopes_by<C, TableRounding<C>>(call, x, slopes, first, n);
}

FAKEQUANT_CLONES void slopes_f32(const Call<float>& call, const float* x, Slopes<float>& slopes, int64_t first,
                                 int64_t n) {
  slopes_as(call, x, slopes, first, n);
}
void slopes_of(const Call<float>& call, const float* x, Slopes<float>& slopes, int64_t first, int64_t n) {
  slopes_f32(call, x, slopes, first, n);
}
void slopes_of(const Call<double>& call, const double* x, Slopes<double>& slopes, int64_t first, int64_t n) {
  slopes_as(call, x, slopes, first, n);
}

// An element that does not move the parameter gives nothing, whatever dy is.
template <typename C>
FAKEQUANT_INLINE void multiply(const C* dy, const C* slopes, double* products, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const double product = static_cast<double>(dy[i]) * static_cast<double>(slopes[i]);
    products[i] = slopes[i] == 0 ? 0.0 : product;
  }
}
FAKEQUANT_CLONES void products_of(const float* dy, const float* slopes, double* products, int64_t n) {
  multiply(dy, slopes, products, n);
}
void products_of(const double* dy, const double* slopes, double* products, int64_t n) {
  multiply(dy, slopes, products, n);
}

// Groups as columns of rows of memory, cut into parts: `height` rows of one g0 index, `width` elements of each.
struct Parts {
  int64_t blocks, rows, columns, length;  // length: of the run of a column in a row
  int64_t width, height, across, down;

  explicit Parts(const Tiles& t) {
    const bool one_axis = t.g1 == 1 && t.b1 == 1;  // then all groups are in one row
    blocks = one_axis ? 1 : t.g0;
    rows = one_axis ? 1 : t.b0;
    columns = one_axis ? t.g0 : t.g1;
    length = one_axis ? t.b0 : t.b1;
    const int64_t wanted = rows == 1 ? kPartElements : kRowElements;
    width = std::min(row(), length <= kPartElements ? std::max<int64_t>(wanted / length, 1) * length : wanted);
    height = std::clamp<int64_t>(kPartElements / width, 1, rows);
    across = (row() + width - 1) / width;
    down = (rows + height - 1) / height;
  }
  // Whether each group lies in a single part.
  bool whole_groups() const { return down == 1 && (width == row() || width % length == 0); }
  int64_t row() const { return columns * length; }
  int64_t count() const { return blocks * down * across; }
  // Elements of each row before those of a part.
  int64_t left(int64_t part) const { return part % across * width; }
  int64_t first_column(int64_t part) const { return left(part) / length; }
  int64_t groups(int64_t part) const {
    return (std::min(left(part) + width, row()) - 1) / length - first_column(part) + 1;
  }
  // Calls `run(first, n)` for the runs of memory of a part.
  template <typename F>
  void for_each_run_of(int64_t part, const F& run) const {
    const int64_t first_row = part / across % down * height;
    const int64_t part_rows = std::min(height, rows - first_row);
    const int64_t first = (part / across / down * rows + first_row) * row() + left(part);
    if (across == 1) return run(first, part_rows * row());
    for (int64_t i = 0; i < part_rows; ++i) run(first + i * row(), std::min(width, row() - left(part)));
  }
};

// Adds the products of the elements [first, first + n) to the sums of the columns from `first_column` on.
void add_products(const Parts& parts, double* products, int64_t first, int64_t n, int64_t first_column, Sums& sums) {
  int64_t in_row = first % parts.row();
  for (int64_t i = 0, piece; i < n; i += piece, in_row = (in_row + piece) % parts.row()) {
    if (parts.length == 1) {
      piece = std::min(parts.columns - in_row, n - i);
      sums.add_row(in_row - first_column, products + i, piece);
    } else {
      piece = std::min(parts.length - in_row % parts.length, n - i);
      sums.add(in_row / parts.length - first_column, products + i, piece);
    }
  }
}

// Numbers in the type to compute in: themselves, or converted.
template <typename T, typename C>
const C* computable(const T* stored, C* converted, int64_t n) {
  if constexpr (std::is_same_v<T, C>) return stored;
  load(stored, converted, n);
  return converted;
}

template <typename T, typename C>
struct Job {
  Call<C> call;
  const T* dy;
  const T* x;
  Parts parts;
};

// The sums of a part, one for each of the two parameters that is wanted.
template <typename T, typename C>
void sum_part(const Job<T, C>& job, int64_t part, Sums* scale, Sums* zero_point) {
  const int64_t first_column = job.parts.first_column(part);
  Slopes<C> slopes;
  alignas(64) C converted_x[kChunk], converted_dy[kChunk];
  alignas(64) double products[kChunk];
  const auto add = [&](const C* dy, const C* by_parameter, int64_t first, int64_t n, Sums* sums) {
    if (!sums) return;
    products_of(dy, by_parameter, products, n);
    add_products(job.parts, products, first, n, first_column, *sums);
  };
  job.parts.for_each_run_of(part, [&](int64_t begin, int64_t elements) {
    for (int64_t i = 0; i < elements; i += kChunk) {
      const int64_t first = begin + i, n = std::min(kChunk, elements - i);
      const C* x = computable(job.x + first, converted_x, n);
      const C* dy = computable(job.dy + first, converted_dy, n);
      slopes_of(job.call, x, slopes, first, n);
      add(dy, slopes.scale, first, n, scale);
      add(dy, slopes.zero_point, first, n, zero_point);
    }
  });
}

// The sums of one parameter: kept for every part, or finished part by part where each group lies in a single one.
struct Collected {
  const Parts& parts;
  double* totals;
  std::vector<Sums> kept;

  Collected(const Parts& parts, double* totals) : parts(parts), totals(totals) {
    if (totals && !parts.whole_groups()) kept.resize(parts.count());
  }
  void take(int64_t part, Sums&& sums) {
    if (!totals) return;
    if (!kept.empty()) {
      kept[part] = std::move(sums);
      return;
    }
    const int64_t first = part / parts.across * parts.columns + parts.first_column(part);
    for (int64_t i = 0; i < parts.groups(part); ++i) {
      Total sum;
      sum.add(sums, i);
      totals[first + i] = sum.value();
    }
  }
  // Adds what was kept.
  void finish() const {
    if (kept.empty()) return;
    parallel_for(0, parts.blocks * parts.columns, kGrainGroups, [&](int64_t begin, int64_t end) {
      for (int64_t group = begin; group < end; ++group) {
        const int64_t block = group / parts.columns, column = group % parts.columns;
        const int64_t first = column * parts.length / parts.width;
        const int64_t last = ((column + 1) * parts.length - 1) / parts.width;
        Total sum;
        for (int64_t i = 0; i < parts.down; ++i)
          for (int64_t j = first; j <= last; ++j) {
            const int64_t part = (block * parts.down + i) * parts.across + j;
            sum.add(kept[part], column - parts.first_column(part));
          }
        totals[group] = sum.value();
      }
    });
  }
};

template <typename T, typename C>
void sum_all(const Job<T, C>& job, const GradientSums& totals) {
  const Parts& parts = job.parts;
  Collected scale(parts, totals.scale), zero_point(parts, totals.zero_point);
  const int64_t grain = std::max<int64_t>(1, kGrainChunks * kChunk / (parts.width * parts.height));
  parallel_for(0, parts.count(), grain, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      Sums scale_sums(scale.totals ? parts.groups(part) : 0);
      Sums zero_point_sums(zero_point.totals ? parts.groups(part) : 0);
      sum_part(job, part, scale.totals ? &scale_sums : nullptr, zero_point.totals ? &zero_point_sums : nullptr);
      scale.take(part, std::move(scale_sums));
      zero_point.take(part, std::move(zero_point_sums));
    }
  });
  scale.finish();
  zero_point.finish();
}

template <typename C>
void sum_as(const Call<C>& call, const Tensor& dy, const Tensor& x, const GradientSums& sums) {
  STD_TORCH_CHECK(dy.scalar_type() == x.scalar_type() && dy.numel() == x.numel(),
                  "fakequant_cpu: the gradient of the output has another dtype or shape than the input");
  check_dense(dy);
  check_some(call.tiles);
  with_float_type(x, [&](auto t, auto c) {
    using T = decltype(t);
    if constexpr (std::is_same_v<decltype(c), C>)
      sum_all(Job<T, C>{call, static_cast<const T*>(dy.data_ptr()), static_cast<const T*>(x.data_ptr()),
                        Parts(call.tiles)},
              sums);
  });
}

}  // namespace

void sum_gradients(const Call<float>& call, const Tensor& dy, const Tensor& x, const GradientSums& sums) {
  sum_as(call, dy, x, sums);
}
void sum_gradients(const Call<double>& call, const Tensor& dy, const Tensor& x, const GradientSums& sums) {
  sum_as(call, dy, x, sums);
}

}  // namespace fakequant
