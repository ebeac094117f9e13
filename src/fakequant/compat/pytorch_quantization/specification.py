"""Convert num_bits, unsigned, narrow_range, axis and amax of the interface to specifications and parameters."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fakequant.numerics.formats import formats
from fakequant.numerics.formats.floats import ExponentFormat, FloatFormat, Format, IntegerFormat
from fakequant.numerics.granularity import Granularity, PerBlock, PerChannel, PerTensor
from fakequant.numerics.qparams import QParams, Range, compute_dtype, is_concrete
from fakequant.numerics.scales import ScaleRounding, ScaleSpec
from fakequant.numerics.spec import Arithmetic, Gradient, QuantSpec

NumBits = int | tuple[int, int]

# The smallest subnormal of float16.
SMALLEST_AMAX = 2.0**-24


def integer_format(num_bits: int, unsigned: bool = False, narrow_range: bool = False) -> IntegerFormat:
    """All codes of `num_bits` bits; `narrow_range` leaves the lowest of the signed ones out.

    Raises:
        SpecError: fewer codes than two, or more than 24 bits.

    >>> print(integer_format(8), integer_format(8, narrow_range=True), integer_format(4, unsigned=True))
    int8 int8_narrow uint4
    """
    return IntegerFormat.of(num_bits, signed=not unsigned, narrow=narrow_range and not unsigned)


def float_format(num_bits: tuple[int, int]) -> Format:
    """The first registered format with E exponent and M mantissa bits.

    Raises:
        TypeError: there is none.

    >>> print(float_format((4, 3)), float_format((2, 1)), float_format((8, 0)))
    float8_e4m3fn float4_e2m1fn float8_e8m0fnu
    """
    known: dict[tuple[int, int], Format] = {}
    for fmt in reversed(formats().values()):
        if isinstance(fmt, FloatFormat):
            known[fmt.exponent_bits, fmt.mantissa_bits] = fmt
        elif isinstance(fmt, ExponentFormat):
            known[fmt.bits, 0] = fmt
    if num_bits not in known:
        raise TypeError(
            f"num_bits must be a positive integer or one of the tuples (exponent bits, mantissa bits) "
            f"{sorted(known)}, not {num_bits!r}"
        )
    return known[num_bits]


def format_of(num_bits: NumBits, unsigned: bool = False, narrow_range: bool = False) -> Format:
    """The format of a descriptor.

    Raises:
        SpecError, TypeError: there is none.
    """
    if isinstance(num_bits, int):
        return integer_format(num_bits, unsigned, narrow_range)
    return float_format(num_bits)


def specification(fmt: Format, granularity: Granularity) -> QuantSpec:
    """How the interface computes: code = clamp(rint(x * m)), value = code / m, gradient where |x| <= amax."""
    return QuantSpec(fmt, granularity, arithmetic=Arithmetic.MULTIPLIER, gradient=Gradient.INPUT_RANGE)


def block_specification(fmt: Format, block_sizes: dict[int | str, object]) -> QuantSpec:
    """The specification of a descriptor's `block_sizes`; the last block of an axis may be smaller.

    "scale_bits" is the format of the scales. (8, 0): powers of two, rounded up as NVIDIA does, so that no value
    saturates. Another format: the scales have float32 scales, over blocks of "scale_block_sizes" or the whole tensor.

    >>> print(block_specification(format_of(4), {-1: 32}))
    int4 per_block(-1:32,pad) multiplier input_range
    >>> print(block_specification(format_of((2, 1)), {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}))
    float4_e2m1fn per_block(-1:16,pad) input_range scale=float8_e4m3fn@per_tensor
    """
    granularity = PerBlock(block_axes(block_sizes), pad=True)
    bits = block_sizes.get("scale_bits")
    if bits is None:
        return specification(fmt, granularity)
    scale_format = format_of(bits, unsigned=True)  # pyright: ignore[reportArgumentType]
    if isinstance(scale_format, ExponentFormat):
        scale = ScaleSpec(scale_format, ScaleRounding.CEIL)
    else:
        sizes = block_sizes.get("scale_block_sizes")
        shared = PerBlock(sizes, pad=True) if isinstance(sizes, dict) else PerTensor()
        scale = ScaleSpec(scale_format, granularity=shared)
    return QuantSpec(fmt, granularity, gradient=Gradient.INPUT_RANGE, scale=scale)


def block_axes(block_sizes: dict[int | str, object]) -> dict[int, int]:
    """The part of `block_sizes` that says how large a block is along which axis."""
    return {axis: size for axis, size in block_sizes.items() if isinstance(axis, int) and isinstance(size, int)}


class OperatorArguments(NamedTuple):
    """What an amax becomes: a specification and parameters, and which groups become 0."""

    spec: QuantSpec
    params: QParams
    zero: Tensor | None
    """Which groups become 0, [groups, axes kept]: integers under an amax of at most `SMALLEST_AMAX`, floats whose scale
    is infinite. Their scale is 1. None if there are none."""


def read_amax(amax: Tensor | float | None, x: Tensor, fmt: Format) -> OperatorArguments:
    """Parameters for x of a range -amax to amax; of None, those with which a code is its own value.

    Args:
        amax: broadcasts with x; the axes along which it has several values are those that have their own scales.
        x: any floating tensor, of the shape that both broadcast to.
        fmt: what amax is mapped to the bound of.

    Raises:
        ValueError: a negative amax.
    """
    zero = None
    if amax is None:
        amax = as_tensor(fmt.bound, x)
        scale = torch.ones_like(amax)
    else:
        amax = as_tensor(amax, x)
        scale = codes_per_unit(amax, fmt)
        if _may_be_tiny(amax):
            zero = amax <= SMALLEST_AMAX if fmt.has_zero_point else scale.isinf()
            scale = torch.where(zero, 1.0, scale)
    granularity, shape = granularity_of(amax.shape, x.shape)
    amax, scale = (values.to(compute_dtype(x.dtype)).reshape(shape) for values in (amax, scale))
    return OperatorArguments(
        specification(fmt, granularity),
        QParams(scale, None, Range(-amax, amax)),
        None if zero is None else zero.reshape(shape),
    )


def codes_per_unit(amax: Tensor, fmt: Format) -> Tensor:
    """The multiplier m that maps amax to the format's bound, in the dtype of amax.

    For floats it is bound * (1 / amax), rounded twice, because torch divides a number by a tensor this way. This is at
    most 1 ulp from the quotient.
    """
    bound = torch.full_like(amax, fmt.bound)
    return bound / amax if fmt.has_zero_point else bound * amax.reciprocal()


def as_tensor(values: Tensor | float, x: Tensor) -> Tensor:
    """Given values, without a gradient, in float32 or float64 on the device of x."""
    values = torch.as_tensor(values, device=x.device).detach()
    return values if values.dtype == torch.float64 else values.float()


def granularity_of(given: torch.Size, shape: torch.Size) -> tuple[Granularity, tuple[int, ...]]:
    """The granularity of parameters [given] for a tensor [shape], and their shape with all axes kept."""
    if given.numel() == 1:
        return PerTensor(), (1,) * len(shape)
    full = (1,) * (len(shape) - len(given)) + tuple(given)
    return PerChannel(*(axis for axis, n in enumerate(full) if n != 1)), full


def _may_be_tiny(amax: Tensor) -> bool:
    """Whether some amax is at most `SMALLEST_AMAX`, or has no readable values.

    Raises:
        ValueError: a negative amax.
    """
    if not amax.numel() or not is_concrete(amax):
        return amax.numel() > 0
    lowest = amax.item() if amax.numel() == 1 else amax.nan_to_num(nan=math.inf).min().item()
    if lowest < 0:
        raise ValueError(f"Negative values in amax: {lowest:g}; give the largest magnitude, which is at least 0")
    return lowest <= SMALLEST_AMAX
