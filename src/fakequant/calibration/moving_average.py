"""The moving average of the range of every batch."""

from __future__ import annotations

import torch
from torch import Tensor

from fakequant.errors import CalibrationError, ConfigError
from fakequant.numerics.qparams import Range
from fakequant.numerics.spec import QuantSpec

from .batches import match_groups, read_batch
from .calibrator import NOTHING_OBSERVED, Calibrator, register_calibrator
from .observer import check_keys

_STATE = ("average_lo", "average_hi")


@register_calibrator("moving_average")
class MovingAverageCalibrator(Calibrator):
    """The moving average of the lowest and of the highest value of every batch.

    The first batch gives its own range. Every later batch moves both ends by `averaging_constant` times their distance
    from its own. A rare outlier therefore counts little, and the result depends on the order of the batches: such
    calibrators do not merge. The range is the average, extended to contain 0.0.

    Args:
        spec: how the tensor will be quantized.
        averaging_constant: the weight of a new batch, above 0 and at most 1.

    Raises:
        ConfigError: an averaging constant out of these bounds.

    Source: torch.ao's MovingAverageMinMaxObserver and MovingAveragePerChannelMinMaxObserver, with the same bits. They
    compute float64 batches in float32; this computes them in float64.

    >>> calibrator = MovingAverageCalibrator("int8", averaging_constant=0.5)
    >>> for largest in (1.0, 2.0, 2.0):
    ...     calibrator.observe(torch.tensor([-1.0, largest]))
    >>> calibrator.compute_range()
    Range(lo=tensor([-1.]), hi=tensor([1.7500]))
    """

    mergeable = False

    def __init__(self, spec: QuantSpec | str, *, averaging_constant: float = 0.01) -> None:
        super().__init__(spec)
        if not 0 < averaging_constant <= 1:
            raise ConfigError(
                f"averaging_constant {averaging_constant}: expected a number above 0 and at most 1, such as 0.01"
            )
        self.averaging_constant = averaging_constant
        self._average: Range | None = None

    def update(self, x: Tensor) -> None:
        """Move the average towards the range of a batch; see `Observer.update`."""
        batch = read_batch(x, self.spec.granularity)
        if batch is None:
            return
        if self._average is None:
            self._average = Range(batch.range.lo.clone(), batch.range.hi.clone())
            return
        new = match_groups(self._average, batch.range)
        lo, hi = (self._moved(old, end.to(old.device)) for old, end in zip(self._average, new, strict=True))
        self._average = Range(lo, hi)

    def _moved(self, average: Tensor, new: Tensor) -> Tensor:
        moved = average + self.averaging_constant * (new - average)
        # The difference of two numbers of opposite sign near the largest of their dtype is inf.
        apart = average * (1 - self.averaging_constant) + new * self.averaging_constant
        return torch.where(moved.isfinite(), moved, apart)

    @torch.inference_mode(False)
    @torch.no_grad()
    def compute_range(self) -> Range:
        """The average, extended to contain 0.0; see `Calibrator.compute_range`."""
        if self._average is None:
            raise CalibrationError(NOTHING_OBSERVED)
        return Range(self._average.lo.clamp(max=0.0), self._average.hi.clamp(min=0.0))

    @property
    def observed(self) -> bool:
        return self._average is not None

    def state_dict(self) -> dict[str, Tensor]:
        """Both averages [groups, axes kept]; see `Observer.state_dict`."""
        if self._average is None:
            return {}
        return {name: end.clone() for name, end in zip(_STATE, self._average, strict=True)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Replace the averages; see `Observer.load_state_dict`."""
        if not state:
            self._average = None
            return
        check_keys(state, _STATE)
        lo, hi = (state[name] for name in _STATE)
        if lo.shape != hi.shape or not bool((lo.isfinite() & hi.isfinite() & (lo <= hi)).all()):
            raise CalibrationError(
                f"a calibrator state with average_lo of shape {list(lo.shape)} and average_hi of shape "
                f"{list(hi.shape)} that is no range; expected equal shapes and finite values with average_lo <= "
                "average_hi"
            )
        self._average = Range(*(end.clone(memory_format=torch.contiguous_format) for end in (lo, hi)))
