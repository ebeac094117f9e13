// Columns of a weight matrix chosen one after the other, each making good the errors of those before it: the roundings
// and the order of sums of ops/sweep.py. Rows are independent, so that those of a tile take all columns in the cache.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "call.h"
#include "chunks.h"
#include "threads.h"

namespace fakequant {
namespace {

using torch::stable::Tensor;

// 64 KB of 128 columns: half of a second-level cache at the least.
constexpr int64_t kRows = 128;
// Tiles that are worth a thread.
constexpr int64_t kGrainTiles = 2;

// Adds a share of an error to each of some columns of a tile; the shares are `stride` apart.
FAKEQUANT_CLONES void make_good(float* FAKEQUANT_RESTRICT tile, const float* FAKEQUANT_RESTRICT shares, int64_t stride,
                                const float* FAKEQUANT_RESTRICT error, int64_t columns) {
  for (int64_t c = 0; c < columns; ++c, tile += kRows)
    for (int64_t i = 0; i < kRows; ++i) tile[i] += shares[c * stride] * error[i];
}

// What rows of a column have beside scale and zero point, from the first row of a tile on; null where it is absent.
struct Beside {
  const float *offset, *sign;
  const bool *zero, *zeros;
};

FAKEQUANT_CLONES void before_rounding(const Beside& own, const float* wanted, float* x, int64_t n) {
  std::copy_n(wanted, n, x);
  if (own.offset)
    for (int64_t i = 0; i < n; ++i) x[i] = x[i] + own.offset[i];
  if (own.sign)
    for (int64_t i = 0; i < n; ++i) x[i] = x[i] * own.sign[i];
}

FAKEQUANT_CLONES void after_rounding(const Beside& own, float* y, int64_t n) {
  if (own.zero)
    for (int64_t i = 0; i < n; ++i) y[i] = own.zero[i] ? 0.0f : y[i];
  if (own.sign)
    for (int64_t i = 0; i < n; ++i) y[i] = y[i] * own.sign[i];
  if (own.offset)
    for (int64_t i = 0; i < n; ++i) y[i] = y[i] - own.offset[i];
  if (own.zeros)
    for (int64_t i = 0; i < n; ++i) y[i] = own.zeros[i] ? 0.0f : y[i];
}

void sweep(Tensor wanted, const Tensor& left, const Tensor& shares, Tensor errors, Tensor missed, const Tensor& form,
           const Tensor& runs, const Tensor& scale, const std::optional<Tensor>& zero_point,
           const std::optional<Tensor>& offset, const std::optional<Tensor>& sign, const std::optional<Tensor>& zero,
           const std::optional<Tensor>& zeros) {
  const int64_t columns = runs.numel(), elements = wanted.numel(), rows = columns ? elements / columns : 0;
  if (!elements) return;
  const int64_t shared = scale.numel(), stride = shares.numel() / columns;
  STD_TORCH_CHECK(stride >= columns && shares.numel() == columns * stride, "fakequant_cpu: shares of other columns");
  float* values = data_of<float>(wanted, columns * rows);
  float* error = data_of<float>(errors, elements);
  float* miss = data_of<float>(missed, elements);
  const float *weight = data_of<float>(left, elements), *share = data_of<float>(shares, shares.numel());
  const int64_t* run = data_of<int64_t>(runs, columns);
  for (int64_t c = 0; c < columns; ++c)
    STD_TORCH_CHECK(run[c] >= 0 && run[c] < shared / rows, "fakequant_cpu: a column without a scale");
  const auto floats = [&](const std::optional<Tensor>& t) -> const float* {
    return t.has_value() ? data_of<float>(*t, shared) : nullptr;
  };
  const float *scales = data_of<float>(scale, shared), *points = floats(zero_point);
  const float *offsets = floats(offset), *signs = floats(sign);
  const bool* is_zero = zero.has_value() ? data_of<bool>(*zero, shared) : nullptr;
  const bool* stays_zero = zeros.has_value() ? data_of<bool>(*zeros, elements) : nullptr;
  const Call<float> plain = call_of<float>(form, rows);
  parallel_for(0, (rows + kRows - 1) / kRows, kGrainTiles, [&](int64_t begin, int64_t end) {
    std::vector<float> tile(columns * kRows);
    alignas(64) float x[kRows], y[kRows], e[kRows] = {};
    for (int64_t first = begin * kRows; first < std::min(end * kRows, rows); first += kRows) {
      const int64_t n = std::min(kRows, rows - first);
      for (int64_t c = 0; c < columns; ++c) std::copy_n(values + c * rows + first, n, tile.data() + c * kRows);
      for (int64_t k = columns - 1; k >= 0; --k) {
        const float* own = tile.data() + k * kRows;
        const int64_t at = k * rows + first, group = run[k] * rows;
        Call<float> call = plain;
        call.params = {scales + group, points ? points + group : nullptr, nullptr, nullptr};
        const auto from = [&](const auto* t, int64_t place) { return t ? t + place : nullptr; };
        const Beside beside{from(offsets, group + first), from(signs, group + first), from(is_zero, group + first),
                            from(stays_zero, at)};
        before_rounding(beside, own, x, n);
        quantize_span(call, x, y, nullptr, first, n);
        after_rounding(beside, y, n);
        for (int64_t i = 0; i < n; ++i) {
          miss[at + i] = own[i] - y[i];
          error[at + i] = e[i] = weight[at + i] - y[i];
          values[at + i] = y[i];
        }
        make_good(tile.data(), share + k, stride, e, k);
      }
    }
  });
}

}  // namespace
}  // namespace fakequant

STABLE_TORCH_LIBRARY_FRAGMENT(fakequant_cpu, m) {
  m.def("sweep(Tensor(a!) wanted, Tensor left, Tensor shares, Tensor(b!) errors, Tensor(c!) missed, Tensor form, "
        "Tensor runs, Tensor scale, Tensor? zero_point, Tensor? offset, Tensor? sign, Tensor? zero, Tensor? zeros) "
        "-> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fakequant_cpu, CPU, m) { m.impl("sweep", TORCH_BOX(&fakequant::sweep)); }
