// From the exact sums of a product of codes to its result: scales and bias in one pass, row by row or transposed; or
// codes by integers of a fixed point.
//
// The bits are those of `scaled` in numerics/products.py: float32(sum) * (row scale * column scale) + bias, each operation
// rounded once.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "call.h"
#include "chunks.h"

namespace fakequant {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kFour = 4;  // rows and columns that are transposed in registers
// Rows at a time: several cache lines of every column of the result. Columns often lie a power of two apart, where single
// lines push each other out of the cache: 100 us instead of 370 us for 32 images of 32 columns and 1024 rows.
constexpr int64_t kBlock = 64;

struct Epilogue {
  const float* row_scale;  // one per row, or one for all
  int64_t row_step;        // 0 where one row scale is for all
  const float* column_scale;
  const float* bias;  // or null
  int64_t columns;
};

// Rows [rows, columns]. A row is short: what a call and a test for overlap cost is shared by many of them.
template <bool kBias, typename S>
FAKEQUANT_INLINE void scale_rows_as(const Epilogue& e, const S* FAKEQUANT_RESTRICT sums, const float* row_scale,
                                    int64_t rows, float* FAKEQUANT_RESTRICT y) {
  const int64_t columns = e.columns, step = e.row_step;
  const float* FAKEQUANT_RESTRICT column_scale = e.column_scale;
  const float* FAKEQUANT_RESTRICT bias = e.bias;
  for (int64_t row = 0; row < rows; ++row, sums += columns, y += columns) {
    const float s = row_scale[row * step];
    for (int64_t c = 0; c < columns; ++c) {
      const float scaled = static_cast<float>(sums[c]) * (s * column_scale[c]);
      y[c] = kBias ? scaled + bias[c] : scaled;
    }
  }
}

FAKEQUANT_CLONES void scale_int32(const Epilogue& e, const int32_t* sums, const float* row_scale, int64_t rows,
                                  float* y) {
  if (e.bias) return scale_rows_as<true>(e, sums, row_scale, rows, y);
  scale_rows_as<false>(e, sums, row_scale, rows, y);
}

FAKEQUANT_CLONES void scale_float(const Epilogue& e, const float* sums, const float* row_scale, int64_t rows,
                                  float* y) {
  if (e.bias) return scale_rows_as<true>(e, sums, row_scale, rows, y);
  scale_rows_as<false>(e, sums, row_scale, rows, y);
}

void scale(const Epilogue& e, const int32_t* sums, const float* row_scale, int64_t rows, float* y) {
  scale_int32(e, sums, row_scale, rows, y);
}
void scale(const Epilogue& e, const float* sums, const float* row_scale, int64_t rows, float* y) {
  scale_float(e, sums, row_scale, rows, y);
}

// `scaled` [kBlock, columns] to y [columns, y_rows].
void transpose_scalar(const float* scaled, int64_t columns, int64_t first, float* y, int64_t y_rows) {
  for (int64_t c = first; c < columns; ++c)
    for (int64_t i = 0; i < kBlock; ++i) y[c * y_rows + i] = scaled[i * columns + c];
}

// GCC 11 and other compilers have no such shuffles.
#if defined(__clang__) || (defined(__GNUC__) && __GNUC__ >= 12)
typedef float Four __attribute__((vector_size(16)));

FAKEQUANT_INLINE void store_four(float* y, Four v) { std::memcpy(y, &v, sizeof(v)); }

FAKEQUANT_INLINE void transpose_4x4(const float* from, int64_t columns, float* y, int64_t y_rows) {
  Four r[kFour];
  for (int64_t i = 0; i < kFour; ++i) std::memcpy(&r[i], from + i * columns, sizeof(Four));
  const Four a = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5), b = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7);
  const Four d = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5), e = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
  store_four(y, __builtin_shufflevector(a, d, 0, 1, 4, 5));
  store_four(y + y_rows, __builtin_shufflevector(a, d, 2, 3, 6, 7));
  store_four(y + 2 * y_rows, __builtin_shufflevector(b, e, 0, 1, 4, 5));
  store_four(y + 3 * y_rows, __builtin_shufflevector(b, e, 2, 3, 6, 7));
}

void transpose(const float* scaled, int64_t columns, float* y, int64_t y_rows) {
  const int64_t whole = columns / kFour * kFour;
  for (int64_t c = 0; c < whole; c += kFour)
    for (int64_t i = 0; i < kBlock; i += kFour)
      transpose_4x4(scaled + i * columns + c, columns, y + c * y_rows + i, y_rows);
  transpose_scalar(scaled, columns, whole, y, y_rows);
}
#else
void transpose(const float* scaled, int64_t columns, float* y, int64_t y_rows) {
  transpose_scalar(scaled, columns, 0, y, y_rows);
}
#endif

// sums [outer, inner, columns] to y [outer, columns, inner].
template <typename S>
void scale_transposed(const Epilogue& e, const S* sums, int64_t outer, int64_t inner, float* y) {
  const int64_t blocks = (inner + kBlock - 1) / kBlock;
  const int64_t grain = std::max<int64_t>(1, kGrainChunks * kChunk / (kBlock * e.columns));
  parallel_for(0, outer * blocks, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> scaled(kBlock * e.columns);
    for (int64_t block = begin; block < end; ++block) {
      const int64_t image = block / blocks, first = block % blocks * kBlock, rows = std::min(kBlock, inner - first);
      const S* in = sums + (image * inner + first) * e.columns;
      float* out = y + image * inner * e.columns + first;
      scale(e, in, e.row_scale, rows, scaled.data());
      if (rows == kBlock) {
        transpose(scaled.data(), e.columns, out, inner);
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
  parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    scale(e, sums + begin * e.columns, e.row_scale + begin * e.row_step, end - begin, y + begin * e.columns);
  });
}

// sums: int32 or float32 in memory as [outer, inner, columns]; y: float32, alike, or as [outer, columns, inner].
void scale_sums(const Tensor& sums, const Tensor& row_scale, const Tensor& column_scale,
                const std::optional<Tensor>& bias, Tensor y, int64_t outer, bool transposed) {
  const int64_t columns = column_scale.numel();
  if (sums.numel() == 0) return;
  STD_TORCH_CHECK(columns > 0 && outer > 0, "fakequant_cpu::scale_sums: no columns, or none of the outer axis");
  const int64_t rows = sums.numel() / columns;
  STD_TORCH_CHECK(y.scalar_type() == ScalarType::Float && y.is_contiguous() && sums.is_contiguous(),
                  "fakequant_cpu::scale_sums: the result is float32, and both are contiguous");
  STD_TORCH_CHECK(y.numel() == sums.numel() && rows * columns == sums.numel() && rows % outer == 0 &&
                      (row_scale.numel() == 1 || (row_scale.numel() == rows && !transposed)),
                  "fakequant_cpu::scale_sums: sums, scales and result do not fit");
  const Epilogue e{data_of<float>(row_scale, row_scale.numel()), row_scale.numel() > 1,
                   data_of<float>(column_scale, columns), bias.has_value() ? data_of<float>(*bias, columns) : nullptr,
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

// floor(floor((sum + constant) * down) * factor + 0.5) between two codes, in float64 as in `fixed_point` of
// numerics/products.py.
struct FixedPoint {
  const double* constant;
  const double* down;
  const double* factor;
  double low, high;

  // `codes` are those of uint8 or int8, of which both are the lowest byte of the integer.
  template <bool kSame, typename S>
  FAKEQUANT_INLINE void store(const S* FAKEQUANT_RESTRICT sums, int64_t first, int64_t count,
                              uint8_t* FAKEQUANT_RESTRICT codes) const {
    const double *c = constant + first, *d = down + first, *f = factor + first;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t own = kSame ? 0 : i;
      const double kept = std::floor((static_cast<double>(sums[i]) + c[own]) * d[own]);
      const double code = std::floor(kept * f[own] + 0.5);
      codes[i] = static_cast<uint8_t>(static_cast<int32_t>(std::min(std::max(code, low), high)));
    }
  }
};

FAKEQUANT_CLONES void store_one(const FixedPoint& by, const int32_t* sums, int64_t c, int64_t count, uint8_t* codes) {
  by.store<true>(sums, c, count, codes);
}
FAKEQUANT_CLONES void store_one(const FixedPoint& by, const float* sums, int64_t c, int64_t count, uint8_t* codes) {
  by.store<true>(sums, c, count, codes);
}
FAKEQUANT_CLONES void store_all(const FixedPoint& by, const int32_t* sums, int64_t count, uint8_t* codes) {
  by.store<false>(sums, 0, count, codes);
}
FAKEQUANT_CLONES void store_all(const FixedPoint& by, const float* sums, int64_t count, uint8_t* codes) {
  by.store<false>(sums, 0, count, codes);
}

// sums: int32 or float32, and codes: int8 or uint8, [outer, channels, inner]; steps: float64 [3, channels].
void fixed_point(const Tensor& sums, const Tensor& steps, int64_t low, int64_t high, int64_t inner, Tensor codes) {
  const int64_t channels = steps.numel() / 3, all = sums.numel();
  const bool is_signed = codes.scalar_type() == ScalarType::Char;
  STD_TORCH_CHECK((is_signed || codes.scalar_type() == ScalarType::Byte) && codes.is_contiguous() &&
                      sums.is_contiguous() && codes.numel() == all,
                  "fakequant_cpu::fixed_point: codes of 8 bits, as many as sums, and both contiguous");
  STD_TORCH_CHECK(low >= (is_signed ? -128 : 0) && low <= high && high <= (is_signed ? 127 : 255),
                  "fakequant_cpu::fixed_point: a range beyond the codes");
  const auto* constant = data_of<double>(steps, 3 * channels);
  if (all == 0) return;
  STD_TORCH_CHECK(channels > 0 && inner > 0 && inner <= all && all % inner == 0 && all / inner % channels == 0,
                  "fakequant_cpu::fixed_point: sums and steps do not fit");
  const FixedPoint by{constant, constant + channels, constant + 2 * channels, static_cast<double>(low),
                      static_cast<double>(high)};
  auto* to = static_cast<uint8_t*>(codes.data_ptr());
  const auto run = [&](const auto* in) {
    const int64_t run = inner == 1 ? channels : inner;
    parallel_for(0, all / run, std::max<int64_t>(1, kGrainChunks * kChunk / run), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if (inner == 1)
          store_all(by, in + i * run, run, to + i * run);
        else
          store_one(by, in + i * run, i % channels, run, to + i * run);
      }
    });
  };
  switch (sums.scalar_type()) {
    case ScalarType::Int: return run(static_cast<const int32_t*>(sums.data_ptr()));
    case ScalarType::Float: return run(static_cast<const float*>(sums.data_ptr()));
    default: STD_TORCH_CHECK(false, "fakequant_cpu::fixed_point: sums are int32 or float32");
  }
}

}  // namespace
}  // namespace fakequant

STABLE_TORCH_LIBRARY_FRAGMENT(fakequant_cpu, m) {
  m.def(
      "scale_sums(Tensor sums, Tensor row_scale, Tensor column_scale, Tensor? bias, Tensor(a!) y, int outer, "
      "bool transposed) -> ()");
  m.def("fixed_point(Tensor sums, Tensor steps, int low, int high, int inner, Tensor(a!) codes) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fakequant_cpu, CPU, m) {
  m.impl("scale_sums", TORCH_BOX(&fakequant::scale_sums));
  m.impl("fixed_point", TORCH_BOX(&fakequant::fixed_point));
}
