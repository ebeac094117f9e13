"""The range of every group of a tensor and the counts of its magnitudes, by the backend that serves the tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from fakequant.numerics.qparams import Range, is_concrete
from fakequant.numerics.reference import Bins, Observed, observe_by_definition

from .dispatch import choose_for


def observe(values: Tensor, bins: Bins | None = None) -> Observed:
    """The range of values [groups, elements] and, if there are bins, their counts; elements >= 1."""
    if not is_concrete(values):
        return observe_by_definition(values, bins)
    return choose_for(values).observe(values.contiguous(), bins)


def update(values: Tensor, range: Range, bins: Bins | None, counts: Tensor | None) -> bool:
    """Widen a range in place to contain these values, and add them to the counts; or do nothing and return False.

    It is one call of a kernel, for the many batches that need no wider bins. It does nothing if a value is not finite
    or is beyond the last bin, and if the kernel cannot serve.

    Args:
        values: ordered by group, as many in every group, without gaps.
        range: lowest and highest value of every group, in the dtype of computation; it contains 0.0.
        bins: where to count; None for not at all.
        counts: int64 [groups, 2, bins], or None.
    """
    if not is_concrete(values) or values.device != range.lo.device:
        return False
    return choose_for(values).take_in(values, range, bins, counts)


def join_bins(counts: Tensor, times: Tensor) -> Tensor:
    """The counts [groups, 2, bins] after neighbouring bins were added `times` times [groups].

    >>> join_bins(torch.tensor([[[4, 1, 2, 3], [0, 0, 5, 6]]]), torch.tensor([1]))
    tensor([[[ 5,  5,  0,  0],
             [ 0, 11,  0,  0]]])
    """
    # On a CPU a few groups grow. To ask which would be a wait for an accelerator, where all of them are written.
    grown = times.nonzero().reshape(-1) if times.is_cpu else None
    if grown is not None and grown.numel() == 0:
        return counts
    old, joined = (counts, times) if grown is None else (counts[grown], times[grown])
    bins = counts.shape[2]
    shift = joined.to(torch.int64).clamp(max=bins.bit_length())[:, None, None]
    index = torch.bitwise_right_shift(torch.arange(bins, device=counts.device), shift)
    new = torch.zeros_like(old).scatter_add_(2, index.expand_as(old), old)
    return new if grown is None else counts.index_copy(0, grown, new)
