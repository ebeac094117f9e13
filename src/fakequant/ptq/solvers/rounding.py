"""Codes of a weight matrix that lower the error of its product: GPTQ (arXiv 2210.17323) and coordinate descent.

Both minimise tr(E H E^T) + 2 tr(P E^T), E = W - Q, over the values Q of a grid, where H is the sum of x x^T over the
inputs, and P what their drift adds: see `Problem`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fakequant.ptq.solvers.grid import WeightGrid
from fakequant.ptq.solvers.problem import by_unit, damped_factor, mean_of_diagonal, ordered, sum_of_squares

_BLOCK = 128  # columns whose errors are carried over to the others at once
_INNER = 16  # likewise within a block, whose sums stay in a cache


def gptq(
    target: Tensor, moments: Tensor, grid: WeightGrid, damping: float = 0.05, pull: Tensor | None = None
) -> Tensor:
    """Values of a grid for a matrix [out, columns], column by column: later ones make good the errors of earlier ones.

    Columns with the largest moments come first. A column whose input is always 0 gets the nearest values.

    Args:
        target: the matrix W.
        moments: H, float64 [columns, columns].
        grid: of the matrix.
        damping: added to the diagonal, as a share of its mean.
        pull: P [out, columns], float64.

    Raises:
        CalibrationError: the moments are not finite, or not positive semidefinite.
    """
    return gptq_and_loss(target, moments, grid, damping, pull)[0]


def gptq_and_loss(
    weight: Tensor, moments: Tensor, grid: WeightGrid, damping: float, pull: Tensor | None
) -> tuple[Tensor, float]:
    """The values of `gptq`, and their error.

    With the damped moments L L^T, columns in reverse order, and the pull B L^T, the error of a row e of W - Q is
    |e L + b|^2 less |b|^2. Column k of e L + b is e_k L_kk + b_k plus the sum of e_i L_ik over the columns i > k, which
    are chosen before it: so k comes near to W_k plus this by L_kk. These are the steps of GPTQ without the inverse that
    it factors (arXiv 2507.18553); by how much columns miss what they want is the error. All is float32, as what the
    operator rounds: the damping bounds the condition.
    """
    order, unit = moments.diagonal().argsort(descending=True, stable=True).flip(0), mean_of_diagonal(moments)
    factor, added = damped_factor(ordered(moments, unit, order), damping)
    diagonal = factor.diagonal()
    pulled = None
    if pull is not None:
        pulled = by_unit(pull[:, order], unit)
        torch.linalg.solve_triangular(factor.mT, pulled, upper=True, left=False, out=pulled)
    chosen, errors = torch.empty_like(weight), weight.new_empty(weight.T.shape, dtype=torch.float32)
    loss = 0.0 if pulled is None else -sum_of_squares(pulled)
    for end in range(len(order), 0, -_BLOCK):
        start = max(end - _BLOCK, 0)
        columns = order[start:end]
        left = weight[:, columns].T.float().contiguous()
        shares = factor[start:, start:end] / diagonal[start:end]  # L_ik / L_kk
        wanted = torch.addmm(left, shares[end - start :].T, errors[end:])
        if pulled is not None:
            wanted += (pulled[:, start:end] / diagonal[start:end]).T
        missed = _choose(wanted, left, shares[: end - start], errors[start:end], grid, columns.tolist())
        loss += sum_of_squares(missed.mul_(diagonal[start:end, None]))
        loss -= sum_of_squares(errors[start:end] * added[start:end, None].sqrt())
        chosen[:, columns] = wanted.T.to(weight.dtype)
    return chosen, loss * float(unit)


def _choose(
    wanted: Tensor, left: Tensor, shares: Tensor, errors: Tensor, grid: WeightGrid, columns: Sequence[int]
) -> Tensor:
    """Choose the values of some columns, the last one first, each [out]; returns by how much they miss what they want.

    Args:
        wanted: what to come near to, without the errors of these columns; becomes the values.
        left: the matrix.
        shares: of the error of a column that others make good.
        errors: of the values; written.
        grid: of the matrix.
        columns: their numbers in it.
    """
    missed = torch.empty_like(wanted)
    for end in range(len(columns), 0, -_INNER):
        part = slice(max(end - _INNER, 0), end)
        wanted[part].addmm_(shares[end:, part].T, errors[end:])
        for place in range(end - 1, part.start - 1, -1):
            wanted[place].addmv_(errors[place + 1 : end].T, shares[place + 1 : end, place])
            found = grid.column(columns[place], wanted[place])
            torch.sub(wanted[place], found, out=missed[place])
            torch.sub(left[place], found, out=errors[place])
            wanted[place] = found
    return missed


def descend(
    target: Tensor, chosen: Tensor, moments: Tensor, grid: WeightGrid, passes: int = 2, pull: Tensor | None = None
) -> Tensor:
    """Values of a grid with a loss that is not larger, by choosing each column anew while the others stay.

    Args:
        target: the matrix W [out, columns].
        chosen: values of the grid.
        moments: H, float64 [columns, columns].
        grid: of the matrix.
        passes: how many times each column is chosen.
        pull: P [out, columns], float64.
    """
    best = chosen.to(torch.float64, copy=True)
    slope = (best - target) @ moments
    if pull is not None:
        slope -= pull
    curvature = moments.diagonal()
    for _ in range(passes):
        changed = False
        for column in torch.nonzero(curvature > 0).flatten().tolist():
            wanted = grid.column(column, best[:, column] - slope[:, column] / curvature[column])
            step = wanted - best[:, column]
            gain = -(2 * step * slope[:, column] + step * step * curvature[column])
            step = torch.where(gain > 0, step, 0.0)
            if bool(step.any()):
                changed = True
                best[:, column] += step
                slope += step[:, None] * moments[column]
        if not changed:
            break
    return best.to(target.dtype)
