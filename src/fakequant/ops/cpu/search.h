// What the kernels of the searches in histograms share.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "chunks.h"

namespace fakequant {
namespace {

using torch::stable::Tensor;

constexpr int64_t kGrain = 32;  // thresholds: fewer are not worth a second thread
constexpr int64_t kLanes = 8;   // sums that grow side by side, so that they vectorise

constexpr int64_t in_lanes(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

const float* floats(const Tensor& t, int64_t n) { return data_of<float>(t, n); }
const double* doubles(const Tensor& t, int64_t n) { return data_of<double>(t, n); }
const int64_t* longs(const Tensor& t, int64_t n) { return data_of<int64_t>(t, n); }


Tensor made_doubles(std::initializer_list<int64_t> sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t axis = sizes.size(); axis-- > 1;) strides[axis - 1] = strides[axis] * sizes.begin()[axis];
  return made(static_cast<int64_t>(sizes.size()), sizes.begin(), strides.data(), aoti_torch_dtype_float64());
}

// The sum of terms, as many as fill whole lanes.
FAKEQUANT_INLINE double sum_of(const double* terms, int64_t n) {
  double lanes[kLanes] = {};
  for (int64_t i = 0; i < n; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += terms[i + lane];
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

}  // namespace
}  // namespace fakequant
