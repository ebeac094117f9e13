// The backward pass of a learned scale as one operator. Allocating and converting each gradient in Python cost 12 of the
// 65 us that 4,096 elements took, forward and backward.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "call.h"
#include "chunks.h"
#include "gradients.h"

namespace fakequant {
namespace {

using torch::stable::Tensor;

// Sums as a tensor like a parameter, whose elements are of type C.
template <typename C>
std::optional<Tensor> rounded(const std::vector<double>& sums, const Tensor& parameter, bool wanted) {
  if (!wanted) return std::nullopt;
  Tensor made = made_like(parameter);
  std::transform(sums.begin(), sums.end(), static_cast<C*>(made.data_ptr()),
                 [](double sum) { return static_cast<C>(sum); });
  return made;
}

using Gradients = std::tuple<std::optional<Tensor>, std::optional<Tensor>, std::optional<Tensor>>;

// The gradients of x (where there is a mask), scale and zero point, for tensors in the order of the tiles. The parameters
// are as the kernels of the forward pass read them, and a zero point has the type of the scale.
Gradients learned_gradients(const Tensor& dy, const Tensor& x, const std::optional<Tensor>& mask, const Tensor& scale,
                            const std::optional<Tensor>& zero_point, const Tensor& form, bool by_scale,
                            bool by_zero_point) {
  std::optional<Tensor> dx, scale_grad, zero_point_grad;
  with_float_type(x, [&](auto, auto c) {
    using C = decltype(c);
    Call<C> call = call_of<C>(form, x.numel());
    const int64_t groups = call.tiles.groups();
    const C* zero = zero_point.has_value() ? data_of<C>(*zero_point, groups) : nullptr;
    call.params = {data_of<C>(scale, groups), zero, nullptr, nullptr};
    std::vector<double> scale_sums(by_scale ? groups : 0), zero_point_sums(by_zero_point ? groups : 0);
    sum_gradients(call, dy, x,
                  {by_scale ? scale_sums.data() : nullptr, by_zero_point ? zero_point_sums.data() : nullptr});
    scale_grad = rounded<C>(scale_sums, scale, by_scale);
    zero_point_grad = rounded<C>(zero_point_sums, scale, by_zero_point);
  });
  if (mask.has_value()) dx = mask_gradient(dy, *mask);
  return {dx, scale_grad, zero_point_grad};
}

}  // namespace
}  // namespace fakequant

STABLE_TORCH_LIBRARY_FRAGMENT(fakequant_cpu, m) {
  m.def(
      "learned_gradients(Tensor dy, Tensor x, Tensor? mask, Tensor scale, Tensor? zero_point, Tensor form, "
      "bool by_scale, bool by_zero_point) -> (Tensor?, Tensor?, Tensor?)");
}

STABLE_TORCH_LIBRARY_IMPL(fakequant_cpu, CPU, m) {
  m.impl("learned_gradients", TORCH_BOX(&fakequant::learned_gradients));
}
