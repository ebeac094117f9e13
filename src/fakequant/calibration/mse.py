"""The threshold with the smallest mean squared error of the quantized values."""

from __future__ import annotations

import torch
from torch import Tensor

from fakequant.functional import fake_quantize
from fakequant.numerics.granularity import PerChannel
from fakequant.numerics.qparams import QParams, Range, choose_qparams

from .calibrator import register_calibrator
from .counts import Histogram
from .histogram import HistogramCalibrator
from .search import cheapest, used_bins

_COARSE = 64
# Bytes per threshold and bin: float32 values and errors.
_BYTES = 8


@register_calibrator("mse")
class MseCalibrator(HistogramCalibrator):
    """The threshold that gives the smallest mean squared error.

    `fakequant.fake_quantize` quantizes the middle of every bin under the specification itself, for every format and
    arithmetic, and the squared errors are weighted with the counts. Thresholds are edges of bins and the largest
    magnitude: every 64th part of the bins first, then the neighbours of the best. If errors are equal, the largest
    threshold wins.

    Args:
        spec: how the tensor will be quantized.
        num_bins: see `HistogramCalibrator`.

    >>> calibrator = MseCalibrator("int4")
    >>> calibrator.observe(torch.randn(10000, generator=torch.Generator().manual_seed(0)))
    >>> 2.3 < calibrator.compute_range().hi.item() < 3.0
    True
    """

    def search_bytes(self, bins: int) -> int:
        """The memory that the search needs for one group, in bytes."""
        return _BYTES * (_COARSE + 1) * 2 * bins

    def find_clip(self, histogram: Histogram) -> Tensor:
        """Bins up to the threshold with the smallest error."""
        error, last = _SquaredError(self, histogram), used_bins(self.magnitudes(histogram))
        return cheapest(error, 1, last, bins=histogram.bins, coarse=_COARSE)


class _SquaredError:
    """Sums of squared errors of thresholds, in units of bins: scaling by a power of two changes no rounding."""

    def __init__(self, calibrator: HistogramCalibrator, histogram: Histogram) -> None:
        self.ignores_negative = calibrator.ignores_negative
        # Every row is a candidate threshold.
        self.spec = calibrator.spec.replace(granularity=PerChannel(0))
        centers = torch.arange(histogram.bins, dtype=torch.float32, device=histogram.counts.device) + 0.5
        if self.ignores_negative or not histogram.counts[:, 0].any():
            self.centers, self.counts = centers, histogram.counts[:, 1]
        else:
            self.centers, self.counts = torch.cat([-centers.flip(0), centers]), histogram.line()[1]
        width = torch.where(histogram.width > 0, histogram.width, 1.0)
        self.seen = Range(*((values / width)[:, None].float() for values in histogram.range))

    def __call__(self, kept: Tensor) -> Tensor:
        """The sum of squared errors for every number of bins kept, float64 [groups, n]."""
        params = self._params(kept)
        x = self.centers.expand(kept.numel(), -1)
        error = fake_quantize(x, self.spec, scale=params.scale, zero_point=params.zero_point).sub_(x)
        weights = self.counts[:, None].to(torch.float32)
        # In place and in float32, except the sum: new float64 arrays of this size cost ten times the arithmetic.
        return error.square_().view(*kept.shape, -1).mul_(weights).sum(-1, dtype=torch.float64)

    def _params(self, kept: Tensor) -> QParams:
        limit = kept.to(torch.float32)
        lo = torch.zeros_like(limit) if self.ignores_negative else torch.maximum(self.seen.lo, -limit)
        hi = torch.minimum(self.seen.hi, limit)
        # Where there are only zeros every range serves, but that of one bin has a finite scale in every arithmetic.
        hi = torch.where(lo < hi, hi, 1.0)
        return choose_qparams(Range(lo.reshape(-1, 1), hi.reshape(-1, 1)), self.spec)
