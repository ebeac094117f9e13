"""Integer formats.

Source: ONNX QuantizeLinear.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fakequant.errors import SpecError
from fakequant.numerics.formats.format import Format, Grid, Neighbours

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
        object.__setattr__(self, "grid", Grid(self.low, self.high))
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
