"""What a number format is: a set of codes and the rounding to it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor


class Table(NamedTuple):
    """The values of a table format in rising order, and the middles between them, exact in float64."""

    values: tuple[float, ...]
    middles: tuple[float, ...]


class Neighbours(NamedTuple):
    """The two values of a format on both sides of each number, as if the format had no bounds.

    `share` is the distance of a number from `near` divided by that of `far` from `near`, 0 to 1. It is exact if the
    dtype has that number; it is 0 or NaN if the number is a value itself or has no neighbours.
    """

    near: Tensor
    far: Tensor
    share: Tensor


@dataclass(frozen=True)
class Grid:
    """What a kernel needs to know about a format: its bounds and the spacing of its values.

    `mantissa_bits` is None for the integers (spacing 1 everywhere); otherwise the spacing at 2**e is
    2**(max(e, min_exponent) - mantissa_bits). `table` is given if no such rule holds.
    """

    quant_min: float
    quant_max: float
    mantissa_bits: int | None = None
    min_exponent: int = 0
    negative_zero: bool = False
    table: Table | None = None


class Format(ABC):
    """A set of codes and the rounding to it."""

    has_zero_point: ClassVar[bool] = False
    """Whether codes can be shifted, so that 0.0 has a code other than 0."""

    grid: Grid
    """Bounds and spacing, for the kernels; made once, with the format."""

    def __deepcopy__(self, memo: dict[int, object]) -> Format:
        """Itself: it does not change, and compilers know a registered format by its identity."""
        return self

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
    def storage(self) -> torch.dtype:
        """The torch dtype that holds codes."""

    @abstractmethod
    def round(self, v: Tensor) -> Tensor:
        """The nearest code, ties to even, as if the format had no bounds."""

    @abstractmethod
    def neighbours(self, v: Tensor) -> Neighbours:
        """The codes on both sides of v, as if the format had no bounds."""

    def round_stochastically(self, v: Tensor, words: Tensor) -> Tensor:
        """One of the two neighbours of v, each with the probability of its nearness, as if the format had no bounds.

        The probabilities are multiples of 2**-31, within 2**-32 of the exact ones; the expected code is as close to v.

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
        """The binary digits after the leading one of every normal code; for integers, of the largest code."""

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
        """The code that is farthest from 0; of two the positive one."""
        return self.quant_min if -self.quant_min > self.quant_max else self.quant_max

    def clamp(self, code: Tensor) -> Tensor:
        """Saturate codes to the format's bounds; NaN and -0.0 stay (torch.clamp may turn -0.0 into a bound of +0.0)."""
        code = torch.where(code < self.quant_min, self.quant_min, code)
        return torch.where(code > self.quant_max, self.quant_max, code)

    def __str__(self) -> str:
        return self.name
