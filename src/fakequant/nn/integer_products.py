"""How each kind of layer multiplies codes, see `integer.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fakequant.nn.integer import DTYPES, CodedTensor, IntegerProduct, Laid, Ready, cannot_multiply, cannot_scale
from fakequant.numerics.granularity import PerChannel, PerTensor, PerToken
from fakequant.numerics.products import Places
from fakequant.numerics.spec import QuantSpec
from fakequant.ops import convolutions, float8_products, products

_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_ROUNDED = 'sums of float8 products are rounded, and "auto" takes exact ones; execution="integer" takes these too'
_Cannot = Callable[[QuantSpec], str | None]


class LinearProduct(IntegerProduct):
    """Input [..., in] times the transposed weight [out, in], both integers or both float8."""

    def cannot(self, layer: Any, input: QuantSpec | None, other: QuantSpec | None, *, exact: bool) -> str | None:
        if input is not None and other is not None and _is_float(input) and _is_float(other):
            return (
                _input_reason(input, PerTensor, PerToken, cannot=cannot_scale)
                or _weight_reason(other, layer.weight, cannot=cannot_scale)
                or float8_products.linear_unavailable(layer.weight.device, input.format.storage, other.format.storage)
                or (_ROUNDED if exact else None)
            )
        return (
            _input_reason(input, PerTensor, PerToken)
            or _weight_reason(other, layer.weight)
            or products.linear_unavailable(layer.weight.device.type)
            or _sum_reason(layer.weight, input, other)
        )

    def fits(self, x: Tensor, other: Tensor, specs: tuple[QuantSpec, QuantSpec] | None) -> bool:
        # torch says what is wrong with other sizes.
        return super().fits(x, other, specs) and x.shape[-1] == other.shape[-1]

    def multiply(self, ready: Ready, x: CodedTensor, other: CodedTensor, bias: Tensor | None) -> Tensor:
        of_codes = float8_products if _is_float(x.spec) else products
        return of_codes.linear(x.factor, other.factor, bias)

    def in_float(self, x: Tensor, other: Tensor, bias: Tensor | None, places: Places) -> Tensor:
        return F.linear(x, other, bias)

    def grad_input(self, dy: Tensor, other: Tensor, x: Laid, places: Places) -> Tensor:
        return dy @ other

    def grad_other(
        self, dy: Tensor, x: Tensor, other: Laid, places: Places, *, with_bias: bool
    ) -> tuple[Tensor, Tensor | None]:
        rows = dy.reshape(-1, dy.shape[-1])
        return rows.t() @ x.reshape(-1, x.shape[-1]), rows.sum(0) if with_bias else None


class ConvolutionProduct(IntegerProduct):
    """Input [n, in, ...] convolved with weight [out, in / groups, ...]."""

    def depends_on(self, layer: Any) -> tuple[Any, ...]:
        return *super().depends_on(layer), *self.windows(layer)

    def windows(self, layer: Any) -> tuple[Any, ...]:
        return layer.stride, layer.padding, layer.dilation, layer.groups, layer.padding_mode

    def cannot(self, layer: Any, input: QuantSpec | None, other: QuantSpec | None, *, exact: bool) -> str | None:
        return (
            _input_reason(input, PerTensor)
            or _weight_reason(other, layer.weight)
            or (f"padding_mode={layer.padding_mode!r} is simulated" if layer.padding_mode != "zeros" else None)
            or ("padding='same' is simulated" if layer.padding == "same" else None)
            or convolutions.convolution_unavailable(layer.weight.device.type)
            or _sum_reason(layer.weight, input, other)
        )

    def places(self, layer: Any) -> Places:
        padding = 0 if isinstance(layer.padding, str) else layer.padding
        # Layers are made with a number for each axis, but may be given one number for all of them later.
        stride, padding, dilation = (
            [value] * len(layer.kernel_size) if isinstance(value, int) else list(value)
            for value in (layer.stride, padding, layer.dilation)
        )
        return Places(stride, padding, dilation, layer.groups)

    def multiply(self, ready: Ready, x: CodedTensor, other: CodedTensor, bias: Tensor | None) -> Tensor:
        packed, codes = ready.packed, other.codes
        if packed is None or not packed.is_of(codes):
            ready.packed = packed = convolutions.PackedWeight(codes, ready.places)
        return convolutions.convolution(x.factor, packed, other.factor.scale, bias)

    def in_float(self, x: Tensor, other: Tensor, bias: Tensor | None, places: Places) -> Tensor:
        return _CONVOLUTIONS[x.dim() - 2](x, other, bias, *places)

    def empty_result(self, x: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if not convolutions.is_channels_last(x):
            return x.new_empty(shape, dtype=dtype)
        images, channels, *places = shape
        return x.new_empty((images, *places, channels), dtype=dtype).movedim(-1, 1)

    def grad_input(self, dy: Tensor, other: Tensor, x: Laid, places: Places) -> Tensor:
        return _convolution_backward(dy, dy.new_empty_strided(*x), other, places, [True, False, False])[0]

    def grad_other(
        self, dy: Tensor, x: Tensor, other: Laid, places: Places, *, with_bias: bool
    ) -> tuple[Tensor, Tensor | None]:
        wants = [False, True, with_bias]
        _, d_weight, d_bias = _convolution_backward(dy, x, dy.new_empty_strided(*other), places, wants)
        return d_weight, d_bias if with_bias else None

    def grad_bias(self, dy: Tensor, x: Laid, other: Laid, places: Places) -> Tensor:
        # Summed in the order of torch's kernel, which finds the weight's with it, here of zeros that lie as x does.
        given = dy.new_empty_strided(*x).zero_(), dy.new_empty_strided(*other)
        return _convolution_backward(dy, *given, places, [False, False, True])[2]


class MatMulProduct(IntegerProduct):
    """Input [..., n, k] times other input [..., k, m]."""

    quantizers = ("_input_quantizer", "_other_quantizer")
    fewest_axes = 2

    def cannot(self, layer: Any, input: QuantSpec | None, other: QuantSpec | None, *, exact: bool) -> str | None:
        return (
            _input_reason(input, PerTensor, PerToken)
            or _input_reason(other, PerTensor, name="other input")
            or products.linear_unavailable(_device_type(layer))
        )

    def depends_on(self, layer: Any) -> tuple[Any, ...]:
        return ()

    def fits(self, x: Tensor, other: Tensor, specs: tuple[QuantSpec, QuantSpec] | None) -> bool:
        if not super().fits(x, other, specs) or x.shape[-1] != other.shape[-2]:
            return False
        return specs is None or (products.linear_unavailable(x.device.type) is None and x.shape[-1] <= _most(*specs))

    def multiply(self, ready: Ready, x: CodedTensor, other: CodedTensor, bias: Tensor | None) -> Tensor:
        return products.matmul(x.factor, other.factor)

    def in_float(self, x: Tensor, other: Tensor, bias: Tensor | None, places: Places) -> Tensor:
        return torch.matmul(x, other)

    def grad_input(self, dy: Tensor, other: Tensor, x: Laid, places: Places) -> Tensor:
        if _multiplies_rows(x.shape, other.shape):
            return dy.mT.reshape(-1, x.shape[0]).t() @ other.mT.reshape(-1, x.shape[-1])
        return (dy @ other.mT).sum_to_size(x.shape)

    def grad_other(
        self, dy: Tensor, x: Tensor, other: Laid, places: Places, *, with_bias: bool
    ) -> tuple[Tensor, Tensor | None]:
        inner, columns = other.shape[-2:]
        if _multiplies_rows(x.shape, other.shape):
            return (dy.mT.reshape(-1, x.shape[0]) @ x).reshape(*other.shape[:-2], columns, inner).mT, None
        if len(other.shape) == 2:
            return x.reshape(-1, inner).t() @ dy.reshape(-1, columns), None
        return (x.mT @ dy).sum_to_size(other.shape), None


def _multiplies_rows(x: torch.Size, other: torch.Size) -> bool:
    """Whether torch multiplies the transposed factors as rows, and rounds so."""
    return len(x) == 2 < len(other)


def _convolution_backward(dy: Tensor, x: Tensor, weight: Tensor, places: Places, wants: list[bool]) -> Any:
    """The gradients of input, weight and bias; of the one whose gradient is wanted only shape and strides are read."""
    form = places.stride, places.padding, places.dilation, False, [0] * len(places.stride), places.groups
    return torch.ops.aten.convolution_backward(dy, x, weight, [dy.shape[1]], *form, wants)


def _is_float(spec: QuantSpec) -> bool:
    """Whether codes are 8-bit floats of torch's, which `torch._scaled_mm` may multiply."""
    return spec.format.storage.is_floating_point


def _input_reason(
    spec: QuantSpec | None, *granularities: type, name: str = "input", cannot: _Cannot = cannot_multiply
) -> str | None:
    """Why an input has no codes for a product."""
    if spec is None:
        return f"its {name} is in float"
    if reason := cannot(spec):
        return f"its {name}: {reason}"
    if not isinstance(spec.granularity, granularities):
        return f"its {name}: a sum of products has one scale, not {spec.granularity}"
    return None


def _weight_reason(spec: QuantSpec | None, weight: Tensor, *, cannot: _Cannot = cannot_multiply) -> str | None:
    """Why a weight with output channels on axis 0 has no codes for a product."""
    if spec is None:
        return "its weight is in float"
    if reason := cannot(spec):
        return f"its weight: {reason}"
    if spec.format.has_zero_point and (not spec.symmetric or spec.format.storage != torch.int8):
        return "its weight: codes must be signed, without a zero point"
    granularity = spec.granularity
    per_output = isinstance(granularity, PerChannel) and [a % weight.dim() for a in granularity.axes] == [0]
    if not per_output and not isinstance(granularity, PerTensor):
        return f"its weight: a sum of products has one scale, not {granularity}"
    return None if weight.dtype in DTYPES else f"its weight is {weight.dtype}"


def _sum_reason(weight: Tensor, *specs: QuantSpec | None) -> str | None:
    """Why the sums of products of a layer may leave int32."""
    size, most = weight[0].numel(), _most(*(spec for spec in specs if spec is not None))
    return f"sums of {size:,} products may leave int32; of {most:,} they cannot" if size > most else None


@lru_cache
def _most(input: QuantSpec, other: QuantSpec) -> int:
    """How many products of codes may be summed."""
    return products.largest_inner_size(_reach(input), _reach(other))


def _reach(spec: QuantSpec) -> int:
    """How far codes may be from 0, or from a zero point."""
    lowest, highest = int(spec.format.quant_min), int(spec.format.quant_max)
    return max(-lowest, highest) if spec.symmetric else highest - lowest


def _device_type(layer: Any) -> str:
    """Where a layer without a weight is: where the scales of its quantizers are."""
    return next((buffer.device.type for buffer in layer.buffers()), "cpu")
