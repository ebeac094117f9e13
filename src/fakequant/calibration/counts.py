"""Counts of magnitudes, which calibrators search and reports plot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fakequant.numerics.formats.floats import power_of_two
from fakequant.numerics.qparams import Range


class Histogram(NamedTuple):
    """The counts of magnitudes of every group."""

    counts: Tensor
    """int64 [groups, 2, bins]: bin k holds k * width <= |x| < (k + 1) * width, of negative x first."""
    exponent: Tensor
    """int32 [groups]: the width of a bin is 2**exponent, in units of x."""
    range: Range
    """The exact range seen, in units of x; lo and hi [groups]."""

    @property
    def bins(self) -> int:
        """Bins on either side of 0.0."""
        return self.counts.shape[2]

    @property
    def width(self) -> Tensor:
        """float64 [groups]: the width of a bin in units of x; 0.0 for a group that has seen zeros only."""
        return power_of_two_or_zero(self.exponent)

    def line(self) -> tuple[Tensor, Tensor]:
        """The bins from the lowest to the highest, as plots want them.

        Returns:
            edges, float64 [groups, 2 * bins + 1] in units of x, and counts [groups, 2 * bins] between them.
        """
        steps = torch.arange(-self.bins, self.bins + 1, dtype=torch.float64, device=self.counts.device)
        return steps * self.width[:, None], torch.cat([self.counts[:, 0].flip(-1), self.counts[:, 1]], dim=1)

    def to(self, device: torch.device | str) -> Histogram:
        """The histogram on a device."""
        lo, hi = self.range
        return Histogram(self.counts.to(device), self.exponent.to(device), Range(lo.to(device), hi.to(device)))

    def split(self, groups: int) -> Iterator[Histogram]:
        """The histogram in parts of at most `groups` groups."""
        for start in range(0, self.counts.shape[0], groups):
            part = slice(start, start + groups)
            yield Histogram(self.counts[part], self.exponent[part], Range(self.range.lo[part], self.range.hi[part]))


def power_of_two_or_zero(exponent: Tensor) -> Tensor:
    """2.0**exponent in float64, exactly; 0.0 if that is no normal number."""
    normal = (exponent >= -1022) & (exponent <= 1023)
    return torch.where(normal, power_of_two(torch.where(normal, exponent, 0).to(torch.int64)), 0.0)
