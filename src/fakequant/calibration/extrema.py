"""The lowest and highest value seen: what every calibrator keeps, and all that "max" needs."""

from __future__ import annotations

import math
from functools import lru_cache
from threading import Lock
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fakequant.errors import CalibrationError, ConfigError, ShapeError
from fakequant.numerics.granularity import Granularity, block_axes, blocked
from fakequant.numerics.histogram import Bins
from fakequant.numerics.qparams import Range, check_tensor, compute_dtype
from fakequant.numerics.spec import QuantSpec
from fakequant.ops.histogram import observe, take_in

from .calibrator import NOTHING_OBSERVED, Calibrator, check_keys, register_calibrator


class Batch(NamedTuple):
    """A finite batch, ordered by group."""

    values: Tensor
    """[groups, elements], in the dtype of the batch; the order of a group's elements means nothing."""
    range: Range
    """Exact, in the dtype of computation [groups, axes kept]."""
    counts: Tensor | None = None
    """The counts that were asked for, see `Observed.counts`."""


def read_batch(x: Tensor, granularity: Granularity, bins: Bins | None = None) -> Batch | None:
    """The groups of a tensor and their ranges, and if asked for their counts; None for a tensor without elements.

    Raises:
        CalibrationError: the tensor holds NaN or inf.
    """
    compute_dtype(x.dtype)
    view = _group_view(granularity, x.shape, x.stride())
    if x.numel() == 0:
        return None
    groups = math.prod(view.groups)
    values = _by_group(x.detach(), view, groups)
    (lo, hi), counts = observe(values, bins if bins is not None and bins.inverse.numel() == groups else None)
    if bool(lo.isnan().any()):
        raise CalibrationError(_describe_non_finite(values, x.shape))
    return Batch(values, Range(lo.clamp(max=0.0).reshape(view.groups), hi.clamp(min=0.0).reshape(view.groups)), counts)


class _GroupView(NamedTuple):
    blocks: tuple[int, ...]
    groups: tuple[int, ...]
    order: list[int]
    """The axes of the blocked view, groups first; those within a group in the order of memory, so that a dense tensor
    (channels-last, transposed) needs no copy."""


# Every batch comes here, and a layer sees few shapes.
@lru_cache(maxsize=4096)
def _group_view(granularity: Granularity, shape: tuple[int, ...], stride: tuple[int, ...]) -> _GroupView:
    blocks, groups = granularity.block_shape(shape), granularity.group_shape(shape)
    values = blocked(torch.empty_strided(shape, stride, device="meta"), blocks)
    inside = sorted(block_axes(shape, blocks), key=lambda axis: -values.stride(axis))
    return _GroupView(blocks, groups, [axis for axis in range(values.dim()) if axis not in inside] + inside)


def _by_group(x: Tensor, view: _GroupView, groups: int) -> Tensor:
    if groups == 1 and x.is_contiguous():
        return x.view(1, -1)
    # A view of two axes in the other order would have gaps.
    return blocked(x, view.blocks).permute(view.order).reshape(groups, -1).contiguous()


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

    keeps_range_and_counts: ClassVar[bool] = False
    """Whether that is the range and `_known_counts` alone, so that one kernel takes in most batches; `_count` and
    `_add` then see the others."""

    def __init__(self, spec: QuantSpec | str) -> None:
        super().__init__(spec)
        # What was seen is read, changed and written back: two threads would lose what one of them adds.
        self._observing = Lock()
        self._seen: Range | None = None
        # Shape and strides of the last batch, and how its elements are ordered by group.
        self._layout: tuple[torch.Size, tuple[int, ...]] | None = None
        self._view: _GroupView | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without the lock, which cannot be copied."""
        return {name: value for name, value in vars(self).items() if name != "_observing"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._observing = Lock()

    def observe(self, x: Tensor) -> None:
        """Take in a batch; see `Calibrator.observe`. Several threads may call it."""
        if not torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            with self._observing:
                self._observe(x)
            return
        # What is kept must be plain tensors, also when the batches come under torch.inference_mode.
        with torch.inference_mode(False), torch.no_grad(), self._observing:
            self._observe(x)

    def _observe(self, x: Tensor) -> None:
        check_tensor("batch", x)
        if x.is_meta:
            raise CalibrationError(
                "a batch on the device meta holds no values; move the model and the batches to a device, such as by "
                "model.to_empty(device='cpu') and loading its weights"
            )
        if self.keeps_range_and_counts and self._takes(x):
            return
        batch = read_batch(x, self.spec.granularity, self._known_bins())
        if batch is None:
            return
        if self._covers(batch.range):
            self._add(batch)
            return
        seen = join_ranges(self._seen, batch.range)
        self._count(batch)
        self._seen = seen

    def _takes(self, x: Tensor) -> bool:
        """Take in a batch laid out like the last in one call, if it needs no wider bins; most batches do not.

        In a model whose layers have driven Python from the caches, every line here costs more than a thousand values.
        """
        seen = self._seen
        if seen is None or compute_dtype(x.dtype) != seen.lo.dtype:
            return False
        layout = x.shape, x.stride()
        if layout != self._layout:
            self._view, self._layout = _group_view(self.spec.granularity, *layout), layout
        view = self._view
        if view is None or seen.lo.shape != view.groups or x.numel() == 0:
            return False
        return take_in(_by_group(x.detach(), view, seen.lo.numel()), seen, self._known_bins(), self._known_counts())

    def _covers(self, range: Range) -> bool:
        """Whether a range tells nothing new; for one group, the usual case, in numbers instead of tensors."""
        seen = self._seen
        if seen is None or seen.lo.shape != range.lo.shape:
            return False
        if seen.lo.numel() == 1:
            return seen.lo.item() <= range.lo.item() and range.hi.item() <= seen.hi.item()
        return bool(((seen.lo <= range.lo.to(seen.lo.device)) & (range.hi.to(seen.hi.device) <= seen.hi)).all())

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
        # A copy, because what is kept is widened in place.
        seen = Range(*(values.clone() for values in join_ranges(self._seen, other._seen)))
        self._absorb(other)
        self._seen = seen

    def adopt(self, other: Calibrator) -> None:
        """Replace all that was seen by what another calibrator has seen; see `Calibrator.adopt`."""
        kept = other.state_dict()
        needed = self._state_names()
        if other.spec != self.spec or not (not kept or set(needed) <= set(kept)):
            raise ConfigError(
                f"{type(self).__name__}({self.spec}) cannot go on from {type(other).__name__}({other.spec}), which "
                f"keeps {', '.join(kept) or 'nothing'}; collect with one specification, and by percentile, entropy or "
                "mse if one of them is to follow"
            )
        try:
            self.load_state_dict({name: kept[name] for name in needed} if kept else {})
        except CalibrationError as error:
            raise ConfigError(f"{error}; give both calibrators one num_bins") from error

    def _state_names(self) -> tuple[str, ...]:
        return "lo", "hi"

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
        check_keys(state, self._state_names())
        self._seen = read_range(state)

    def _known_bins(self) -> Bins | None:
        """Where to count while the range of a batch is measured, if that is known."""
        return None

    def _known_counts(self) -> Tensor | None:
        """Counts to which those of a batch may be added, if there are any."""
        return None

    def _count(self, batch: Batch) -> None:
        """Take in more of a batch than its range."""

    def _add(self, batch: Batch) -> None:
        """Take in more of a batch whose range lies within the one seen."""

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
    return Range(*(end.clone(memory_format=torch.contiguous_format) for end in (lo, hi)))


@register_calibrator("max")
class MaxCalibrator(ExtremaCalibrator):
    """The whole range seen, as if it had been measured on all batches at once.

    >>> calibrator = MaxCalibrator("int8 per_channel(1)")
    >>> calibrator.observe(torch.tensor([[1.0, -2.0]]))
    >>> calibrator.observe(torch.tensor([[-3.0, -5.0], [0.5, 0.25]]))
    >>> calibrator.compute_range()
    Range(lo=tensor([[-3., -5.]]), hi=tensor([[1.0000, 0.2500]]))
    """

    keeps_range_and_counts = True

    @torch.inference_mode(False)
    def compute_range(self) -> Range:
        """Lowest and highest value seen; see `Calibrator.compute_range`."""
        return Range(*(values.clone() for values in self.seen))
