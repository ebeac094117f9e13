"""The cost of observing a batch, compared with a copy of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.harness import COPY, CannotRunError, Prepared
from fakequant.numerics.reference import Bins, Observed, observe_by_definition
from fakequant.ops.library import observe
from tests.support.exactness import differing

_BINS = 4096
# Normal numbers, of which none lies beyond 8, fill the bins.
_INVERSE = _BINS / 8


@dataclass(frozen=True)
class Observation:
    """The range and the counts of magnitudes of each channel, of numbers of which half are zeros.

    Args:
        elements: of the batch.
        channels: groups; 1 is per tensor.
        dtype: of the batch.
        device: where it is.
    """

    elements: int
    channels: int
    dtype: torch.dtype
    device: str
    direction: str = "calibration"

    @property
    def name(self) -> str:
        return "range and histogram of a batch"

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def text(self) -> str:
        return "int8 per_tensor" if self.channels == 1 else f"int8 per_channel(0), {self.channels} channels"

    def differing(self) -> int:
        """Ends of ranges and counts that differ from those of the definition on the same device."""
        values, bins = self._values(), self._bins()
        found, right = (_tensors(each(values, bins)) for each in (observe, observe_by_definition))
        return sum(differing(one, other) for one, other in zip(found, right, strict=True))

    def prepare(self, against: str) -> Prepared:
        if against != COPY:
            raise CannotRunError(f"{against} has no histogram")
        bins = self._bins()
        return Prepared(lambda x: observe(x, bins), torch.clone, [self._values() for _ in range(2)])

    def _values(self) -> Tensor:
        random = torch.Generator(self.device).manual_seed(0)
        x = torch.randn(self.channels, self.elements // self.channels, generator=random, device=self.device)
        return x.relu_().to(self.dtype)

    def _bins(self) -> Bins:
        return Bins(torch.full((self.channels,), _INVERSE, dtype=torch.float64, device=self.device), _BINS)


def _tensors(observed: Observed) -> tuple[Tensor, ...]:
    assert observed.counts is not None
    return *observed.range, observed.counts
