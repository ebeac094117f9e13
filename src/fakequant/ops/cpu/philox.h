// The random words of stochastic rounding: Philox-4x32-10, as numerics/philox.py defines them.
#pragma once

#include <cstdint>

#include "call.h"

namespace fakequant {

// Counters are worked on side by side, in lanes of 64 bits that hold words of 32: so the products vectorise (0.34 ns a
// word; 0.73 counter by counter).
constexpr int64_t kLanes = 32;
constexpr int64_t kWordsPerBatch = 4 * kLanes;

FAKEQUANT_INLINE void draw_batch(uint64_t seed, uint64_t counter, uint32_t* words) {
  constexpr uint64_t kMultiplier0 = 0xD2511F53u, kMultiplier1 = 0xCD9E8D57u, kWord = 0xFFFFFFFFu;
  uint64_t c0[kLanes], c1[kLanes], c2[kLanes], c3[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) {
    c0[i] = (counter + i) & kWord;
    c1[i] = (counter + i) >> 32;
    c2[i] = c3[i] = 0;
  }
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int64_t i = 0; i < kLanes; ++i) {
      const uint64_t p0 = kMultiplier0 * (c0[i] & kWord), p1 = kMultiplier1 * (c2[i] & kWord);
      c0[i] = (p1 >> 32) ^ c1[i] ^ k0;
      c1[i] = p1 & kWord;
      c2[i] = (p0 >> 32) ^ c3[i] ^ k1;
      c3[i] = p0 & kWord;
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  for (int64_t i = 0; i < kLanes; ++i) {
    words[4 * i] = static_cast<uint32_t>(c0[i]);
    words[4 * i + 1] = static_cast<uint32_t>(c1[i]);
    words[4 * i + 2] = static_cast<uint32_t>(c2[i]);
    words[4 * i + 3] = static_cast<uint32_t>(c3[i]);
  }
}

// The words of the elements [first, first + n), and those up to the end of a batch; `first` is a multiple of 4.
FAKEQUANT_INLINE void draw_words(uint64_t seed, int64_t first, int64_t n, uint32_t* words) {
  for (int64_t i = 0; i < n; i += kWordsPerBatch)
    draw_batch(seed, static_cast<uint64_t>(first + i) / 4, words + i);
}

}  // namespace fakequant
