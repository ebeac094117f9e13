"""The range of every group of a tensor and the counts of its magnitudes: the definition, in plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .qparams import Range, compute_dtype

# Values that are counted at a time: they stay in the processor's cache from one step to the next.
_CHUNK = 1 << 17
# Bins that are counted at a time: they take 16 MiB, and their positions fit int32.
_CHUNK_BINS = 1 << 21
_SIGN_BITS = {torch.float32: (torch.int32, 31), torch.float64: (torch.int64, 63)}


class Bins(NamedTuple):
    """The bins to count in: from 0 outwards, on both sides."""

    inverse: Tensor
    """float64 [groups]: 1 / width, powers of two; 0.0 puts all values of a group in the first bin."""
    number: int

    def inverse_for(self, values: Tensor) -> Tensor:
        """`inverse` on the device of values and in their dtype of computation; finite, so that 0.0 stays in bin 0."""
        dtype = compute_dtype(values.dtype)
        return self.inverse.clamp(max=torch.finfo(dtype).max).to(values.device, dtype)


class Observed(NamedTuple):
    """The range and the counts of a tensor."""

    range: Range
    """Lowest and highest value of every group [groups], in the dtype of computation; NaN if one is not finite."""
    counts: Tensor | None
    """int64 [groups, 2, bins]: how often floor(|x| / width) is k, of negative x first; None if not requested.
    Undefined for a group with a value that is not finite or is beyond the last bin."""


def observe_by_definition(values: Tensor, bins: Bins | None = None) -> Observed:
    """The range of values [groups, elements] and, if there are bins, their counts; elements >= 1."""
    dtype = compute_dtype(values.dtype)
    # Both propagate NaN.
    lo, hi = (end.to(dtype) + 0.0 for end in (values.amin(1), values.amax(1)))
    finite = lo.isfinite() & hi.isfinite()
    lo, hi = (torch.where(finite, end, torch.nan) for end in (lo, hi))
    if bins is None:
        return Observed(Range(lo, hi), None)
    inverse, number = bins.inverse_for(values), bins.number
    groups, elements = values.shape
    rows, columns = max(1, min(_CHUNK // elements, _CHUNK_BINS // (2 * number))), min(elements, _CHUNK)
    # One line of bins per group: the negative values below the middle, outwards in both directions.
    middle = torch.arange(min(rows, groups), dtype=torch.int32, device=values.device)[:, None] * (2 * number) + number
    bits, sign = _SIGN_BITS[inverse.dtype]
    line = torch.zeros(groups, 2 * number, dtype=torch.int64, device=values.device)
    for row in range(0, groups, rows):
        part_inverse = inverse[row : row + rows, None]
        count = part_inverse.shape[0]
        for column in range(0, elements, columns):
            part = values[row : row + rows, column : column + columns].to(inverse.dtype)
            # Truncated towards zero, then one lower if negative; adding 0.0 keeps -0.0 on the side of +0.0.
            index = (part * part_inverse).nan_to_num(nan=0.0).clamp(1 - number, number - 1).to(torch.int32)
            index.add_(middle[:count]).add_(torch.bitwise_right_shift((part + 0.0).view(bits), sign))
            found = torch.bincount(index.reshape(-1), minlength=count * 2 * number)
            line[row : row + rows] += found.view(count, -1)
    return Observed(Range(lo, hi), torch.stack([line[:, :number].flip(-1), line[:, number:]], dim=1))
