// Compares the arguments of a kernel with each other before the first element is read: sizes, dtypes, memory without
// gaps. A wrong form or size raises; it never reads or writes foreign memory. All checks of a call take less than 0.1
// us.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "call.h"

namespace fakequant {
namespace {

// Whole numbers below are exact in float64.
constexpr double kMostElements = 0x1p53;
constexpr int64_t kMostTableValues = 256;  // the size of the arrays of TableRounding

template <typename T>
constexpr torch::headeronly::ScalarType scalar_type_of() {
  using torch::headeronly::ScalarType;
  if constexpr (std::is_same_v<T, float>) return ScalarType::Float;
  if constexpr (std::is_same_v<T, double>) return ScalarType::Double;
  if constexpr (std::is_same_v<T, bool>) return ScalarType::Bool;
  if constexpr (std::is_same_v<T, int8_t>) return ScalarType::Char;
  if constexpr (std::is_same_v<T, uint8_t>) return ScalarType::Byte;
  if constexpr (std::is_same_v<T, int32_t>) return ScalarType::Int;
  if constexpr (std::is_same_v<T, int64_t>) return ScalarType::Long;
}

// Whether the elements fill a run of memory, in any order of the axes.
inline bool is_dense(const torch::stable::Tensor& t) {
  if (t.is_contiguous()) return true;
  const auto sizes = t.sizes(), strides = t.strides();
  const int64_t all = t.numel();
  int64_t elements = 1;
  for (bool found = true; found && elements < all;) {
    found = false;
    for (int64_t axis = 0; axis < t.dim() && !found; ++axis) {
      found = sizes[axis] > 1 && strides[axis] == elements;
      if (found) elements *= sizes[axis];
    }
  }
  return elements == all;
}

inline void check_dense(const torch::stable::Tensor& t) {
  STD_TORCH_CHECK(is_dense(t), "fakequant_cpu: a tensor with gaps or overlaps in memory; give a contiguous one");
}

inline void check_elements(const torch::stable::Tensor& t, int64_t elements) {
  STD_TORCH_CHECK(t.numel() == elements, "fakequant_cpu: a tensor of ", t.numel(), " elements, expected ", elements);
}

// The elements of a tensor, which must be of type T and contiguous and have this number of elements.
template <typename T>
T* data_of(const torch::stable::Tensor& t, int64_t elements) {
  STD_TORCH_CHECK(t.scalar_type() == scalar_type_of<T>() && t.is_contiguous(),
                  "fakequant_cpu: a tensor of another dtype, or with gaps in memory, than a kernel reads");
  check_elements(t, elements);
  return static_cast<T*>(t.data_ptr());
}

// The tiles of a tensor of this number of elements.
inline Tiles checked_tiles(double g0, double b0, double g1, double b1, int64_t elements) {
  const double blocks = g0 * b0, columns = blocks * g1, all = columns * b1;
  const bool whole = g0 == std::trunc(g0) && b0 == std::trunc(b0) && g1 == std::trunc(g1) && b1 == std::trunc(b1);
  STD_TORCH_CHECK(whole && g0 >= 0 && b0 >= 0 && g1 >= 0 && b1 >= 0 && g0 * g1 < kMostElements &&
                      blocks < kMostElements && columns < kMostElements && b0 * b1 < kMostElements &&
                      b1 < kMostElements && all == static_cast<double>(elements),
                  "fakequant_cpu: the tiles [", g0, ", ", b0, ", ", g1, ", ", b1, "] do not fill a tensor of ",
                  elements, " elements");
  return {static_cast<int64_t>(g0), static_cast<int64_t>(b0), static_cast<int64_t>(g1), static_cast<int64_t>(b1)};
}

// For kernels that need at least one element.
inline void check_some(const Tiles& t) { STD_TORCH_CHECK(t.elements() > 0, "fakequant_cpu: a tensor without elements"); }

// The exponents and widths that the roundings shift by, of float64 at the most.
inline void check_grid(const Grid& grid) {
  STD_TORCH_CHECK(grid.mantissa_bits >= -1 && grid.mantissa_bits <= 52 && grid.min_exponent >= -1074 &&
                      grid.min_exponent <= 1023 && grid.quant_min <= grid.quant_max,
                  "fakequant_cpu: no grid of a format: mantissa bits ", grid.mantissa_bits, ", smallest exponent ",
                  grid.min_exponent, ", codes from ", grid.quant_min, " to ", grid.quant_max);
}

// Positions among bins, on both sides of 0.0, are int32.
inline void check_bins(int64_t bins) {
  STD_TORCH_CHECK(bins > 0 && bins < int64_t{1} << 30, "fakequant_cpu: ", bins, " bins, expected 1 to 2**30 - 1");
}

// A number of a form as an integer, below 2**53 in magnitude.
inline int64_t whole(double field) {
  STD_TORCH_CHECK(std::fabs(field) < kMostElements, "fakequant_cpu: ", field, " is no whole number of a form");
  return static_cast<int64_t>(field);
}

}  // namespace
}  // namespace fakequant
