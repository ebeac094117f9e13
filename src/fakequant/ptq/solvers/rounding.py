"""Codes of a weight matrix that lower the error of its product: GPTQ (arXiv 2210.17323) and coordinate descent.

Both minimise tr((Q - T) H (Q - T)^T) over the values Q of a grid, where H is the sum of x x^T over the inputs and T the
matrix to come close to.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fakequant.errors import CalibrationError
from fakequant.ptq.solvers.grid import WeightGrid
from fakequant.ptq.solvers.problem import damped_factor, factored

_BLOCK = 128  # columns whose errors are carried over to the others at once


def gptq(target: Tensor, moments: Tensor, grid: WeightGrid, damping: float = 0.05) -> Tensor:
    """Values of a grid for a matrix [out, columns], column by column: later ones make good the errors of earlier ones.

    Columns with the largest moments come first. A column whose input is always 0 gets the nearest values.

    Args:
        target: the matrix.
        moments: float64 [columns, columns].
        grid: of the matrix.
        damping: added to the diagonal, as a share of its mean.

    Raises:
        CalibrationError: the moments are not finite, or not positive semidefinite.
    """
    order = moments.diagonal().argsort(descending=True, stable=True)
    factor = _inverse_factor(moments, damping, order)
    left = target[:, order].double()
    chosen = torch.empty_like(left)
    columns = order.tolist()
    for start in range(0, len(columns), _BLOCK):
        end = min(start + _BLOCK, len(columns))
        errors = torch.zeros(left.shape[0], end - start, dtype=torch.float64, device=left.device)
        for place in range(start, end):
            chosen[:, place] = grid.column(columns[place], left[:, place])
            error = (left[:, place] - chosen[:, place]) / factor[place, place]
            left[:, place + 1 : end] -= error[:, None] * factor[place, place + 1 : end]
            errors[:, place - start] = error
        left[:, end:] -= errors @ factor[start:end, end:]
    return chosen[:, order.argsort()].to(target.dtype)


def _inverse_factor(moments: Tensor, damping: float, order: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse of damped moments, in the memory of one matrix."""
    factor = damped_factor(moments, damping, order)
    torch.cholesky_inverse(factor, out=factor)
    if not factored(factor, upper=True):
        raise CalibrationError("the sums of inputs are not positive semidefinite")
    return factor


def descend(target: Tensor, chosen: Tensor, moments: Tensor, grid: WeightGrid, passes: int = 2) -> Tensor:
    """Values of a grid with a loss that is not larger, by choosing each column anew while the others stay.

    Args:
        target: the matrix to come close to [out, columns].
        chosen: values of the grid.
        moments: float64 [columns, columns].
        grid: of the matrix.
        passes: how many times each column is chosen.
    """
    best = chosen.double().clone()
    slope = (best - target.double()) @ moments
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
