"""Scales and offsets as a file stores them: codes and shared scales."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .blocks import block_axes, blocked, blocked_groups, unblocked
from .compilers import is_approximate, is_watched
from .formats.format import Format
from .granularity import Granularity

_HALF = (torch.float16, torch.bfloat16)
"""torch rounds to these as the formats say, in a tenth of the time."""


class StoredScales(NamedTuple):
    """Scales or offsets as a file stores them.

    Attributes:
        codes: [groups, axes kept], in the storage of their format; float32 without a format.
        shared: the scales of the codes, float32 [groups of these groups, axes kept]; None without shared scales.
    """

    codes: Tensor
    shared: Tensor | None = None


def rounded(v: Tensor, fmt: Format) -> Tensor:
    """The nearest code of a format."""
    if fmt.storage in _HALF and v.dtype is torch.float32 and not is_watched():
        return fmt.clamp(v.to(fmt.storage).to(v.dtype))  # of a number beyond the end it is inf
    code = fmt.clamp(v)
    # Float formats divide by powers of two to round, which an approximate division need not do exactly either.
    return fmt.round(code.double()).to(code.dtype) if is_approximate(code) else fmt.round(code)


def split_scales(
    values: Tensor,
    fmt: Format | None,
    granularity: Granularity | None,
    shared: Format | None,
    under: Tensor | None = None,
) -> StoredScales | None:
    """See `ScaleSpec.split`; None if no split is exact."""
    if fmt is None:
        return StoredScales(values)
    if granularity is None:
        stored = fmt.to_storage(values)  # of no number that is not of the format, as reading it shows
        return StoredScales(stored) if torch.equal(fmt.from_storage(stored, values.dtype), values) else None
    if not values.numel():
        return StoredScales(fmt.to_storage(values), values.new_zeros(granularity.group_shape(values.shape)))
    blocks = granularity.block_shape(values.shape)
    view = blocked(values, blocks)
    axes = block_axes(values.shape, blocks)
    found = _shared(view, axes, fmt, shared) if under is None else under.expand(view.amax(axes, True).shape)
    if found is None or (under is not None and not torch.equal(_codes(view, found, fmt) * found, view)):
        return None
    codes = fmt.to_storage(unblocked(_codes(view, found, fmt), values.shape, blocks))
    return StoredScales(codes, found.reshape(granularity.group_shape(values.shape)))


def join_scales(stored: StoredScales, fmt: Format | None, granularity: Granularity | None) -> Tensor:
    """See `ScaleSpec.join`."""
    if fmt is None:
        return stored.codes
    codes = fmt.from_storage(stored.codes, torch.float32)
    if granularity is None or stored.shared is None:
        return codes
    blocks = granularity.block_shape(codes.shape)
    shared = stored.shared.float().reshape(granularity.group_shape(codes.shape))
    return unblocked(blocked(codes, blocks) * blocked_groups(shared, codes.shape, blocks), codes.shape, blocks)


def farthest(view: Tensor, axes: tuple[int, ...]) -> Tensor:
    """In every block, the value farthest from 0, with its sign; the block's axes are kept."""
    low, high = (view.amin(axes, True), view.amax(axes, True)) if axes else (view, view)
    return torch.where(-low > high, low, high)


def _codes(view: Tensor, shared: Tensor, fmt: Format) -> Tensor:
    return rounded(view / torch.where(shared == 0, 1.0, shared), fmt)


def _shared(view: Tensor, axes: tuple[int, ...], fmt: Format, shared: Format | None) -> Tensor | None:
    """The shared scale of every block: its farthest scale divided by the farthest code that gives an exact split."""
    whole = farthest(view, axes)
    found, open = torch.zeros_like(whole), whole != 0
    for code in _from_farthest(fmt):
        for tried in _near(whole / code, shared):
            if not bool(open.any()):
                return found
            # Subnormal shared scales would be flushed somewhere.
            same = (_codes(view, tried, fmt) * tried == view) & (tried.abs() >= torch.finfo(tried.dtype).tiny)
            good = open & (same.amin(axes, True) if axes else same)
            found, open = torch.where(good, tried, found), open & ~good
    return None if bool(open.any()) else found


def _from_farthest(fmt: Format) -> list[float]:
    """Candidate codes for the farthest scale, farthest first; of q and -q, the sign of the format's farthest first."""
    if fmt.has_zero_point:
        codes = [float(code) for code in range(int(fmt.quant_min), int(fmt.quant_max) + 1) if code]
    else:
        patterns = torch.arange(1 << fmt.bits).to(torch.uint8).view(fmt.storage)
        codes = [code for code in fmt.from_storage(patterns, torch.float64).tolist() if 0 < code < math.inf]
    return sorted(codes, key=lambda code: (-abs(code), code * fmt.farthest < 0))


def _near(value: Tensor, fmt: Format | None) -> list[Tensor]:
    """Candidates for a shared scale: the nearest number of its format; in float32 also its neighbours."""
    if fmt is not None:
        return [rounded(value, fmt)]
    end = torch.full_like(value, torch.inf)
    return [value, torch.nextafter(value, end), torch.nextafter(value, -end)]
