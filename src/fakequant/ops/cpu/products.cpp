// From the exact sums of a product of codes to its result: scales and bias in one pass, row by row or transposed.
//
// The bits are those of `scaled` in numerics/products.py: float32(sum) * (row scale * column scale) + bias, each operation
// rounded once.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "call.h"
#include "chunks.h"

namespace fakequant {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kBlock = 4;  // rows and columns that are transposed in registers

struct Epilogue {
  const float* row_scale;  // one per row, or one for all
  int64_t row_step;        // 0 where one row scale is for all
  const float* column_scale;
  const float* bias;  // or null
  int64_t columns;
};

template <typename S>
FAKEQUANT_INLINE void scale_row_as(const Epilogue& e, const S* sums, float row_scale, float* y) {
  if (e.bias) {
    for (int64_t c = 0; c < e.columns; ++c)
      y[c] = static_cast<float>(sums[c]) * (row_scale * e.column_scale[c]) + e.bias[c];
  } else {
    for (int64_t c = 0; c < e.columns; ++c) y[c] = static_cast<float>(sums[c]) * (row_scale * e.column_scale[c]);
  }
}

FAKEQUANT_CLONES void scale_row(const Epilogue& e, const int32_t* sums, float row_scale, float* y) {
  scale_row_as(e, sums, row_scale, y);
}

FAKEQUANT_CLONES void scale_row_of_float(const Epilogue& e, const float* sums, float row_scale, float* y) {
  scale_row_as(e, sums, row_scale, y);
}
void scale_row(const Epilogue& e, const float* sums, float row_scale, float* y) {
  scale_row_of_float(e, sums, row_scale, y);
}

// `scaled` [rows, columns] to y [columns, rows of y], for kBlock rows at a time.
#if defined(__GNUC__)
using Four = float __attribute__((vector_size(16), aligned(4)));

void transpose_4(const float* scaled, int64_t columns, float* y, int64_t y_rows) {
  using Whole = int32_t __attribute__((vector_size(16)));
  constexpr Whole kLow{0, 4, 1, 5}, kHigh{2, 6, 3, 7}, kFirst{0, 1, 4, 5}, kSecond{2, 3, 6, 7};
  int64_t c = 0;
  for (; c + kBlock <= columns; c += kBlock) {
    Four r[kBlock];
    for (int64_t i = 0; i < kBlock; ++i) r[i] = *reinterpret_cast<const Four*>(scaled + i * columns + c);
    const Four a = __builtin_shuffle(r[0], r[1], kLow), b = __builtin_shuffle(r[0], r[1], kHigh);
    const Four d = __builtin_shuffle(r[2], r[3], kLow), f = __builtin_shuffle(r[2], r[3], kHigh);
    *reinterpret_cast<Four*>(y + c * y_rows) = __builtin_shuffle(a, d, kFirst);
    *reinterpret_cast<Four*>(y + (c + 1) * y_rows) = __builtin_shuffle(a, d, kSecond);
    *reinterpret_cast<Four*>(y + (c + 2) * y_rows) = __builtin_shuffle(b, f, kFirst);
    *reinterpret_cast<Four*>(y + (c + 3) * y_rows) = __builtin_shuffle(b, f, kSecond);
  }
  for (; c < columns; ++c)
    for (int64_t i = 0; i < kBlock; ++i) y[c * y_rows + i] = scaled[i * columns + c];
}
#else
void transpose_4(const float* scaled, int64_t columns, float* y, int64_t y_rows) {
  for (int64_t c = 0; c < columns; ++c)
    for (int64_t i = 0; i < kBlock; ++i) y[c * y_rows + i] = scaled[i * columns + c];
}
#endif

// sums [outer, inner, columns] to y [outer, columns, inner].
template <typename S>
void scale_transposed(const Epilogue& e, const S* sums, int64_t outer, int64_t inner, float* y) {
  const int64_t blocks = (inner + kBlock - 1) / kBlock;
  const int64_t grain = std::max<int64_t>(1, kGrainChunks * kChunk / (kBlock * e.columns));
  torch::stable::parallel_for(0, outer * blocks, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> scaled(kBlock * e.columns);
    for (int64_t block = begin; block < end; ++block) {
      const int64_t image = block / blocks, first = block % blocks * kBlock, rows = std::min(kBlock, inner - first);
      const S* in = sums + (image * inner + first) * e.columns;
      float* out = y + image * inner * e.columns + first;
      for (int64_t i = 0; i < rows; ++i) scale_row(e, in + i * e.columns, *e.row_scale, &scaled[i * e.columns]);
      if (rows == kBlock) {
        transpose_4(scaled.data(), e.columns, out, inner);
        continue;
      }
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t c = 0; c < e.columns; ++c) out[c * inner + i] = scaled[i * e.columns + c];
    }
  });
}

template <typename S>
void scale_rows(const Epilogue& e, const S* sums, int64_t rows, float* y) {
  const int64_t grain = std::max<int64_t>(1, kGrainChunks * kChunk / e.columns);
  torch::stable::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      scale_row(e, sums + row * e.columns, e.row_scale[row * e.row_step], y + row * e.columns);
  });
}

// sums: int32 or float32 in memory as [outer, inner, columns]; y: float32, alike, or as [outer, columns, inner].
void scale_sums(const Tensor& sums, const Tensor& row_scale, const Tensor& column_scale,
                const std::optional<Tensor>& bias, Tensor y, int64_t outer, bool transposed) {
  const int64_t columns = column_scale.numel();
  if (sums.numel() == 0) return;
  const int64_t rows = sums.numel() / columns;
  STD_TORCH_CHECK(y.numel() == sums.numel() && rows * columns == sums.numel() && rows % outer == 0 &&
                      (row_scale.numel() == 1 || (row_scale.numel() == rows && !transposed)) &&
                      (!bias.has_value() || bias->numel() == columns),
                  "fakequant_cpu::scale_sums: sums, scales, bias and result do not fit");
  const auto data = [](const Tensor& t) { return static_cast<const float*>(t.data_ptr()); };
  const Epilogue e{data(row_scale), row_scale.numel() > 1, data(column_scale), bias.has_value() ? data(*bias) : nullptr,
                   columns};
  auto* out = static_cast<float*>(y.data_ptr());
  const auto run = [&](const auto* in) {
    if (transposed) return scale_transposed(e, in, outer, rows / outer, out);
    scale_rows(e, in, rows, out);
  };
  switch (sums.scalar_type()) {
    case ScalarType::Int: return run(static_cast<const int32_t*>(sums.data_ptr()));
    case ScalarType::Float: return run(static_cast<const float*>(sums.data_ptr()));
    default: STD_TORCH_CHECK(false, "fakequant_cpu::scale_sums: sums are int32 or float32");
  }
}

}  // namespace
}  // namespace fakequant

STABLE_TORCH_LIBRARY_FRAGMENT(fakequant_cpu, m) {
  m.def(
      "scale_sums(Tensor sums, Tensor row_scale, Tensor column_scale, Tensor? bias, Tensor(a!) y, int outer, "
      "bool transposed) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fakequant_cpu, CPU, m) { m.impl("scale_sums", TORCH_BOX(&fakequant::scale_sums)); }
