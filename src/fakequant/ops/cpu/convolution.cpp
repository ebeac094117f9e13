// Convolutions of codes for processors with AVX-512 VNNI: exact sums, scales and bias, written once, in the order of a
// contiguous result.
//
// Each image is laid out once as planes of 4 channels, [channels / 4][phases][places][4], with its padding. The phases are
// those of the strides: within one, each tap of the kernel is a fixed distance away, so that 16 neighbouring
// outputs are one load for each tap. Registers hold 8 output channels of 3 times 16 outputs, and each step of a tap adds 4
// channels to all of them. oneDNN's convolution writes its sums channels-last, to be read, scaled and turned around:
// by it a convolution of 64 channels took 0.60 of the time in float, by this 0.36.
//
// The bits are those of `convolution` in numerics/products.py. Sums wrap around in int32 and come back, because the
// centred sum fits.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "call.h"
#include "check.h"
#include "threads.h"

namespace fakequant {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

#ifdef FAKEQUANT_X86
const bool kConvolves = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
#else
const bool kConvolves = false;
#endif

bool convolves() { return kConvolves; }

#ifdef FAKEQUANT_X86
#define FAKEQUANT_VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))

constexpr int64_t kAxes = 3;  // fewer are filled up in front with axes of one place
constexpr int64_t kDepth = 4;  // channels that one instruction multiplies and adds
constexpr int64_t kRows = 8;  // output channels at a time
constexpr int64_t kVectors = 3;  // registers of outputs at a time, of each of them
constexpr int64_t kOutputs = 16;  // of a register
constexpr int64_t kMostPlaces = int64_t{1} << 61;  // of which sums do not overflow
constexpr int64_t kSlack = 64;  // bytes that a load may reach beyond the last place

using Axes = std::array<int64_t, kAxes>;

// 16 outputs. The ones in the mask are written one after the other, starting at one place of the result.
struct Strip {
  int64_t start;  // place of the first within its phase
  int64_t to;  // place of the first in the result
  __mmask16 mask;
};

// What follows from sizes and windows alone.
struct Shape {
  int64_t images, channels, groups, outputs;  // groups: of kDepth channels each, the convolution itself has none
  Axes in, out, kernel, stride, padding, dilation;
  Axes pitch;  // places of a phase
  int64_t phase, phases;  // places of one phase; how many there are
  uint32_t every_step = 0;  // bits 0, stride, 2 * stride, ... of the last axis
  std::vector<int64_t> taps;  // bytes from a place to the place that each tap of the kernel reads
  std::vector<Strip> strips;

  int64_t group_bytes() const { return phases * phase * kDepth; }
  int64_t places() const { return out[0] * out[1] * out[2]; }
  // Bytes from the start of a group to where a padded row begins, whose columns of phase 0 begin there.
  int64_t row_start(int64_t d, int64_t h) const {
    const int64_t of_phase = (d % stride[0] * stride[1] + h % stride[1]) * stride[2];
    return (of_phase * phase + (d / stride[0] * pitch[1] + h / stride[1]) * pitch[2]) * kDepth;
  }
};

struct Operands {
  const uint8_t* codes;
  uint8_t flip;  // 128 for int8, which then counts from -128 as uint8 does from 0
  int32_t zero_point;  // after that
  const int8_t* weight;  // [outputs / kRows][groups][taps][kRows][kDepth]
  const int32_t* weight_sums;
  float x_scale;
  const float* scale;  // or null: sums are written as they are
  const float* bias;  // or null
  void* y;  // float, or int32_t without scales
};

void find_taps(Shape& s) {
  for (int64_t d = 0; d < s.kernel[0]; ++d)
    for (int64_t h = 0; h < s.kernel[1]; ++h)
      for (int64_t w = 0; w < s.kernel[2]; ++w) {
        const int64_t column = w * s.dilation[2];
        const int64_t bytes = s.row_start(d * s.dilation[0], h * s.dilation[1]) +
                              (column % s.stride[2] * s.phase + column / s.stride[2]) * kDepth;
        s.taps.push_back(bytes);
      }
}

// Each strip begins at the first output that no strip before it has; what lies between rows is computed and left out.
void find_strips(Shape& s) {
  int64_t to = 0;
  for (int64_t d = 0; d < s.out[0]; ++d)
    for (int64_t h = 0; h < s.out[1]; ++h)
      for (int64_t w = 0; w < s.out[2]; ++w, ++to) {
        const int64_t place = (d * s.pitch[1] + h) * s.pitch[2] + w;
        if (s.strips.empty() || place >= s.strips.back().start + kOutputs) s.strips.push_back({place, to, 0});
        s.strips.back().mask |= static_cast<__mmask16>(1u << (place - s.strips.back().start));
      }
}

// Up to 16 columns of kDepth channels, as one word of kDepth bytes for each column.
FAKEQUANT_VNNI __m512i interleave(const uint8_t* const* rows, int64_t column, __mmask16 columns) {
  __m128i x[kDepth];
  for (int64_t c = 0; c < kDepth; ++c) x[c] = _mm_maskz_loadu_epi8(columns, rows[c] + column);
  const __m128i low = _mm_unpacklo_epi8(x[0], x[1]), low2 = _mm_unpacklo_epi8(x[2], x[3]);
  const __m128i high = _mm_unpackhi_epi8(x[0], x[1]), high2 = _mm_unpackhi_epi8(x[2], x[3]);
  __m512i words = _mm512_castsi128_si512(_mm_unpacklo_epi16(low, low2));
  words = _mm512_inserti32x4(words, _mm_unpackhi_epi16(low, low2), 1);
  words = _mm512_inserti32x4(words, _mm_unpacklo_epi16(high, high2), 2);
  return _mm512_inserti32x4(words, _mm_unpackhi_epi16(high, high2), 3);
}

FAKEQUANT_VNNI __mmask16 first(int64_t count) {
  return static_cast<__mmask16>(count < kOutputs ? (1u << count) - 1 : 0xFFFFu);
}

// One row of kDepth channels, each column in its phase; `to` is where column 0 of the padded row lies.
FAKEQUANT_VNNI void lay_row(const Shape& s, const uint8_t* const* rows, uint8_t flip, uint8_t* to) {
  const int64_t step = s.stride[2], width = s.in[2];
  const __m512i flips = _mm512_set1_epi8(static_cast<char>(flip));
  for (int64_t w = 0; w < width; w += kOutputs) {
    const __mmask16 columns = first(width - w);
    const __m512i words = _mm512_xor_si512(interleave(rows, w, columns), flips);
    const int64_t padded = w + s.padding[2];
    if (step == 1) {
      _mm512_mask_storeu_epi32(to + padded * kDepth, columns, words);
      continue;
    }
    for (int64_t i = 0; i < std::min(step, kOutputs); ++i) {  // the columns i, i + step, ... of these
      const int64_t phase = (padded + i) % step;
      const auto those = static_cast<__mmask16>(s.every_step << i & columns);
      uint8_t* places = to + (phase * s.phase + (padded + i) / step) * kDepth;
      _mm512_mask_storeu_epi32(places, first(__builtin_popcount(those)), _mm512_maskz_compress_epi32(those, words));
    }
  }
}

// One image [channels, ...] in the order of its loads. What is beyond it holds the zero point already.
void lay_image(const Shape& s, const Operands& o, int64_t image, uint8_t* to) {
  const int64_t rows = s.in[0] * s.in[1], places = rows * s.in[2];
  const uint8_t* from = o.codes + image * s.channels * places;
  for (int64_t group = 0; group < s.groups; ++group, to += s.group_bytes())
    for (int64_t row = 0; row < rows; ++row) {
      const uint8_t* channel[kDepth];
      // Channels beyond the last have weights of 0: any codes will do.
      for (int64_t c = 0; c < kDepth; ++c)
        channel[c] = from + std::min(group * kDepth + c, s.channels - 1) * places + row * s.in[2];
      const int64_t d = row / s.in[1] + s.padding[0], h = row % s.in[1] + s.padding[1];
      lay_row(s, channel, o.flip, to + s.row_start(d, h));
    }
}

FAKEQUANT_VNNI void write(const Operands& o, const Shape& s, const Strip& strip, __m512i sums, int64_t image,
                          int64_t output) {
  if (o.scale) {
    __m512 y = _mm512_mul_ps(_mm512_cvtepi32_ps(sums), _mm512_set1_ps(o.x_scale * o.scale[output]));
    if (o.bias) y = _mm512_add_ps(y, _mm512_set1_ps(o.bias[output]));
    sums = _mm512_castps_si512(y);
  }
  int32_t* to = static_cast<int32_t*>(o.y) + (image * s.outputs + output) * s.places() + strip.to;
  const unsigned count = __builtin_popcount(strip.mask);
  if (count == kOutputs) return _mm512_storeu_si512(to, sums);
  _mm512_mask_storeu_epi32(to, static_cast<__mmask16>((1u << count) - 1), _mm512_maskz_compress_epi32(strip.mask, sums));
}

// Strips side by side, of kRows output channels.
template <int64_t V>
FAKEQUANT_VNNI void sum_strips(const Shape& s, const Operands& o, const uint8_t* laid, int64_t image, int64_t block,
                               const Strip* strips) {
  __m512i sums[kRows][V];
  for (int64_t r = 0; r < kRows; ++r)
    for (int64_t v = 0; v < V; ++v)
      sums[r][v] = _mm512_set1_epi32(static_cast<int32_t>(static_cast<uint32_t>(-o.zero_point) *
                                                          static_cast<uint32_t>(o.weight_sums[block * kRows + r])));
  const auto taps = static_cast<int64_t>(s.taps.size());
  const int64_t* tap = s.taps.data();
  const int8_t* weight = o.weight + block * s.groups * taps * kRows * kDepth;
  for (int64_t group = 0; group < s.groups; ++group, laid += s.group_bytes())
    for (int64_t t = 0; t < taps; ++t, weight += kRows * kDepth) {
      __m512i x[V];
      for (int64_t v = 0; v < V; ++v) x[v] = _mm512_loadu_si512(laid + tap[t] + strips[v].start * kDepth);
#pragma GCC unroll 8
      for (int64_t r = 0; r < kRows; ++r) {
        int32_t four;
        std::memcpy(&four, weight + r * kDepth, kDepth);
        const __m512i w = _mm512_set1_epi32(four);
        for (int64_t v = 0; v < V; ++v) sums[r][v] = _mm512_dpbusd_epi32(sums[r][v], x[v], w);
      }
    }
  for (int64_t r = 0; r < std::min(kRows, s.outputs - block * kRows); ++r)
    for (int64_t v = 0; v < V; ++v) write(o, s, strips[v], sums[r][v], image, block * kRows + r);
}

FAKEQUANT_VNNI void convolve_block(const Shape& s, const Operands& o, const uint8_t* laid, int64_t image,
                                   int64_t block) {
  const auto count = static_cast<int64_t>(s.strips.size());
  const Strip* strip = s.strips.data();
  int64_t i = 0;
  for (; i + kVectors <= count; i += kVectors) sum_strips<kVectors>(s, o, laid, image, block, strip + i);
  if (count - i == 2) sum_strips<2>(s, o, laid, image, block, strip + i);
  if (count - i == 1) sum_strips<1>(s, o, laid, image, block, strip + i);
}

void convolve_all(const Shape& s, const Operands& o) {
  const int64_t blocks = (s.outputs + kRows - 1) / kRows;
  // Where images are few, several threads take output channels of the same one, and each lays it out.
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t parts = s.images >= 2 * threads ? 1 : std::min(blocks, (2 * threads + s.images - 1) / s.images);
  parallel_for(0, s.images * parts, 1, [&](int64_t begin, int64_t end) {
    std::vector<uint8_t> laid(s.groups * s.group_bytes() + kOutputs * kDepth + kSlack,
                              static_cast<uint8_t>(o.zero_point));
    int64_t there = -1;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t image = i / parts, part = i % parts;
      if (image != there) lay_image(s, o, image, laid.data());
      there = image;
      for (int64_t block = blocks * part / parts; block < blocks * (part + 1) / parts; ++block)
        convolve_block(s, o, laid.data(), image, block);
    }
  });
}
#endif

#ifdef FAKEQUANT_X86
// The sizes and windows of codes and result, which has as many places as there are windows.
Shape shape_of(const Tensor& codes, const Tensor& windows, const Tensor& y) {
  const int64_t axes = codes.dim() - 2, front = kAxes - axes;
  STD_TORCH_CHECK(kConvolves && axes >= 1 && axes <= kAxes && y.dim() == codes.dim() && y.size(0) == codes.size(0),
                  "fakequant_cpu::convolve: codes and result do not fit, or not this processor");
  const auto* window = data_of<int64_t>(windows, 4 * axes);
  Shape s{codes.size(0), codes.size(1), (codes.size(1) + kDepth - 1) / kDepth, y.size(1)};
  double places = static_cast<double>(s.groups) * kDepth, taps = 1;
  for (int64_t axis = 0; axis < kAxes; ++axis) {
    const int64_t own = axis - front;
    const auto of_window = [&](int64_t which, int64_t least) {
      const int64_t found = own < 0 ? least : window[which * axes + own];
      STD_TORCH_CHECK(found >= least && found < kMostPlaces, "fakequant_cpu::convolve: a window with the number ", found);
      return found;
    };
    s.in[axis] = own < 0 ? 1 : codes.size(2 + own), s.out[axis] = own < 0 ? 1 : y.size(2 + own);
    s.kernel[axis] = of_window(0, 1), s.stride[axis] = of_window(1, 1);
    s.padding[axis] = of_window(2, 0), s.dilation[axis] = of_window(3, 1);
    const int64_t padded = s.in[axis] + 2 * s.padding[axis];
    // In float64, in which no product overflows: the dilation of a single tap may be any number.
    const double reach = static_cast<double>(s.dilation[axis]) * static_cast<double>(s.kernel[axis] - 1) + 1;
    STD_TORCH_CHECK(reach <= static_cast<double>(padded) &&
                        (padded - static_cast<int64_t>(reach)) / s.stride[axis] + 1 == s.out[axis],
                    "fakequant_cpu::convolve: the result has another size than there are windows");
    // With a single output the stride does not matter. It must not become phases: it may be far larger than the input.
    if (s.out[axis] == 1) s.stride[axis] = 1;
    s.pitch[axis] = (padded + s.stride[axis] - 1) / s.stride[axis];
    places *= static_cast<double>(s.pitch[axis]) * static_cast<double>(s.stride[axis]), taps *= static_cast<double>(s.kernel[axis]);
  }
  STD_TORCH_CHECK(places < kMostElements && taps * static_cast<double>(s.groups) * kDepth < kMostElements,
                  "fakequant_cpu::convolve: windows beyond all memory");
  s.phase = s.pitch[0] * s.pitch[1] * s.pitch[2], s.phases = s.stride[0] * s.stride[1] * s.stride[2];
  return s;
}
#endif

// windows: int64 [4, axes], kernel, stride, padding and dilation; weight: of `products.py`; y: contiguous, float32, or
// int32 for sums without scales.
void convolve(const Tensor& codes, int64_t zero_point, const Tensor& weight, const Tensor& weight_sums,
              const Tensor& windows, const std::optional<Tensor>& x_scale, const std::optional<Tensor>& scale,
              const std::optional<Tensor>& bias, Tensor y) {
#ifdef FAKEQUANT_X86
  if (y.numel() == 0) return;
  STD_TORCH_CHECK(codes.is_contiguous(), "fakequant_cpu::convolve: codes with gaps");
  const bool is_signed = codes.scalar_type() == ScalarType::Char;
  STD_TORCH_CHECK(is_signed || codes.scalar_type() == ScalarType::Byte, "fakequant_cpu::convolve: codes of 8 bits only");
  const bool is_scaled = scale.has_value();
  STD_TORCH_CHECK(x_scale.has_value() == is_scaled && (is_scaled || !bias.has_value()),
                  "fakequant_cpu::convolve: both scales, or neither and no bias");
  Shape s = shape_of(codes, windows, y);
  const int64_t taps = s.kernel[0] * s.kernel[1] * s.kernel[2], filled = (s.outputs + kRows - 1) / kRows * kRows;
  const Operands o{static_cast<const uint8_t*>(codes.data_ptr()),
                   static_cast<uint8_t>(is_signed ? 128 : 0),
                   static_cast<int32_t>(zero_point + (is_signed ? 128 : 0)),
                   data_of<int8_t>(weight, filled * s.groups * taps * kDepth),
                   data_of<int32_t>(weight_sums, filled),
                   is_scaled ? *data_of<float>(*x_scale, 1) : 1.0f,
                   is_scaled ? data_of<float>(*scale, s.outputs) : nullptr,
                   bias.has_value() ? data_of<float>(*bias, s.outputs) : nullptr,
                   is_scaled ? static_cast<void*>(data_of<float>(y, y.numel())) : data_of<int32_t>(y, y.numel())};
  for (int64_t i = 0; i < kOutputs; i += s.stride[2]) s.every_step |= 1u << i;
  find_taps(s);
  find_strips(s);
  convolve_all(s, o);
#else
  STD_TORCH_CHECK(false, "fakequant_cpu::convolve: not for this processor");
#endif
}

}  // namespace
}  // namespace fakequant

STABLE_TORCH_LIBRARY_FRAGMENT(fakequant_cpu, m) {
  m.def("convolves() -> bool");
  m.def(
      "convolve(Tensor codes, int zero_point, Tensor weight, Tensor weight_sums, Tensor windows, Tensor? x_scale, "
      "Tensor? scale, Tensor? bias, Tensor(a!) y) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fakequant_cpu, CompositeExplicitAutograd, m) {
  m.impl("convolves", TORCH_BOX(&fakequant::convolves));
}

STABLE_TORCH_LIBRARY_IMPL(fakequant_cpu, CPU, m) { m.impl("convolve", TORCH_BOX(&fakequant::convolve)); }
