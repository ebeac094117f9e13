"""Codes of a weight matrix that lower the error of its product: GPTQ (arXiv 2210.17323) and coordinate descent.

Both minimise tr((Q - W) H (Q - W)^T) over the values Q of a grid, where H is the sum of x x^T over the inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fakequant.errors import CalibrationError
from fakequant.ptq.grid import Grid

_BLOCK = 128  # columns whose errors are carried over to the others at once
_LADDER = (1.0, 10.0, 100.0, 1000.0)  # times the damping, until H is positive definite in float64


def loss(weight: Tensor, chosen: Tensor, moments: Tensor) -> float:
    """The sum of squared errors of all outputs, for inputs with these moments [columns, columns]."""
    difference = chosen.double() - weight.double()
    return float(((difference @ moments) * difference).sum())


def gptq(weight: Tensor, moments: Tensor, grid: Grid, damping: float = 0.05) -> Tensor:
    """Values of a grid for a matrix [out, columns], column by column: later ones make good the errors of earlier ones.

    Columns with the largest moments come first. A column whose input is always 0 gets the nearest values.

    Args:
        weight: the float matrix.
        moments: float64 [columns, columns].
        grid: of the matrix.
        damping: added to the diagonal, as a share of its mean.

    Raises:
        CalibrationError: the moments are not finite, or not positive semidefinite.
    """
    order = moments.diagonal().argsort(descending=True, stable=True)
    dead = moments.diagonal()[order] <= 0
    factor = _inverse_factor(moments[order][:, order], dead, damping)
    left = weight.double()[:, order].clone()
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
    return chosen[:, order.argsort()].to(weight.dtype)


def _inverse_factor(moments: Tensor, dead: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of the inverse of damped moments; more damping where they are singular."""
    if not bool(moments.isfinite().all()):
        raise CalibrationError("the sums of inputs are not finite")
    mean = moments.diagonal().mean().clamp(min=torch.finfo(torch.float64).tiny)
    identity = torch.eye(len(moments), dtype=torch.float64, device=moments.device)
    for step in _LADDER:
        damped = moments + identity * (step * damping * mean + dead.double() * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper
    raise CalibrationError("the sums of inputs are not positive semidefinite")


def descend(weight: Tensor, chosen: Tensor, moments: Tensor, grid: Grid, passes: int = 2) -> Tensor:
    """Values of a grid with a loss that is not larger, by choosing each column anew while the others stay.

    Args:
        weight: the float matrix [out, columns].
        chosen: values of the grid.
        moments: float64 [columns, columns].
        grid: of the matrix.
        passes: how many times each column is chosen.
    """
    target, best = weight.double(), chosen.double().clone()
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
    return best.to(weight.dtype)
