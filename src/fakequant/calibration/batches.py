"""Batches ordered by group, with the range of every group."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fakequant.errors import CalibrationError, ShapeError
from fakequant.numerics.blocks import block_axes, blocked
from fakequant.numerics.granularity import Granularity
from fakequant.numerics.histogram import Bins
from fakequant.numerics.qparams import Range, compute_dtype
from fakequant.ops.histogram import observe


class Batch(NamedTuple):
    """A finite batch, ordered by group."""

    values: Tensor
    """[groups, elements], in the dtype of the batch; the order of a group's elements has no meaning."""
    range: Range
    """Lowest and highest value of every group [groups, axes kept], in the dtype of computation."""
    counts: Tensor | None = None
    """The counts in the given bins, see `Observed.counts`; None without bins."""


def read_batch(x: Tensor, granularity: Granularity, bins: Bins | None = None) -> Batch | None:
    """The groups of a tensor, their ranges and, with bins, their counts; None for a tensor without elements.

    Raises:
        CalibrationError: the tensor holds NaN or inf.
    """
    compute_dtype(x.dtype)
    view = group_view(granularity, x.shape, x.stride())
    if x.numel() == 0:
        return None
    groups = math.prod(view.groups)
    values = by_group(x.detach(), view, groups)
    (lo, hi), counts = observe(values, bins if bins is not None and bins.inverse.numel() == groups else None)
    if bool(lo.isnan().any()):
        raise CalibrationError(_describe_non_finite(values, x.shape))
    return Batch(values, Range(lo.reshape(view.groups), hi.reshape(view.groups)), counts)


class GroupView(NamedTuple):
    """The order of a tensor's elements by group."""

    blocks: tuple[int, ...]
    groups: tuple[int, ...]
    order: list[int]
    """The axes of the blocked view, groups first; those within a group in the order of memory, so that a dense tensor
    (channels-last, transposed) needs no copy."""


@lru_cache(maxsize=4096)  # for every batch; a layer sees few shapes
def group_view(granularity: Granularity, shape: tuple[int, ...], stride: tuple[int, ...]) -> GroupView:
    """The order of the elements of a tensor of this shape and stride, by group."""
    blocks, groups = granularity.block_shape(shape), granularity.group_shape(shape)
    values = blocked(torch.empty_strided(shape, stride, device="meta"), blocks)
    inside = sorted(block_axes(shape, blocks), key=lambda axis: -values.stride(axis))
    return GroupView(blocks, groups, [axis for axis in range(values.dim()) if axis not in inside] + inside)


def by_group(x: Tensor, view: GroupView, groups: int) -> Tensor:
    """The elements of x [groups, elements], without gaps."""
    if groups == 1 and x.is_contiguous():
        return x.view(1, -1)
    # A view of two axes in the other order would have gaps.
    return blocked(x, view.blocks).permute(view.order).reshape(groups, -1).contiguous()


def _describe_non_finite(values: Tensor, shape: torch.Size) -> str:
    nans, infs = int(values.isnan().sum()), int(values.isinf().sum())
    negative = not nans and infs == int((values == -math.inf).sum())
    advice = "; if an attention mask makes the -inf, give prepare an example with the mask" if negative else ""
    return (
        f"a batch of shape {list(shape)} contains {nans} NaN and {infs} inf values of {values.numel()}; a range needs "
        f"finite data, so remove such inputs from the calibration batches or repair the layer that makes them{advice}"
    )


def match_groups(seen: Range, new: Range) -> Range:
    """A new range in the shape of the one seen before.

    Raises:
        ShapeError: they have different groups.
    """
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
