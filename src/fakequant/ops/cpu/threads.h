// Work on several threads, with one arithmetic on all of them.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>

#include "call.h"

namespace fakequant {
namespace {

// While it lives, its thread computes with subnormal numbers. torch.set_flush_denormal(True) makes 0 of them on some
// threads alone, and the scale 2**-127 of a block of zeros is one: 0 / 0 would be NaN. Takes 5 ns.
class WithSubnormals {
 public:
#if defined(FAKEQUANT_X86)
  WithSubnormals() : before_(_mm_getcsr()) {
    if (before_ & kFlushes) _mm_setcsr(before_ & ~kFlushes);
  }
  ~WithSubnormals() {
    if (before_ & kFlushes) _mm_setcsr(before_);
  }

 private:
  static constexpr unsigned kFlushes = 0x8040;  // results and operands
  unsigned before_;
#elif defined(FAKEQUANT_NEON)
  WithSubnormals() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    if (before_ & kFlushes) asm volatile("msr fpcr, %0" : : "r"(before_ & ~kFlushes));
  }
  ~WithSubnormals() {
    if (before_ & kFlushes) asm volatile("msr fpcr, %0" : : "r"(before_));
  }

 private:
  static constexpr uint64_t kFlushes = uint64_t{1} << 24;
  uint64_t before_;
#else
  WithSubnormals() {}
#endif
 public:
  WithSubnormals(const WithSubnormals&) = delete;
  WithSubnormals& operator=(const WithSubnormals&) = delete;
};

// Calls `body(first, last)` for parts of [begin, end), of at least `grain` each, on torch's threads.
template <typename F>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const F& body) {
  torch::stable::parallel_for(begin, end, grain, [&](int64_t first, int64_t last) {
    const WithSubnormals mode;
    body(first, last);
  });
}

}  // namespace
}  // namespace fakequant
