// The gradient of x, which is dy where the packed mask has a bit: as another tensor, or over dy.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#include "apply_mask.h"
#include "chunks.h"
#include "gradients.h"
#include "streaming.h"

namespace fakequant {
namespace {

using torch::stable::Tensor;

// dx may be dy.
void mask_into(const Tensor& dy, const Tensor& mask, Tensor& dx) {
  check_dense(dy);
  STD_TORCH_CHECK(mask.numel() >= (dy.numel() + 7) / 8, "fakequant_cpu: a mask of ", mask.numel(), " bytes for ",
                  dy.numel(), " elements");
  const auto* bits = data_of<uint8_t>(mask, mask.numel());
  // What is written over itself is in the caches already.
  const bool streamed = dx.data_ptr() != dy.data_ptr() && streams(dy.numel() * dy.element_size());
  const auto run = [&](auto u) {
    using U = decltype(u);
    const auto* in = static_cast<const U*>(dy.data_ptr());
    auto* out = static_cast<U*>(dx.data_ptr());
    for_each_chunk(dy.numel(), [&](int64_t first, int64_t n) {
      apply_mask(in + first, bits + first / 8, out + first, n, streamed);
    });
  };
  switch (dy.element_size()) {
    case 1: run(uint8_t{}); break;
    case 2: run(uint16_t{}); break;
    case 4: run(uint32_t{}); break;
    case 8: run(uint64_t{}); break;
    default: STD_TORCH_CHECK(false, "fakequant_cpu::mask_gradient: elements of 1, 2, 4 or 8 bytes only");
  }
}

void mask_gradient_over(Tensor dy, const Tensor& mask) { mask_into(dy, mask, dy); }

}  // namespace

Tensor mask_gradient(const Tensor& dy, const Tensor& mask) {
  Tensor dx = made_like(dy);
  mask_into(dy, mask, dx);
  return dx;
}

}  // namespace fakequant

STABLE_TORCH_LIBRARY_FRAGMENT(fakequant_cpu, m) {
  m.def("mask_gradient(Tensor dy, Tensor mask) -> Tensor");
  m.def("mask_gradient_over(Tensor(a!) dy, Tensor mask) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fakequant_cpu, CPU, m) {
  m.impl("mask_gradient", TORCH_BOX(&fakequant::mask_gradient));
  m.impl("mask_gradient_over", TORCH_BOX(&fakequant::mask_gradient_over));
}
