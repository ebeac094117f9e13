"""Formats of the scales themselves: power-of-two scales, and scales under a scale of their own.

Sources: OCP Microscaling 1.0, section 6.3 (E8M0, floor); NVIDIA TensorRT Model Optimizer (E8M0, ceil; NVFP4).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from fakequant.errors import SpecError
from fakequant.numerics.blocks import block_axes, blocked, blocked_groups, unblocked
from fakequant.numerics.compilers import is_approximate
from fakequant.numerics.division import divide
from fakequant.numerics.floats import ExponentFormat, power_of_two
from fakequant.numerics.format import Format
from fakequant.numerics.formats import parse_format
from fakequant.numerics.granularity import Granularity, parse_granularity
from fakequant.numerics.tables import TableFormat


class ScaleRounding(Enum):
    """How a scale is rounded to its format."""

    NEAREST = "nearest"
    """To the nearest, ties to even."""
    FLOOR = "floor"
    """Power-of-two scales: floor(log2(amax)) - floor(log2(bound)), which can saturate. OCP Microscaling 1.0."""
    CEIL = "ceil"
    """Power-of-two scales: ceil(log2(amax / bound)), with which nothing saturates. NVIDIA."""
    EVEN = "even"
    """Power-of-two scales: as FLOOR after rounding amax to the element format's precision. torchao, Quark."""


@dataclass(frozen=True)
class ScaleSpec:
    """How scales are stored.

    Args:
        format: None for float32; a float format, an unsigned integer format, or `float8_e8m0fnu`.
        rounding: see `ScaleRounding`; power-of-two scales need FLOOR, CEIL or EVEN, all others NEAREST.
        granularity: over the tensor of scales: which of them share a float32 scale of their own (NVFP4: `PerTensor()`).
            None: the scales have none.

    Raises:
        SpecError: a combination that is not defined.

    >>> print(ScaleSpec("float8_e8m0fnu", ScaleRounding.FLOOR), ScaleSpec("float8_e4m3fn", granularity=PerTensor()))
    scale=float8_e8m0fnu:floor scale=float8_e4m3fn@per_tensor
    """

    format: Format | None = None
    rounding: ScaleRounding = ScaleRounding.NEAREST
    granularity: Granularity | None = None

    def __init__(
        self,
        format: Format | str | None = None,
        rounding: ScaleRounding | None = None,
        granularity: Granularity | None = None,
    ) -> None:
        fmt = None if format is None else parse_format(format)
        powers = isinstance(fmt, ExponentFormat)
        default = ScaleRounding.FLOOR if powers else ScaleRounding.NEAREST
        object.__setattr__(self, "format", fmt)
        object.__setattr__(self, "rounding", rounding or default)
        object.__setattr__(self, "granularity", granularity)
        if fmt is not None and (isinstance(fmt, TableFormat) or (fmt.has_zero_point and fmt.signed)):
            raise SpecError(f"scales are positive, and {fmt} is no format for them; use a float or an unsigned integer")
        if granularity is not None and not isinstance(granularity, Granularity):
            raise SpecError(f"granularity must be a Granularity such as PerTensor(), got {granularity!r}")
        if powers == (self.rounding is ScaleRounding.NEAREST):
            kinds = "floor, ceil or even" if powers else "nearest"
            raise SpecError(f"scales in {fmt or 'float32'} are rounded by {kinds}, not by {self.rounding.value}")
        if (fmt is None or powers) and granularity is not None:
            raise SpecError(f"scales in {fmt or 'float32'} need no scale of their own; leave the granularity out")
        if fmt is not None and not powers and granularity is None:
            raise SpecError(
                f"scales in {fmt} reach {fmt.quant_max:g} at most and need a scale of their own: "
                "give its granularity, such as PerTensor()"
            )

    def __str__(self) -> str:
        if self.format is None:
            return ""
        # Added up, because torch.compile does not know the texts of formats that are filled in.
        if self.granularity is not None:
            return "scale=" + str(self.format) + "@" + str(self.granularity)
        return "scale=" + str(self.format) + ":" + self.rounding.value

    def __repr__(self) -> str:
        return "ScaleSpec()" if self.format is None else f"ScaleSpec.parse({str(self)!r})"

    @classmethod
    def parse(cls, text: str) -> ScaleSpec:
        """The specification of a text form; empty text stands for float32 scales.

        Raises:
            SpecError: the text is not one.
        """
        if not text:
            return cls()
        name, _, granularity = text.removeprefix("scale=").partition("@")
        name, _, rounding = name.partition(":")
        try:
            return cls(
                name,
                ScaleRounding(rounding) if rounding else None,
                parse_granularity(granularity) if granularity else None,
            )
        except ValueError as error:
            raise SpecError(f"cannot read the scale format {text!r}: {error}") from error

    def choose(self, amax: Tensor, element: Format, limit: float) -> Tensor:
        """The scale of every group, rounded to its format.

        Args:
            amax: [groups, axes kept], in units of x; float32 or float64.
            element: the format of the codes, whose bound amax is mapped to.
            limit: the largest scale with which every code stays finite.

        Returns:
            [groups, axes kept], positive, in units of x per code.
        """
        if isinstance(self.format, ExponentFormat):
            return _powers_of_two(amax, element, self.rounding, self.format.exponent_bias, limit)
        if self.format is None or self.granularity is None:
            scale = divide(amax, torch.full_like(amax, element.bound)).clamp(min=torch.finfo(amax.dtype).tiny)
        else:
            scale = _under_a_scale(amax, element.bound, self.format, self.granularity)
        return scale.clamp(max=limit)


def _powers_of_two(amax: Tensor, element: Format, rounding: ScaleRounding, largest: int, limit: float) -> Tensor:
    """2**e for every group, e limited to +-largest; a group of zeros gets the smallest."""
    if rounding is ScaleRounding.CEIL:
        measured = divide(amax, torch.full_like(amax, element.bound))
        mantissa, exponent = torch.frexp(measured)
        exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    else:
        measured = amax
        mantissa, exponent = torch.frexp(measured)
        exponent = exponent - 1 - (math.frexp(element.bound)[1] - 1)
        if rounding is ScaleRounding.EVEN:
            # The mantissa rounds up to the next power of two at the precision of the element.
            exponent = exponent + (mantissa >= 1 - 2.0 ** -(element.fraction_bits + 2)).to(exponent.dtype)
    # At most the largest power of two that is not beyond the limit.
    exponent = exponent.clamp(-largest, min(largest, math.frexp(limit)[1] - 1))
    # Of 0, to which a quotient may underflow, frexp says 0 instead of an exponent below all.
    exponent = torch.where(measured > 0, exponent, -largest).to(torch.int64)
    # float64 has all these powers as normal numbers; the cast is exact (2**-127 is subnormal in float32).
    return power_of_two(exponent).to(amax.dtype)


def _under_a_scale(amax: Tensor, bound: float, fmt: Format, granularity: Granularity) -> Tensor:
    """code * g, with g = amax of the whole / (bound * largest code) and code = amax / (bound * g) rounded.

    A code of 0 becomes the smallest positive one: a block that is small compared with its tensor loses precision, but
    not all.
    """
    if amax.numel() == 0:
        return amax
    finfo = torch.finfo(amax.dtype)
    if fmt.quant_max * bound > finfo.max:
        raise SpecError(f"scales in {fmt} under codes up to {bound:g} reach beyond {amax.dtype}; choose a smaller one")
    blocks = granularity.block_shape(amax.shape)
    axes = block_axes(amax.shape, blocks)
    view = blocked(amax, blocks)
    whole = (view.amax(axes) if axes else view).reshape(granularity.group_shape(amax.shape))
    shared = divide(whole, torch.full_like(whole, fmt.quant_max * bound)).clamp(min=finfo.tiny)
    shared = blocked_groups(shared, amax.shape, blocks)
    code = fmt.clamp(divide(view, bound * shared))
    # Float formats divide by powers of two to round, which an approximate division need not do exactly either.
    code = fmt.round(code.double()).to(code.dtype) if is_approximate(code) else fmt.round(code)
    scale = torch.where(code > 0, code, fmt.smallest) * shared
    return unblocked(scale, amax.shape, blocks).clamp(min=finfo.tiny)
