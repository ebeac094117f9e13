"""Formats: integers, tables, small binary floats and powers of two.

Sources: ONNX QuantizeLinear (integers), arXiv 2209.05433 and OCP OFP8 1.0 (8 bits), OCP Microscaling 1.0 (4 and 6),
arXiv 2206.02915 (fnuz).
"""

from __future__ import annotations

import itertools
import math
import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fakequant.errors import QParamsError, ShapeError, SpecError
from fakequant.numerics.division import divide

# Formats keep their floats as text: torch.compile may take a float attribute for one that varies (with dynamic=True, or
# where it compiled the same code for another format before), and fails where a second autograd function reads it.


def _text(numbers: Iterable[float]) -> str:
    return " ".join(repr(float(number)) for number in numbers)


def _numbers(text: str) -> tuple[float, ...]:
    return tuple([float(word) for word in text.split()])


@dataclass(frozen=True)
class Table:
    """The values of a table format in rising order, and the middles between neighbouring values, exact in float64.

    Both fields are texts of numbers, which `values` and `middles` return as tuples.
    """

    rising: str
    between: str

    @property
    def values(self) -> tuple[float, ...]:
        """The values in rising order."""
        return _numbers(self.rising)

    @property
    def middles(self) -> tuple[float, ...]:
        """The middles between neighbouring values."""
        return _numbers(self.between)


class Neighbours(NamedTuple):
    """The two values of a format on both sides of each number, as if the format had no bounds.

    `share` is |v - near| / |far - near| for a number v, from 0 to 1, and exact if the dtype can hold the quotient. If v
    is a value of the format or has no neighbours, `share` is 0 or NaN.
    """

    near: Tensor
    far: Tensor
    share: Tensor


@dataclass(frozen=True)
class Grid:
    """The data of a format for kernels: its bounds and the spacing of its values.

    `mantissa_bits` is None for the integers (spacing 1 everywhere); otherwise the spacing at 2**e is
    2**(max(e, min_exponent) - mantissa_bits). A format with other values has a `table`.
    """

    ends: str
    mantissa_bits: int | None = None
    min_exponent: int = 0
    negative_zero: bool = False
    table: Table | None = None

    @property
    def quant_min(self) -> float:
        """The lowest code."""
        return float(self.ends.split()[0])

    @property
    def quant_max(self) -> float:
        """The highest code."""
        return float(self.ends.split()[1])


class Format(ABC):
    """Base of formats: a set of codes, and how numbers are rounded to these codes."""

    has_zero_point: ClassVar[bool] = False
    """Whether codes can be shifted, so that 0.0 has a code other than 0."""

    grid: Grid
    """The bounds and the spacing, for the kernels; it is made once, with the format."""

    def __deepcopy__(self, memo: dict[int, object]) -> Format:
        """The format itself: it does not change, and compilers know a registered format by its identity."""
        return self

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the format, which `parse_format` reads."""

    @property
    @abstractmethod
    def bits(self) -> int:
        """Bits of one code."""

    @property
    @abstractmethod
    def storage(self) -> torch.dtype:
        """The torch dtype that holds codes."""

    @abstractmethod
    def round(self, v: Tensor) -> Tensor:
        """The nearest code, ties to even, as if the format had no bounds."""

    @abstractmethod
    def neighbours(self, v: Tensor) -> Neighbours:
        """The codes on both sides of v, as if the format had no bounds."""

    def round_stochastically(self, v: Tensor, words: Tensor) -> Tensor:
        """One of the two neighbours of v, at random, the nearer more often; as if the format had no bounds.

        The probabilities are multiples of 2**-31, off by at most 2**-32; the expected code is as close to v.

        Args:
            words: a uniform 32-bit word for every element.

        Source: Gupta et al., Deep Learning with Limited Numerical Precision, arXiv 1502.02551, section 3.1.
        """
        near, far, share = self.neighbours(v)
        reached_by = (share.nan_to_num(0.0) * 2.0**31).round().to(torch.int64)
        return torch.where(torch.bitwise_right_shift(words, 1) < reached_by, far, near)

    @abstractmethod
    def to_storage(self, code: Tensor) -> Tensor:
        """Clamped codes in the storage dtype. NaN becomes the format's NaN, or its lowest code if it has none."""

    @abstractmethod
    def from_storage(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """The codes that `to_storage` stored, in a floating dtype."""

    @property
    @abstractmethod
    def fraction_bits(self) -> int:
        """How many binary digits follow the leading 1 of every normal code; for integers, of the largest code."""

    @property
    def quant_min(self) -> float:
        """The lowest code."""
        return self.grid.quant_min

    @property
    def quant_max(self) -> float:
        """The highest code."""
        return self.grid.quant_max

    @property
    def smallest(self) -> float:
        """The smallest positive code; a scale that would round to 0 becomes this code."""
        grid = self.grid
        if grid.table is not None:
            return min(value for value in grid.table.values if value > 0)
        return 1.0 if grid.mantissa_bits is None else 2.0 ** (grid.min_exponent - grid.mantissa_bits)

    @property
    def has_zero(self) -> bool:
        """Whether 0.0 has a code."""
        return self.quant_min <= 0 if self.grid.table is None else 0.0 in self.grid.table.values

    @property
    def signed(self) -> bool:
        """Whether there are negative codes."""
        return self.quant_min < 0

    @property
    def bound(self) -> float:
        """The code that `amax` is mapped to: quant_max, or -quant_min if there is no positive code (int1)."""
        return self.quant_max or -self.quant_min

    @property
    def second(self) -> float:
        """The code below the highest."""
        grid = self.grid
        if grid.table is not None:
            return grid.table.values[-2]
        if grid.mantissa_bits is None:
            return grid.quant_max - 1
        mantissa, exponent = math.frexp(grid.quant_max)
        below = exponent - 1 - int(mantissa == 0.5)
        return grid.quant_max - 2.0 ** (max(below, grid.min_exponent) - grid.mantissa_bits)

    @property
    def farthest(self) -> float:
        """The code that is farthest from 0; the positive code of two that are equally far."""
        return self.quant_min if -self.quant_min > self.quant_max else self.quant_max

    def clamp(self, code: Tensor) -> Tensor:
        """Saturate codes to the format's bounds; NaN and -0.0 stay (torch.clamp may turn -0.0 into a bound of +0.0)."""
        code = torch.where(code < self.quant_min, self.quant_min, code)
        return torch.where(code > self.quant_max, self.quant_max, code)

    def __str__(self) -> str:
        return self.name


_INTEGER_STORAGE = (torch.uint8, torch.int8, torch.uint16, torch.int16, torch.int32)
_INTEGER_NAME = re.compile(r"(u?)int(\d+)(_narrow)?")
_INTEGER_RANGE = re.compile(r"int\[(-?\d+),(-?\d+)\]")
MAX_NAMED_BITS = 16
# float32 is exact up to 2**24.
_MAX_BITS = 24


@dataclass(frozen=True)
class IntegerFormat(Format):
    """The integers from quant_min to quant_max.

    Common ranges have names: `int8`, `uint4`, `int8_narrow` (-127 to 127). Any other range that contains 0 prints and
    parses as `int[-100,37]`.

    Raises:
        SpecError: the range does not contain 0, contains only 0, or exceeds 24 bits (float32 is exact to 2**24).

    >>> INT8.quant_min, INT8.quant_max, INT8.bits
    (-128, 127, 8)
    >>> print(IntegerFormat(-127, 127), IntegerFormat(0, 100))
    int8_narrow int[0,100]
    """

    low: int
    high: int
    has_zero_point: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "grid", Grid(_text([self.low, self.high])))
        if not (self.low <= 0 <= self.high and self.low < self.high):
            raise SpecError(
                f"IntegerFormat({self.low}, {self.high}): the range must contain 0 and one other code, "
                "because 0.0 has to keep an exact code"
            )
        if self.bits > _MAX_BITS:
            raise SpecError(
                f"IntegerFormat({self.low}, {self.high}) needs {self.bits} bits; codes are computed in float32, "
                f"which is exact up to {_MAX_BITS} bits"
            )

    @classmethod
    def of(cls, bits: int, *, signed: bool = True, narrow: bool = False) -> IntegerFormat:
        """The full range of two's complement or unsigned integers; `narrow` drops the lowest code.

        Raises SpecError for a format without bits, or with more than 24.

        >>> IntegerFormat.of(4), IntegerFormat.of(4, signed=False)
        (IntegerFormat(low=-8, high=7), IntegerFormat(low=0, high=15))
        """
        if bits < 1:
            raise SpecError(f"IntegerFormat.of({bits}): an integer format has at least 1 bit")
        low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
        return cls(low + int(narrow), high)

    # Attributes: calls under an engine's arithmetic ask for them each time.
    @property
    def quant_min(self) -> int:
        return self.low

    @property
    def quant_max(self) -> int:
        return self.high

    @property
    def bits(self) -> int:
        if self.low == 0:
            return self.high.bit_length()
        return max((-self.low - 1).bit_length(), self.high.bit_length()) + 1

    @property
    def name(self) -> str:
        prefix = "int" if self.low < 0 else "uint"
        full = IntegerFormat.of(self.bits, signed=self.low < 0)
        if self == full:
            return f"{prefix}{self.bits}"
        if (self.low, self.high) == (full.low + 1, full.high):
            return f"{prefix}{self.bits}_narrow"
        return f"int[{self.low},{self.high}]"

    @property
    def storage(self) -> torch.dtype:
        for dtype in _INTEGER_STORAGE:
            limits = torch.iinfo(dtype)
            if limits.min <= self.low and self.high <= limits.max:
                return dtype
        raise AssertionError(f"{self} passed the check for 24 bits, so int32 holds it")

    @property
    def fraction_bits(self) -> int:
        return self.high.bit_length() - 1

    def round(self, v: Tensor) -> Tensor:
        return v.round()

    def neighbours(self, v: Tensor) -> Neighbours:
        magnitude = v.abs()
        near = magnitude.floor()
        return Neighbours(near.copysign(v), (near + 1).copysign(v), magnitude - near)

    def to_storage(self, code: Tensor) -> Tensor:
        return torch.where(code.isnan(), self.low, code).to(self.storage)

    def from_storage(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        return stored.to(dtype)

    @classmethod
    def parse(cls, name: str) -> IntegerFormat | None:
        """The format of an integer name, or None if the name is of another family."""
        if match := _INTEGER_NAME.fullmatch(name):
            unsigned, bits, narrow = match.groups()
            if 1 <= int(bits) <= _MAX_BITS:
                return cls.of(int(bits), signed=not unsigned, narrow=bool(narrow))
        if match := _INTEGER_RANGE.fullmatch(name):
            return cls(int(match[1]), int(match[2]))
        return None


_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class TableFormat(Format):
    """A format whose values stand in a table. A number becomes the nearest value; a middle becomes the even code.

    Args:
        label: the name.
        values: the values by code, rising; 2 to 256, each exact in float32. Without 0.0 among them zeros become the
            nearest value, except in groups of zeros whose scale may be 0, see `ScaleSpec`.

    Raises:
        SpecError: values that do not rise, have all one sign, are inexact, too few or too many.

    >>> TableFormat("ternary", (-1.0, 0.0, 1.0)).round(torch.tensor([0.4, 0.5, 0.6, -0.5]))
    tensor([ 0.,  1.,  1., -1.])
    """

    label: str
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not all(abs(v) <= _LARGEST for v in self.values):
            raise SpecError(f"TableFormat {self.label!r}: values must be finite in float32, got {self.values}")
        rises = all(low < high for low, high in itertools.pairwise(self.values))
        if not (2 <= len(self.values) <= 256 and rises and self.values[0] <= 0.0 <= self.values[-1]):
            raise SpecError(
                f"TableFormat {self.label!r}: needs 2 to 256 rising values from one that is not positive to one that "
                f"is not negative; got {self.values}"
            )
        if inexact := [v for v in self.values if struct.unpack("f", struct.pack("f", v))[0] != v]:
            raise SpecError(f"TableFormat {self.label!r}: {inexact} are not exact in float32; round them first")
        middles = [float((Fraction(low) + Fraction(high)) / 2) for low, high in itertools.pairwise(self.values)]
        grid = Grid(_text([self.values[0], self.values[-1]]), table=Table(_text(self.values), _text(middles)))
        object.__setattr__(self, "grid", grid)

    def __repr__(self) -> str:
        return f"TableFormat({self.label!r}, {len(self.values)} values)"

    @property
    def name(self) -> str:
        return self.label

    @property
    def bits(self) -> int:
        return (len(self.values) - 1).bit_length()

    @property
    def _table(self) -> Table:
        assert self.grid.table is not None, "made with the format"
        return self.grid.table

    @property
    def bound(self) -> float:
        return max(-self.quant_min, self.quant_max)

    @property
    def fraction_bits(self) -> int:
        return self.bits - 2

    @property
    def storage(self) -> torch.dtype:
        return torch.uint8

    def round(self, v: Tensor) -> Tensor:
        """The nearest value of the table; a v beyond its ends, or NaN, is returned as it is."""
        values = torch.tensor(self._table.values, dtype=v.dtype, device=v.device)
        return torch.where(self._beyond(v), v, values[self._codes(v)])

    def neighbours(self, v: Tensor) -> Neighbours:
        """The values below and above v; beyond the ends of the table both are v."""
        values = torch.tensor(self._table.values, dtype=torch.float64, device=v.device)
        exact = v.double()
        code = (torch.bucketize(exact, values, right=True) - 1).clamp(0, len(self.values) - 2)
        below, above = values[code], values[code + 1]
        beyond = self._beyond(v)
        share = torch.where(beyond, 0.0, (exact - below) / (above - below))
        return Neighbours(torch.where(beyond, v, below.to(v.dtype)), torch.where(beyond, v, above.to(v.dtype)), share)

    def _beyond(self, v: Tensor) -> Tensor:
        return (v > self.quant_max) | (v < self.quant_min) | v.isnan()

    def to_storage(self, code: Tensor) -> Tensor:
        return self._codes(code.nan_to_num(self.quant_min)).to(torch.uint8)

    def from_storage(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.tensor(self._table.values, dtype=dtype, device=stored.device)[stored.to(torch.int64)]

    def _codes(self, v: Tensor) -> Tensor:
        # float64 holds every float32 and every middle exactly, so that ties are seen as such.
        middles = torch.tensor(self._table.middles, dtype=torch.float64, device=v.device)
        exact = v.double()
        below, above = torch.bucketize(exact, middles), torch.bucketize(exact, middles, right=True)
        return torch.where(above % 2 == 0, above, below)


_INTEGERS = {1: torch.uint8, 2: torch.int16}
"""Integer types for the codes of floats, by bytes."""


def lowest_of(format: Format) -> int:
    """The number that `patterns_of` subtracts from codes: the lowest code of an integer format, 0 for other formats."""
    is_integer = format.grid.table is None and format.grid.mantissa_bits is None
    return int(format.quant_min) if is_integer else 0


def count_of(format: Format) -> int:
    """The number of codes of a format; for floats the number of bit patterns."""
    if format.grid.table is not None:
        return len(format.grid.table.values)
    return int(format.quant_max - format.quant_min) + 1 if format.grid.mantissa_bits is None else 1 << format.bits


def patterns_of(codes: Tensor, format: Format) -> Tensor:
    """A number from 0 on for each code, int32: a float's bit pattern, a table's index, or an integer - lowest code."""
    # A float of 16 bits has its sign in that of the int16 that stores it: only its bits count.
    whole = as_integers(codes.contiguous()).to(torch.int32) - lowest_of(format)
    return whole & (1 << format.bits) - 1 if format.grid.mantissa_bits is not None else whole


def as_integers(codes: Tensor) -> Tensor:
    """The codes as integers in the same memory; codes in a float dtype would be converted by `model.to(dtype)`."""
    return codes.view(_INTEGERS[codes.element_size()]) if codes.dtype.is_floating_point else codes


def of_integers(codes: Tensor, format: Format) -> Tensor:
    """Undo `as_integers`: the codes in the storage dtype of their format."""
    return codes.view(format.storage) if format.storage.is_floating_point else codes


def integers_of(format: Format) -> torch.dtype:
    """The integer dtype in which `as_integers` returns the codes of a format."""
    return _INTEGERS[format.storage.itemsize] if format.storage.is_floating_point else format.storage


def check_codes(codes: Tensor, shape: tuple[int, ...], format: Format) -> None:
    """Raise ShapeError if codes have another shape than `shape`, QParamsError for a wrong dtype or code."""
    if tuple(codes.shape) != tuple(shape):
        raise ShapeError(f"are of shape {list(codes.shape)}, but the weight of shape {list(shape)}")
    if codes.dtype is not format.storage:
        raise QParamsError(f"are {codes.dtype}, but {format} has {format.storage}")
    # Integers as they are: patterns take eight times their bytes.
    is_plain = format.grid.mantissa_bits is None and codes.dtype in (torch.int8, torch.uint8, torch.int16, torch.int32)
    first = lowest_of(format) if is_plain else 0
    ends = (codes if is_plain else patterns_of(codes, format)).aminmax() if codes.numel() else (first, first)
    lowest, highest, last = *map(int, ends), first + count_of(format) - 1
    if lowest < first or highest > last:
        wrong = lowest if lowest < first else highest
        raise QParamsError(f"hold {wrong}, but the codes of {format} are {first} to {last}")


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
        # The pattern of the largest number: all bits set, less those that are no numbers.
        pattern = (1 << self.bits - 1) - 1
        pattern -= {Specials.IEEE: 1 << self.mantissa_bits, Specials.NAN_ONLY: 1}.get(self.specials, 0)
        field, mantissa = divmod(pattern, 1 << self.mantissa_bits)
        significand = mantissa + (1 << self.mantissa_bits if field else 0)
        largest = significand * 2.0 ** (max(field, 1) - self.exponent_bias - self.mantissa_bits)
        negative_zero = self.specials is not Specials.NEGATIVE_ZERO_IS_NAN
        grid = Grid(_text([-largest, largest]), self.mantissa_bits, 1 - self.exponent_bias, negative_zero)
        object.__setattr__(self, "grid", grid)
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
        """Whether torch's conversions give the codes; to 8 bits they saturate and encode NaN differently."""
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
        """The bit pattern of NaN; in a format without NaN, the pattern of the lowest code."""
        sign = 1 << self.bits - 1
        return {
            Specials.IEEE: sign - 1,
            Specials.NAN_ONLY: sign - 1,
            Specials.NEGATIVE_ZERO_IS_NAN: sign,
            Specials.NONE: 2 * sign - 1,
        }[self.specials]

    def round(self, v: Tensor) -> Tensor:
        spacing = self._spacing(v)
        return self._code(torch.where(v.abs() == math.inf, v, divide(v, spacing).round() * spacing))

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
        object.__setattr__(self, "grid", Grid(_text([1.0 / largest, largest]), 0, -self.exponent_bias))

    @property
    def name(self) -> str:
        return self.label

    @property
    def bits(self) -> int:
        return self.exponent_bits

    @property
    def exponent_bias(self) -> int:
        """The number that is added to an exponent to get its bit pattern; also the largest exponent."""
        return (1 << self.exponent_bits - 1) - 1

    @property
    def storage(self) -> torch.dtype:
        return torch.float8_e8m0fnu

    @property
    def fraction_bits(self) -> int:
        return 0

    def round(self, v: Tensor) -> Tensor:
        """The nearest power of two; a middle, which is 1.5 times a power, becomes the larger power."""
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
    """2**exponent of int64 exponents as normal float64 numbers: the exponent field is written, for exp2 may be inexact.

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
