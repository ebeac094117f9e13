// The gradients of x, which is dy where a mask has a bit, and of scale and zero point: per group, the sum of dy times
// slope.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "call.h"

namespace fakequant {

// dy, of any floating type, where the packed mask has a bit, else +0.0; both in one order of the elements.
torch::stable::Tensor mask_gradient(const torch::stable::Tensor& dy, const torch::stable::Tensor& mask);

// Where the sums [groups] go; null where they are not wanted.
struct GradientSums {
  double* scale;
  double* zero_point;
};

// x and dy lie in the order of the call's tiles. Where its mask is Mask::kClip, its lo and hi are the values of the
// lowest and the highest code.
void sum_gradients(const Call<float>& call, const torch::stable::Tensor& dy, const torch::stable::Tensor& x,
                   const GradientSums& sums);
void sum_gradients(const Call<double>& call, const torch::stable::Tensor& dy, const torch::stable::Tensor& x,
                   const GradientSums& sums);

}  // namespace fakequant
