"""Rounding up or down, learned for a whole matrix at once: AdaRound (arXiv 2004.10568) from the sums over inputs.

The paper passes inputs through the layer in every iteration. The loss of a linear layer is a function of the sum H of
x x^T alone, so that an iteration is one product of matrices here, all inputs count in it, and no order is drawn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fakequant.errors import CalibrationError, ConfigError
from fakequant.ptq.solvers.problem import WeightGrid

_LOW, _HIGH = -0.1, 1.1  # the sigmoid is stretched to these ends, and reaches 0 and 1 (equation 23)
_FIRST_POWER, _LAST_POWER = 20.0, 2.0  # of the regularizer, from first to last iteration
_WARM = 0.2  # share of the iterations without a regularizer


@torch.no_grad()
def adaround(
    target: Tensor,
    moments: Tensor,
    grid: WeightGrid,
    start: Tensor,
    iterations: int = 500,
    *,
    rate: float = 0.05,
    weight: float = 10.0,
) -> Tensor:
    """Values of a grid for a matrix [out, columns]: each goes up or down, and all are learned together.

    The loss is tr((Q - T) H (Q - T)^T), in parts of that of `start`, and a regularizer that drives values to the grid.
    Each row keeps its start where that is better.

    Args:
        target: the matrix T.
        moments: H, float64 [columns, columns].
        grid: of the matrix.
        start: values of the grid, such as the nearest or those of `gptq`. A value that is further from the target than
            its neighbours is learned between itself and the next value towards the target.
        iterations: of Adam.
        rate: its learning rate.
        weight: of the regularizer.

    Returns:
        Values with a loss that is not larger than that of `start`, row by row.

    Raises:
        CalibrationError: the moments are not finite.
        ConfigError: fewer than one iteration.

    >>> from fakequant.functional import choose_qparams
    >>> weight, x = torch.tensor([[0.9, 0.4, 0.3]]), torch.ones(8, 3, dtype=torch.float64)
    >>> grid = WeightGrid(QuantSpec("int2"), choose_qparams(torch.ones(1, 3), "int2"), weight.shape)
    >>> adaround(weight, x.T @ x, grid, grid.nearest(weight)).sum()
    tensor(2.)
    """
    if iterations < 1:
        raise ConfigError(f"iterations={iterations}: adaround needs at least 1 iteration")
    if not bool(moments.isfinite().all()):
        raise CalibrationError("the sums of inputs are not finite")
    before = _losses(start, target, moments)
    wanted, first = target.float(), start.float()
    low, high = grid.neighbours(wanted)
    further = (first < low) | (first > high)  # then the start is one of the two values
    low, high = grid.neighbours(torch.where(further, torch.nextafter(first, wanted), wanted))
    gap = high - low
    share = torch.where(gap > 0, (wanted - low) / gap, 0.0).clamp(0, 1)
    learned = ((share - _LOW) / (_HIGH - share)).log()  # the sigmoid's inverse, stretched
    optimizer = torch.optim.Adam([learned], rate)
    # The loss of a row of the start counts as one for each of its values, whatever the inputs' units.
    unit = (before / target.shape[1]).clamp(min=torch.finfo(torch.float64).tiny)
    pull = 2 * gap / unit[:, None]
    products = moments.float()
    for step in range(iterations):
        sigmoid = learned.sigmoid()
        stretched = sigmoid * (_HIGH - _LOW) + _LOW
        share = stretched.clamp(0, 1)
        slope = ((low + share * gap - wanted) @ products) * pull
        if (progress := step / iterations) >= _WARM:
            power = _LAST_POWER + (_FIRST_POWER - _LAST_POWER) * (1 - (progress - _WARM) / (1 - _WARM))
            side = 2 * share - 1
            slope -= weight * 2 * power * side.sign() * side.abs() ** (power - 1)
        learned.grad = (slope * (stretched == share) * sigmoid * (1 - sigmoid) * (_HIGH - _LOW)).float()
        optimizer.step()
    chosen = torch.where(learned >= 0, high, low).to(target.dtype)
    better = _losses(chosen, target, moments) < before
    return torch.where(better[:, None], chosen, start.to(target.dtype))


def _losses(values: Tensor, target: Tensor, moments: Tensor) -> Tensor:
    """The loss of each row [out], float64."""
    error = values.double() - target.double()
    return ((error @ moments) * error).sum(1)
