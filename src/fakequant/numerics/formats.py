"""Number formats: what codes exist and how a real number is rounded to one.

A format is a value. Names are those of ml_dtypes; every bound is derived from the fields.
Sources: ONNX QuantizeLinear (integers); arXiv 2209.05433 and OCP OFP8 1.0 (8-bit floats).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch
from torch import Tensor

from fakequant.errors import SpecError, nearest


@dataclass(frozen=True)
class Grid:
    """What a kernel must know of a format: bounds, and the spacing of its values.

    `mantissa_bits` is None for the integers (spacing 1 everywhere); otherwise the spacing at 2**e is
    2**(max(e, min_exponent) - mantissa_bits).
    """

    quant_min: float
    quant_max: float
    mantissa_bits: int | None = None
    min_exponent: int = 0


class Format(ABC):
    """A set of codes and the rounding to it."""

    has_zero_point: ClassVar[bool] = False

    @property
    @abstractmethod
    def name(self) -> str:
        """The name that `parse_format` reads back."""

    @property
    @abstractmethod
    def bits(self) -> int:
        """Bits of one code."""

    @property
    @abstractmethod
    def grid(self) -> Grid:
        """Bounds and spacing, for the kernels."""

    @property
    @abstractmethod
    def storage(self) -> torch.dtype:
        """The torch dtype that holds codes."""

    @abstractmethod
    def round(self, v: Tensor) -> Tensor:
        """The nearest code, ties to even, as if the format had no bounds."""

    @property
    def quant_min(self) -> float:
        """The lowest code."""
        return self.grid.quant_min

    @property
    def quant_max(self) -> float:
        """The highest code."""
        return self.grid.quant_max

    @property
    def signed(self) -> bool:
        """Whether there are negative codes."""
        return self.quant_min < 0

    @property
    def bound(self) -> float:
        """The code that `amax` is mapped to: quant_max, or -quant_min where that is all there is (int1)."""
        return self.quant_max or -self.quant_min

    def clamp(self, code: Tensor) -> Tensor:
        """Saturate codes to the format's bounds; NaN stays NaN."""
        return code.clamp(self.quant_min, self.quant_max)

    def __str__(self) -> str:
        return self.name


_INTEGER_STORAGE = (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32)
_INTEGER_NAME = re.compile(r"(u?)int(\d+)(_narrow)?")
_INTEGER_RANGE = re.compile(r"int\[(-?\d+),(-?\d+)\]")
_MAX_INTEGER_BITS = 16


@dataclass(frozen=True)
class IntegerFormat(Format):
    """All integers from quant_min to quant_max.

    `int8`, `uint4`, `int8_narrow` (-127 to 127) are names of common ranges; any other range that contains 0 prints
    and parses as `int[-100,37]`.

    Raises:
        SpecError: the range does not contain 0, holds nothing else, or exceeds 24 bits (float32 is exact to 2**24).

    >>> INT8.quant_min, INT8.quant_max, INT8.bits
    (-128, 127, 8)
    >>> print(IntegerFormat(-127, 127), IntegerFormat(0, 100))
    int8_narrow int[0,100]
    """

    low: int
    high: int
    has_zero_point: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (self.low <= 0 <= self.high and self.low < self.high):
            raise SpecError(
                f"IntegerFormat({self.low}, {self.high}): the range must contain 0 and one other code, "
                "because 0.0 has to keep an exact code"
            )
        if self.bits > 24:
            raise SpecError(
                f"IntegerFormat({self.low}, {self.high}) needs {self.bits} bits; codes are computed in float32, "
                "which is exact up to 24 bits"
            )

    @classmethod
    def of(cls, bits: int, *, signed: bool = True, narrow: bool = False) -> IntegerFormat:
        """The full range of two's complement or unsigned integers; `narrow` drops the lowest code.

        >>> IntegerFormat.of(4), IntegerFormat.of(4, signed=False)
        (IntegerFormat(low=-8, high=7), IntegerFormat(low=0, high=15))
        """
        if bits < 1:
            raise SpecError(f"IntegerFormat.of({bits}): an integer format has at least 1 bit")
        low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
        return cls(low + int(narrow), high)

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
    def grid(self) -> Grid:
        return Grid(self.low, self.high)

    @property
    def storage(self) -> torch.dtype:
        for dtype in _INTEGER_STORAGE:
            limits = torch.iinfo(dtype)
            if limits.min <= self.low and self.high <= limits.max:
                return dtype
        raise AssertionError(f"{self} passed the check for 24 bits, so int32 holds it")

    def round(self, v: Tensor) -> Tensor:
        return v.round()

    @classmethod
    def parse(cls, name: str) -> IntegerFormat | None:
        """The format of an integer name, or None if the name is of another family."""
        if match := _INTEGER_NAME.fullmatch(name):
            unsigned, bits, narrow = match.groups()
            if 1 <= int(bits) <= _MAX_INTEGER_BITS:
                return cls.of(int(bits), signed=not unsigned, narrow=bool(narrow))
        if match := _INTEGER_RANGE.fullmatch(name):
            return cls(int(match[1]), int(match[2]))
        return None


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
    def grid(self) -> Grid:
        top_field = (1 << self.exponent_bits) - 1 - (self.specials is Specials.IEEE)
        top_mantissa = (2 << self.mantissa_bits) - 1 - (self.specials is Specials.NAN_ONLY)
        largest = top_mantissa * 2.0 ** (top_field - self.exponent_bias - self.mantissa_bits)
        return Grid(-largest, largest, self.mantissa_bits, 1 - self.exponent_bias)

    @property
    def storage(self) -> torch.dtype:
        dtype = getattr(torch, self.label, None)
        if not isinstance(dtype, torch.dtype):
            raise SpecError(f"torch has no dtype for the codes of {self.label}; use fake_quantize instead of quantize")
        return dtype

    def round(self, v: Tensor) -> Tensor:
        grid = self.grid
        spacing = _power_of_two_below(v).clamp(min=2.0**grid.min_exponent) * 2.0**-self.mantissa_bits
        return torch.where(v.isinf(), v, (v / spacing).round() * spacing)


def _power_of_two_below(v: Tensor) -> Tensor:
    """2**floor(log2(|v|)), exactly: the mantissa bits are cleared (0 for subnormals, inf for inf and NaN)."""
    if v.dtype == torch.float64:
        return (v.view(torch.int64) & 0x7FF0000000000000).view(torch.float64)
    return (v.view(torch.int32) & 0x7F800000).view(torch.float32)


INT8 = IntegerFormat.of(8)
UINT8 = IntegerFormat.of(8, signed=False)
INT4 = IntegerFormat.of(4)
FLOAT8_E4M3FN = FloatFormat("float8_e4m3fn", 4, 3, Specials.NAN_ONLY)
FLOAT8_E5M2 = FloatFormat("float8_e5m2", 5, 2, Specials.IEEE)

_registry: dict[str, Format] = {
    fmt.name: fmt
    for fmt in (
        *(IntegerFormat.of(bits) for bits in range(1, _MAX_INTEGER_BITS + 1)),
        *(IntegerFormat.of(bits, signed=False) for bits in range(1, _MAX_INTEGER_BITS + 1)),
        FLOAT8_E4M3FN,
        FLOAT8_E5M2,
    )
}


def register_format(fmt: Format) -> Format:
    """Make a format known by its name.

    Raises:
        SpecError: another format already has the name.
    """
    if _registry.get(fmt.name, fmt) != fmt:
        raise SpecError(f"a different format is already registered as {fmt.name!r}")
    _registry[fmt.name] = fmt
    return fmt


def formats() -> dict[str, Format]:
    """All registered formats by name."""
    return dict(_registry)


def parse_format(fmt: str | Format) -> Format:
    """The format of a name; a format is returned as it is.

    Raises:
        SpecError: no format has the name; the nearest names are offered.

    >>> parse_format("uint4")
    IntegerFormat(low=0, high=15)
    """
    if isinstance(fmt, Format):
        return fmt
    found = _registry.get(fmt) or IntegerFormat.parse(fmt)
    if found is None:
        raise SpecError(f"unknown format {fmt!r}{nearest(fmt, list(_registry))}")
    return found
