// How kernels walk over memory: chunks of 1024 elements, each converted, quantized in the first-level cache, converted
// back. A chunk covers whole bytes of the packed mask, so threads never share one.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "call.h"
#include "convert.h"

namespace fakequant {

constexpr int64_t kGrainChunks = 32;  // 32,768 elements: below that a second thread costs more than it brings.

// The values of the elements [first, first + n) of the tiles of a call; `inside` gets one byte per element.
void quantize_chunk(const Call<float>& call, const float* x, float* y, uint8_t* inside, int64_t first, int64_t n);
void quantize_chunk(const Call<double>& call, const double* x, double* y, uint8_t* inside, int64_t first, int64_t n);
// The same where call.draw is on, and the codes instead of the values.
void quantize_chunk_drawn(const Call<float>& call, const float* x, float* y, uint8_t* inside, int64_t first, int64_t n);
void quantize_chunk_drawn(const Call<double>& call, const double* x, double* y, uint8_t* inside, int64_t first,
                          int64_t n);
void encode_chunk_drawn(const Call<float>& call, const float* x, float* codes, int64_t first, int64_t n);
void encode_chunk_drawn(const Call<double>& call, const double* x, double* codes, int64_t first, int64_t n);

namespace {

// `random`: a seed, one int64, or a word for every element of the tiles, int32; without it rounding is to nearest.
Draw draw_of(const std::optional<torch::stable::Tensor>& random) {
  using torch::headeronly::ScalarType;
  if (!random.has_value()) return {};
  if (random->scalar_type() == ScalarType::Int) return {true, 0, static_cast<const uint32_t*>(random->data_ptr()), 0};
  STD_TORCH_CHECK(random->scalar_type() == ScalarType::Long && random->numel() == 1,
                  "fakequant_cpu: random numbers are a seed of int64, or words of int32");
  return {true, static_cast<uint64_t>(*static_cast<const int64_t*>(random->data_ptr())), nullptr, 0};
}

template <typename F>
void for_each_chunk(int64_t elements, const F& body) {
  const int64_t chunks = (elements + kChunk - 1) / kChunk;
  torch::stable::parallel_for(0, chunks, kGrainChunks, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk)
      body(chunk * kChunk, std::min(kChunk, elements - chunk * kChunk));
  });
}

// One chunk of x, y and mask, which point to the first element of the call.
template <typename T, typename C>
void quantize_chunk_of(const Call<C>& call, const T* x, T* y, uint8_t* mask, int64_t first, int64_t n) {
  alignas(64) uint8_t inside[kChunk];
  if constexpr (std::is_same_v<T, C>) {
    quantize_chunk(call, x + first, y + first, inside, first, n);
  } else {
    alignas(64) C in[kChunk];
    alignas(64) C out[kChunk];
    load(x + first, in, n);
    quantize_chunk(call, in, out, inside, first, n);
    store(out, y + first, n);
  }
  if (call.mask != Mask::kNone) pack(inside, mask + first / 8, n);
}

template <typename T, typename C>
void quantize_all(const Call<C>& call, const T* x, T* y, uint8_t* mask) {
  for_each_chunk(call.tiles.elements(),
                 [&](int64_t first, int64_t n) { quantize_chunk_of(call, x, y, mask, first, n); });
}

// Calls `body` with a value of the element type of a floating tensor and one of its compute type.
template <typename F>
void with_float_type(const torch::stable::Tensor& t, const F& body) {
  using torch::headeronly::ScalarType;
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
