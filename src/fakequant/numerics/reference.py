"""The definition: what quantization computes, in plain torch, on any device.

Everything here broadcasts: parameters are [groups, axes kept] and `x` is any shape that the granularity accepts. Each
backend must return these bits. float16 and bfloat16 are computed in float32 and rounded once, at the end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .granularity import block_axes, blocked, blocked_groups
from .qparams import QParams, Range, compute_dtype
from .spec import Arithmetic, Gradient, QuantSpec


class Codes(NamedTuple):
    """What quantization finds on its way, in the blocked view of x."""

    scaled: Tensor
    """x in units of codes, before rounding."""
    unclamped: Tensor
    """The rounded code plus the zero point, as if the format had no bounds."""
    clamped: Tensor
    """The code."""


class _Blocked(NamedTuple):
    """Parameters in the compute dtype, shaped to broadcast with the blocked view of x."""

    x: Tensor
    scale: Tensor
    zero_point: Tensor | None


def _blocked(x: Tensor, params: QParams, spec: QuantSpec, dtype: torch.dtype | None = None) -> _Blocked:
    blocks = spec.granularity.block_shape(x.shape)
    dtype = dtype or compute_dtype(x.dtype)
    scale = blocked_groups(params.scale.to(dtype), x.shape, blocks)
    zero_point = params.zero_point
    if zero_point is not None:
        zero_point = blocked_groups(zero_point.to(dtype), x.shape, blocks)
    return _Blocked(blocked(x.to(dtype), blocks), scale, zero_point)


def _encode(b: _Blocked, spec: QuantSpec) -> Codes:
    if spec.arithmetic is Arithmetic.DIVIDE:
        scaled = b.x / b.scale
    elif spec.arithmetic is Arithmetic.RECIPROCAL:
        scaled = b.x * b.scale.reciprocal()
    else:
        scaled = b.x * b.scale
    unclamped = spec.format.round(scaled)
    if b.zero_point is not None:
        unclamped = unclamped + b.zero_point
    return Codes(scaled, unclamped, spec.format.clamp(unclamped))


def _decode(codes: Tensor, b: _Blocked, spec: QuantSpec) -> Tensor:
    if spec.arithmetic is Arithmetic.MULTIPLIER:
        return codes / b.scale
    if b.zero_point is not None:
        codes = codes - b.zero_point
    elif spec.format.has_zero_point:
        # Integers have no negative zero: -0.0 + 0.0 is +0.0, every other value stays.
        codes = codes + 0.0
    return codes * b.scale


def fake_quantize(x: Tensor, params: QParams, spec: QuantSpec) -> Tensor:
    """The values that x becomes: encoded, then decoded; shape and dtype of x."""
    b = _blocked(x, params, spec)
    return _decode(_encode(b, spec).clamped, b, spec).reshape(x.shape).to(x.dtype)


def quantize(x: Tensor, params: QParams, spec: QuantSpec) -> Tensor:
    """The codes of x in the format's storage dtype; NaN has no integer code and becomes quant_min (ONNX Runtime)."""
    codes = _encode(_blocked(x, params, spec), spec).clamped.reshape(x.shape)
    if spec.format.has_zero_point:
        codes = torch.where(codes.isnan(), spec.format.quant_min, codes)
    return codes.to(spec.format.storage)


def dequantize(codes: Tensor, params: QParams, spec: QuantSpec, dtype: torch.dtype) -> Tensor:
    """The values of codes, in the given dtype."""
    b = _blocked(codes, params, spec, compute_dtype(dtype))
    return _decode(b.x, b, spec).reshape(codes.shape).to(dtype)


def input_range(params: QParams, spec: QuantSpec) -> Range:
    """The range of inputs that the codes span: the one measured, else the one that the scale implies."""
    if params.range is not None:
        return params.range
    fmt = spec.format
    if spec.symmetric:
        bound = torch.full_like(params.scale, fmt.bound)
        amax = bound / params.scale if spec.arithmetic is Arithmetic.MULTIPLIER else bound * params.scale
        return Range(-amax, amax)
    zero_point = 0.0 if params.zero_point is None else params.zero_point.to(params.scale.dtype)
    return Range((fmt.quant_min - zero_point) * params.scale, (fmt.quant_max - zero_point) * params.scale)


def passes(x: Tensor, params: QParams, spec: QuantSpec) -> Tensor:
    """Where the gradient of the output reaches the input; bool, the shape of x."""
    if spec.gradient is Gradient.IDENTITY:
        return torch.ones_like(x, dtype=torch.bool)
    b = _blocked(x, params, spec)
    if spec.gradient is Gradient.CODE_RANGE:
        code = _encode(b, spec).unclamped
        inside = (code >= spec.format.quant_min) & (code <= spec.format.quant_max)
    else:
        blocks = spec.granularity.block_shape(x.shape)
        lo, hi = (blocked_groups(r.to(b.x.dtype), x.shape, blocks) for r in input_range(params, spec))
        inside = (b.x >= lo) & (b.x <= hi)
    return inside.reshape(x.shape)


def grad_input(dy: Tensor, mask: Tensor) -> Tensor:
    """The gradient of the input: dy where `passes`, exactly zero elsewhere whatever dy is."""
    return torch.where(mask, dy, 0.0)


def grad_params(
    dy: Tensor, x: Tensor, params: QParams, spec: QuantSpec, wants: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of scale and zero point [groups, axes kept], rounding taken as the identity.

    Where a code is in range, y = (rint(x/s) + zp - zp) * s has dy/ds = rint(x/s) - x/s and dy/dzp = 0; where it
    saturates, y = (bound - zp) * s has dy/ds = bound - zp and dy/dzp = -s. Sums run in float64.

    Source: LSQ, arXiv 1902.08153, equation 3; LSQ+, arXiv 2004.09576, section 3.

    Args:
        wants: whether the gradient of the scale, and that of the zero point, is wanted.
    """
    b = _blocked(x, params, spec)
    codes = _encode(b, spec)
    inside = (codes.unclamped >= spec.format.quant_min) & (codes.unclamped <= spec.format.quant_max)
    offset = 0.0 if b.zero_point is None else b.zero_point
    dy = dy.to(b.x.dtype).reshape(b.x.shape)
    axes = block_axes(x.shape, spec.granularity.block_shape(x.shape))

    def per_group(values: Tensor) -> Tensor:
        total = values.double().sum(axes) if axes else values.double()
        return total.reshape(params.scale.shape)

    scale_grad = zero_point_grad = None
    if wants[0]:
        error = torch.where(inside, codes.unclamped - offset - codes.scaled, codes.clamped - offset)
        if spec.arithmetic is Arithmetic.MULTIPLIER:
            # y = q / m and, in range, q ~ x * m: dy/dm = x/m - q/m^2.
            error = -error / (b.scale * b.scale)
        scale_grad = per_group(dy * error).to(params.scale.dtype)
    if wants[1] and params.zero_point is not None:
        zero_point_grad = per_group(torch.where(inside, 0.0, -dy * b.scale)).to(params.zero_point.dtype)
    return scale_grad, zero_point_grad
