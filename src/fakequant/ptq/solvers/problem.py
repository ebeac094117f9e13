"""The error of a layer's output as a function of the values of its weight."""

from __future__ import annotations

import torch
from torch import Tensor

from fakequant.errors import CalibrationError
from fakequant.ptq.solvers.sums import InputSums

DAMPING = 0.05
"""The damping that serves most models: see docs/notes/improve.md."""
_PRIOR = 0.5
"""`Problem.prior` for as many rows as columns; it falls by the fourth power of the rows."""
_PANEL = 1024  # columns that are multiplied at once
_ROWS = 128  # rows of moments that are put in order at once
_VALUES = 2**18  # that are added at once: they stay in a cache
_LADDER = (1.0, 10.0, 100.0, 1000.0)  # times the damping, until a matrix is positive definite in float64


class Problem:
    """A weight matrix W, and the sums over the inputs x of its layer.

    The error of values Q is the sum of |W (x + d) - Q x|^2, where d is the drift of x: with E = W - Q and y = W d,
    tr(E H E^T) + 2 tr(P E^T) + sum |y|^2, H the moments of x and P the sum of y x^T. Without a drift only the first
    term is there.

    Args:
        weight: float [out, ...], the groups of a convolution one after the other.
        sums: over the inputs of the layer.
        damping: what solvers add to the diagonal of the moments, as a share of its mean; None: by the number of rows.
        share: how much of the drift solvers make good; None: by the number of rows.
    """

    def __init__(
        self, weight: Tensor, sums: InputSums, damping: float | None = None, share: float | None = None
    ) -> None:
        self._matrix_shape = len(sums.moments), -1, sums.moments.shape[-1]
        self.sums = sums
        self.weight = weight.float().reshape(self._matrix_shape)
        """[groups, outputs, columns]"""
        self._pull = None if sums.drift is None else sums.drift.products
        self._constant = 0.0 if sums.drift is None else float(sums.drift.output_squares.sum())
        columns_per_row = self._matrix_shape[2] / max(sums.count, 1)
        self.prior = _PRIOR * min(columns_per_row, columns_per_row**4)
        """What is added to the diagonal of the moments, as a share of its mean, where values are chosen: the errors of
        columns cancel less for new rows than for those that were seen."""
        self.damping = DAMPING + self.prior if damping is None else damping
        """What solvers add in all: one share for codes and for drift."""
        self.share = 1 / (1 + columns_per_row) if share is None else share
        """How much of the drift solvers make good: few rows show a drift that new rows do not have."""

    def loss(self, chosen: Tensor) -> float:
        """The error of values in the shape of the weight."""
        error = self._error(chosen)
        found = _trace(error, self.sums.moments)
        if self._pull is None:
            return found
        # The terms cancel where the values make good the whole drift: what is below 0 then is rounding.
        return max(found + 2 * _inner(self._pull, error) + self._constant, 0.0)

    def _error(self, chosen: Tensor) -> Tensor:
        return self.weight - chosen.float().reshape(self._matrix_shape)

    def unseen(self, chosen: Tensor) -> float:
        """What new rows may add to the error of values."""
        squares = self._error(chosen).square_().sum((1, 2), dtype=torch.float64)
        return float((squares * self.prior * self._mean_squares()).sum())

    def moments(self, group: int) -> Tensor:
        """A copy of the moments of a group with a damped diagonal; columns that are always 0 stay so."""
        found = self.sums.moments[group].clone()
        diagonal = found.diagonal()
        diagonal.add_(torch.where(diagonal > 0, self.damping * self._mean_squares()[group], 0.0))
        return found

    def _mean_squares(self) -> Tensor:
        """The mean of the diagonal of the moments of each group."""
        return self.sums.moments.diagonal(dim1=1, dim2=2).mean(1)

    def energy(self) -> float:
        """The sum of squares of the output in the float model."""
        found = _trace(self.weight, self.sums.moments)
        if self._pull is not None:
            found += 2 * _inner(self._pull, self.weight) + self._constant
        return max(found, torch.finfo(torch.float64).tiny)

    def pull(self, group: int) -> Tensor | None:
        """What the drift adds to the error of a group, P, as far as solvers make it good."""
        return None if self._pull is None else self._pull[group] * self.share

    def loss_of(self, solved: float, chosen: Tensor) -> float:
        """The error of values whose tr(E H E^T) + 2 tr(P E^T) a solver gave, with P as `pull` gives it."""
        if self._pull is not None:
            solved += 2 * (1 - self.share) * _inner(self._pull, self._error(chosen))
        return max(solved + self._constant, 0.0)

    def missed_mean(self, chosen: Tensor) -> Tensor:
        """What the mean of the wanted output is above that of the output by values [outputs of all groups]."""
        error = self.weight.double() - chosen.double().reshape(self._matrix_shape)
        missed = (error @ self.sums.mean()[:, :, None])[:, :, 0]
        if self.sums.drift is not None:
            missed += self.sums.drift.output_total / max(self.sums.count, 1)
        return missed.reshape(-1)

    def target(self, group: int) -> Tensor:
        """The matrix [outputs, columns] with the smallest error: W, moved to make good the drift.

        GPTAQ (arXiv 2504.02692) and Qronos (arXiv 2505.11695) go to it column by column.
        """
        if self._pull is None:
            return self.weight[group]
        moments = self.sums.moments[group]
        unit = mean_of_diagonal(moments)
        factor, _ = damped_factor(by_unit(moments, unit), self.damping)
        found = by_unit(self._pull[group] * self.share, unit)
        half = torch.linalg.solve_triangular(factor.mT, found, upper=True, left=False)
        torch.linalg.solve_triangular(factor, half, upper=False, left=False, out=found)
        return found.add_(self.weight[group])


def damped_factor(moments: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """The lower Cholesky factor of moments [columns, columns] with a damped diagonal, and what was added to it.

    Args:
        moments: float64 or float32; their upper half is read.
        damping: added to the diagonal, as a share of its mean, more where it fails; a diagonal value of 0 is replaced
            by the mean.

    Raises:
        CalibrationError: the moments are not finite, or not positive semidefinite.
    """
    diagonal = moments.diagonal()
    # A sum is finite only where all values are, and takes no matrix of its own.
    if not bool(moments.sum().isfinite()):
        raise CalibrationError("the sums of inputs are not finite")
    mean = diagonal.mean().clamp(min=torch.finfo(moments.dtype).tiny)
    for step in _LADDER:
        damped, added = moments.clone(), step * damping * mean + (diagonal <= 0) * mean
        damped.diagonal().add_(added)
        if factored(damped.mT):
            return damped.mT, added
    raise CalibrationError("the sums of inputs are not positive semidefinite")


def factored(matrix: Tensor, *, upper: bool = False) -> bool:
    """Replace a symmetric matrix by its Cholesky factor; whether it is positive definite.

    Args:
        matrix: the columns one after the other in memory, so that LAPACK needs no copy: one matrix of 28,672 columns
            takes 6.6 GB.
        upper: whether the factor is upper triangular.
    """
    failed = torch.empty((), dtype=torch.int32, device=matrix.device)
    torch.linalg.cholesky_ex(matrix, upper=upper, out=(matrix, failed))
    return not failed


def _trace(matrix: Tensor, moments: Tensor) -> float:
    """tr(M H M^T) of float32 [groups, outputs, columns] and float64 [groups, columns, columns], by products in float32.

    The moments are sums of such products, too. They are symmetric: each product of two columns is made once.
    """
    found, unit = 0.0, mean_of_diagonal(moments)
    for start in range(0, matrix.shape[2], _PANEL):
        end = min(start + _PANEL, matrix.shape[2])
        panel = by_unit(moments[:, start:, start:end], unit)
        panel[:, end - start :] *= 2
        found += _inner(matrix[:, :, start:] @ panel, matrix[:, :, start:end])
    return found * float(unit)


def mean_of_diagonal(moments: Tensor) -> Tensor:
    """The mean of the diagonals, by which tiny moments stay in the range of float32."""
    return moments.diagonal(dim1=-2, dim2=-1).mean().clamp(min=torch.finfo(torch.float64).tiny)


def by_unit(values: Tensor, unit: Tensor) -> Tensor:
    """Float64 values by a unit, in float32; some rows at a time."""
    found = torch.empty_like(values, dtype=torch.float32)
    for start in range(0, values.shape[-2], _PANEL):
        found[..., start : start + _PANEL, :] = values[..., start : start + _PANEL, :] / unit
    return found


def ordered(moments: Tensor, unit: Tensor, order: Tensor) -> Tensor:
    """The upper half of moments [columns, columns] by a unit, in float32; `order`: of its rows and columns."""
    found = torch.zeros_like(moments, dtype=torch.float32)
    for start in range(0, len(order), _ROWS):
        rows = (moments[order[start : start + _ROWS]] / unit).float()
        found[start : start + _ROWS, start:] = rows[:, order[start:]]
    return found


def sum_of_squares(values: Tensor) -> float:
    """The sum of squares of a matrix, added in float64; some rows at a time."""
    return _inner(values[None], values[None])


def _inner(one: Tensor, other: Tensor) -> float:
    """The sum of products of two tensors, added in float64; some rows at a time."""
    rows = max(_VALUES // max(one[0, :1].numel(), 1), 1)
    pairs = zip(one.flatten(0, 1).split(rows), other.flatten(0, 1).split(rows), strict=True)
    return float(sum(((x * y).sum(dtype=torch.float64) for x, y in pairs), torch.zeros(())))
