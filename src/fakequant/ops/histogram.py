"""The range of every group of a tensor and the counts of its magnitudes: the definition, and a kernel for it."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fakequant.numerics.qparams import Range, compute_dtype, has_values

from .cpu.backend import load_kernels

# So many values at a time stay in the processor's cache from one step of counting to the next.
_CHUNK = 1 << 17
# So many bins at a time take 16 MiB, and their positions fit int32.
_CHUNK_BINS = 1 << 21
_SIGN_BITS = {torch.float32: (torch.int32, 31), torch.float64: (torch.int64, 63)}


class Bins(NamedTuple):
    """Where to count: in bins from 0 outwards, on either side of it."""

    inverse: Tensor
    """float64 [groups]: 1 / width, powers of two; 0.0 puts all values of a group in the first bin."""
    number: int

    def inverse_for(self, values: Tensor) -> Tensor:
        """`inverse` where values are and in their dtype of computation; finite, because 0.0 has to stay in bin 0."""
        dtype = compute_dtype(values.dtype)
        return self.inverse.clamp(max=torch.finfo(dtype).max).to(values.device, dtype)


class Observed(NamedTuple):
    """What a tensor holds."""

    range: Range
    """Lowest and highest value of every group [groups], in the dtype of computation; NaN where one is not finite."""
    counts: Tensor | None
    """int64 [groups, 2, bins]: how often floor(|x| / width) is k, of negative x first; None if it was not asked for.
    Nothing, where a group has a value that is not finite or lies beyond the last bin."""


def observe(values: Tensor, bins: Bins | None = None) -> Observed:
    """The range of values [groups, elements] and, if asked for, their counts; elements >= 1."""
    if values.device.type == "cpu" and has_values(values) and load_kernels() is None:
        return _observe_by_kernel(values.contiguous(), bins)
    return observe_by_definition(values, bins)


def take_in(values: Tensor, range: Range, bins: Bins | None, counts: Tensor | None) -> bool:
    """Widen a range, in place, to hold these values and add them to the counts; or do nothing and return False.

    One call of a kernel, for the many batches that bring nothing new. It does nothing where a value is not finite or
    lies beyond the last bin, and where the kernel cannot serve.

    Args:
        values: ordered by group, as many in every group, without gaps.
        range: lowest and highest value of every group, in the dtype of computation; it contains 0.0.
        bins: where to count; None for not at all.
        counts: int64 [groups, 2, bins], or None.
    """
    if load_kernels() is not None or not has_values(values) or not (values.is_cpu and range.lo.is_cpu):
        return False
    inverse = _nowhere(range.lo.numel()) if bins is None else bins.inverse
    return torch.ops.fakequant_cpu.take_in.default(values, inverse, range.lo, range.hi, counts)


@lru_cache(maxsize=64)
def _nowhere(groups: int) -> Tensor:
    return torch.zeros(groups, dtype=torch.float64)


def _observe_by_kernel(values: Tensor, bins: Bins | None) -> Observed:
    groups = values.shape[0]
    ends = torch.empty(2, groups, dtype=compute_dtype(values.dtype))
    counts = None if bins is None else torch.zeros(groups, 2, bins.number, dtype=torch.int64)
    inverse = _nowhere(groups) if bins is None else bins.inverse.to(values.device)
    torch.ops.fakequant_cpu.observe(values, inverse, ends, counts)
    # 0.0 is added because which of the two zeros comes first depends on the order of the values.
    return Observed(Range(*(ends + 0.0).unbind()), counts)


def observe_by_definition(values: Tensor, bins: Bins | None = None) -> Observed:
    """`observe` in plain torch, on any device."""
    dtype = compute_dtype(values.dtype)
    # Both propagate NaN.
    lo, hi = (end.to(dtype) + 0.0 for end in (values.amin(1), values.amax(1)))
    finite = lo.isfinite() & hi.isfinite()
    lo, hi = (torch.where(finite, end, torch.nan) for end in (lo, hi))
    return Observed(Range(lo, hi), None if bins is None else _counts(values, bins.inverse_for(values), bins.number))


def _counts(values: Tensor, inverse: Tensor, bins: int) -> Tensor:
    groups, elements = values.shape
    rows, columns = max(1, min(_CHUNK // elements, _CHUNK_BINS // (2 * bins))), min(elements, _CHUNK)
    # One line of bins per group: the negative values below the middle, outwards in both directions.
    middle = torch.arange(min(rows, groups), dtype=torch.int32, device=values.device)[:, None] * (2 * bins) + bins
    bits, sign = _SIGN_BITS[inverse.dtype]
    line = torch.zeros(groups, 2 * bins, dtype=torch.int64, device=values.device)
    for row in range(0, groups, rows):
        part_inverse = inverse[row : row + rows, None]
        count = part_inverse.shape[0]
        for column in range(0, elements, columns):
            part = values[row : row + rows, column : column + columns].to(inverse.dtype)
            # Truncated towards zero, then one lower if negative; adding 0.0 keeps -0.0 on the side of +0.0.
            index = (part * part_inverse).nan_to_num(nan=0.0).clamp(1 - bins, bins - 1).to(torch.int32)
            index.add_(middle[:count]).add_((part + 0.0).view(bits) >> sign)
            found = torch.bincount(index.reshape(-1), minlength=count * 2 * bins)
            line[row : row + rows] += found.view(count, -1)
    return torch.stack([line[:, :bins].flip(-1), line[:, bins:]], dim=1)
