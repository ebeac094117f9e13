// The parameters of every group as a call has them, checked; and whether their values are valid.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "call.h"
#include "chunks.h"

namespace fakequant {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

#define FAKEQUANT_PARAMS \
  const Tensor &scale, const std::optional<Tensor>&zero_point, const std::optional<Tensor>&lo, const std::optional<Tensor>&hi

template <typename C>
Call<C> make_call(FAKEQUANT_PARAMS, const Tensor& form, int64_t elements, int64_t mask,
                  const std::optional<Tensor>& random) {
  Call<C> call = call_of<C>(form, elements, mask, random);
  const bool by_range = call.mask == Mask::kInputRange || call.mask == Mask::kClip;
  STD_TORCH_CHECK(lo.has_value() == hi.has_value() && (lo.has_value() || !by_range),
                  "fakequant_cpu: a range has two ends, and this mask needs one");
  const auto data = [&](const std::optional<Tensor>& t) -> const C* {
    return t.has_value() ? data_of<C>(*t, call.tiles.groups()) : nullptr;
  };
  call.params = {data_of<C>(scale, call.tiles.groups()), data(zero_point), data(lo), data(hi)};
  return call;
}

template <typename C>
const C* converted(const std::optional<Tensor>& zero_point, int64_t groups, std::vector<C>& memory) {
  if (!zero_point.has_value()) return nullptr;
  if (zero_point->scalar_type() != ScalarType::Int) return data_of<C>(*zero_point, groups);
  const auto* codes = data_of<int32_t>(*zero_point, groups);
  memory.assign(codes, codes + groups);
  return memory.data();
}

// The call with scale and zero point; `memory` holds the zero point where it is converted.
template <typename C>
Call<C> plain_call(const Tensor& scale, const std::optional<Tensor>& zero_point, const Tensor& form, int64_t elements,
                   Mask kind, std::vector<C>& memory) {
  Call<C> call = call_of<C>(form, elements, static_cast<int64_t>(kind));
  const int64_t groups = call.tiles.groups();
  call.params = {data_of<C>(scale, groups), converted(zero_point, groups, memory), nullptr, nullptr};
  return call;
}

// Whether every scale is positive and finite, with a finite reciprocal where that is used, and every zero point a code.
template <typename C>
bool is_valid(const Call<C>& call) {
  constexpr C kLargest = std::numeric_limits<C>::max();
  const bool inverted = call.arithmetic == Arithmetic::kReciprocal;
  const int64_t groups = call.tiles.groups();
  int valid = 1;
  for (int64_t g = 0; g < groups; ++g) {
    const C scale = call.params.scale[g];
    valid &= (scale > 0) & (scale <= kLargest) & (!inverted | (C(1) / scale <= kLargest));
  }
  if (const C* zero_point = call.params.zero_point) {
    for (int64_t g = 0; g < groups; ++g) {
      const double z = zero_point[g];
      valid &= (z >= call.grid.quant_min) & (z <= call.grid.quant_max) & (z == std::nearbyint(z));
    }
  }
  return valid != 0;
}

}  // namespace
}  // namespace fakequant
