"""The lowest and highest value seen: what every calibrator keeps, and all that "max" needs."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fakequant.errors import CalibrationError, ConfigError, ShapeError
from fakequant.numerics.granularity import Granularity, block_axes, blocked
from fakequant.numerics.qparams import Range, compute_dtype
from fakequant.numerics.spec import QuantSpec

from .calibrator import NOTHING_OBSERVED, Calibrator, check_keys, register_calibrator


class Batch(NamedTuple):
    """A finite batch, ordered by group."""

    values: Tensor
    """[groups, elements], in the dtype of the batch; the order of a group's elements means nothing."""
    range: Range
    """Exact, in the dtype of computation [groups, axes kept]."""


def read_batch(x: Tensor, granularity: Granularity) -> Batch | None:
    """The groups of a tensor and their ranges; None for a tensor without elements.

    Raises:
        CalibrationError: the tensor holds NaN or inf.
    """
    dtype = compute_dtype(x.dtype)
    shape = granularity.group_shape(x.shape)
    if x.numel() == 0:
        return None
    values = _by_group(x.detach(), granularity, math.prod(shape))
    # Both propagate NaN, so that the extrema of a batch tell whether all of it is finite, without another pass.
    lo, hi = values.amin(1), values.amax(1)
    if not bool((lo.isfinite() & hi.isfinite()).all()):
        raise CalibrationError(_describe_non_finite(values, x.shape))
    # Adding 0.0 makes -0.0 to +0.0: which of the two a minimum returns would depend on the order of the batches.
    lo, hi = lo.to(dtype).clamp(max=0.0) + 0.0, hi.to(dtype).clamp(min=0.0) + 0.0
    return Batch(values, Range(lo.reshape(shape), hi.reshape(shape)))


def _by_group(x: Tensor, granularity: Granularity, groups: int) -> Tensor:
    blocks = granularity.block_shape(x.shape)
    values = blocked(x, blocks)
    # In the order of memory, so that a dense tensor (channels-last, transposed) needs no copy.
    inside = sorted(block_axes(x.shape, blocks), key=lambda axis: -values.stride(axis))
    outside = [axis for axis in range(values.dim()) if axis not in inside]
    return values.permute(outside + inside).reshape(groups, -1)


def _describe_non_finite(values: Tensor, shape: torch.Size) -> str:
    nans, infs = int(values.isnan().sum()), int(values.isinf().sum())
    return (
        f"a batch of shape {list(shape)} contains {nans} NaN and {infs} inf values of {values.numel()}; a range needs "
        "finite data, so remove such inputs from the calibration batches or repair the layer that makes them"
    )


def join_ranges(seen: Range | None, new: Range) -> Range:
    """The range that covers two, on the device of the first.

    Raises:
        ShapeError: they have different groups.
    """
    if seen is None:
        return new
    if seen.lo.numel() == 1 == new.lo.numel():
        # One group whatever the rank: a layer may see [n, features] and [n, tokens, features].
        new = Range(new.lo.reshape(seen.lo.shape), new.hi.reshape(seen.hi.shape))
    if seen.lo.shape != new.lo.shape:
        raise ShapeError(
            f"the groups changed: scales have shape {list(seen.lo.shape)} for the data before and "
            f"{list(new.lo.shape)} for this; use batches of one layout, or a granularity that does not depend on "
            "the batch, such as per_tensor"
        )
    lo, hi = (values.to(seen.lo.device) for values in new)
    return Range(torch.minimum(seen.lo, lo), torch.maximum(seen.hi, hi))


class ExtremaCalibrator(Calibrator):
    """A calibrator that keeps the exact range seen; what else it keeps of a batch, a subclass adds."""

    def __init__(self, spec: QuantSpec | str) -> None:
        super().__init__(spec)
        self._seen: Range | None = None

    # What is kept must be plain tensors, also when the batches come under torch.inference_mode.
    @torch.inference_mode(False)
    @torch.no_grad()
    def observe(self, x: Tensor) -> None:
        """Take in a batch; see `Calibrator.observe`."""
        batch = read_batch(x, self.spec.granularity)
        if batch is None:
            return
        seen = join_ranges(self._seen, batch.range)
        self._count(batch)
        self._seen = seen

    @torch.inference_mode(False)
    @torch.no_grad()
    def merge(self, other: Calibrator) -> None:
        """Take in what another calibrator has seen; see `Calibrator.merge`."""
        if type(other) is not type(self) or other.spec != self.spec:
            raise ConfigError(
                f"cannot merge {type(other).__name__}({other.spec}) into {type(self).__name__}({self.spec}); "
                "calibrators merge only with one method and one specification"
            )
        if other._seen is None:
            return
        seen = join_ranges(self._seen, other._seen)
        self._absorb(other)
        self._seen = seen

    @property
    def observed(self) -> bool:
        return self._seen is not None

    @property
    def seen(self) -> Range:
        """Lowest and highest value seen [groups, axes kept], extended to contain 0.0.

        Raises:
            CalibrationError: nothing was observed.
        """
        if self._seen is None:
            raise CalibrationError(NOTHING_OBSERVED)
        return self._seen

    def state_dict(self) -> dict[str, Tensor]:
        """What was seen; see `Calibrator.state_dict`."""
        if self._seen is None:
            return {}
        return {"lo": self._seen.lo.clone(), "hi": self._seen.hi.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Replace what was seen; see `Calibrator.load_state_dict`."""
        if not state:
            self._seen = None
            return
        check_keys(state, ("lo", "hi"))
        self._seen = read_range(state)

    def _count(self, batch: Batch) -> None:
        """Take in more of a batch than its range."""

    def _absorb(self, other: Any) -> None:
        """Take in more of a calibrator of the same class than its range."""


def read_range(state: dict[str, Tensor]) -> Range:
    """A copy of the range in a state.

    Raises:
        CalibrationError: it is none.
    """
    lo, hi = state["lo"], state["hi"]
    if lo.shape != hi.shape or not bool(((lo <= 0) & lo.isfinite() & (hi >= 0) & hi.isfinite()).all()):
        raise CalibrationError(
            f"a calibrator state with lo of shape {list(lo.shape)} and hi of shape {list(hi.shape)} that is no range; "
            "expected equal shapes and finite values with lo <= 0 <= hi"
        )
    return Range(lo.clone(), hi.clone())


@register_calibrator("max")
class MaxCalibrator(ExtremaCalibrator):
    """The whole range seen, as if it had been measured on all batches at once.

    >>> calibrator = MaxCalibrator("int8 per_channel(1)")
    >>> calibrator.observe(torch.tensor([[1.0, -2.0]]))
    >>> calibrator.observe(torch.tensor([[-3.0, -5.0], [0.5, 0.25]]))
    >>> calibrator.compute_range()
    Range(lo=tensor([[-3., -5.]]), hi=tensor([[1.0000, 0.2500]]))
    """

    @torch.inference_mode(False)
    def compute_range(self) -> Range:
        """Lowest and highest value seen; see `Calibrator.compute_range`."""
        return Range(*(values.clone() for values in self.seen))
