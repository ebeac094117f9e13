// How kernels walk over memory where registers.h does not serve: chunks of 1024 elements, each converted, quantized in
// the first-level cache, converted back. A chunk covers whole bytes of the packed mask, so threads never share one.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>

#include "call.h"
#include "check.h"
#include "convert.h"
#include "rectify.h"
#include "registers.h"
#include "threads.h"

namespace fakequant {

constexpr int64_t kGrainChunks = 32;  // 32,768 elements: below that a second thread costs more than it brings.

// The values of the elements [first, first + n) of the tiles of a call, their codes, and the values of codes. x and y
// point to the first of them and are not the same memory; `inside` gets one byte per element. n <= kChunk.
void quantize_chunk(const Call<float>& call, const float* x, float* y, uint8_t* inside, int64_t first, int64_t n);
void quantize_chunk(const Call<double>& call, const double* x, double* y, uint8_t* inside, int64_t first, int64_t n);
void encode_chunk(const Call<float>& call, const float* x, float* codes, uint8_t* inside, int64_t first, int64_t n);
void encode_chunk(const Call<double>& call, const double* x, double* codes, uint8_t* inside, int64_t first, int64_t n);
void decode_chunk(const Call<float>& call, const float* codes, float* y, int64_t first, int64_t n);
void decode_chunk(const Call<double>& call, const double* codes, double* y, int64_t first, int64_t n);
// Rounds numbers in units of codes, in place, where call.draw is on.
void round_chunk_drawn(const Call<float>& call, float* y, int64_t first, int64_t n);
void round_chunk_drawn(const Call<double>& call, double* y, int64_t first, int64_t n);

namespace {

uint64_t seed_of(const torch::stable::Tensor& seed) { return static_cast<uint64_t>(*data_of<int64_t>(seed, 1)); }

// `random`: a seed, one int64, or a word for each element, int32; without it rounding is to nearest.
Draw draw_of(const std::optional<torch::stable::Tensor>& random, int64_t elements) {
  if (!random.has_value()) return {};
  if (random->scalar_type() != torch::headeronly::ScalarType::Int) return {true, seed_of(*random), nullptr, 0};
  check_dense(*random);
  check_elements(*random, elements);
  return {true, 0, static_cast<const uint32_t*>(random->data_ptr()), 0};
}

// What follows from a specification and the layout of a tensor, as one tensor, because every argument of an operator
// costs 0.2 us: g0, b0, g1, b1, quant_min, quant_max, mantissa_bits, min_exponent, negative_zero, arithmetic, rectified,
// shifted, exact, and the table where the format has one.
constexpr int64_t kFormFields = 13;

// Without parameters, which `params_of` adds.
template <typename C>
Call<C> call_of(const torch::stable::Tensor& form, int64_t elements, int64_t mask = 0,
                const std::optional<torch::stable::Tensor>& random = std::nullopt) {
  const int64_t in_table = form.numel() - kFormFields;
  STD_TORCH_CHECK(in_table == 0 || (in_table > 0 && in_table % 2 && in_table < 2 * kMostTableValues),
                  "fakequant_cpu: a form of ", form.numel(), " numbers");
  const auto* f = data_of<double>(form, form.numel());
  const int64_t arithmetic = whole(f[9]);
  STD_TORCH_CHECK(arithmetic >= 0 && arithmetic <= 2 && mask >= 0 && mask <= 4, "fakequant_cpu: arithmetic ",
                  arithmetic, " or mask ", mask, " is unknown");
  const Call<C> call{checked_tiles(f[0], f[1], f[2], f[3], elements),
                     {f[4], f[5], whole(f[6]), whole(f[7]), f[8] != 0, in_table ? f + kFormFields : nullptr,
                      (in_table + 1) / 2},
                     static_cast<Arithmetic>(arithmetic),
                     f[10] != 0,
                     f[11] != 0,
                     f[12] != 0,
                     static_cast<Mask>(mask),
                     {nullptr, nullptr, nullptr, nullptr},
                     draw_of(random, elements)};
  check_grid(call.grid);
  return call;
}

// Made here, because every tensor that Python makes costs 1 us, and these cost 0.2 us.
torch::stable::Tensor made(int64_t axes, const int64_t* sizes, const int64_t* strides, int32_t dtype) {
  AtenTensorHandle handle;
  STD_TORCH_CHECK(aoti_torch_empty_strided(axes, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, &handle) == 0,
                  "fakequant_cpu: no memory for a result");
  return torch::stable::Tensor(handle);
}

int32_t dtype_of(const torch::stable::Tensor& x) {
  int32_t dtype;
  STD_TORCH_CHECK(aoti_torch_get_dtype(x.get(), &dtype) == 0, "fakequant_cpu: a tensor without a dtype");
  return dtype;
}

torch::stable::Tensor made_like(const torch::stable::Tensor& x) {
  return made(x.dim(), x.sizes().data(), x.strides().data(), dtype_of(x));
}

std::optional<torch::stable::Tensor> made_mask(const torch::stable::Tensor& x, int64_t kind) {
  if (kind == 0) return std::nullopt;
  const int64_t bytes = (x.numel() + 7) / 8, stride = 1;
  return made(1, &bytes, &stride, aoti_torch_dtype_uint8());
}

// Calls `body(first, n)` for parts of many chunks, or for each chunk.
template <typename F>
void for_each_span(int64_t elements, const F& body) {
  const int64_t chunks = (elements + kChunk - 1) / kChunk;
  parallel_for(0, chunks, kGrainChunks, [&](int64_t begin, int64_t end) {
    body(begin * kChunk, std::min(end * kChunk, elements) - begin * kChunk);
  });
}
template <typename F>
void for_each_chunk_of(int64_t first, int64_t n, const F& body) {
  for (int64_t i = 0; i < n; i += kChunk) body(first + i, std::min(kChunk, n - i));
}
template <typename F>
void for_each_chunk(int64_t elements, const F& body) {
  for_each_span(elements, [&](int64_t first, int64_t n) { for_each_chunk_of(first, n, body); });
}

// The packed mask from an element on that begins a byte; null where there is none.
inline uint8_t* bits_from(uint8_t* mask, int64_t first) { return mask ? mask + first / 8 : nullptr; }

// What is quantized of a chunk: x itself, or what `converted` gets.
template <typename T, typename C>
const C* load_chunk(const Call<C>& call, const T* x, C* converted, int64_t n) {
  const C* in = converted;
  if constexpr (std::is_same_v<T, C>)
    in = x;
  else
    load(x, converted, n);
  if (!call.rectified) return in;
  rectify(in, converted, n);
  return converted;
}

// `in` is what was quantized, and `inside` whether it was within the bounds.
template <typename C>
void pack_mask(const Call<C>& call, const C* in, uint8_t* inside, uint8_t* mask, int64_t n) {
  if (call.rectified) keep_passes(in, inside, n);
  pack(inside, mask, n);
}

// One chunk; x, y and mask point to its first element.
template <typename T, typename C>
void quantize_chunk_of(const Call<C>& call, const T* x, T* y, uint8_t* mask, int64_t first, int64_t n) {
  alignas(64) uint8_t inside[kChunk];
  alignas(64) C converted[kChunk];
  const C* in = load_chunk(call, x, converted, n);
  if constexpr (std::is_same_v<T, C>) {
    // Loops over memory that is read and written at once are not vectorised.
    if (in == y) {
      std::copy_n(in, n, converted);
      in = converted;
    }
    quantize_chunk(call, in, y, inside, first, n);
  } else {
    alignas(64) C out[kChunk];
    quantize_chunk(call, in, out, inside, first, n);
    store(out, y, n);
  }
  if (call.mask != Mask::kNone) pack_mask(call, in, inside, mask, n);
}

// The same for whole chunks and the last; `first` is where one begins.
template <typename T, typename C>
void quantize_span(const Call<C>& call, const T* x, T* y, uint8_t* mask, int64_t first, int64_t n) {
  if constexpr (std::is_same_v<C, float>) {
    if (serves_registers(call)) {
      in_registers(call, x, y, mask, first, n);
      return;
    }
  }
  for_each_chunk_of(0, n, [&](int64_t i, int64_t length) {
    quantize_chunk_of(call, x + i, y + i, bits_from(mask, i), first + i, length);
  });
}

template <typename T, typename C>
void quantize_all(const Call<C>& call, const T* x, T* y, uint8_t* mask) {
  for_each_span(call.tiles.elements(), [&](int64_t first, int64_t n) {
    quantize_span(call, x + first, y + first, bits_from(mask, first), first, n);
  });
}

// Calls `body` with a value of the element type of a floating tensor without gaps and one of its compute type.
template <typename F>
void with_float_type(const torch::stable::Tensor& t, const F& body) {
  using torch::headeronly::ScalarType;
  check_dense(t);
  switch (t.scalar_type()) {
    case ScalarType::Float: return body(float{}, float{});
    case ScalarType::Double: return body(double{}, double{});
    case ScalarType::Half: return body(Half{}, float{});
    case ScalarType::BFloat16: return body(BFloat16{}, float{});
    default: STD_TORCH_CHECK(false, "fakequant_cpu: not a floating tensor");
  }
}

}  // namespace
}  // namespace fakequant
