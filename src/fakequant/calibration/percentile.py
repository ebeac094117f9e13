"""The percentile of the magnitudes: clips a given share of the values."""

from __future__ import annotations

from fractions import Fraction

from torch import Tensor

from fakequant.errors import ConfigError
from fakequant.numerics.spec import QuantSpec

from .calibrator import register_calibrator
from .counts import Histogram
from .histogram import HistogramCalibrator

# Keeps the product of a count's remainder and the numerator below 2**62.
_LARGEST_DENOMINATOR = 1 << 31


@register_calibrator("percentile")
class PercentileCalibrator(HistogramCalibrator):
    """The smallest threshold that at least `percentile` % of the magnitudes do not exceed.

    Both ends are clipped at that threshold, so that at most the rest of the values is clipped, whichever end they are
    at. It is the upper edge of a bin, and never more than was seen: 100 gives exactly what "max" gives.

    Args:
        spec: how the tensor will be quantized.
        percentile: more than 1, up to 100; a share, such as 0.999, is refused.
        num_bins: see `HistogramCalibrator`.

    Raises:
        ConfigError: a percentile that is not in (1, 100].

    >>> calibrator = PercentileCalibrator("int8", percentile=90)
    >>> calibrator.observe(torch.tensor([-1.0] * 9 + [1000.0]))
    >>> calibrator.compute_range()
    Range(lo=tensor([-1.]), hi=tensor([1.2500]))
    """

    def __init__(self, spec: QuantSpec | str, *, percentile: float = 99.99, num_bins: int | None = None) -> None:
        super().__init__(spec, num_bins=num_bins)
        # 1 too: as a share it means all values, as a percentage hardly any.
        if not 1 < percentile <= 100:
            raise ConfigError(f"percentile {percentile}: expected a percentage above 1, such as 99.9, and at most 100")
        self.percentile = percentile

    def find_clip(self, histogram: Histogram) -> Tensor:
        """Bins up to the first where the share of smaller magnitudes reaches the percentile."""
        below = self.magnitudes(histogram).cumsum(-1)
        total = below[:, -1]
        # In whole numbers, from the decimal that was written: 99.9 % of 1000 values are 999, not 999.0000000000001.
        share = (Fraction(str(self.percentile)) / 100).limit_denominator(_LARGEST_DENOMINATOR)
        whole, rest = total // share.denominator, total % share.denominator
        needed = whole * share.numerator + (rest * share.numerator + share.denominator - 1) // share.denominator
        return (below < needed.clamp(min=1)[:, None]).sum(-1) + 1
