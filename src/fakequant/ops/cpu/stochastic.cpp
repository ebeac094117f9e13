// Stochastic rounding, a step of chunks.cpp, and random words for other orders in memory than the row-major one in
// which they are counted.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>

#include "call.h"
#include "chunks.h"
#include "philox.h"
#include "stochastic.h"

namespace fakequant {
namespace {

using torch::stable::Tensor;

constexpr int64_t kWordsPerChunk = (kChunk + kWordsPerBatch - 1) / kWordsPerBatch * kWordsPerBatch;

FAKEQUANT_CLONES void draw_chunk(uint64_t seed, int64_t first, int64_t n, uint32_t* words) {
  draw_words(seed, first, n, words);
}

template <typename Rounding, typename C>
FAKEQUANT_INLINE void round_by(const Grid& grid, const uint32_t* words, C* y, int64_t n) {
  const Rounding rounding(grid);
  for (int64_t i = 0; i < n; ++i) y[i] = rounding.round(y[i], words[i]);
}
template <typename C>
FAKEQUANT_INLINE void round_as(const Grid& grid, const uint32_t* words, C* y, int64_t n) {
  if (grid.is_integer()) return round_by<StochasticInteger<C>>(grid, words, y, n);
  if (!grid.table) return round_by<StochasticFloat<C>>(grid, words, y, n);
  if (grid.table_size <= StochasticSmallTable<C>::kSize) return round_by<StochasticSmallTable<C>>(grid, words, y, n);
  round_by<StochasticTable<C>>(grid, words, y, n);
}
FAKEQUANT_CLONES void round_words(const Grid& grid, const uint32_t* words, float* y, int64_t n) {
  round_as(grid, words, y, n);
}
void round_words(const Grid& grid, const uint32_t* words, double* y, int64_t n) { round_as(grid, words, y, n); }

template <typename C>
void round_drawn(const Call<C>& call, C* y, int64_t first, int64_t n) {
  const Draw& draw = call.draw;
  if (draw.words) return round_words(call.grid, draw.words + draw.before + first, y, n);
  alignas(64) uint32_t words[kWordsPerChunk];
  draw_chunk(draw.seed, draw.before + first, n, words);
  round_words(call.grid, words, y, n);
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

void round_chunk_drawn(const Call<float>& call, float* y, int64_t first, int64_t n) { round_drawn(call, y, first, n); }
void round_chunk_drawn(const Call<double>& call, double* y, int64_t first, int64_t n) {
  round_drawn(call, y, first, n);
}

}  // namespace fakequant

STABLE_TORCH_LIBRARY_FRAGMENT(fakequant_cpu, m) { m.def("draw_words(Tensor seed, Tensor(a!) words, int first=0) -> ()"); }

STABLE_TORCH_LIBRARY_IMPL(fakequant_cpu, CPU, m) { m.impl("draw_words", TORCH_BOX(&fakequant::draw_all)); }
