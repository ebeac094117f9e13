"""Counts of magnitudes with bounded memory, exact whatever the order of the data.

A group counts its negative and its non-negative values apart, in bins of width 2**exponent that start at 0. When a
larger value comes, the width doubles until it fits, and neighbouring bins are added. Because the width is a power of
two, x / width is exact and halving a bin's index is what counting with the doubled width would have given: so the
counts depend on the set of values seen and on nothing else.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from fakequant.errors import CalibrationError, ConfigError
from fakequant.numerics.histogram import Bins
from fakequant.numerics.qparams import Range
from fakequant.numerics.spec import QuantSpec
from fakequant.ops.histogram import observe

from .batches import Batch
from .counts import Histogram, power_of_two_or_zero
from .extrema import ExtremaCalibrator, read_range
from .observer import check_keys

DEFAULT_BINS = 4096
_FEWEST_BINS, _MOST_BINS = 16, 1 << 16
_STATE_BYTES = 64 * 2**20
# Small enough that the allocator hands out the same pages again.
_SEARCH_BYTES = 16 * 2**20

# The exponent of a group that has seen zeros only: below every exponent of a width, so that any value replaces it.
_NO_EXPONENT = -(1 << 14)
# 2**-exponent must be a normal number in the dtype that counts.
_SMALLEST_EXPONENT = {torch.float32: -126, torch.float64: -1022}


class HistogramCalibrator(ExtremaCalibrator):
    """A calibrator that clips at a magnitude; its method finds that magnitude in a histogram.

    Both ends are clipped at one magnitude t: the range is max(lo, -t) to min(hi, t). So values that are never negative
    keep lo = 0 exactly, and a short side is kept whole. Under a symmetric specification with an unsigned format
    negative values become 0 whatever the range is; they count for nothing and lo is 0.

    Args:
        spec: how the tensor will be quantized.
        num_bins: bins on either side of 0.0, a power of two from 16 to 65536. By default 4096, and fewer (not below
            `fewest_bins`) where there are so many groups that the counts would take more than 64 MiB.

    Raises:
        ConfigError: a number of bins that is no power of two, or out of bounds.
    """

    keeps_range_and_counts = True
    fewest_bins: int = 128
    """The lowest default number of bins."""

    def __init__(self, spec: QuantSpec | str, *, num_bins: int | None = None) -> None:
        super().__init__(spec)
        if num_bins is not None and (not _FEWEST_BINS <= num_bins <= _MOST_BINS or num_bins & (num_bins - 1)):
            raise ConfigError(
                f"num_bins must be a power of two from {_FEWEST_BINS} to {_MOST_BINS}, such as {DEFAULT_BINS}; "
                f"got {num_bins}"
            )
        self.num_bins = num_bins
        self._counts = torch.zeros(0, 2, num_bins or DEFAULT_BINS, dtype=torch.int64, device="cpu")
        self._exponent = torch.zeros(0, dtype=torch.int32, device="cpu")
        self._inverse = torch.zeros(0, dtype=torch.float64, device="cpu")

    @abstractmethod
    def find_clip(self, histogram: Histogram) -> Tensor:
        """The number of bins of the magnitude to keep, int64 [groups], for a histogram on the CPU."""

    def search_bytes(self, bins: int) -> int:
        """The memory that `find_clip` needs for one group, in bytes."""
        return 64 * bins

    @torch.inference_mode(False)
    @torch.no_grad()
    def compute_range(self) -> Range:
        """The range seen, clipped at the magnitude that the method finds; see `Calibrator.compute_range`."""
        seen = self.seen
        # Sums of floats round differently on other devices; on the CPU the same counts give the same range.
        histogram = self._histogram().to("cpu")
        # As many groups at a time as the memory allows.
        parts = histogram.split(max(1, _SEARCH_BYTES // self.search_bytes(histogram.bins)))
        kept = torch.cat([self.find_clip(part) for part in parts])
        # (bins kept) * width is exact in float64, and in float32 too where the data was.
        limit = (kept * histogram.width).to(seen.lo.dtype).reshape(seen.lo.shape).to(seen.lo.device)
        lo = torch.zeros_like(seen.lo) if self.ignores_negative else torch.maximum(seen.lo, -limit)
        return Range(lo + 0.0, torch.minimum(seen.hi, limit))

    @property
    def ignores_negative(self) -> bool:
        """Whether negative values become 0 for every range."""
        return self.spec.symmetric and not self.spec.format.signed

    def magnitudes(self, histogram: Histogram) -> Tensor:
        """The counts of each magnitude, int64 [groups, bins], without negative values if they become 0."""
        return histogram.counts[:, 1] if self.ignores_negative else histogram.counts.sum(1)

    def histogram(self) -> Histogram | None:
        """A copy of the counts, or None if nothing was observed; see `Calibrator.histogram`."""
        if not self.observed:
            return None
        counts, exponent, (lo, hi) = self._histogram()
        return Histogram(counts.clone(), exponent.clone(), Range(lo.clone(), hi.clone()))

    def state_dict(self) -> dict[str, Tensor]:
        """What was seen; see `Observer.state_dict`."""
        if not self.observed:
            return {}
        return super().state_dict() | {"counts": self._counts.clone(), "exponent": self._exponent.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Replace what was seen; see `Observer.load_state_dict`."""
        if state:
            check_keys(state, self._state_names())
            seen = read_range(state)
            counts, exponent = state["counts"], state["exponent"]
            groups = seen.lo.numel()
            expected = (groups, 2, self._bins(groups))
            if counts.shape != expected or exponent.shape != (groups,) or counts.dtype != torch.int64:
                raise CalibrationError(
                    f"a calibrator state with {counts.dtype} counts of shape {list(counts.shape)} and exponents of "
                    f"shape {list(exponent.shape)}, expected torch.int64 of shape {list(expected)} and {[groups]}; "
                    "load it into a calibrator with the num_bins of the one that made it"
                )
            if exponent.is_floating_point() or bool((counts < 0).any() | (counts.sum((1, 2)) < 1).any()):
                raise CalibrationError(
                    f"a calibrator state with counts from {counts.min().item()} on, {int(counts.sum())} in all, and "
                    f"{exponent.dtype} exponents; expected counts >= 0, at least one in every group, and whole "
                    "exponents; load what state_dict returned"
                )
            self._seen, self._counts = seen, counts.clone(memory_format=torch.contiguous_format)
            self._set_exponent(exponent.to(torch.int32, copy=True))
        else:
            super().load_state_dict(state)

    def _state_names(self) -> tuple[str, ...]:
        return "lo", "hi", "counts", "exponent"

    def _histogram(self) -> Histogram:
        return Histogram(self._counts, self._exponent, Range(*(values.reshape(-1) for values in self.seen)))

    def _bins(self, groups: int) -> int:
        if self.num_bins is not None:
            return self.num_bins
        # The largest power of two of int64 counts, on two sides, that fits the budget.
        fitting = 1 << max(1, _STATE_BYTES // (2 * 8 * groups)).bit_length() - 1
        return max(self.fewest_bins, min(DEFAULT_BINS, fitting))

    def _known_bins(self) -> Bins | None:
        return Bins(self._inverse, self._counts.shape[2]) if self.observed else None

    def _known_counts(self) -> Tensor | None:
        return self._counts if self.observed else None

    def _count(self, batch: Batch) -> None:
        amax = batch.range.amax.reshape(-1)
        bins = self._bins(amax.numel())
        if not self.observed:
            self._set_exponent(_exponent(amax, bins))
            counts = observe(batch.values, Bins(self._inverse, bins)).counts
            assert counts is not None
            self._counts = counts
            return
        before = self._exponent
        self._grow(_exponent(amax, bins), bins)
        if batch.counts is None or not torch.equal(self._exponent, before):
            batch = batch._replace(counts=observe(batch.values, Bins(self._inverse, bins)).counts)
        self._add(batch)

    def _add(self, batch: Batch) -> None:
        assert batch.counts is not None, "a calibrator that has seen groups counts while it measures"
        self._counts += batch.counts.to(self._counts.device)

    def _absorb(self, other: Any) -> None:
        groups, _, bins = other._counts.shape
        if self._bins(groups) != bins:
            raise ConfigError(
                f"cannot merge counts of {bins} bins into {self._bins(groups)}; give both calibrators one num_bins"
            )
        self._grow(other._exponent, bins)
        shift = self._exponent - other._exponent.to(self._exponent.device)
        self._counts = self._counts + _halve(other._counts.to(self._counts.device), shift)

    def _grow(self, exponent: Tensor, bins: int) -> None:
        """Widen the bins to at least these exponents; the first time, make them."""
        if not self.observed:
            self._counts = torch.zeros(exponent.numel(), 2, bins, dtype=torch.int64, device=exponent.device)
            self._exponent = torch.full_like(exponent, _NO_EXPONENT)
        wider = torch.maximum(self._exponent, exponent.to(self._exponent.device))
        self._counts = _halve(self._counts, wider - self._exponent)
        self._set_exponent(wider)

    def _set_exponent(self, exponent: Tensor) -> None:
        self._exponent = exponent
        # 0.0 for groups that have seen zeros only.
        self._inverse = power_of_two_or_zero(-exponent)


def _exponent(amax: Tensor, bins: int) -> Tensor:
    """The smallest exponent whose bins reach beyond amax, int32 [groups]: amax falls into their upper half."""
    exponent = torch.frexp(amax).exponent - (bins.bit_length() - 1)
    smallest = _SMALLEST_EXPONENT[amax.dtype]
    return torch.where(amax > 0, exponent.clamp(min=smallest), _NO_EXPONENT).to(torch.int32)


def _halve(counts: Tensor, times: Tensor) -> Tensor:
    """The counts [groups, 2, bins] after neighbouring bins were added `times` times [groups]."""
    grown = times.nonzero().reshape(-1)
    if grown.numel() == 0:
        return counts
    bins = counts.shape[2]
    shift = times[grown].to(torch.int64).clamp(max=bins.bit_length())[:, None, None]
    index = torch.bitwise_right_shift(torch.arange(bins, device=counts.device), shift)
    old = counts[grown]
    return counts.index_copy(0, grown, torch.zeros_like(old).scatter_add_(2, index.expand_as(old), old))
