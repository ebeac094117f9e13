// Chunks that are rounded stochastically, which kernels.cpp hands over, and random words for other orders in memory
// than the row-major one in which they are counted.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>

#include "call.h"
#include "chunks.h"
#include "philox.h"
#include "runs.h"
#include "stochastic.h"

namespace fakequant {
namespace {

using torch::stable::Tensor;

constexpr int64_t kWordsPerChunk = (kChunk + kWordsPerBatch - 1) / kWordsPerBatch * kWordsPerBatch;

template <Emit E, typename C, typename Rounding>
FAKEQUANT_INLINE void quantize_drawn(const Call<C>& call, const C* x, C* y, uint8_t* inside, int64_t first, int64_t n) {
  alignas(64) uint32_t drawn_words[kWordsPerChunk];
  const Draw& draw = call.draw;
  const uint32_t* words = draw.words ? draw.words + draw.before + first : drawn_words;
  if (!draw.words) draw_words(draw.seed, draw.before + first, n, drawn_words);
  const Rounding rounding(call.grid);
  for_each_run(call, first, n, [&](int64_t i, int64_t piece, const auto& p) FAKEQUANT_INLINE_LAMBDA {
    const Drawn<C, Rounding> drawn{rounding, words + i, rounding.lo, rounding.hi};
    quantize_run_as<E>(call, x + i, y + i, inside + i, piece, drawn, p);
  });
}

template <typename C>
FAKEQUANT_INLINE void quantize_as(const Call<C>& call, const C* x, C* y, uint8_t* inside, int64_t first, int64_t n) {
  constexpr Emit kValue = Emit::kValue;
  if (call.grid.is_integer()) return quantize_drawn<kValue, C, StochasticInteger<C>>(call, x, y, inside, first, n);
  if (!call.grid.table) return quantize_drawn<kValue, C, StochasticFloat<C>>(call, x, y, inside, first, n);
  if (call.grid.table_size <= StochasticSmallTable<C>::kSize)
    return quantize_drawn<kValue, C, StochasticSmallTable<C>>(call, x, y, inside, first, n);
  quantize_drawn<kValue, C, StochasticTable<C>>(call, x, y, inside, first, n);
}

FAKEQUANT_CLONES void quantize_f32(const Call<float>& call, const float* x, float* y, uint8_t* inside, int64_t first,
                                   int64_t n) {
  quantize_as(call, x, y, inside, first, n);
}
FAKEQUANT_CLONES void encode_f32(const Call<float>& call, const float* x, float* codes, int64_t first, int64_t n) {
  quantize_drawn<Emit::kCode, float, StochasticInteger<float>>(call, x, codes, nullptr, first, n);
}
FAKEQUANT_CLONES void draw_chunk(uint64_t seed, int64_t first, int64_t n, uint32_t* words) {
  draw_words(seed, first, n, words);
}

// The words of the elements from `first_element`, a multiple of 4, on.
void draw_all(const Tensor& seed, Tensor words, int64_t first_element) {
  const uint64_t key = seed_of(seed);
  auto* out = reinterpret_cast<uint32_t*>(data_of<int32_t>(words, words.numel()));
  for_each_chunk(words.numel(), [&](int64_t first, int64_t n) {
    alignas(64) uint32_t chunk[kWordsPerChunk];
    draw_chunk(key, first_element + first, n, chunk);
    std::copy(chunk, chunk + n, out + first);
  });
}

}  // namespace

void quantize_chunk_drawn(const Call<float>& call, const float* x, float* y, uint8_t* inside, int64_t first,
                          int64_t n) {
  quantize_f32(call, x, y, inside, first, n);
}
void quantize_chunk_drawn(const Call<double>& call, const double* x, double* y, uint8_t* inside, int64_t first,
                          int64_t n) {
  quantize_as(call, x, y, inside, first, n);
}
void encode_chunk_drawn(const Call<float>& call, const float* x, float* codes, int64_t first, int64_t n) {
  encode_f32(call, x, codes, first, n);
}
void encode_chunk_drawn(const Call<double>& call, const double* x, double* codes, int64_t first, int64_t n) {
  quantize_drawn<Emit::kCode, double, StochasticInteger<double>>(call, x, codes, nullptr, first, n);
}

}  // namespace fakequant

STABLE_TORCH_LIBRARY_FRAGMENT(fakequant_cpu, m) { m.def("draw_words(Tensor seed, Tensor(a!) words, int first=0) -> ()"); }

STABLE_TORCH_LIBRARY_IMPL(fakequant_cpu, CPU, m) { m.impl("draw_words", TORCH_BOX(&fakequant::draw_all)); }
