"""Calibrators that keep the lowest and highest value observed, and the methods "max" and "moving_average"."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fakequant.calibration.calibrator import NOTHING_OBSERVED, Calibrator, Observer, check_keys, register_calibrator
from fakequant.errors import CalibrationError, ConfigError, ShapeError
from fakequant.numerics.granularity import Granularity, block_axes, blocked
from fakequant.numerics.qparams import Range, compute_dtype
from fakequant.numerics.reference import Bins
from fakequant.numerics.spec import QuantSpec
from fakequant.ops.library import observe, update
from fakequant.ops.waiting import is_refused


class Batch(NamedTuple):
    """A batch of finite values, with its elements ordered by group."""

    values: Tensor
    """[groups, elements], in the dtype of the batch; the order of a group's elements has no meaning."""
    range: Range
    """Lowest and highest value of every group [groups per axis], in the dtype of computation."""


def read_batch(x: Tensor, granularity: Granularity) -> Batch | None:
    """The groups of a tensor and their ranges; None for a tensor without elements.

    Raises CalibrationError if the tensor holds NaN or inf.
    """
    compute_dtype(x.dtype)
    view = group_view(granularity, x.shape, x.stride())
    if x.numel() == 0:
        return None
    groups = math.prod(view.groups)
    values = by_group(x.detach(), view, groups)
    (lo, hi), _ = observe(values)
    if is_refused(lo.isnan().any()):
        nans, infs = int(values.isnan().sum()), int(values.isinf().sum())
        negative = not nans and infs == int((values == -math.inf).sum())
        advice = "; if an attention mask makes the -inf, give prepare an example with the mask" if negative else ""
        raise CalibrationError(
            f"a batch of shape {list(x.shape)} contains {nans} NaN and {infs} inf values of {values.numel()}; a range "
            "needs finite data, so remove such inputs from the calibration batches or repair the layer that makes "
            f"them{advice}"
        )
    return Batch(values, Range(lo.reshape(view.groups), hi.reshape(view.groups)))


class GroupView(NamedTuple):
    """How to reorder the elements of a tensor by group."""

    blocks: tuple[int, ...]
    groups: tuple[int, ...]
    order: list[int]
    """The axes of the blocked view: first the axes of the groups, then the axes within a group, in the order of memory,
    so that a dense tensor (channels-last, transposed) needs no copy."""


@lru_cache(maxsize=4096)  # for every batch; a layer sees few shapes
def group_view(granularity: Granularity, shape: tuple[int, ...], stride: tuple[int, ...]) -> GroupView:
    """The order of the elements of a tensor of this shape and stride, by group."""
    blocks, groups = granularity.block_shape(shape), granularity.group_shape(shape)
    values = blocked(torch.empty_strided(shape, stride, device="meta"), blocks)
    inside = sorted(block_axes(shape, blocks), key=lambda axis: -values.stride(axis))
    return GroupView(blocks, groups, [axis for axis in range(values.dim()) if axis not in inside] + inside)


def by_group(x: Tensor, view: GroupView, groups: int) -> Tensor:
    """The elements of x as a contiguous tensor [groups, elements]."""
    if groups == 1 and x.is_contiguous():
        return x.view(1, -1)
    # A view of two axes in the other order would have gaps.
    return blocked(x, view.blocks).permute(view.order).reshape(groups, -1).contiguous()


def match_groups(seen: Range, new: Range) -> Range:
    """The range `new` in the shape of the range `seen`; raises ShapeError if both have different groups."""
    if seen.lo.numel() == 1 == new.lo.numel():
        # One group whatever the rank: a layer may see [n, features] and [n, tokens, features].
        new = Range(new.lo.reshape(seen.lo.shape), new.hi.reshape(seen.hi.shape))
    if seen.lo.shape != new.lo.shape:
        raise ShapeError(
            f"the groups changed: scales have shape {list(seen.lo.shape)} for the data before and "
            f"{list(new.lo.shape)} for this; use batches of one layout, or a granularity that does not depend on "
            "the batch, such as per_tensor"
        )
    return new


_STATE = ("average_lo", "average_hi")


@register_calibrator("moving_average")
class MovingAverageCalibrator(Calibrator):
    """The moving average of the lowest and of the highest value of every batch.

    The first batch gives its range. Every later batch moves both ends by `averaging_constant` times their distance from
    the ends of the batch. A rare outlier therefore counts little, and the result depends on the order of the batches:
    calibrators of this class do not merge. The range is the average, extended to contain 0.0.

    Args:
        spec: how the tensor will be quantized.
        averaging_constant: the weight of a new batch, above 0 and at most 1.

    Raises:
        ConfigError: an averaging constant out of these bounds.

    Source: torch.ao's MovingAverageMinMaxObserver and MovingAveragePerChannelMinMaxObserver, with the same bits. Those
    compute float64 batches in float32; this class computes them in float64.

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
        batch = read_batch(x, self.spec.granularity)
        if batch is None:
            return
        if self._average is None:
            self._average = Range(batch.range.lo.clone(), batch.range.hi.clone())
            return
        new = match_groups(self._average, batch.range)
        ends: list[Tensor] = []
        for old, end in zip(self._average, new, strict=True):
            end = end.to(old.device)
            moved = old + self.averaging_constant * (end - old)
            # The difference of two numbers of opposite sign near the largest of their dtype is inf.
            apart = old * (1 - self.averaging_constant) + end * self.averaging_constant
            ends.append(torch.where(moved.isfinite(), moved, apart))
        self._average = Range(*ends)

    @torch.inference_mode(False)
    @torch.no_grad()
    def compute_range(self) -> Range:
        if self._average is None:
            raise CalibrationError(NOTHING_OBSERVED)
        return Range(self._average.lo.clamp(max=0.0), self._average.hi.clamp(min=0.0))

    @property
    def observed(self) -> bool:
        return self._average is not None

    def state_dict(self) -> dict[str, Tensor]:
        if self._average is None:
            return {}
        return {name: end.clone() for name, end in zip(_STATE, self._average, strict=True)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if not state:
            self._average = None
            return
        check_keys(state, _STATE)
        lo, hi = (state[name] for name in _STATE)
        if lo.shape != hi.shape or not bool((lo.isfinite() & hi.isfinite() & (lo <= hi)).all()):
            raise CalibrationError(
                f"average_lo of shape {list(lo.shape)} and average_hi of shape {list(hi.shape)} in a calibrator's "
                "state is not a range; expected equal shapes and finite values with average_lo <= average_hi"
            )
        self._average = Range(*(end.clone(memory_format=torch.contiguous_format) for end in (lo, hi)))


def join_ranges(seen: Range | None, new: Range) -> Range:
    """The range that covers both ranges, on the device of the first; raises ShapeError if their groups differ."""
    if seen is None:
        return new
    lo, hi = (values.to(seen.lo.device) for values in match_groups(seen, new))
    return Range(torch.minimum(seen.lo, lo), torch.maximum(seen.hi, hi))


class ExtremaCalibrator(Calibrator):
    """A calibrator that keeps the lowest and highest value of each group exactly; subclasses may keep more."""

    keeps_range_and_counts: ClassVar[bool] = False
    """Whether the state is the range and `_known_counts` alone. A single kernel then updates the state for most
    batches, and `_count` gets the other batches."""

    def __init__(self, spec: QuantSpec | str) -> None:
        super().__init__(spec)
        self._seen: Range | None = None
        # Shape and strides of the last batch, and how its elements are ordered by group.
        self._layout: tuple[torch.Size, tuple[int, ...]] | None = None
        self._view: GroupView | None = None

    def update(self, x: Tensor) -> None:
        if self.keeps_range_and_counts and self._updated_in_place(x):
            return
        batch = read_batch(x, self.spec.granularity)
        if batch is None:
            return
        lo, hi = batch.range
        batch = batch._replace(range=Range(lo.clamp(max=0.0), hi.clamp(min=0.0)))
        seen = join_ranges(self._seen, batch.range)
        self._count(batch)
        self._seen = seen

    def _updated_in_place(self, x: Tensor) -> bool:
        """If x needs no wider bins, update the state by one call of a kernel and return True; else return False.

        Most batches need no wider bins. With cold caches, each line here takes longer than a thousand values.
        """
        seen = self._seen
        if seen is None or compute_dtype(x.dtype) != seen.lo.dtype:
            return False
        layout = x.shape, x.stride()
        if layout != self._layout:
            self._view, self._layout = group_view(self.spec.granularity, *layout), layout
        view = self._view
        if view is None or seen.lo.shape != view.groups or x.numel() == 0:
            return False
        return update(by_group(x.detach(), view, seen.lo.numel()), seen, self._known_bins(), self._known_counts())

    @torch.inference_mode(False)
    @torch.no_grad()
    def merge(self, other: Observer) -> None:
        if not isinstance(other, ExtremaCalibrator) or type(other) is not type(self) or other.spec != self.spec:
            came = f"{type(other).__name__}({other.spec if isinstance(other, Calibrator) else ''})"
            raise ConfigError(
                f"cannot merge {came} into {type(self).__name__}({self.spec}); "
                "give calibrators with the same method and specification"
            )
        if other._seen is None:
            return
        # A copy, because the kernel widens the range in place.
        seen = Range(*(values.clone() for values in join_ranges(self._seen, other._seen)))
        self._absorb(other)
        self._seen = seen

    def load_from(self, other: Calibrator) -> None:
        kept = other.state_dict()
        needed = self._state_names()
        if other.spec != self.spec or not (not kept or set(needed) <= set(kept)):
            raise ConfigError(
                f"{type(self).__name__}({self.spec}) cannot use what {type(other).__name__}({other.spec}) saw: it "
                f"needs {', '.join(needed)}, and got {', '.join(kept) or 'nothing'}. Calibrate with the same "
                "specification; percentile, entropy and mse need a calibration by one of these three methods"
            )
        try:
            self.load_state_dict({name: kept[name] for name in needed} if kept else {})
        except CalibrationError as error:
            raise ConfigError(f"{error}; give both calibrators the same num_bins") from error

    def _state_names(self) -> tuple[str, ...]:
        return "lo", "hi"

    @property
    def observed(self) -> bool:
        return self._seen is not None

    @property
    def seen(self) -> Range:
        """Lowest and highest value seen [groups per axis], extended to 0.0; raises CalibrationError without data."""
        if self._seen is None:
            raise CalibrationError(NOTHING_OBSERVED)
        return self._seen

    def state_dict(self) -> dict[str, Tensor]:
        if self._seen is None:
            return {}
        return {"lo": self._seen.lo.clone(), "hi": self._seen.hi.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if not state:
            self._seen = None
            return
        check_keys(state, self._state_names())
        self._seen = read_range(state)

    def _known_bins(self) -> Bins | None:
        """The bins that `_known_counts` counts; None if there are none."""
        return None

    def _known_counts(self) -> Tensor | None:
        """The counts that the kernel may add to; None if there are none."""
        return None

    def _count(self, batch: Batch) -> None:
        """Update with a batch what a subclass keeps besides the range; the default keeps nothing."""

    def _absorb(self, other: Any) -> None:
        """Merge what `other`, of the same class, keeps besides the range; the default keeps nothing."""


def read_range(state: dict[str, Tensor]) -> Range:
    """A copy of the range in a state; raises CalibrationError if the state holds no valid range."""
    lo, hi = state["lo"], state["hi"]
    if lo.shape != hi.shape or not bool(((lo <= 0) & lo.isfinite() & (hi >= 0) & hi.isfinite()).all()):
        raise CalibrationError(
            f"lo of shape {list(lo.shape)} and hi of shape {list(hi.shape)} in a calibrator's state is not a range; "
            "expected equal shapes and finite values with lo <= 0 <= hi"
        )
    return Range(*(end.clone(memory_format=torch.contiguous_format) for end in (lo, hi)))


@register_calibrator("max")
class MaxCalibrator(ExtremaCalibrator):
    """The calibrator "max": the range from the lowest to the highest value of all batches.

    >>> calibrator = MaxCalibrator("int8 per_channel(1)")
    >>> calibrator.observe(torch.tensor([[1.0, -2.0]]))
    >>> calibrator.observe(torch.tensor([[-3.0, -5.0], [0.5, 0.25]]))
    >>> calibrator.compute_range()
    Range(lo=tensor([[-3., -5.]]), hi=tensor([[1.0000, 0.2500]]))
    """

    keeps_range_and_counts = True

    @torch.inference_mode(False)
    def compute_range(self) -> Range:
        return Range(*(values.clone() for values in self.seen))
