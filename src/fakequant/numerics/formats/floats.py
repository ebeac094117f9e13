"""Small binary floats.

Sources: arXiv 2209.05433 and OCP OFP8 1.0 (8 bits), OCP Microscaling 1.0 (4 and 6 bits), arXiv 2206.02915 (fnuz).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from fakequant.errors import SpecError
from fakequant.numerics.formats.format import Format, Grid, Neighbours


class Specials(Enum):
    """Which codes of a small float are not finite numbers."""

    IEEE = "the top exponent holds inf and NaN"
    NAN_ONLY = "the code with all bits set is NaN, there is no inf"
    NEGATIVE_ZERO_IS_NAN = "the code of -0 is NaN, there is no inf"
    NONE = "every code is a finite number"


@dataclass(frozen=True)
class FloatFormat(Format):
    """A small binary float with subnormals; `max`, the smallest exponent and the spacing follow from the fields.

    >>> FLOAT8_E4M3FN.quant_max, FLOAT8_E5M2.quant_max
    (448.0, 57344.0)
    >>> FLOAT8_E4M3FN.round(torch.tensor([17.0, 19.0]))
    tensor([16., 20.])
    """

    label: str
    exponent_bits: int
    mantissa_bits: int
    specials: Specials
    bias: int | None = None

    def __post_init__(self) -> None:
        if self.exponent_bits < 1 or self.mantissa_bits < 0 or self.bits > 16:
            raise SpecError(
                f"FloatFormat {self.label!r}: needs at least 1 exponent bit, no negative mantissa and at most 16 bits "
                f"with the sign; got E={self.exponent_bits}, M={self.mantissa_bits}"
            )
        if self.specials is Specials.IEEE and not self.mantissa_bits:
            raise SpecError(
                f"FloatFormat {self.label!r}: IEEE tells NaN from infinity by the mantissa, which has no bits; use "
                "Specials.NAN_ONLY or NONE"
            )
        object.__setattr__(self, "grid", self._grid())
        if not self.quant_max:
            raise SpecError(
                f"FloatFormat {self.label!r} has no number but 0 with E={self.exponent_bits}, M={self.mantissa_bits}, "
                f"{self.specials}; give it more bits"
            )
        if self.quant_max > torch.finfo(torch.float32).max or self.grid.min_exponent < -126:
            raise SpecError(
                f"FloatFormat {self.label!r} reaches from 2**{self.grid.min_exponent} to {self.quant_max:g}, but codes "
                "are computed in float32, whose normal numbers end at 2**-126 and 3.4e38; give it fewer exponent bits"
            )

    @property
    def name(self) -> str:
        return self.label

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def exponent_bias(self) -> int:
        return (1 << self.exponent_bits - 1) - 1 if self.bias is None else self.bias

    def _grid(self) -> Grid:
        # The pattern of the largest number: all bits set, less those that are no numbers.
        pattern = (1 << self.bits - 1) - 1
        pattern -= {Specials.IEEE: 1 << self.mantissa_bits, Specials.NAN_ONLY: 1}.get(self.specials, 0)
        field, mantissa = divmod(pattern, 1 << self.mantissa_bits)
        significand = mantissa + (1 << self.mantissa_bits if field else 0)
        largest = significand * 2.0 ** (max(field, 1) - self.exponent_bias - self.mantissa_bits)
        negative_zero = self.specials is not Specials.NEGATIVE_ZERO_IS_NAN
        return Grid(-largest, largest, self.mantissa_bits, 1 - self.exponent_bias, negative_zero)

    @property
    def storage(self) -> torch.dtype:
        """The dtype that torch has for the format, else uint8 or int16 with the bit pattern."""
        pattern = torch.int16 if self.bits > 8 else torch.uint8
        dtype = getattr(torch, self.label, None)
        return dtype if isinstance(dtype, torch.dtype) and dtype.itemsize == pattern.itemsize else pattern

    @property
    def fraction_bits(self) -> int:
        return self.mantissa_bits

    @property
    def _is_torchs(self) -> bool:
        """Whether torch's own conversions are exact: of 8 bits, they saturate and name NaN in other ways."""
        return self.storage.is_floating_point and self.bits == 16

    def to_storage(self, code: Tensor) -> Tensor:
        if self._is_torchs:
            raw = code.to(self.storage).view(torch.int16)
            return torch.where(code.abs() <= self.quant_max, raw, self.nan_pattern).view(self.storage)
        magnitude = code.abs()
        spacing = self._spacing(magnitude)
        # A binade has 2**mantissa_bits codes: counted in its own spacing a number is its mantissa with the leading one,
        # and every binade above the subnormals adds that many codes again.
        binades = (spacing.log2() - self.grid.min_exponent + self.mantissa_bits).round()
        pattern = (magnitude / spacing) + binades * 2.0**self.mantissa_bits
        sign = torch.signbit(code) & ((code != 0) | self.grid.negative_zero)
        pattern = pattern + sign * 2.0 ** (self.bits - 1)
        stored = torch.where(code.isnan(), float(self.nan_pattern), pattern).to(torch.int32)
        return stored.to(torch.int16 if self.bits > 8 else torch.uint8).view(self.storage)

    def from_storage(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        if self._is_torchs:
            return stored.view(self.storage).to(dtype)
        raw = stored.view(torch.int16 if self.bits > 8 else torch.uint8)
        pattern = raw.to(torch.int64) & ((1 << self.bits) - 1)
        magnitude = pattern & ((1 << self.bits - 1) - 1)
        binade = torch.bitwise_right_shift(magnitude, self.mantissa_bits).clamp(min=1)
        mantissa = magnitude - (binade - 1) * 2**self.mantissa_bits
        # Exponents of formats up to 16 bits are far inside float64's.
        exponent = binade - self.exponent_bias - self.mantissa_bits
        value = mantissa * power_of_two(exponent)
        value = torch.where(value > self.quant_max, torch.nan, value)
        if self.specials is Specials.IEEE:
            top = (1 << self.exponent_bits) - 1
            value = torch.where(magnitude == top << self.mantissa_bits, torch.inf, value)
        value = torch.where(pattern >= 1 << self.bits - 1, -value, value)
        if self.specials is Specials.NEGATIVE_ZERO_IS_NAN:
            value = torch.where(pattern == 1 << self.bits - 1, torch.nan, value)
        return value.to(dtype)

    @property
    def nan_pattern(self) -> int:
        """The bit pattern of NaN; of the lowest code where there is none."""
        sign = 1 << self.bits - 1
        return {
            Specials.IEEE: sign - 1,
            Specials.NAN_ONLY: sign - 1,
            Specials.NEGATIVE_ZERO_IS_NAN: sign,
            Specials.NONE: 2 * sign - 1,
        }[self.specials]

    def round(self, v: Tensor) -> Tensor:
        spacing = self._spacing(v)
        return self._code(torch.where(v.isinf(), v, (v / spacing).round() * spacing))

    def neighbours(self, v: Tensor) -> Neighbours:
        spacing = self._spacing(v)
        steps = (v / spacing).abs()
        near = steps.floor()
        # A step further than the last number of a binade is the first of the next.
        codes = [torch.where(v.isinf(), v, (n * spacing).copysign(v)) for n in (near, near + 1)]
        return Neighbours(self._code(codes[0]), self._code(codes[1]), steps - near)

    def _code(self, value: Tensor) -> Tensor:
        # -0.0 + 0.0 is +0.0, every other value stays.
        return value if self.grid.negative_zero else value + 0.0

    def _spacing(self, v: Tensor) -> Tensor:
        """The distance between the format's numbers around v."""
        return power_of_two_below(v).clamp(min=2.0**self.grid.min_exponent) * 2.0**-self.mantissa_bits


@dataclass(frozen=True)
class ExponentFormat(Format):
    """Powers of two without sign, zero or inf: a format for scales, 2**-127 to 2**127.

    Source: OCP Microscaling 1.0, E8M0.
    """

    label: str
    exponent_bits: int = 8

    def __post_init__(self) -> None:
        largest = 2.0**self.exponent_bias
        object.__setattr__(self, "grid", Grid(1.0 / largest, largest, 0, -self.exponent_bias))

    @property
    def name(self) -> str:
        return self.label

    @property
    def bits(self) -> int:
        return self.exponent_bits

    @property
    def exponent_bias(self) -> int:
        """What is added to an exponent to get its code; also the largest exponent."""
        return (1 << self.exponent_bits - 1) - 1

    @property
    def storage(self) -> torch.dtype:
        return torch.float8_e8m0fnu

    @property
    def fraction_bits(self) -> int:
        return 0

    def round(self, v: Tensor) -> Tensor:
        """The nearest power of two; from the middle of two, 1.5 times the lower, the upper."""
        below = power_of_two_below(v)
        return torch.where(v < below * 1.5, below, below * 2.0)

    def neighbours(self, v: Tensor) -> Neighbours:
        below = power_of_two_below(v)
        return Neighbours(below, below * 2.0, v / below - 1.0)

    def to_storage(self, code: Tensor) -> Tensor:
        return code.to(self.storage)

    def from_storage(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        return stored.to(dtype)


def power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent of int64 exponents, normal float64 numbers: the exponent field is written, for exp2 may be inexact.

    >>> power_of_two(torch.tensor([-1, 10]))
    tensor([5.0000e-01, 1.0240e+03], dtype=torch.float64)
    """
    # Not by `<<`: in torch 2.13 `<<` and `>>` of a DTensor do nothing. Code that takes any tensor multiplies, or calls
    # torch.bitwise_right_shift, which is right.
    return ((exponent + 1023) * 2**52).view(torch.float64)


def power_of_two_below(v: Tensor) -> Tensor:
    """2**floor(log2(|v|)), exactly: the mantissa bits are cleared (0 for subnormals, inf for inf and NaN)."""
    if v.dtype == torch.float64:
        return (v.view(torch.int64) & 0x7FF0000000000000).view(torch.float64)
    return (v.view(torch.int32) & 0x7F800000).view(torch.float32)
