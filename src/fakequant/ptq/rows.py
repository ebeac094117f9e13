"""Whether a change lowers the error of the output, judged by its rows: in sum, and more than chance explains."""

from __future__ import annotations

from torch import Tensor

SURE, SURE_OF_PART = 1.0, 2.0
"""How many standard errors of the mean log ratio of rows a gain must be: of all changes, and of one of many parts. Of
24 small networks with 24 rows, 14 lost on new rows without a judge, and 1 with these."""
_FLOOR = 0.1
"""Rows of less error than this share of the mean count as that much: a ratio of two small errors is chance."""


def helps(before: Tensor, after: Tensor, sure: float) -> bool:
    """Whether the error of rows falls, in sum and by the mean of their ratios more than chance explains."""
    if before.shape != after.shape or not bool(after.isfinite().all()):
        return False
    changed = before != after
    if not bool(changed.any()) or float(after.sum()) > float(before.sum()):
        return False
    floor = _FLOOR * float(before.mean())
    ratios = ((after[changed] + floor) / (before[changed] + floor)).log()
    chance = float(ratios.std()) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
    return float(ratios.mean()) < -sure * chance
