"""The threshold whose quantized distribution is nearest to the data's, by the Kullback-Leibler divergence."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from fakequant.calibration.calibrator import Histogram
from fakequant.calibration.histogram import cheapest, magnitudes, used_bins
from fakequant.errors import ConfigError
from fakequant.numerics.formats.floats import Format
from fakequant.numerics.spec import QuantSpec

from .calibrator import register_calibrator
from .histogram import DEFAULT_BINS, HistogramCalibrator

_COARSE, _FEWEST_COARSE = 512, 64
# Thresholds times cells that are searched together, per group: 1 MiB for each array of float64.
_TABLE = 1 << 17
# With fewer bins per code, a cell would have nothing to merge.
_BINS_PER_CODE = 8
# Arrays of float64 or int64, one value per threshold and cell, that a search holds at a time.
_ARRAYS = 8


@register_calibrator("entropy")
class EntropyCalibrator(HistogramCalibrator):
    """The threshold that loses the least information, in the sense of the Kullback-Leibler divergence.

    For a threshold, P is the histogram below it, to whose last bin that is not empty the clipped counts are added. Q is
    the same histogram without these, merged into the cells of the format (all magnitudes that become one code) and
    spread again over the bins of each cell that are not empty. The threshold with the smallest KL(P || Q) is taken, of
    equal ones the largest. Bin 0 counts as much as its neighbour: it holds the exact zeros (of a ReLU, often half of
    the data), which have an exact code whatever the threshold is. Thresholds are edges of bins, from the one that keeps
    as many bins that are not empty as the format has codes on a side: fewer could each have a code of their own, and Q
    would equal P whatever was clipped. All are tried where there are at most 512 (fewer for formats of more than 8
    bits), else every n-th and then the neighbours of the best. The search takes 2 to 5 ms for each group: about 10 s
    for a tensor with 4,000 channels.

    Args:
        spec: how the tensor will be quantized.
        num_bins: see `HistogramCalibrator`.

    Raises:
        ConfigError: a format with more codes on a side than there are bins.

    Source: Migacz, "8-bit inference with TensorRT", GTC 2017; the treatment of bin 0 and of equal divergences as in
    NVIDIA's pytorch-quantization.

    >>> calibrator = EntropyCalibrator("int8")
    >>> calibrator.observe(torch.randn(10000, generator=torch.Generator().manual_seed(0)))
    >>> calibrator.observe(torch.tensor([20.0]))
    >>> calibrator.compute_range().hi.item() < 5.0
    True
    """

    def __init__(self, spec: QuantSpec | str, *, num_bins: int | None = None) -> None:
        super().__init__(spec, num_bins=num_bins)
        self._span = _span(self.spec)
        bins = num_bins or DEFAULT_BINS
        cells = _cells(self.spec.format, self._span, bins)
        if cells is None:
            raise ConfigError(
                f"entropy compares a histogram with its cells, and {self.spec.format} has more codes on a side than "
                f"the histogram's {bins} bins; use the method mse or percentile"
            )
        self._codes, self._midpoints = cells
        self._coarse = max(_FEWEST_COARSE, min(_COARSE, _TABLE // self._codes))
        self.fewest_bins = min(DEFAULT_BINS, max(self.fewest_bins, _power_of_two_from(_BINS_PER_CODE * self._codes)))

    def search_bytes(self, bins: int) -> int:
        """The memory that the search needs for one group, in bytes."""
        sides = 1 if self.spec.symmetric else 2
        return 8 * _ARRAYS * sides * (self._coarse + 1) * (self._codes + 1)

    def find_clip(self, histogram: Histogram) -> Tensor:
        """Bins up to the threshold with the smallest divergence."""
        counts = self.magnitudes(histogram)[:, None] if self.spec.symmetric else histogram.counts
        used = used_bins(counts)
        divergence = _Divergence(counts, used, self._midpoints, self._span, self.spec.symmetric)
        last = used.amax(1)
        first = torch.minimum((divergence.filled.sum(1) < self._codes).sum(1), last)
        return cheapest(divergence, first, last, bins=histogram.bins, coarse=self._coarse)


@lru_cache(maxsize=64)
def _cells(fmt: Format, span: float, bins: int) -> tuple[int, Tensor] | None:
    """The number of codes of a side, and the ends of their cells in codes; None if there are more codes than bins."""
    codes = magnitudes(fmt, span, at_most=bins)
    return None if codes is None else (codes.numel(), (codes[:-1] + codes[1:]) * 0.5)


def _span(spec: QuantSpec) -> float:
    """Codes from 0.0 to the threshold, or over both sides where there is a zero point."""
    return spec.format.bound if spec.symmetric else spec.format.quant_max - spec.format.quant_min


def _power_of_two_from(n: int) -> int:
    return 1 << (n - 1).bit_length()


class _Divergence:
    """KL(P || Q) of thresholds, from cumulative sums: a cell costs one difference, however many bins it has.

    With counts c, clipped counts O, cells of S counts in n bins that are not empty, N counts in all and C unclipped:
    KL = (sum P log P - sum P log Q) / N - log N + log C, where P is c (and c + O in the last bin) and Q is S / n.

    Args:
        counts: int64 [groups, sides, bins].
        used: bins up to the last that is not empty, int64 [groups, sides].
        midpoints: where cells end, in codes [cells - 1].
        span: codes from 0.0 to the threshold if `symmetric`, else over both sides.
    """

    def __init__(self, counts: Tensor, used: Tensor, midpoints: Tensor, span: float, symmetric: bool) -> None:
        counts = counts.to(torch.float64, copy=True)
        counts[..., 0] = counts[..., 1]
        self.counts, self.used, self.midpoints, self.span, self.symmetric = counts, used, midpoints, span, symmetric
        filled = counts > 0
        positions = torch.arange(counts.shape[-1], device=counts.device)
        # Entry k is about bins 0 to k - 1.
        self.mass = _from_zero(counts.cumsum(-1))
        self.filled = _from_zero(filled.cumsum(-1))
        self.self_information = _from_zero(torch.xlogy(counts, counts).cumsum(-1))
        self.last_filled = _from_zero(torch.where(filled, positions, -1).cummax(-1).values, first=-1)

    def __call__(self, kept: Tensor) -> Tensor:
        """The divergence for every number of bins kept, float64 [groups, n]."""
        ends = torch.minimum(kept[:, None], self.used[:, :, None])
        total = self.mass[..., -1].sum(1, keepdim=True)
        inside = self.mass.gather(-1, ends)
        clipped = self.mass[..., -1:] - inside
        last = self.last_filled.gather(-1, ends)
        last_count = self.counts.gather(-1, last.clamp(min=0))
        p_log_p = self.self_information.gather(-1, ends) - torch.xlogy(last_count, last_count)
        p_log_p += torch.xlogy(last_count + clipped, last_count + clipped)
        divergence = (p_log_p - self._cross(kept, ends, clipped)).sum(1) / total - total.log() + inside.sum(1).log()
        # Counts that are clipped on a side without any bin kept: Q cannot hold them.
        impossible = ((clipped > 0) & (last < 0)).any(1)
        return torch.where(impossible, torch.inf, divergence.nan_to_num(nan=0.0, posinf=torch.inf))

    def _cross(self, kept: Tensor, ends: Tensor, clipped: Tensor) -> Tensor:
        """Sum of P log Q, float64 [groups, sides, n]."""
        width = (kept if self.symmetric else ends.sum(1)).to(torch.float64)
        # A bin belongs to the cell that contains its middle.
        edges = (self.midpoints * width[..., None] / self.span - 0.5).ceil().to(torch.int64).clamp(min=0)
        edges = torch.minimum(edges[:, None], ends[..., None])
        edges = torch.cat([torch.zeros_like(ends)[..., None], edges, ends[..., None]], dim=-1)
        cell_mass = self._between(self.mass, edges)
        spread = self._between(self.filled, edges)
        log_q = torch.where(cell_mass > 0, (cell_mass / spread).log(), 0.0)
        cells = torch.arange(log_q.shape[-1], device=log_q.device)
        last = torch.where(cell_mass > 0, cells, 0).amax(-1, keepdim=True)
        return (cell_mass * log_q).sum(-1) + clipped * log_q.gather(-1, last)[..., 0]

    @staticmethod
    def _between(cumulative: Tensor, edges: Tensor) -> Tensor:
        return cumulative.gather(-1, edges.flatten(-2)).view(edges.shape).diff(dim=-1)


def _from_zero(cumulative: Tensor, first: int = 0) -> Tensor:
    return torch.nn.functional.pad(cumulative, (1, 0), value=first)
