"""How each kind of layer runs in integers, see `integer.py`."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fakequant.nn.integer import DTYPES, CodedTensor, IntegerProduct, Ready, cannot_multiply
from fakequant.numerics.granularity import PerChannel, PerTensor, PerToken
from fakequant.numerics.products import ConvParams
from fakequant.numerics.spec import QuantSpec
from fakequant.offload import fetched
from fakequant.ops import convolutions, products


class LinearProduct(IntegerProduct):
    """Input [..., in] times the transposed weight [out, in]."""

    def cannot(self, layer: Any, input: QuantSpec | None, other: QuantSpec | None) -> str | None:
        return (
            _input_reason(input, PerTensor, PerToken)
            or _weight_reason(other, layer.weight)
            or products.linear_unavailable(fetched(layer, "weight", layer.weight).device.type)
            or _sum_reason(layer.weight, input, other)
        )

    def fits(self, x: Tensor, other: Tensor, specs: tuple[QuantSpec, QuantSpec]) -> bool:
        # torch says what is wrong with other sizes.
        return super().fits(x, other, specs) and x.shape[-1] == other.shape[-1]

    def multiply(self, ready: Ready, x: CodedTensor, other: CodedTensor, bias: Tensor | None) -> Tensor:
        return products.linear(x.factor, other.factor, bias)


class ConvolutionProduct(IntegerProduct):
    """Input [n, in, ...] convolved with weight [out, in / groups, ...]."""

    def depends_on(self, layer: Any) -> tuple[Any, ...]:
        windows = layer.stride, layer.padding, layer.dilation, layer.groups, layer.padding_mode
        return *super().depends_on(layer), *windows

    def cannot(self, layer: Any, input: QuantSpec | None, other: QuantSpec | None) -> str | None:
        return (
            _input_reason(input, PerTensor)
            or _weight_reason(other, layer.weight)
            or (f"padding_mode={layer.padding_mode!r} is simulated" if layer.padding_mode != "zeros" else None)
            or ("padding='same' is simulated" if layer.padding == "same" else None)
            or convolutions.convolution_unavailable(fetched(layer, "weight", layer.weight).device.type)
            or _sum_reason(layer.weight, input, other)
        )

    def places(self, layer: Any) -> ConvParams:
        padding = 0 if isinstance(layer.padding, str) else layer.padding
        # Layers are made with a number for each axis, but may be given one number for all of them later.
        stride, padding, dilation = (
            [value] * len(layer.kernel_size) if isinstance(value, int) else list(value)
            for value in (layer.stride, padding, layer.dilation)
        )
        return ConvParams(stride, padding, dilation, layer.groups)

    def multiply(self, ready: Ready, x: CodedTensor, other: CodedTensor, bias: Tensor | None) -> Tensor:
        packed, codes = ready.packed, other.codes
        if packed is None or not packed.is_of(codes):
            ready.packed = packed = convolutions.PackedWeight(codes, ready.places)
        return convolutions.convolution(x.factor, packed, other.factor.scale, bias)


class MatMulProduct(IntegerProduct):
    """Input [..., n, k] times other input [..., k, m]."""

    quantizers = ("_input_quantizer", "_other_quantizer")
    fewest_axes = 2

    def cannot(self, layer: Any, input: QuantSpec | None, other: QuantSpec | None) -> str | None:
        return (
            _input_reason(input, PerTensor, PerToken)
            or _input_reason(other, PerTensor, name="other input")
            or products.linear_unavailable(_device_type(layer))
        )

    def depends_on(self, layer: Any) -> tuple[Any, ...]:
        return ()

    def fits(self, x: Tensor, other: Tensor, specs: tuple[QuantSpec, QuantSpec]) -> bool:
        if not super().fits(x, other, specs) or x.shape[-1] != other.shape[-2]:
            return False
        return products.linear_unavailable(x.device.type) is None and x.shape[-1] <= _most(*specs)

    def multiply(self, ready: Ready, x: CodedTensor, other: CodedTensor, bias: Tensor | None) -> Tensor:
        return products.matmul(x.factor, other.factor)


def _input_reason(spec: QuantSpec | None, *granularities: type, name: str = "input") -> str | None:
    """Why an input has no codes for a product."""
    if spec is None:
        return f"its {name} is in float"
    if reason := cannot_multiply(spec):
        return f"its {name}: {reason}"
    if not isinstance(spec.granularity, granularities):
        return f"its {name}: a sum of products has one scale, not {spec.granularity}"
    return None


def _weight_reason(spec: QuantSpec | None, weight: Tensor) -> str | None:
    """Why a weight with output channels on axis 0 has no codes for a product."""
    if spec is None:
        return "its weight is in float"
    if reason := cannot_multiply(spec):
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
    """The device of a layer without a weight: that of its quantizers' scales."""
    return next((buffer.device.type for buffer in layer.buffers()), "cpu")
