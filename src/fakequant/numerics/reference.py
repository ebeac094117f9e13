"""The definition: what quantization computes, in plain torch, on any device.

Everything here broadcasts: parameters are [groups per axis] and `x` is any shape that the granularity accepts. Each
backend must return these bits. float16 and bfloat16 are computed in float32 and rounded once, at the end.

Gradients are summed by `order_free_sum`, which gives the same result in any order, so that neither threads nor strides
nor a device change a gradient. Every number is written as DIGITS digits in base 2**30; the first digit is of the lowest
power of the base above all magnitudes, and digits after the last are cut off. Digits of one position are added as
integers, which is exact in any order.

The sum of n numbers up to a magnitude M is off by less than n * 2**-90 * M for the digits cut off (the power of the
base may be 2**30 * M, and 120 bits below it are kept), and by 2**-51 of itself for the rounding to float64. A plain
sum in float64 is off by up to n * 2**-53 of the sum of the magnitudes. n may be up to 2**33.

Source: Demmel and Nguyen, Fast Reproducible Floating-Point Summation, ARITH 21, 2013; here with bins at fixed powers,
as in Ahrens, Demmel and Nguyen, Algorithms for Efficient Reproducible Floating Point Summation, TOMS 46(3), 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fakequant.distributed import is_sharded
from fakequant.errors import QParamsError
from fakequant.numerics.division import divide, multiply, reciprocal
from fakequant.numerics.formats.floats import power_of_two
from fakequant.numerics.granularity import (
    Granularity,
    PerBlock,
    PerChannel,
    PerTensor,
    PerToken,
    Shape,
    block_axes,
    blocked,
    blocked_groups,
    unblocked,
)
from fakequant.numerics.philox import random_words
from fakequant.numerics.qparams import QParams, Range, above, choose_qparams, compute_dtype, measure
from fakequant.numerics.scales import ScaleRounding
from fakequant.numerics.spec import Arithmetic, Gradient, QuantSpec, Rounding

# 2**33 digits below 2**30 add up to less than 2**63. An even number, because the scaling is halved.
DIGIT_BITS = 30
DIGITS = 4


def order_free_sum(values: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The sum of float64 values over axes that hold elements; without axes, each value is its own sum.

    As in a plain sum, NaN or both infinities give NaN, one infinity gives this infinity, and zeros give +0.0.
    Differentiable, with the gradient of a sum.

    >>> values = torch.tensor([1e17, 1.0, -1e17, 2.0**-40], dtype=torch.float64)
    >>> order_free_sum(values, (0,)) - 1.0 == order_free_sum(values.flip(0), (0,)) - 1.0 == 2.0**-40
    tensor(True)
    """
    values, axes = values.unsqueeze(-1), (*axes, values.dim())
    is_finite = values.isfinite()
    finite, others = torch.where(is_finite, values, 0.0), torch.where(is_finite, 0.0, values.detach())
    # The exponent field: the largest is below 2**(field - 1022), for subnormals too.
    field = torch.bitwise_right_shift(whole_sums(finite.detach().abs().amax(axes, keepdim=True)).view(torch.int64), 52)
    power = (field - 1022 + (DIGIT_BITS - 1)) // DIGIT_BITS
    # The first digit becomes the integer part. Halved, because float64 lacks 2**1050, by which subnormals are scaled.
    half = power_of_two((1 - power) * (DIGIT_BITS // 2))
    rest = finite.detach() * half * half
    digits = []
    for _ in range(DIGITS):
        digit = rest.trunc()
        digits.append(whole_sums(digit.to(torch.int64).sum(axes)))
        rest = (rest - digit) * 2.0**DIGIT_BITS
    back = power_of_two((power.squeeze(axes) - 1) * (DIGIT_BITS // 2))
    # The number that summed digits stand for, in units of the first digit.
    number, carry = torch.zeros_like(digits[0], dtype=torch.float64), 0
    for digit in reversed(digits[1:]):
        digit = digit + carry
        carry = torch.bitwise_right_shift(digit + 2 ** (DIGIT_BITS - 1), DIGIT_BITS)
        number = (number + (digit - carry * 2**DIGIT_BITS)) * 2.0**-DIGIT_BITS
    total = (number + (digits[0] + carry)) * back * back + whole_sums(others.sum(axes))
    # Zeros, which carry the gradient: integers have none.
    return total + (finite - finite.detach()).sum(axes) if finite.requires_grad else total


def is_less(one: Tensor, other: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Whether the order-free sum of `one` is below that of `other`: finite float64 values >= 0 of one shape."""
    return order_free_sum(one, axes) < order_free_sum(other, axes)


def is_less_by_plain_sums(one: Tensor, other: Tensor, axes: tuple[int, ...]) -> Tensor:
    """`is_less` in a quarter of the time, for tensors whose values can be read: plain sums decide almost everywhere.

    >>> one = torch.tensor([[1e17, 1.0, 0.0], [2.0, 0.0, 0.0]], dtype=torch.float64)
    >>> is_less_by_plain_sums(one, one.flip(0), (1,)).tolist(), is_less(one, one.flip(0), (1,)).tolist()
    ([False, True], [False, True])
    """
    if is_sharded(one) or not axes:
        return is_less(one, other, axes)
    sums = one.sum(axes), other.sum(axes)
    found, both = sums[0] < sums[1], sums[0] + sums[1]
    count = one.numel() // max(found.numel(), 1)
    # Each plain sum is off by up to count * 2**-53 of itself, each order-free one by less than 2**-50.
    unsure = ~((sums[0] - sums[1]).abs() > both * ((count + 16) * 2.0**-52)) & (both > 0)
    if bool(unsure.any()):
        kept = [axis for axis in range(one.dim()) if axis not in axes]
        pair = [own.permute(*kept, *axes)[unsure].flatten(1) for own in (one, other)]
        found[unsure] = is_less(pair[0], pair[1], (1,))
    return found


def whole_sums(values: Tensor) -> Tensor:
    """The sums or extremes of a DTensor over all processes; a plain tensor is returned as it is."""
    if not is_sharded(values):
        return values
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(values, DTensor)
    whole = [Replicate() if placement.is_partial() else placement for placement in values.placements]
    return values.redistribute(placements=whole)


class Codes(NamedTuple):
    """The intermediate results of quantization, in the blocked view of x."""

    scaled: Tensor
    """x in units of codes, before rounding."""
    unclamped: Tensor
    """The rounded code plus the zero point, as if the format had no bounds."""
    clamped: Tensor
    """The code."""


class _Blocked(NamedTuple):
    """The blocked view of x, and parameters shaped to broadcast with it, in the compute dtype."""

    x: Tensor
    scale: Tensor
    zero_point: Tensor | None
    words: Tensor | None = None
    """The random words of stochastic rounding; None if rounding is to nearest or no code is computed."""


def _blocked_params(params: QParams, shape: Shape, blocks: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point, shaped to broadcast with the blocked view of a tensor [shape]."""
    scale = blocked_groups(params.scale.to(dtype), shape, blocks)
    zero_point = params.zero_point
    return scale, None if zero_point is None else blocked_groups(zero_point.to(dtype), shape, blocks)


def seed_of(seed: Tensor | None, spec: QuantSpec) -> Tensor | None:
    """The seed of stochastic rounding, None if rounding is to nearest; raises QParamsError if it is missing."""
    if spec.rounding is Rounding.NEAREST_EVEN:
        return None
    if seed is None:
        raise QParamsError(f"{spec} rounds by random numbers, and there is no seed; give QParams(..., seed=...)")
    return seed


def _to_encode(x: Tensor, params: QParams, spec: QuantSpec) -> _Blocked:
    blocks, dtype, seed = spec.granularity.block_shape(x.shape), compute_dtype(x.dtype), seed_of(params.seed, spec)
    words = None if seed is None else blocked(random_words(seed, x), blocks)
    return _Blocked(blocked(x.to(dtype), blocks), *_blocked_params(params, x.shape, blocks, dtype), words)


def _encode(b: _Blocked, spec: QuantSpec) -> Codes:
    scaled = _scaled(b, spec)
    unclamped = spec.format.round(scaled) if b.words is None else spec.format.round_stochastically(scaled, b.words)
    if spec.offset is None and b.zero_point is not None:
        unclamped = unclamped + b.zero_point
    return Codes(scaled, unclamped, spec.format.clamp(unclamped))


def _scaled(b: _Blocked, spec: QuantSpec) -> Tensor:
    x, scale = b.x, b.scale
    if spec.scale.is_exact:
        # Under a scale of 0 all values are 0, by whichever code; a quotient would be NaN.
        scale = torch.where(scale == 0, torch.finfo(scale.dtype).max, scale)
    if spec.offset is not None and b.zero_point is not None:
        x = x + b.zero_point
    if spec.arithmetic is Arithmetic.DIVIDE:
        return divide(x, scale)
    if spec.arithmetic is Arithmetic.RECIPROCAL:
        return x * reciprocal(scale)
    if spec.arithmetic is Arithmetic.MULTIPLIER:
        return x * scale
    return x * _multiplier_and_step(scale, spec)[0]


def _decode(codes: Tensor, scale: Tensor, zero_point: Tensor | None, spec: QuantSpec) -> Tensor:
    if spec.arithmetic is Arithmetic.MULTIPLIER:
        return divide(codes, scale)
    if spec.offset is not None and zero_point is not None:
        return (codes + 0.0) * scale - zero_point
    if zero_point is not None:
        codes = codes - zero_point
    elif spec.format.has_zero_point:
        # Integers have no negative zero: -0.0 + 0.0 is +0.0, every other value stays.
        codes = codes + 0.0
    return multiply(codes, scale if spec.arithmetic.is_linear else _multiplier_and_step(scale, spec)[1])


def _multiplier_and_step(scale: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """The number of codes per unit of x by which Q8_0 and Q8_K encode, and the units per code by which they decode."""
    bound = torch.full_like(scale, spec.format.bound)
    amax = scale * above(spec.format.bound)
    multiplier = divide(bound, amax)
    if spec.arithmetic is Arithmetic.Q8_0:
        return multiplier, divide(amax, bound).half().to(scale.dtype)
    assert spec.arithmetic is Arithmetic.Q8_K, f"an arithmetic without a definition: {spec.arithmetic}"
    return multiplier, reciprocal(multiplier)


PART = 1 << 19
"""Elements of a part of a large tensor, see `divided`."""
_DIVIDED = {PerTensor, PerChannel, PerToken, PerBlock}
"""Granularities that give a part of a tensor the groups that it has in the whole tensor."""


def divided(
    spec: QuantSpec, tensors: Sequence[Tensor], params: Sequence[Tensor], *, with_shared: bool
) -> Iterator[tuple[Sequence[Tensor], Sequence[Tensor]]]:
    """Parts of large tensors along their first axis, small enough that all steps read a part from a CPU's cache.

    Args:
        spec: how the tensors are quantized.
        tensors: tensors of the same shape; their parts are views.
        params: scales, zero points and others [groups per axis]; a part gets the values of its groups.
        with_shared: whether tensors are divided even if a group then lies in several parts.
    """
    x, granularity = tensors[0], spec.granularity
    axis = next((axis for axis, size in enumerate(x.shape) if size > 1), None)
    groups = granularity.group_shape(x.shape)
    fits = type(granularity) in _DIVIDED and all(one.shape == groups for one in params)
    if axis is not None and groups[axis] == 1:
        fits = fits and with_shared and not isinstance(granularity, PerBlock)
    if axis is None or x.numel() <= PART or not fits:
        yield tensors, params
        return
    is_shared, count = groups[axis] == 1, x.shape[axis]
    high = 1 if is_shared else granularity.block_shape(x.shape)[axis]
    step = max(1, PART // (x.numel() // count) // high) * high
    for start in range(0, count, step):
        size = min(step, count - start)
        own = params if is_shared else [one.narrow(axis, start // high, -(-size // high)) for one in params]
        yield from divided(spec, [one.narrow(axis, start, size) for one in tensors], own, with_shared=with_shared)


SEARCHED = range(-4, 7)
"""`ScaleRounding.SEARCHED` tries the scales so many numbers of the format away from the scale of NEAREST."""


def choose(x: Tensor, spec: QuantSpec) -> QParams:
    """Scale and zero point from the values of x, see `qparams.choose_qparams` and `ScaleRounding`."""
    return choose_from(x, None, spec)


def choose_from(x: Tensor, range: Range | None, spec: QuantSpec, is_less: Callable[..., Tensor] = is_less) -> QParams:
    """`choose` with a known range of x (None: the range is measured) and another function that compares sums."""
    largest = torch.finfo(x.dtype).max
    if spec.scale.rounding is ScaleRounding.MEAN:
        # The mean magnitude of the finite values of every group [groups per axis].
        dtype = compute_dtype(x.dtype)
        values = x.detach().to(dtype).double().abs()
        values = torch.where(values.isfinite(), values, 0.0)
        number = _sums(torch.ones_like(values), spec.granularity).clamp(min=1.0)
        amax = (_sums(values, spec.granularity) / number).to(dtype) * spec.format.bound
        range = Range(-amax, amax)
    elif spec.offset is not None and spec.offset.needs_values:
        range = measure(x, spec.granularity, with_zero=False)
    elif range is None:
        range = measure(x, spec.granularity)
    params = choose_qparams(range, spec, largest=largest)
    if spec.scale.rounding is ScaleRounding.FOUR_OVER_SIX:
        # The scale of the largest code stays where both have the same error.
        others = [choose_qparams(range, spec, largest=largest, bound=spec.format.second).scale]
    elif spec.scale.rounding is ScaleRounding.SEARCHED:
        others = [choose_qparams(range, spec, largest=largest, steps=steps).scale for steps in SEARCHED if steps]
    else:
        return params
    if not x.numel():
        return params
    x, nearest = x.detach(), spec.replace(rounding=Rounding.NEAREST_EVEN)
    if type(x) is not Tensor or not x.is_cpu or is_less is not is_less_by_plain_sums:  # or compiled
        return params._replace(scale=_best(x, [params.scale, *others], nearest, is_less))
    found = torch.empty_like(params.scale)
    for (part,), (own, *tried) in divided(spec, [x], [found, params.scale, *others], with_shared=False):
        own.copy_(_best(part, tried, nearest, is_less))
    return params._replace(scale=found)


def _best(x: Tensor, scales: Sequence[Tensor], spec: QuantSpec, is_less: Callable[..., Tensor]) -> Tensor:
    """For each group the scale with the least squared error; of scales with equal errors, the first."""
    blocks = spec.granularity.block_shape(x.shape)
    exact, axes = x.to(compute_dtype(x.dtype)), block_axes(x.shape, blocks)

    def error_of(scale: Tensor) -> Tensor:
        error = (fake_quantize(exact, QParams(scale), spec) - exact).double()
        return blocked(torch.where(error.isfinite(), error, 0.0).square(), blocks)

    found, *others = scales
    best = error_of(found)
    for other in others:
        error = error_of(other)
        better = is_less(error, best, axes).reshape(found.shape)
        found = torch.where(better, other, found)
        best = torch.where(blocked_groups(better, x.shape, blocks), error, best)
    return found


def _sums(values: Tensor, granularity: Granularity) -> Tensor:
    blocks, groups = granularity.block_shape(values.shape), granularity.group_shape(values.shape)
    if not values.numel():
        return values.new_zeros(groups)
    return order_free_sum(blocked(values, blocks), block_axes(values.shape, blocks)).reshape(groups)


def fake_quantize(x: Tensor, params: QParams, spec: QuantSpec) -> Tensor:
    """The values of x after encoding and decoding, in the shape and dtype of x."""
    b = _to_encode(x, params, spec)
    values = _decode(_encode(b, spec).clamped, b.scale, b.zero_point, spec)
    return unblocked(values, x.shape, spec.granularity.block_shape(x.shape)).to(x.dtype)


def quantize(x: Tensor, params: QParams, spec: QuantSpec) -> Tensor:
    """The codes of x in the format's storage dtype; NaN has no integer code and becomes quant_min (ONNX Runtime)."""
    codes = _encode(_to_encode(x, params, spec), spec).clamped
    return spec.format.to_storage(unblocked(codes, x.shape, spec.granularity.block_shape(x.shape)))


def scaled(x: Tensor, params: QParams, spec: QuantSpec) -> Tensor:
    """x in units of codes, before rounding [shape of x], in the dtype of computation."""
    return unblocked(_scaled(_to_encode(x, params, spec), spec), x.shape, spec.granularity.block_shape(x.shape))


def dequantize(codes: Tensor, params: QParams, spec: QuantSpec, dtype: torch.dtype) -> Tensor:
    """The values of codes, in the given dtype."""
    return decode(spec.format.from_storage(codes, compute_dtype(dtype)), params, spec, dtype)


def decode(codes: Tensor, params: QParams, spec: QuantSpec, dtype: torch.dtype) -> Tensor:
    """The values of codes that are numbers in the compute dtype of `dtype`; see `dequantize`."""
    blocks = spec.granularity.block_shape(codes.shape)
    scale, zero_point = _blocked_params(params, codes.shape, blocks, codes.dtype)
    return unblocked(_decode(blocked(codes, blocks), scale, zero_point, spec), codes.shape, blocks).to(dtype)


def input_range(params: QParams, spec: QuantSpec) -> Range:
    """The range of inputs that the codes span: `params.range`, or without it the range that the scale implies."""
    if params.range is not None:
        return params.range
    fmt = spec.format
    if spec.symmetric:
        bound = torch.full_like(params.scale, above(fmt.bound) if spec.arithmetic.has_two_scales else fmt.bound)
        amax = divide(bound, params.scale) if spec.arithmetic is Arithmetic.MULTIPLIER else (bound * params.scale).abs()
        return Range(-amax, amax)
    zero_point = 0.0 if params.zero_point is None else params.zero_point.to(params.scale.dtype)
    if spec.offset is not None:
        return Range(fmt.quant_min * params.scale - zero_point, fmt.quant_max * params.scale - zero_point)
    return Range((fmt.quant_min - zero_point) * params.scale, (fmt.quant_max - zero_point) * params.scale)


def clip_range(params: QParams, spec: QuantSpec, dtype: torch.dtype) -> Range:
    """The values of the lowest and the highest code [groups per axis], as they come out in a compute dtype."""
    zero_point = None if params.zero_point is None else params.zero_point.to(dtype)
    return _ends(params.scale.to(dtype), zero_point, spec)


def _ends(scale: Tensor, zero_point: Tensor | None, spec: QuantSpec) -> Range:
    return Range(*(_decode(code, scale, zero_point, spec) for code in _end_codes(scale, spec)))


def _end_codes(scale: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """The two end codes of a format, first that of the lower value; a negative scale swaps them."""
    lowest, highest = (torch.full_like(scale, code) for code in (spec.format.quant_min, spec.format.quant_max))
    if not spec.scale.is_exact:
        return lowest, highest
    return torch.where(scale < 0, highest, lowest), torch.where(scale < 0, lowest, highest)


def passes(x: Tensor, params: QParams, spec: QuantSpec) -> Tensor:
    """True where the gradient of the output reaches the input; bool [shape of x]."""
    if spec.gradient is Gradient.IDENTITY:
        return torch.ones_like(x, dtype=torch.bool)
    blocks = spec.granularity.block_shape(x.shape)
    b = _to_encode(x, params, spec)
    if spec.gradient is Gradient.CODE_RANGE:
        code = _encode(b, spec).unclamped
        inside = (code >= spec.format.quant_min) & (code <= spec.format.quant_max)
    elif spec.gradient is Gradient.CLIP:
        lo, hi = _ends(b.scale, b.zero_point, spec)
        inside = (b.x > lo) & (b.x < hi)
    else:
        lo, hi = (blocked_groups(r.to(b.x.dtype), x.shape, blocks) for r in input_range(params, spec))
        inside = (b.x >= lo) & (b.x <= hi)
    return unblocked(inside, x.shape, blocks)


def grad_input(dy: Tensor, mask: Tensor) -> Tensor:
    """The gradient of the input: dy where `mask` is True, elsewhere exactly zero, also where dy is NaN or inf."""
    return torch.where(mask, dy, 0.0)


class _Slopes(NamedTuple):
    """The derivatives of y by scale and zero point, in the blocked view of x."""

    scale: Tensor
    zero_point: Tensor


def _slopes(b: _Blocked, spec: QuantSpec) -> _Slopes:
    """The derivatives of y by scale, and by zero point or offset, where rounding counts as the identity.

    Where a code is in range, y = (rint(x/s) + zp - zp) * s has dy/ds = rint(x/s) - x/s and dy/dzp = 0; where it
    saturates, y = (bound - zp) * s has dy/ds = bound - zp and dy/dzp = -s. With an offset m, y = rint((x + m)/s) * s -
    m: dy/ds = rint((x + m)/s) - (x + m)/s and dy/dm = 0; where it saturates, dy/ds = bound and dy/dm = -1. Where
    rounding is stochastic, the code that was drawn takes the place of rint(x/s). Under `Gradient.CLIP`, y = x between
    the ends and saturates at and beyond them.

    Source: LSQ, arXiv 1902.08153, equation 3; LSQ+, arXiv 2004.09576, section 3; PACT, arXiv 1805.06085, equation 3.
    """
    fmt, offset = spec.format, b.zero_point
    if offset is None or spec.offset is not None:
        offset = torch.zeros_like(b.scale)
    if spec.gradient is Gradient.CLIP:
        lo, hi = _ends(b.scale, b.zero_point, spec)
        low, high = b.x <= lo, b.x >= hi
        inside = ~(low | high)
        first, last = _end_codes(b.scale, spec)
        scale = torch.where(low, first - offset, torch.where(high, last - offset, 0.0))
    else:
        codes = _encode(b, spec)
        inside = (codes.unclamped >= fmt.quant_min) & (codes.unclamped <= fmt.quant_max)
        scale = torch.where(inside, codes.unclamped - offset - codes.scaled, codes.clamped - offset)
    if spec.arithmetic is Arithmetic.MULTIPLIER:
        # y = q / m and, in range, q ~ x * m: dy/dm = x/m - q/m^2. Divided twice, because the square of m < 1e-22 is 0
        # in float32, and at most the largest number, because m < 1e-18 reaches beyond it: 0 / 0 and 0 * inf are NaN.
        largest = torch.finfo(scale.dtype).max
        scale = (-scale / b.scale / b.scale).clamp(-largest, largest)
    elif spec.arithmetic.has_two_scales:
        scale = scale * (above(fmt.bound) / fmt.bound)
    unit = b.scale if spec.offset is None else torch.ones_like(b.scale)
    return _Slopes(scale, torch.where(inside, 0.0, -unit))


def grad_params(
    dy: Tensor, x: Tensor, params: QParams, spec: QuantSpec, wants: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of scale and zero point [groups per axis]: sums of dy times slope, by `order_free_sum`.

    Products are computed in float64, exactly for float32 factors. A zero slope gives a zero product, whatever dy is.

    Args:
        wants: whether the gradient of the scale is wanted, and whether the gradient of the zero point is.
    """
    b = _to_encode(x, params, spec)
    slopes = _slopes(b, spec)
    blocks = spec.granularity.block_shape(x.shape)
    axes = block_axes(x.shape, blocks)
    dy = blocked(dy.to(b.x.dtype), blocks)

    def per_group(slope: Tensor, parameter: Tensor) -> Tensor:
        if not x.numel():
            return torch.zeros_like(parameter)
        products = torch.where((slope == 0) & ~dy.isfinite(), 0.0, dy.double() * slope.double())
        return order_free_sum(products, axes).reshape(parameter.shape).to(parameter.dtype)

    scale_grad = per_group(slopes.scale, params.scale) if wants[0] else None
    if not wants[1] or params.zero_point is None:
        return scale_grad, None
    return scale_grad, per_group(slopes.zero_point, params.zero_point)


def tangent_params(
    x: Tensor, params: QParams, spec: QuantSpec, tangents: tuple[Tensor | None, Tensor | None]
) -> Tensor | None:
    """The tangent of y from the tangents of scale and zero point [groups per axis]; None if both are None."""
    b = _to_encode(x, params, spec)
    blocks = spec.granularity.block_shape(x.shape)
    moved = [
        slope * blocked_groups(tangent.to(b.x.dtype), x.shape, blocks)
        for slope, tangent in zip(_slopes(b, spec), tangents, strict=True)
        if tangent is not None
    ]
    return unblocked(sum(moved[1:], moved[0]), x.shape, blocks).to(x.dtype) if moved else None


# Values that are counted at a time: they stay in the processor's cache from one step to the next.
_CHUNK = 1 << 17
# Bins that are counted at a time: they take 16 MiB, and their positions fit int32.
_CHUNK_BINS = 1 << 21
_SIGN_BITS = {torch.float32: (torch.int32, 31), torch.float64: (torch.int64, 63)}


class Bins(NamedTuple):
    """The bins of a histogram, which begin at 0 and are counted apart for negative and other values."""

    inverse: Tensor
    """float64 [groups]: 1 / width, powers of two; 0.0 puts all values of a group in the first bin."""
    number: int

    def inverse_for(self, values: Tensor) -> Tensor:
        """`inverse` on the device of values and in their dtype of computation; finite, so that 0.0 stays in bin 0."""
        dtype = compute_dtype(values.dtype)
        return self.inverse.clamp(max=torch.finfo(dtype).max).to(values.device, dtype)


class Observed(NamedTuple):
    """The range and the counts of a tensor."""

    range: Range
    """Lowest and highest value of every group [groups], in the dtype of computation; NaN if one is not finite."""
    counts: Tensor | None
    """int64 [groups, 2, bins]: how often floor(|x| / width) is k, first for negative x; None if not requested.
    Undefined for a group with a value that is not finite or is beyond the last bin."""


def observe_by_definition(values: Tensor, bins: Bins | None = None) -> Observed:
    """Find the range of values [groups, elements], elements >= 1, and, if there are bins, count the values."""
    dtype = compute_dtype(values.dtype)
    # Both propagate NaN.
    lo, hi = (end.to(dtype) + 0.0 for end in (values.amin(1), values.amax(1)))
    finite = lo.isfinite() & hi.isfinite()
    lo, hi = (torch.where(finite, end, torch.nan) for end in (lo, hi))
    if bins is None:
        return Observed(Range(lo, hi), None)
    inverse, number = bins.inverse_for(values), bins.number
    groups, elements = values.shape
    rows, columns = max(1, min(_CHUNK // elements, _CHUNK_BINS // (2 * number))), min(elements, _CHUNK)
    # One line of bins per group: the negative values below the middle, outwards in both directions.
    middle = torch.arange(min(rows, groups), dtype=torch.int32, device=values.device)[:, None] * (2 * number) + number
    bits, sign = _SIGN_BITS[inverse.dtype]
    line = torch.zeros(groups, 2 * number, dtype=torch.int64, device=values.device)
    for row in range(0, groups, rows):
        part_inverse = inverse[row : row + rows, None]
        count = part_inverse.shape[0]
        for column in range(0, elements, columns):
            part = values[row : row + rows, column : column + columns].to(inverse.dtype)
            # Truncated towards zero, then one lower if negative; adding 0.0 keeps -0.0 on the side of +0.0.
            index = (part * part_inverse).nan_to_num(nan=0.0).clamp(1 - number, number - 1).to(torch.int32)
            index.add_(middle[:count]).add_(torch.bitwise_right_shift((part + 0.0).view(bits), sign))
            found = torch.bincount(index.reshape(-1), minlength=count * 2 * number)
            line[row : row + rows] += found.view(count, -1)
    return Observed(Range(lo, hi), torch.stack([line[:, :number].flip(-1), line[:, number:]], dim=1))
