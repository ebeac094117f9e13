"""The range of every group of a tensor and the counts of its magnitudes, by the backend that serves the tensor."""

from __future__ import annotations

from torch import Tensor

from fakequant.numerics.histogram import Bins, Observed, observe_by_definition
from fakequant.numerics.qparams import Range, has_values

from .dispatch import choose_for


def observe(values: Tensor, bins: Bins | None = None) -> Observed:
    """The range of values [groups, elements] and, if asked for, their counts; elements >= 1."""
    if not has_values(values):
        return observe_by_definition(values, bins)
    return choose_for(values).observe(values.contiguous(), bins)


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
    if not has_values(values) or values.device != range.lo.device:
        return False
    return choose_for(values).take_in(values, range, bins, counts)
