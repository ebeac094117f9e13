"""Sums over the inputs of a layer; they give the output's error for any change of the weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fakequant.distributed import gather
from fakequant.errors import CalibrationError

_ROWS = 16_384
"""Rows that are multiplied at a time: float32 products of them, added in float64."""
_NOISE = 1e-6
"""The share of a mean square below which a variance is what the rounding of float32 products leaves."""

MOST_DRIFT = 0.5
"""The largest share that the squares of a drift may have of those of the rows. That of unrelated rows is 2."""


class InputSums:
    """Sums over the rows that a layer multiplies with the rows of its weight matrix.

    The drift d of a row x is the float model's row minus x; x differs because earlier layers are quantized.

    Attributes:
        moments: the sum of x x^T, float64 [groups, columns, columns].
        total: the sum of x, float64 [groups, columns].
        count: the number of rows of each group.
        drift: the sum of d x^T, as `moments`; None where no drift was given.
        drift_moments: the sum of d d^T.
        drift_total: the sum of d.

    >>> sums = InputSums()
    >>> sums.add(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]))
    >>> sums.moments
    tensor([[[10., 14.],
             [14., 20.]]], dtype=torch.float64)
    """

    def __init__(self) -> None:
        self.moments = self.total = torch.zeros(0)
        self.drift: Tensor | None = None
        self.drift_moments = self.drift_total = torch.zeros(0)
        self.count = 0

    def add(self, rows: Tensor, wanted: Tensor | None = None) -> None:
        """Add rows [groups, rows, columns].

        Args:
            rows: the inputs of the layer.
            wanted: its inputs in the float model; given for all rows or for none.

        Raises:
            CalibrationError: they hold NaN or inf.
        """
        if not bool(rows.isfinite().all()) or not (wanted is None or bool(wanted.isfinite().all())):
            raise CalibrationError("an input holds NaN or inf; leave the batch out")
        if not self.count:
            self._begin(rows.shape[0], rows.shape[2], rows.device, with_drift=wanted is not None)
        for start in range(0, rows.shape[1], _ROWS):
            x = rows[:, start : start + _ROWS].float()
            self.moments += x.mT @ x
            self.total += x.sum(1, dtype=torch.float64)
            if wanted is not None and self.drift is not None:
                d = wanted[:, start : start + _ROWS].float() - x
                self.drift += d.mT @ x
                self.drift_moments += d.mT @ d
                self.drift_total += d.sum(1, dtype=torch.float64)
        self.count += rows.shape[1]

    def merge(self, other: InputSums) -> None:
        """Merge the sums of another `InputSums` of the same layer."""
        if not other.count:
            return
        if not self.count:
            vars(self).update(vars(other))
            return
        self.moments = self.moments + other.moments
        self.total = self.total + other.total
        self.count += other.count
        if self.drift is not None and other.drift is not None:
            self.drift = self.drift + other.drift
            self.drift_moments = self.drift_moments + other.drift_moments
            self.drift_total = self.drift_total + other.drift_total

    def merge_processes(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Merge the sums of all processes of a group; each of them calls this, and gets the same bits.

        Args:
            group: of torch.distributed.
            device: of the layer, for a process that has seen nothing.
        """
        shape = tuple(self.total.shape) if self.count else None
        seen = gather((self.count, shape, self.drift is not None), group)
        shapes = [(shape, with_drift) for _, shape, with_drift in seen if shape is not None]
        if not shapes:
            return
        if not self.count:
            (groups, columns), with_drift = shapes[0]
            self._begin(groups, columns, device, with_drift=with_drift)
        tensors = [self.moments, self.total]
        if self.drift is not None:
            tensors += [self.drift, self.drift_moments, self.drift_total]
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
        self.count = sum(count for count, *_ in seen)

    def _begin(self, groups: int, columns: int, device: torch.device, *, with_drift: bool) -> None:
        self.moments = torch.zeros(groups, columns, columns, dtype=torch.float64, device=device)
        self.total = torch.zeros(groups, columns, dtype=torch.float64, device=device)
        if with_drift:
            self.drift, self.drift_moments = torch.zeros_like(self.moments), torch.zeros_like(self.moments)
            self.drift_total = torch.zeros_like(self.total)

    def about_mean(self) -> InputSums:
        """The sums of x and d about their means: the part that a bias cannot correct; 0 for constant columns."""
        found = InputSums()
        found.count, count = self.count, max(self.count, 1)
        found.total = torch.zeros_like(self.total)
        found.moments = _less_outer(self.moments, self.total, self.total, count)
        # A column that is constant has no moments: what is left of them may make the matrix indefinite.
        squares = self.moments.diagonal(dim1=1, dim2=2)
        varies = (found.moments.diagonal(dim1=1, dim2=2) > _NOISE * squares).double()
        found.moments.mul_(varies[:, :, None]).mul_(varies[:, None, :])
        if self.drift is not None:
            found.drift_total = torch.zeros_like(self.total)
            found.drift = _less_outer(self.drift, self.drift_total, self.total, count).mul_(varies[:, None, :])
            found.drift_moments = _less_outer(self.drift_moments, self.drift_total, self.drift_total, count)
        return found

    def mean(self) -> Tensor:
        """The mean of x [groups, columns]."""
        return self.total / max(self.count, 1)

    def wanted_mean(self) -> Tensor:
        """The mean of x in the float model [groups, columns]."""
        return self.mean() if self.drift is None else self.mean() + self.drift_total / max(self.count, 1)


def _less_outer(moments: Tensor, one: Tensor, other: Tensor, count: int) -> Tensor:
    """The moments less the outer product of two totals by a count; one matrix is made, not three."""
    outer = (one[:, :, None] * other[:, None, :]).div_(count)
    return torch.sub(moments, outer, out=outer)


def drift_share(*parts: InputSums) -> float:
    """The variance of the drift as a share of the variance of the rows; 0 without a drift."""
    drift = rows = 0.0
    for part in parts:
        if part.count and part.drift is not None:
            drift += _spread(part.drift_moments, part.drift_total, part.count)
            rows += _spread(part.moments, part.total, part.count)
    return drift / rows if rows > 0 else 0.0


def _spread(moments: Tensor, total: Tensor, count: int) -> float:
    return float(moments.diagonal(dim1=1, dim2=2).sum() - total.square().sum() / count)


def stacked(parts: Sequence[InputSums]) -> InputSums:
    """The sums of all groups, for a layer whose groups have different inputs.

    Each group is weighted as if it had as many rows as the largest group, so that its mean error counts.

    Args:
        parts: the sums of each group.
    """
    seen = [part for part in parts if part.count]
    if len(parts) == 1 or not seen:
        return parts[0]
    found, count = InputSums(), max(part.count for part in seen)
    for name in ("moments", "total", "drift", "drift_moments", "drift_total"):
        first = getattr(seen[0], name)
        if first is not None and first.numel():
            shares = [getattr(part, name) * (count / part.count) if part.count else first * 0 for part in parts]
            setattr(found, name, torch.cat(shares))
    found.count = count
    return found
