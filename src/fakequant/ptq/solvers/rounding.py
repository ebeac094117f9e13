"""Codes of a weight matrix that lower the error of its product: GPTQ (arXiv 2210.17323) and coordinate descent.

Both minimise tr((Q - T) H (Q - T)^T) over the values Q of a grid, where H is the sum of x x^T over the inputs and T the
matrix to come close to.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fakequant.ptq.solvers.grid import WeightGrid
from fakequant.ptq.solvers.problem import damped_factor

_BLOCK = 128  # columns whose errors are carried over to the others at once
_INNER = 16  # likewise within a block, whose sums stay in a cache


def gptq(target: Tensor, moments: Tensor, grid: WeightGrid, damping: float = 0.05) -> Tensor:
    """Values of a grid for a matrix [out, columns], column by column: later ones make good the errors of earlier ones.

    Columns with the largest moments come first. A column whose input is always 0 gets the nearest values.

    With the damped moments L L^T, columns in reverse order, the error of a row e of T - Q is |e L|^2. Column k of e L
    is e_k L_kk plus the sum of e_i L_ik over the columns i > k, which are chosen before it: so k comes near to T_k plus
    this sum by L_kk. These are the steps of GPTQ without the inverse that it factors (arXiv 2507.18553). The sums are
    of float32, as what the operator rounds.

    Args:
        target: the matrix.
        moments: float64 [columns, columns].
        grid: of the matrix.
        damping: added to the diagonal, as a share of its mean.

    Raises:
        CalibrationError: the moments are not finite, or not positive semidefinite.
    """
    order = moments.diagonal().argsort(descending=True, stable=True).flip(0)
    factor = damped_factor(moments, damping, order)
    chosen, errors = torch.empty_like(target), target.new_empty(target.T.shape, dtype=torch.float32)
    for end in range(len(order), 0, -_BLOCK):
        start = max(end - _BLOCK, 0)
        columns = order[start:end]
        left = target[:, columns].T.float().contiguous()
        shares = (factor[start:, start:end] / factor.diagonal()[start:end]).float()  # L_ik / L_kk
        wanted = torch.addmm(left, shares[end - start :].T, errors[end:])
        _choose(wanted, left, shares[: end - start], errors[start:end], grid, columns.tolist())
        chosen[:, columns] = wanted.T.to(target.dtype)
    return chosen


def _choose(
    wanted: Tensor, left: Tensor, shares: Tensor, errors: Tensor, grid: WeightGrid, columns: Sequence[int]
) -> None:
    """Choose the values of some columns, the last one first, each [out].

    Args:
        wanted: what to come near to, without the errors of these columns; becomes the values.
        left: the matrix.
        shares: of the error of a column that others make good.
        errors: of the values; written.
        grid: of the matrix.
        columns: their numbers in it.
    """
    for end in range(len(columns), 0, -_INNER):
        part = slice(max(end - _INNER, 0), end)
        wanted[part].addmm_(shares[end:, part].T, errors[end:])
        for place in range(end - 1, part.start - 1, -1):
            wanted[place].addmv_(errors[place + 1 : end].T, shares[place + 1 : end, place])
            wanted[place] = grid.column(columns[place], wanted[place])
            torch.sub(left[place], wanted[place], out=errors[place])


def descend(target: Tensor, chosen: Tensor, moments: Tensor, grid: WeightGrid, passes: int = 2) -> Tensor:
    """Values of a grid with a loss that is not larger, by choosing each column anew while the others stay.

    Args:
        target: the matrix to come close to [out, columns].
        chosen: values of the grid.
        moments: float64 [columns, columns].
        grid: of the matrix.
        passes: how many times each column is chosen.
    """
    best = chosen.to(torch.float64, copy=True)
    slope = (best - target) @ moments
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
