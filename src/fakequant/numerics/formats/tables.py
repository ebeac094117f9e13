"""Formats whose values are a table."""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from fakequant.errors import SpecError
from fakequant.numerics.formats.format import Format, Grid, Neighbours, Table

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class TableFormat(Format):
    """Codes for the values of a table; a number goes to the nearest value, from a middle to the even code.

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
        middles = tuple(float((Fraction(low) + Fraction(high)) / 2) for low, high in itertools.pairwise(self.values))
        object.__setattr__(self, "grid", Grid(self.values[0], self.values[-1], table=Table(self.values, middles)))

    def __repr__(self) -> str:
        return f"TableFormat({self.label!r}, {len(self.values)} values)"

    @property
    def name(self) -> str:
        return self.label

    @property
    def bits(self) -> int:
        return (len(self.values) - 1).bit_length()

    @property
    def bound(self) -> float:
        return max(-self.values[0], self.values[-1])

    @property
    def fraction_bits(self) -> int:
        return self.bits - 2

    @property
    def storage(self) -> torch.dtype:
        return torch.uint8

    def round(self, v: Tensor) -> Tensor:
        """The nearest value; beyond the ends there is none, and v itself is returned, out of range."""
        values = torch.tensor(self.values, dtype=v.dtype, device=v.device)
        return torch.where(self._beyond(v), v, values[self._codes(v)])

    def neighbours(self, v: Tensor) -> Neighbours:
        """The values below and above; beyond the ends there are none, and v itself is both."""
        values = torch.tensor(self.values, dtype=torch.float64, device=v.device)
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
        return torch.tensor(self.values, dtype=dtype, device=stored.device)[stored.to(torch.int64)]

    def _codes(self, v: Tensor) -> Tensor:
        # float64 holds every float32 and every middle exactly, so that ties are seen as such.
        table = self.grid.table
        assert table is not None
        middles = torch.tensor(table.middles, dtype=torch.float64, device=v.device)
        exact = v.double()
        below, above = torch.bucketize(exact, middles), torch.bucketize(exact, middles, right=True)
        return torch.where(above % 2 == 0, above, below)
