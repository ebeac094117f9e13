"""What the right result is, found without the package: codes by decoding bit patterns, rounding by fractions.

Everything works on numpy arrays. A format is a table of its values in the order of its codes; a number goes to the
nearest entry, and from the middle between two to the one whose code is even. The middles are computed as fractions
and are exact in float64, and so is every float32 that is compared with them: no step here can round.
"""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_right
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
    """A binary float by its layout."""

    exponent_bits: int
    mantissa_bits: int
    finite_codes: int  # with sign 0
    bias: int | None = None
    one_zero: bool = False  # and NaN as the code of -0

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    def decode(self, code: int) -> Fraction:
        """The number of a code with sign 0, as if every code were a finite number."""
        bias = 2 ** (self.exponent_bits - 1) - 1 if self.bias is None else self.bias
        exponent, mantissa = divmod(code, 2**self.mantissa_bits)
        if exponent == 0:
            return Fraction(mantissa, 2**self.mantissa_bits) * Fraction(2) ** (1 - bias)
        return (1 + Fraction(mantissa, 2**self.mantissa_bits)) * Fraction(2) ** (exponent - bias)

    def value(self, code: int) -> float:
        """The number of any code, with its sign; NaN or inf where the code is not finite."""
        sign, magnitude = divmod(code, 2 ** (self.exponent_bits + self.mantissa_bits))
        if sign and not magnitude and self.one_zero:
            return float("nan")
        if magnitude < self.finite_codes:
            number = float(self.decode(magnitude))
        else:
            ieee_inf = magnitude == self.finite_codes and magnitude % 2**self.mantissa_bits == 0
            number = float("inf") if ieee_inf else float("nan")
        return -number if sign else number


FLOAT16 = SmallFloat(5, 10, finite_codes=0x7C00)
BFLOAT16 = SmallFloat(8, 7, finite_codes=0x7F80)


def small_float(name: str) -> SmallFloat | None:
    """The float of at most 8 bits that has a name as in ml_dtypes, such as float8_e4m3fn; None of another name.

    `fn` has no infinity, and NaN in the last code of 8 bits only; `uz` has one zero, with NaN in place of the other,
    and a bias larger by one; without them it is as IEEE 754 has it.
    """
    match = re.fullmatch(r"float([4-8])_e(\d)m(\d)(?:b(\d+))?(?:(fn)(uz)?)?", name)
    if match is None:
        return None
    bits, exponent_bits, mantissa_bits = (int(digits) for digits in match.groups()[:3])
    if bits != 1 + exponent_bits + mantissa_bits:
        return None
    codes = 2 ** (bits - 1)
    if match[6]:
        bias = int(match[4]) if match[4] else 2 ** (exponent_bits - 1)
        return SmallFloat(exponent_bits, mantissa_bits, codes, bias, one_zero=True)
    not_finite = 2**mantissa_bits if not match[5] else int(bits == 8)
    return SmallFloat(exponent_bits, mantissa_bits, codes - not_finite, int(match[4]) if match[4] else None)


@dataclass(frozen=True)
class Integers:
    """The integers from low to high."""

    low: int
    high: int


@dataclass(frozen=True)
class Values:
    """Any numbers, rising; the code of each is its position."""

    numbers: tuple[float, ...]


OracleFormat = SmallFloat | Integers | Values

# QLoRA, arXiv 2305.14314, appendix E.
NF4 = Values(
    (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    )
)


@dataclass(frozen=True)
class Table:
    """Values in rising order, the middles between neighbours, and which codes are even.

    For a float format the first and the last entry lie beyond it: what rounds to them is out of range.
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
def table(fmt: SmallFloat | Values) -> Table:
    """The table of the magnitudes of a float format, or of a list of values."""
    if isinstance(fmt, Values):
        first = 0
        numbers = [Fraction(number) for number in fmt.numbers]
    else:
        first = -1  # a number below zero, which no magnitude reaches
        numbers = [Fraction(-1), *(fmt.decode(code) for code in range(fmt.finite_codes + 1))]
    middles = [(low + high) / 2 for low, high in itertools.pairwise(numbers)]
    middle_floats = np.array([float(m) for m in middles])
    assert [Fraction(m) for m in middle_floats] == middles, "a middle is not exact in float64"
    codes = np.arange(first, first + len(numbers))
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
        if fmt.one_zero:
            decoded = np.where(decoded == 0, 0.0, decoded)
    elif isinstance(fmt, Values):
        entries = table(fmt)
        inside = (v >= fmt.numbers[0]) & (v <= fmt.numbers[-1])
        decoded = entries.values[entries.nearest(v)]
    else:
        nearest = round_integer(v)
        inside = (nearest + zero_point >= fmt.low) & (nearest + zero_point <= fmt.high)
        decoded = np.clip(nearest, fmt.low - zero_point, fmt.high - zero_point)
    return np.where(np.isnan(v), np.nan, decoded), inside & ~np.isnan(v)


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """The four words of Philox-4x32-10, as section 3.3 of its paper (SC 2011) and Random123 have it."""
    a, b, c, d = counter
    first, second = key
    for _ in range(10):
        left, right = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (right >> 32) ^ b ^ first, right % 2**32, (left >> 32) ^ d ^ second, left % 2**32
        first, second = (first + 0x9E3779B9) % 2**32, (second + 0xBB67AE85) % 2**32
    return [a, b, c, d]


def random_words(seed: int, shape: Sequence[int]) -> Array:
    """The word of every element, counted in row-major order, four for every counter."""
    key = seed % 2**32, (seed >> 32) % 2**32
    words = [word for i in range(-(-math.prod(shape) // 4)) for word in philox((i % 2**32, i >> 32, 0, 0), key)]
    return np.array(words[: math.prod(shape)], np.int64).reshape(shape)


@cache
def _magnitudes(fmt: SmallFloat) -> list[Fraction]:
    """The magnitudes of a float format and the first beyond it."""
    return [fmt.decode(code) for code in range(fmt.finite_codes + 1)]


def _drawn(v: float, fmt: OracleFormat, word: int) -> Fraction:
    """The neighbour of a number that a word chooses; beyond the format anything that is."""
    if isinstance(fmt, Integers):
        exact = Fraction(min(abs(v), 2.0**40))
        low, high = Fraction(math.floor(exact)), Fraction(math.floor(exact) + 1)
    else:
        known = [Fraction(n) for n in fmt.numbers] if isinstance(fmt, Values) else _magnitudes(fmt)
        limited = v if isinstance(fmt, Values) else abs(v)
        if not known[0] <= limited < known[-1]:
            return known[-1] if limited > 0 else known[0]
        exact = Fraction(limited)
        at = bisect_right(known, exact)
        low, high = known[at - 1], known[at]
    chosen = high if word >> 1 < round((exact - low) / (high - low) * 2**31) else low
    return chosen if isinstance(fmt, Values) else chosen * int(math.copysign(1, v))


def encode_stochastically(v: Array, fmt: OracleFormat, zero_point: Array, words: Array) -> tuple[Array, Array]:
    """As `encode`, to the neighbour that each word chooses."""
    decoded, inside = np.full(v.shape, np.nan), np.zeros(v.shape, bool)
    for at in np.ndindex(v.shape):
        number = float(v[at])
        if math.isnan(number):
            continue
        drawn, offset = _drawn(number, fmt, int(words[at])), int(zero_point[at])
        if isinstance(fmt, Integers):
            low, high = Fraction(fmt.low - offset), Fraction(fmt.high - offset)
        elif isinstance(fmt, Values):
            low, high = Fraction(fmt.numbers[0]), Fraction(fmt.numbers[-1])
        else:
            low, high = -_magnitudes(fmt)[-2], _magnitudes(fmt)[-2]
        # Values have no codes beyond the ends, and a number there is out of range itself.
        inside[at] = low <= drawn <= high and (not isinstance(fmt, Values) or low <= number <= high)
        decoded[at] = float(min(max(drawn, low), high))
        if isinstance(fmt, SmallFloat) and not (fmt.one_zero and decoded[at] == 0):
            decoded[at] = math.copysign(decoded[at], number)
    return decoded, inside


def decode_pattern(pattern: Array, fmt: OracleFormat) -> Array:
    """The float64 numbers of stored codes: bit patterns of floats, positions of values, integers themselves."""
    if isinstance(fmt, Integers):
        return pattern.astype(np.float64)
    if isinstance(fmt, Values):
        return np.array(fmt.numbers)[pattern]
    return _every_value(fmt)[pattern]


@cache
def _every_value(fmt: SmallFloat) -> Array:
    return np.array([fmt.value(code) for code in range(2**fmt.bits)])


@cache
def stored_nan(fmt: OracleFormat) -> float:
    """What NaN is stored as: itself where a code is NaN, otherwise the lowest value."""
    if isinstance(fmt, Integers):
        return float(fmt.low)
    if isinstance(fmt, Values):
        return fmt.numbers[0]
    return float("nan") if np.isnan(_every_value(fmt)).any() else -float(fmt.decode(fmt.finite_codes - 1))


def round_to(v: Array, fmt: SmallFloat) -> Array:
    """float32 to the values of float16 or bfloat16 (as float32), half to even, overflow to inf."""
    v = _widen(v)
    entries = table(fmt)
    index = entries.nearest(np.abs(v))
    magnitude = np.where(index == len(entries.values) - 1, np.inf, entries.values[index])
    return np.where(np.isnan(v), np.nan, np.copysign(magnitude, v)).astype(np.float32)


@dataclass(frozen=True)
class Result:
    """Each element's value in the compute dtype, its code, and whether the code was in range."""

    value: Array
    code: Array
    inside: Array


def fake_quantize(
    x: Array, scale: Array, zero_point: Array | None, fmt: OracleFormat, arithmetic: str, words: Array | None = None
) -> Result:
    """x, scale and zero_point element by element, in float32 or float64."""
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
        rounded = encode(v, fmt, offset) if words is None else encode_stochastically(_widen(v), fmt, offset, words)
        decoded, inside = rounded
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
    """Per-group values [groups per axis] repeated over their blocks: one per element."""
    for axis, size in enumerate(blocks):
        groups = np.repeat(groups, size, axis)
    return groups
