"""The range of every group of a tensor and the counts of its magnitudes, by the backend that serves the tensor."""

from __future__ import annotations

from torch import Tensor

from fakequant.numerics.histogram import Bins, Observed, observe_by_definition
from fakequant.numerics.qparams import Range, is_concrete

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
