"""What the right result is, found without the package: codes by decoding bit patterns, rounding by fractions.

Everything works on numpy arrays. A format is a table of its values in the order of its codes; a number goes to the
nearest entry, and from the middle between two to the one whose code is even. The middles are computed as fractions
and are exact in float64, and so is every float32 that is compared with them: no step here can round.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class SmallFloat:
    """A binary float by its layout; `finite_codes` is how many codes with sign 0 are finite numbers."""

    exponent_bits: int
    mantissa_bits: int
    finite_codes: int

    def decode(self, code: int) -> Fraction:
        """The number of a code with sign 0, as if every code were a finite number."""
        bias = 2 ** (self.exponent_bits - 1) - 1
        exponent, mantissa = divmod(code, 2**self.mantissa_bits)
        if exponent == 0:
            return Fraction(mantissa, 2**self.mantissa_bits) * Fraction(2) ** (1 - bias)
        return (1 + Fraction(mantissa, 2**self.mantissa_bits)) * Fraction(2) ** (exponent - bias)

    def value(self, code: int) -> float:
        """The number of any code, with its sign; NaN or inf where the code is not finite."""
        sign, magnitude = divmod(code, 2 ** (self.exponent_bits + self.mantissa_bits))
        if magnitude < self.finite_codes:
            number = float(self.decode(magnitude))
        else:
            ieee_inf = magnitude == self.finite_codes and magnitude % 2**self.mantissa_bits == 0
            number = float("inf") if ieee_inf else float("nan")
        return -number if sign else number


E4M3FN = SmallFloat(4, 3, finite_codes=0x7F)
E5M2 = SmallFloat(5, 2, finite_codes=0x7C)
FLOAT16 = SmallFloat(5, 10, finite_codes=0x7C00)
BFLOAT16 = SmallFloat(8, 7, finite_codes=0x7F80)


@dataclass(frozen=True)
class Integers:
    """The integers from low to high."""

    low: int
    high: int


OracleFormat = SmallFloat | Integers


@dataclass(frozen=True)
class Table:
    """Values in rising order, the middles between neighbours, and which codes are even.

    The first and the last entry lie beyond the format: what rounds to them is out of range.
    """

    values: Array
    middles: Array
    even: Array

    def nearest(self, v: Array) -> Array:
        """The entry that each float64 number rounds to; ties go to the even code. NaN goes to entry 0."""
        below = np.searchsorted(self.middles, v, side="left")
        above = np.searchsorted(self.middles, v, side="right")
        tie = below != above
        entry = np.where(tie & ~self.even[np.minimum(below, len(self.even) - 1)], above, below)
        return np.where(np.isnan(v), 0, entry)


@cache
def table(fmt: SmallFloat) -> Table:
    """The table of the magnitudes of a float format."""
    below_zero = Fraction(-1)  # never reached by a magnitude
    numbers = [below_zero, *(fmt.decode(code) for code in range(fmt.finite_codes + 1))]
    middles = [(low + high) / 2 for low, high in itertools.pairwise(numbers)]
    middle_floats = np.array([float(m) for m in middles])
    assert [Fraction(m) for m in middle_floats] == middles, "a middle is not exact in float64"
    codes = np.arange(-1, fmt.finite_codes + 1)
    return Table(np.array([float(v) for v in numbers]), middle_floats, codes % 2 == 0)


def _widen(v: Array) -> Array:
    """float64 from any float; signalling NaN among the inputs are no error."""
    with np.errstate(invalid="ignore"):
        return v.astype(np.float64)


def round_fraction(v: Fraction, fmt: SmallFloat) -> Fraction:
    """v >= 0 to the nearest number of a float format without bounds, ties to the even code: the plain definition."""
    codes = range(fmt.finite_codes + 1)
    return fmt.decode(min(codes, key=lambda code: (abs(fmt.decode(code) - v), code % 2)))


def round_integer(v: Array) -> Array:
    """float64 to the nearest integer, ties to even; what lies beyond 2**40 is limited to that."""
    limited = np.clip(np.where(np.isnan(v), 0.0, v), -(2.0**40), 2.0**40)
    below = np.floor(limited)
    fraction = limited - below  # exact: below 2**40 a float64 has bits to spare
    up = (fraction > 0.5) | ((fraction == 0.5) & (below % 2 == 1))
    return below + up


def encode(v: Array, fmt: OracleFormat, zero_point: Array) -> tuple[Array, Array]:
    """Numbers in units of codes to (code minus zero point, whether the code before clamping is in range)."""
    v = _widen(v)
    if isinstance(fmt, SmallFloat):
        entries = table(fmt)
        index = entries.nearest(np.abs(v))
        inside = index < len(entries.values) - 1
        decoded = np.copysign(entries.values[np.minimum(index, len(entries.values) - 2)], v)
    else:
        nearest = round_integer(v)
        inside = (nearest + zero_point >= fmt.low) & (nearest + zero_point <= fmt.high)
        decoded = np.clip(nearest, fmt.low - zero_point, fmt.high - zero_point)
    return np.where(np.isnan(v), np.nan, decoded), inside & ~np.isnan(v)


def round_to(v: Array, fmt: SmallFloat) -> Array:
    """float32 to the values of float16 or bfloat16 (as float32), half to even, overflow to inf."""
    v = _widen(v)
    entries = table(fmt)
    index = entries.nearest(np.abs(v))
    magnitude = np.where(index == len(entries.values) - 1, np.inf, entries.values[index])
    return np.where(np.isnan(v), np.nan, np.copysign(magnitude, v)).astype(np.float32)


@dataclass(frozen=True)
class Result:
    """Of every element: its value in the compute dtype, its code, and whether its code was in range."""

    value: Array
    code: Array
    inside: Array


def fake_quantize(x: Array, scale: Array, zero_point: Array | None, fmt: OracleFormat, arithmetic: str) -> Result:
    """x, scale and zero_point element by element, in float32 or float64.

    Args:
        arithmetic: "divide", "reciprocal" or "multiplier".
    """
    dtype = x.dtype
    assert scale.dtype == dtype
    assert dtype in (np.float32, np.float64)
    offset = np.zeros(x.shape, np.int64) if zero_point is None else zero_point.astype(np.int64)
    with np.errstate(all="ignore"):
        if arithmetic == "divide":
            v = x / scale
        elif arithmetic == "reciprocal":
            v = x * (np.ones((), dtype) / scale)
        else:
            v = x * scale
        assert v.dtype == dtype
        decoded, inside = encode(v, fmt, offset)
        if isinstance(fmt, Integers):
            if arithmetic == "multiplier":
                # rint(x * m) / m keeps the sign of a zero that was rounded to; a bound that is 0 has none.
                decoded = np.where((decoded == 0) & inside, np.copysign(0.0, v), decoded)
            code = decoded + offset
        else:
            code = decoded
        number = decoded.astype(dtype)
        value = number / scale if arithmetic == "multiplier" else number * scale
    return Result(value, code, inside)


def spread(groups: Array, blocks: Sequence[int]) -> Array:
    """Per-group values [groups, axes kept] repeated over their blocks: one per element."""
    for axis, size in enumerate(blocks):
        groups = np.repeat(groups, size, axis)
    return groups
