"""The functions that quantize by an amax, and the descriptors.

amax broadcasts with the inputs: one number, or one per index of the axes that keep their size. float16 and bfloat16 are
computed in float32 and rounded once, at the end. A gradient passes where |inputs| <= amax; amax gets none.

The functions also take the orders of arguments of later releases, (inputs, amax, bias, num_bits, ...), and of the
user's guide, (inputs, amax, num_bits, output_dtype, unsigned).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from fakequant.numerics.formats.floats import Format, IntegerFormat
from fakequant.numerics.qparams import QParams, Range, compute_dtype, is_concrete
from fakequant.numerics.spec import Gradient, QuantSpec
from fakequant.ops import library
from fakequant.ops.trt_fp8 import as_trt_fp8, writes_trt_fp8

from .descriptor import (
    QUANT_DESC_8BIT_CONV1D_WEIGHT_PER_CHANNEL,
    QUANT_DESC_8BIT_CONV2D_WEIGHT_PER_CHANNEL,
    QUANT_DESC_8BIT_CONV3D_WEIGHT_PER_CHANNEL,
    QUANT_DESC_8BIT_CONVTRANSPOSE1D_WEIGHT_PER_CHANNEL,
    QUANT_DESC_8BIT_CONVTRANSPOSE2D_WEIGHT_PER_CHANNEL,
    QUANT_DESC_8BIT_CONVTRANSPOSE3D_WEIGHT_PER_CHANNEL,
    QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW,
    QUANT_DESC_8BIT_PER_TENSOR,
    QUANT_DESC_UNSIGNED_8BIT_PER_TENSOR,
    QuantDescriptor,
    ScaledQuantDescriptor,
)
from .specification import as_tensor, float_format, granularity_of, integer_format, read_amax

__all__ = [
    "QUANT_DESC_8BIT_CONV1D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_CONV2D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_CONV3D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_CONVTRANSPOSE1D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_CONVTRANSPOSE2D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_CONVTRANSPOSE3D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW",
    "QUANT_DESC_8BIT_PER_TENSOR",
    "QUANT_DESC_UNSIGNED_8BIT_PER_TENSOR",
    "FakeAffineTensorQuantFunction",
    "FakeTensorQuantFunction",
    "LegacyFakeTensorQuantFunction",
    "QuantDescriptor",
    "ScaledE4M3Function",
    "ScaledQuantDescriptor",
    "TensorQuantFunction",
    "fake_affine_tensor_quant",
    "fake_tensor_quant",
    "legacy_fake_tensor_quant",
    "scaled_e4m3",
    "scaled_e4m3_abstract",
    "tensor_quant",
]

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
# Inputs below the smallest subnormal of float16 become 0 in the float formats.
_SMALLEST_INPUT = 2.0**-24
_LARGEST_HALF = torch.finfo(torch.float16).max


def _in_other_orders(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """The function, which then also takes a bias after amax and an output_dtype after num_bits by position."""

    @wraps(function)
    def call(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        first, rest = list(args[:2]), list(args[2:])
        if rest and (rest[0] is None or isinstance(rest[0], Tensor)):
            kwargs["bias"] = rest.pop(0)
        if len(rest) > 1 and isinstance(rest[1], torch.dtype):
            kwargs["output_dtype"] = rest.pop(1)
        return function(*first, *rest, **kwargs)  # pyright: ignore[reportCallIssue]

    return call


@_in_other_orders
def fake_tensor_quant(
    inputs: Tensor,
    amax: Tensor | float,
    num_bits: int = 8,
    unsigned: bool = False,
    narrow_range: bool = True,
    *,
    bias: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Inputs rounded to the values that integers of `num_bits` bits have when amax is the largest of them.

    Args:
        inputs: any shape.
        amax: the largest magnitude; broadcasts with inputs. Where it is at most 2**-24 the output is 0.
        num_bits: bits of a code.
        unsigned: codes from 0 instead of on both sides of it.
        narrow_range: leave the lowest signed code out, so that there are as many negative as positive ones.
        bias: taken from the inputs before and added after; broadcasts with inputs.
        output_dtype: of the result; by default that of inputs.

    Raises:
        TypeError: unsigned, and inputs hold negative values; inputs are no floating tensor; or amax is None.
        ValueError: a negative amax.

    >>> fake_tensor_quant(torch.tensor([0.3, -1.0, 5.0]), torch.tensor(1.27))
    tensor([ 0.3000, -1.0000,  1.2700])
    """
    if amax is None:
        raise TypeError("amax must be a number or a tensor, got None; give for example inputs.abs().max()")
    y = _about(bias, inputs, lambda x: fake_quantize(x, amax, _integers(x, num_bits, unsigned, narrow_range)))
    return y if output_dtype is None else y.to(output_dtype)


legacy_fake_tensor_quant = fake_tensor_quant


@_in_other_orders
def tensor_quant(
    inputs: Tensor,
    amax: Tensor | float,
    num_bits: int = 8,
    unsigned: bool = False,
    narrow_range: bool = True,
    *,
    bias: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The codes of inputs as numbers of their dtype, and the scale: codes per unit of inputs, in the shape of amax.

    Arguments and errors are those of `fake_tensor_quant`. The gradient of a code goes to its input as it is. Where
    amax is at most 2**-24 codes are 0 and the scale is 1.

    Raises:
        ValueError: a scale that float16 inputs cannot be multiplied with.

    >>> tensor_quant(torch.tensor([0.3, -1.0, 5.0]), torch.tensor(1.27))
    (tensor([  30., -100.,  127.]), tensor(100.))
    """
    x = inputs if bias is None else inputs - bias
    fmt = _integers(x, num_bits, unsigned, narrow_range)
    x = _broadcast(x, amax)
    read = read_amax(amax, x, fmt)
    scale = read.params.scale.reshape(as_tensor(amax, x).shape)
    if x.dtype == torch.float16 and is_concrete(scale) and bool((scale > _LARGEST_HALF).any()):
        raise ValueError(f"scale is too large for FP16 with amax={amax}")
    # With a scale of 1 codes are their own values, and the range decides where the gradient goes.
    ones = QParams(torch.ones_like(read.params.scale), None, read.params.range)
    codes = library.fake_quantize(x.detach().to(read.params.scale.dtype) * read.params.scale, ones, read.spec)
    codes = _with_gradient(codes.to(x.dtype), library.fake_quantize(x, ones, read.spec))
    if read.zero is not None:
        codes = _zero_where(read.zero, codes)
    return (codes if output_dtype is None else codes.to(output_dtype)), scale.to(x.dtype)


def fake_affine_tensor_quant(
    inputs: Tensor, min_range: Tensor | float, max_range: Tensor | float, num_bits: int = 8
) -> Tensor:
    """Inputs rounded to 2**num_bits values from about min_range to max_range; if 0.0 lies between, it is one of them.

    A gradient goes where min_range <= inputs <= max_range; the ranges get none.

    Source: gemmlowp, quantization.md.

    >>> fake_affine_tensor_quant(torch.tensor([-0.5, 0.1, 2.0]), -0.55, 2.0)
    tensor([-0.5000,  0.1000,  2.0000])
    """
    lo, hi = torch.broadcast_tensors(as_tensor(min_range, inputs), as_tensor(max_range, inputs))
    x = _broadcast(inputs, lo)
    fmt = IntegerFormat.of(num_bits)
    granularity, shape = granularity_of(lo.shape, x.shape)
    lo, hi = (values.to(compute_dtype(x.dtype)).reshape(shape) for values in (lo, hi))
    step = (hi - lo) / torch.full_like(lo, fmt.quant_max - fmt.quant_min)
    zero_point = fmt.quant_min - (lo / step).round()
    spec = QuantSpec(fmt, granularity, symmetric=False, gradient=Gradient.INPUT_RANGE)
    return library.fake_quantize(x, QParams(step, zero_point, Range(lo, hi)), spec)


@_in_other_orders
def scaled_e4m3(
    inputs: Tensor,
    amax: Tensor | float | None = None,
    E: int = 4,
    M: int = 3,
    *,
    bias: Tensor | None = None,
) -> Tensor:
    """Inputs rounded to the values of an 8-bit float with 4 exponent bits, whose largest is amax.

    Args:
        inputs: any shape; what is below 2**-24 becomes 0.
        amax: the largest magnitude; broadcasts with inputs. None: that of the format, 448.
        E: exponent bits: 4.
        M: mantissa bits: 3.
        bias: taken from the inputs before and added after; broadcasts with inputs.

    Raises:
        TypeError: other numbers of bits; a `QuantDescriptor` takes them.
        ValueError: a negative amax.
        AssertionError: several amax in torch.onnx.export(dynamo=False), which writes TensorRT's operators.

    >>> scaled_e4m3(torch.tensor([0.3, -17.0, 101.0]))
    tensor([  0.3125, -16.0000, 104.0000])
    """
    if (E, M) != (4, 3):
        raise TypeError(f"only E=4 and M=3 are supported here, got E={E} and M={M}")
    return _about(bias, inputs, lambda x: _fake_e4m3(x, amax, float_format((E, M))))


def scaled_e4m3_abstract(input: Tensor, amax: Tensor | None = None) -> Tensor:
    """Return an uninitialised tensor like the result of `scaled_e4m3`.

    >>> scaled_e4m3_abstract(torch.zeros(2, 3, device="meta")).shape
    torch.Size([2, 3])
    """
    return torch.empty_like(input)


class TensorQuantFunction:
    """`tensor_quant` under the name that has `apply`."""

    apply = staticmethod(tensor_quant)


class FakeTensorQuantFunction:
    """`fake_tensor_quant` under the name that has `apply`."""

    apply = staticmethod(fake_tensor_quant)


class LegacyFakeTensorQuantFunction:
    """`legacy_fake_tensor_quant` under the name that has `apply`."""

    apply = staticmethod(legacy_fake_tensor_quant)


class FakeAffineTensorQuantFunction:
    """`fake_affine_tensor_quant` under the name that has `apply`."""

    apply = staticmethod(fake_affine_tensor_quant)


class ScaledE4M3Function:
    """`scaled_e4m3` under the name that has `apply`."""

    apply = staticmethod(scaled_e4m3)


def fake_quantize(inputs: Tensor, amax: Tensor | float | None, fmt: Format) -> Tensor:
    """Inputs rounded to the values of any format whose bound is mapped to amax, which broadcasts with them.

    Without an amax the values are those of the format itself.

    Raises:
        ValueError: a negative amax.
    """
    x = _broadcast(inputs, amax)
    read = read_amax(amax, x, fmt)
    y = library.fake_quantize(x, read.params, read.spec)
    if read.zero is not None:
        y = _zero_where(read.zero, y)
    if not fmt.has_zero_point:
        y = torch.where(x.detach().abs() < _SMALLEST_INPUT, _with_gradient(torch.zeros_like(y), y), y)
    return y


def _fake_e4m3(x: Tensor, amax: Tensor | float | None, fmt: Format) -> Tensor:
    if not writes_trt_fp8(fmt):
        return fake_quantize(x, amax, fmt)
    scale = None if amax is None else as_tensor(amax, x).to(compute_dtype(x.dtype)) / fmt.bound
    return as_trt_fp8(x, scale)


def _integers(x: Tensor, num_bits: int, unsigned: bool, narrow_range: bool) -> IntegerFormat:
    compute_dtype(x.dtype)
    if unsigned and x.numel() and is_concrete(x) and bool((x < 0).any()):
        raise TypeError("Negative values encountered in unsigned quantization.")
    return integer_format(num_bits, unsigned, narrow_range)


def _broadcast(x: Tensor, amax: Tensor | float | None) -> Tensor:
    """Return x in the shape that it and amax broadcast to; an amax of one number never adds axes."""
    if not isinstance(amax, Tensor) or amax.numel() == 1:
        return x
    shape = torch.broadcast_shapes(x.shape, amax.shape)
    return x if shape == x.shape else x.expand(shape)


def _about(bias: Tensor | None, inputs: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    return function(inputs) if bias is None else function(inputs - bias) + bias


def _zero_where(zero: Tensor, y: Tensor) -> Tensor:
    """Return y with its gradient, with zeros of the same sign where `zero` is set."""
    return torch.where(zero, _with_gradient(y.detach() * 0.0, y), y)


def _with_gradient(values: Tensor, y: Tensor) -> Tensor:
    """Return values with the gradient of y, which must be finite where the result is used."""
    # Subtracting +0.0 changes no value, not even -0.0.
    return values - (y.detach() - y)
