// CPU kernels on LibTorch's stable ABI: fake quantization, encoding and decoding.
//
// They return the bits of numerics/reference.py. That rests on true division, on a compiler that neither contracts
// products and sums to FMA nor reorders (setup.py: -ffp-contract=off, no -ffast-math), and on clamps written as
// `bound > v ? bound : v`, which keep NaN because the comparison is false.
//
// The tensor is a run of elements in memory, seen as tiles [g0, b0, g1, b1] with one scale per (g0, g1), and worked on
// chunk by chunk (chunks.cpp), or at once in registers where a processor has kernels for it (registers.h). Kernels that
// take the range from the tensor itself are in dynamic.cpp.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>
#include <tuple>

#include "call.h"
#include "chunks.h"
#include "convert.h"
#include "gradients.h"
#include "parameters.h"

namespace fakequant {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename C>
FAKEQUANT_INLINE bool holds_nan_as(const C* x, int64_t n) {
  int found = 0;
  for (int64_t i = 0; i < n; ++i) found |= x[i] != x[i];
  return found != 0;
}
FAKEQUANT_CLONES bool holds_nan(const float* x, int64_t n) { return holds_nan_as(x, n); }
FAKEQUANT_CLONES bool holds_nan(const double* x, int64_t n) { return holds_nan_as(x, n); }

// One chunk; x and codes point to its first element. Whether a number is NaN.
template <typename T, typename C, typename Q>
bool encode_chunk_of(const Call<C>& call, const T* x, Q* codes, int64_t first, int64_t n) {
  alignas(64) C converted[kChunk];
  alignas(64) C out[kChunk];
  alignas(64) uint8_t inside[kChunk];
  const C* in = load_chunk(call, x, converted, n);
  encode_chunk(call, in, out, inside, first, n);
  store(out, codes, n);
  return holds_nan(in, n);
}

// Codes, and whether a number was NaN, which no code tells.
template <typename T, typename C, typename Q>
bool encode_all(const Call<C>& call, const T* x, Q* codes) {
  std::atomic<bool> nan{false};
  for_each_span(call.tiles.elements(), [&](int64_t first, int64_t n) {
    if constexpr (std::is_same_v<C, float> && sizeof(Q) == 1) {
      if (serves_registers(call) && !call.rectified) {
        auto* to = reinterpret_cast<uint8_t*>(codes + first);
        if (in_registers(call, x + first, to, nullptr, first, n)) nan = true;
        return;
      }
    }
    for_each_chunk_of(first, n, [&](int64_t i, int64_t length) {
      if (encode_chunk_of(call, x + i, codes + i, i, length)) nan = true;
    });
  });
  return nan;
}

template <typename Q, typename C, typename T>
void decode_all(const Call<C>& call, const Q* codes, T* y) {
  for_each_span(call.tiles.elements(), [&](int64_t first, int64_t n) {
    if constexpr (std::is_same_v<C, float> && sizeof(Q) == 1) {
      if (register_width()) {
        in_registers(call, codes + first, y + first, nullptr, first, n);
        return;
      }
    }
    for_each_chunk_of(first, n, [&](int64_t i, int64_t length) {
      alignas(64) C in[kChunk];
      alignas(64) C out[kChunk];
      load(codes + i, in, length);
      decode_chunk(call, in, out, i, length);
      store(out, y + i, length);
    });
  });
}

// Calls `body` with a value of the integer type of codes without gaps.
template <typename F>
void with_code_type(const Tensor& t, const F& body) {
  check_dense(t);
  switch (t.scalar_type()) {
    case ScalarType::Char: return body(int8_t{});
    case ScalarType::Byte: return body(uint8_t{});
    case ScalarType::Short: return body(int16_t{});
    case ScalarType::UInt16: return body(uint16_t{});
    case ScalarType::Int: return body(int32_t{});
    default: STD_TORCH_CHECK(false, "fakequant_cpu: no integer dtype for codes");
  }
}

template <typename C>
void check_integers(const Call<C>& call) {
  STD_TORCH_CHECK(call.grid.is_integer(), "fakequant_cpu: codes are those of integer formats");
}

uint8_t* bits_of(const std::optional<Tensor>& mask) {
  return mask.has_value() ? static_cast<uint8_t*>(mask->data_ptr()) : nullptr;
}

std::tuple<Tensor, std::optional<Tensor>> fake_quantize(const Tensor& x, FAKEQUANT_PARAMS, const Tensor& form,
                                                        int64_t mask_kind, const std::optional<Tensor>& random) {
  Tensor y = made_like(x);
  std::optional<Tensor> mask = made_mask(x, mask_kind);
  with_float_type(x, [&](auto t, auto c) {
    using T = decltype(t);
    using C = decltype(c);
    quantize_all(make_call<C>(scale, zero_point, lo, hi, form, x.numel(), mask_kind, random),
                 static_cast<const T*>(x.data_ptr()), static_cast<T*>(y.data_ptr()), bits_of(mask));
  });
  return {y, mask};
}

// Calls `body` with the call, without a range and random numbers, and with x, if every parameter is valid.
template <typename F>
void with_checked(const Tensor& x, const Tensor& scale, const std::optional<Tensor>& zero_point, const Tensor& form,
                  Mask kind, const F& body) {
  with_float_type(x, [&](auto t, auto c) {
    using C = decltype(c);
    std::vector<C> memory;
    const Call<C> call = plain_call<C>(scale, zero_point, form, x.numel(), kind, memory);
    if (is_valid(call)) body(call, static_cast<const decltype(t)*>(x.data_ptr()));
  });
}

// `fake_quantize` with fewer arguments, each of which costs time, of a tensor in the order of its tiles. Nothing is
// returned where a parameter is not valid.
std::tuple<std::optional<Tensor>, std::optional<Tensor>> quantize_checked(const Tensor& x, const Tensor& scale,
                                                                          const std::optional<Tensor>& zero_point,
                                                                          const Tensor& form, Mask kind) {
  std::optional<Tensor> y, mask;
  with_checked(x, scale, zero_point, form, kind, [&](const auto& call, const auto* in) {
    y = made_like(x), mask = made_mask(x, static_cast<int64_t>(kind));
    using T = std::remove_const_t<std::remove_pointer_t<decltype(in)>>;
    quantize_all(call, in, static_cast<T*>(y->data_ptr()), bits_of(mask));
  });
  return {y, mask};
}

std::optional<Tensor> checked(const Tensor& x, const Tensor& scale, const std::optional<Tensor>& zero_point,
                              const Tensor& form) {
  return std::get<0>(quantize_checked(x, scale, zero_point, form, Mask::kNone));
}

std::tuple<std::optional<Tensor>, std::optional<Tensor>> checked_with_mask(const Tensor& x, const Tensor& scale,
                                                                           const std::optional<Tensor>& zero_point,
                                                                           const Tensor& form) {
  return quantize_checked(x, scale, zero_point, form, Mask::kCodeRange);
}

// The values over x itself; whether the parameters are valid.
bool checked_over(Tensor x, const Tensor& scale, const std::optional<Tensor>& zero_point, const Tensor& form) {
  bool valid = false;
  with_checked(x, scale, zero_point, form, Mask::kNone, [&](const auto& call, const auto* in) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(in)>>;
    quantize_all(call, in, static_cast<T*>(x.data_ptr()), nullptr);
    valid = true;
  });
  return valid;
}

// Writes the codes into `codes`. Returns whether the parameters are valid and x has no NaN.
bool checked_codes(const Tensor& x, const Tensor& scale, const std::optional<Tensor>& zero_point, const Tensor& form,
                   Tensor codes) {
  bool found = false;
  with_checked(x, scale, zero_point, form, Mask::kNone, [&](const auto& call, const auto* in) {
    check_integers(call);
    check_elements(codes, x.numel());
    with_code_type(codes, [&](auto q) {
      found = !encode_all(call, in, static_cast<decltype(q)*>(codes.data_ptr()));
    });
  });
  return found;
}

// The values of codes in the order of the tiles, of the dtype of `like`.
Tensor dequantize(const Tensor& codes, const Tensor& scale, const std::optional<Tensor>& zero_point, const Tensor& form,
                  const Tensor& like) {
  Tensor y = made(codes.dim(), codes.sizes().data(), codes.strides().data(), dtype_of(like));
  with_float_type(y, [&](auto t, auto c) {
    using C = decltype(c);
    std::vector<C> memory;
    const Call<C> call = plain_call<C>(scale, zero_point, form, codes.numel(), Mask::kNone, memory);
    with_code_type(codes, [&](auto q) {
      decode_all(call, static_cast<const decltype(q)*>(codes.data_ptr()), static_cast<decltype(t)*>(y.data_ptr()));
    });
  });
  return y;
}

// Writes the codes into `codes`. Returns whether x has NaN.
bool quantize(const Tensor& x, FAKEQUANT_PARAMS, const Tensor& form, Tensor codes,
              const std::optional<Tensor>& random) {
  bool nan = false;
  with_float_type(x, [&](auto t, auto c) {
    using T = decltype(t);
    using C = decltype(c);
    const Call<C> call = make_call<C>(scale, zero_point, lo, hi, form, x.numel(), static_cast<int64_t>(Mask::kNone), random);
    check_integers(call);
    check_elements(codes, x.numel());
    with_code_type(codes, [&](auto q) {
      nan = encode_all(call, static_cast<const T*>(x.data_ptr()), static_cast<decltype(q)*>(codes.data_ptr()));
    });
  });
  return nan;
}

void grad_params(const Tensor& dy, const Tensor& x, FAKEQUANT_PARAMS, const Tensor& form,
                 std::optional<Tensor> scale_grad, std::optional<Tensor> zero_point_grad, int64_t mask_kind) {
  with_float_type(x, [&](auto, auto c) {
    using C = decltype(c);
    const Call<C> call = make_call<C>(scale, zero_point, lo, hi, form, x.numel(), mask_kind, std::nullopt);
    const auto sums = [&](const std::optional<Tensor>& t) {
      return t.has_value() ? data_of<double>(*t, call.tiles.groups()) : nullptr;
    };
    sum_gradients(call, dy, x, {sums(scale_grad), sums(zero_point_grad)});
  });
}

}  // namespace
}  // namespace fakequant

#define FAKEQUANT_SCHEMA_PARAMS "Tensor scale, Tensor? zero_point, Tensor? lo, Tensor? hi, Tensor form, "

STABLE_TORCH_LIBRARY(fakequant_cpu, m) {
  m.def("fake_quantize(Tensor x, " FAKEQUANT_SCHEMA_PARAMS "int mask_kind, Tensor? random=None) -> (Tensor, Tensor?)");
  m.def("checked(Tensor x, Tensor scale, Tensor? zero_point, Tensor form) -> Tensor?");
  m.def("checked_with_mask(Tensor x, Tensor scale, Tensor? zero_point, Tensor form) -> (Tensor?, Tensor?)");
  m.def("checked_over(Tensor(a!) x, Tensor scale, Tensor? zero_point, Tensor form) -> bool");
  m.def("checked_codes(Tensor x, Tensor scale, Tensor? zero_point, Tensor form, Tensor(a!) codes) -> bool");
  m.def("dequantize(Tensor codes, Tensor scale, Tensor? zero_point, Tensor form, Tensor like) -> Tensor");
  m.def("quantize(Tensor x, " FAKEQUANT_SCHEMA_PARAMS
        "Tensor(a!) codes, Tensor? random=None) -> bool");
  m.def("grad_params(Tensor dy, Tensor x, " FAKEQUANT_SCHEMA_PARAMS
        "Tensor(a!)? scale_grad, Tensor(b!)? zero_point_grad, int mask_kind) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fakequant_cpu, CPU, m) {
  m.impl("fake_quantize", TORCH_BOX(&fakequant::fake_quantize));
  m.impl("checked", TORCH_BOX(&fakequant::checked));
  m.impl("checked_with_mask", TORCH_BOX(&fakequant::checked_with_mask));
  m.impl("checked_over", TORCH_BOX(&fakequant::checked_over));
  m.impl("checked_codes", TORCH_BOX(&fakequant::checked_codes));
  m.impl("quantize", TORCH_BOX(&fakequant::quantize));
  m.impl("dequantize", TORCH_BOX(&fakequant::dequantize));
  m.impl("grad_params", TORCH_BOX(&fakequant::grad_params));
}
