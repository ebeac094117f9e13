// Convolutions of codes whose output channels read one input channel each: exact sums, in the order of a contiguous
// result.
//
// Each channel is laid out once as rows of int32, centred, with its padding: a code of padding counts 0. Columns lie in
// the phases of the stride, so that neighbouring outputs read neighbouring numbers for each tap. oneDNN's convolution
// reads and writes channels-last, which is two more passes: by this kernel MobileNetV2 takes 0.8 of the time.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "call.h"
#include "check.h"
#include "chunks.h"

namespace fakequant {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kPlaneAxes = 2;  // fewer are filled up in front with an axis of one place
constexpr int64_t kAtOnce = 16;    // outputs
constexpr int64_t kMostOfAxis = int64_t{1} << 20;  // places, of which products do not overflow

struct Plane {
  std::array<int64_t, kPlaneAxes> in, out, kernel, stride, padding, dilation;
  int64_t rows, pitch;         // of the padded input; numbers of a phase, with those that a load may reach beyond it
  std::vector<int64_t> taps;   // from the first number of an output to that of each tap

  int64_t row() const { return stride[1] * pitch; }
};

// What the kernel of a plane reads and writes.
struct Channel {
  const int32_t* laid;
  const int32_t* weight;  // [taps]
  int32_t* sums;
};

#if defined(__GNUC__)
typedef int32_t Sums __attribute__((vector_size(kAtOnce * sizeof(int32_t))));

FAKEQUANT_INLINE void add(Sums& sums, const int32_t* from, int32_t weight) {
  Sums x;
  std::memcpy(&x, from, sizeof(x));
  sums += x * weight;
}
#else
struct Sums {
  int32_t each[kAtOnce];
};

FAKEQUANT_INLINE void add(Sums& sums, const int32_t* from, int32_t weight) {
  for (int64_t i = 0; i < kAtOnce; ++i) sums.each[i] += from[i] * weight;
}
#endif

// kStep: the stride of columns, where it is known beforehand, or 0.
template <int64_t kStep, typename T>
FAKEQUANT_INLINE void lay_by(const Plane& p, const T* FAKEQUANT_RESTRICT codes, int32_t zero_point,
                             int32_t* FAKEQUANT_RESTRICT laid) {
  const int64_t step = kStep ? kStep : p.stride[1];
  for (int64_t h = 0; h < p.in[0]; ++h, codes += p.in[1]) {
    for (int64_t phase = 0; phase < step; ++phase) {
      const int64_t first = (phase + step - p.padding[1] % step) % step;  // column of this phase
      int32_t* to = laid + (h + p.padding[0]) * p.row() + phase * p.pitch + (first + p.padding[1]) / step;
      const int64_t count = (p.in[1] - first + step - 1) / step;  // 0 or less where the first is beyond the row
      for (int64_t i = 0; i < count; ++i) to[i] = static_cast<int32_t>(codes[first + i * step]) - zero_point;
    }
  }
}

template <typename T>
FAKEQUANT_INLINE void lay_as(const Plane& p, const T* codes, int32_t zero_point, int32_t* laid) {
  if (p.stride[1] == 1) return lay_by<1>(p, codes, zero_point, laid);
  if (p.stride[1] == 2) return lay_by<2>(p, codes, zero_point, laid);
  lay_by<0>(p, codes, zero_point, laid);
}

FAKEQUANT_CLONES void lay(const Plane& p, const uint8_t* codes, int32_t zero_point, int32_t* laid) {
  lay_as(p, codes, zero_point, laid);
}
FAKEQUANT_CLONES void lay(const Plane& p, const int8_t* codes, int32_t zero_point, int32_t* laid) {
  lay_as(p, codes, zero_point, laid);
}

FAKEQUANT_CLONES void convolve_plane(const Plane& p, const Channel& c) {
  const auto taps = static_cast<int64_t>(p.taps.size());
  const int64_t* tap = p.taps.data();
  int32_t* to = c.sums;
  for (int64_t h = 0; h < p.out[0]; ++h, to += p.out[1]) {
    const int32_t* row = c.laid + h * p.stride[0] * p.row();
    for (int64_t w = 0; w < p.out[1]; w += kAtOnce) {
      Sums sums = {};
      for (int64_t t = 0; t < taps; ++t) add(sums, row + tap[t] + w, c.weight[t]);
      if (p.out[1] - w >= kAtOnce)
        std::memcpy(to + w, &sums, sizeof(sums));
      else
        std::memcpy(to + w, &sums, sizeof(int32_t) * (p.out[1] - w));
    }
  }
}

Plane plane_of(const Tensor& codes, const Tensor& windows, const Tensor& sums) {
  const int64_t axes = codes.dim() - 2, front = kPlaneAxes - axes;
  STD_TORCH_CHECK(axes >= 1 && axes <= kPlaneAxes && sums.dim() == codes.dim() && sums.size(0) == codes.size(0) &&
                      codes.size(1) > 0 && sums.size(1) % codes.size(1) == 0,
                  "fakequant_cpu::convolve_channels: codes and sums do not fit");
  const auto* window = data_of<int64_t>(windows, 4 * axes);
  Plane p;
  for (int64_t axis = 0; axis < kPlaneAxes; ++axis) {
    const int64_t own = axis - front;
    const auto of_window = [&](int64_t which, int64_t least) {
      const int64_t found = own < 0 ? least : window[which * axes + own];
      STD_TORCH_CHECK(found >= least && found < kMostOfAxis, "fakequant_cpu::convolve_channels: a window with the number ",
                      found);
      return found;
    };
    p.in[axis] = own < 0 ? 1 : codes.size(2 + own), p.out[axis] = own < 0 ? 1 : sums.size(2 + own);
    p.kernel[axis] = of_window(0, 1), p.stride[axis] = of_window(1, 1);
    p.padding[axis] = of_window(2, 0), p.dilation[axis] = of_window(3, 1);
    const int64_t padded = p.in[axis] + 2 * p.padding[axis], reach = p.dilation[axis] * (p.kernel[axis] - 1) + 1;
    STD_TORCH_CHECK(p.in[axis] < kMostOfAxis && reach <= padded && (padded - reach) / p.stride[axis] + 1 == p.out[axis],
                    "fakequant_cpu::convolve_channels: sums of another size than there are windows");
    if (p.out[axis] == 1) p.stride[axis] = 1;
  }
  p.rows = p.in[0] + 2 * p.padding[0];
  p.pitch = (p.in[1] + 2 * p.padding[1]) / p.stride[1] + 1 + kAtOnce;
  STD_TORCH_CHECK(static_cast<double>(p.rows) * static_cast<double>(p.row()) < kMostElements,
                  "fakequant_cpu::convolve_channels: windows beyond all memory");
  for (int64_t h = 0; h < p.kernel[0]; ++h)
    for (int64_t w = 0; w < p.kernel[1]; ++w) {
      const int64_t column = w * p.dilation[1];
      p.taps.push_back(h * p.dilation[0] * p.row() + column % p.stride[1] * p.pitch + column / p.stride[1]);
    }
  return p;
}

// codes: int8 or uint8 [n, channels, ...] of one or two axes; weight: int8 [outputs, taps]; windows: int64 [4, axes],
// kernel, stride, padding and dilation; sums: int32 [n, outputs, ...]. All contiguous.
void convolve_channels(const Tensor& codes, int64_t zero_point, const Tensor& weight, const Tensor& windows,
                       Tensor sums) {
  if (sums.numel() == 0) return;
  STD_TORCH_CHECK(codes.is_contiguous(), "fakequant_cpu::convolve_channels: codes with gaps");
  const Plane p = plane_of(codes, windows, sums);
  const int64_t channels = codes.size(1), outputs = sums.size(1), each = outputs / channels;
  const auto taps = static_cast<int64_t>(p.taps.size());
  const auto* small = data_of<int8_t>(weight, outputs * taps);
  const std::vector<int32_t> weights(small, small + outputs * taps);
  auto* to = data_of<int32_t>(sums, sums.numel());
  const int64_t places = p.in[0] * p.in[1], results = p.out[0] * p.out[1];
  const auto run = [&](const auto* from) {
    const int64_t grain = std::max<int64_t>(1, kGrainChunks * kChunk / (results * each));
    parallel_for(0, codes.size(0) * channels, grain, [&](int64_t begin, int64_t end) {
      std::vector<int32_t> laid(p.rows * p.row() + kAtOnce);
      for (int64_t i = begin; i < end; ++i) {
        lay(p, from + i * places, static_cast<int32_t>(zero_point), laid.data());
        for (int64_t o = i % channels * each, last = o + each; o < last; ++o)
          convolve_plane(p, {laid.data(), weights.data() + o * taps, to + (i / channels * outputs + o) * results});
      }
    });
  };
  switch (codes.scalar_type()) {
    case ScalarType::Byte: return run(static_cast<const uint8_t*>(codes.data_ptr()));
    case ScalarType::Char: return run(static_cast<const int8_t*>(codes.data_ptr()));
    default: STD_TORCH_CHECK(false, "fakequant_cpu::convolve_channels: codes of 8 bits only");
  }
}

}  // namespace
}  // namespace fakequant

STABLE_TORCH_LIBRARY_FRAGMENT(fakequant_cpu, m) {
  m.def("convolve_channels(Tensor codes, int zero_point, Tensor weight, Tensor windows, Tensor(a!) sums) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fakequant_cpu, CPU, m) {
  m.impl("convolve_channels", TORCH_BOX(&fakequant::convolve_channels));
}
