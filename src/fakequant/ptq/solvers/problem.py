"""The error of a layer's output as a function of the values of its weight.

The steps of `improve` that round: codes of a weight matrix that lower the error of its product, by GPTQ (arXiv
2210.17323), coordinate descent, and AdaRound (arXiv 2004.10568). AdaRound's paper runs batches of inputs through the
layer in every iteration. Here that is not needed: the loss of a linear layer depends on the inputs only through the
sums H and P below. So an iteration is one matrix product that uses all inputs, and no random order of inputs is needed.

All minimise tr(E H E^T) + 2 tr(P E^T), E = W - Q, over the values Q that the scales allow (a grid). H is the sum of
x x^T over the inputs x (their moments), and P what the drift of the inputs adds, see `Problem`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fakequant.errors import CalibrationError, ConfigError
from fakequant.numerics.granularity import PerChannel
from fakequant.numerics.qparams import QParams
from fakequant.numerics.scales import ScaleSpec
from fakequant.numerics.spec import QuantSpec, Rounding
from fakequant.ops import library
from fakequant.ops.backend import ColumnGrid
from fakequant.ops.sweep import nearest, sweep
from fakequant.ptq.solvers.sums import InputSums

STRUCTURED = 0.3
"""The share of zeros in a weight above which the zeros count as a structure of the user's, such as 2:4, and stay."""
_BITS = 33  # steps of a bisection over all float32 numbers


class WeightGrid:
    """The grid of a weight [out, ...]: the values that it can have with fixed scales, as a matrix [out, columns].

    Each column is quantized by the package's own operator with the scales of its elements, so that formats and
    granularities need no special cases.

    Args:
        zeros: where values stay 0, bool [out, columns]; None: nowhere.

    >>> from fakequant.functional import choose_qparams
    >>> weight = torch.tensor([[0.3, -0.7], [1.0, 0.2]])
    >>> grid = WeightGrid(QuantSpec("int2"), choose_qparams(weight, "int2"), weight.shape)
    >>> grid.column(0, weight[:, 0])
    tensor([0., 1.])
    """

    def __init__(self, spec: QuantSpec, params: QParams, shape: torch.Size, zeros: Tensor | None = None) -> None:
        # The operator is fastest for positive scales without offsets: -x by -s and x + m by s have the codes of x, and
        # by a scale of 0 all values are that of the code 0. Where the format of scales has no 0, no scale is 0.
        blocks, plain = spec.granularity.block_shape(shape), {"scale": ScaleSpec(), "rounding": Rounding.NEAREST_EVEN}
        runs = torch.arange(params.scale[:1].numel(), device="cpu").reshape(params.scale[:1].shape)
        self._runs = of_elements(runs, torch.Size([1, *shape[1:]]), (1, *blocks[1:])).flatten().tolist()
        scale = _of_runs(params.scale, shape[0], blocks[0])
        zero = sign = offset = None
        if spec.scale.is_exact:
            zero = _if_any(scale == 0)
            sign = None if _if_any(scale < 0) is None else torch.ones_like(scale).copysign(scale)
            scale = torch.where(scale == 0, 1.0, scale.abs())
        points = None if params.zero_point is None else _of_runs(params.zero_point, shape[0], blocks[0])
        if spec.offset is not None:
            offset, points, plain = points, None, plain | {"offset": None, "symmetric": True}
        spec = spec.replace(granularity=PerChannel(0, 1), **plain)
        zeros, numbers = None if zeros is None else zeros.T.contiguous(), torch.tensor(self._runs, device=scale.device)
        self._columns = ColumnGrid(spec, numbers, scale, points, offset, sign, zero, zeros)

    def column(self, index: int, values: Tensor) -> Tensor:
        """The nearest grid values of a column [out], in the dtype of `values`."""
        run = self._runs[index]
        found = self._nearest(values[:, None], slice(run, run + 1))[:, 0]
        zeros = self._columns.zeros
        return found if zeros is None else found.masked_fill_(zeros[index], 0.0)

    def nearest(self, values: Tensor) -> Tensor:
        """The nearest grid values of a matrix [out, columns], in the dtype of `values`."""
        found, zeros = self._nearest(values, self._columns.runs), self._columns.zeros
        return found if zeros is None else found.masked_fill_(zeros.T, 0.0)

    def nearest_of(self, weight: Tensor) -> Tensor:
        """The nearest grid values of a weight [out, ...]."""
        return self.nearest(weight.flatten(1)).reshape(weight.shape)

    def neighbours(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """For each value of a matrix [out, columns]: the next grid value at or below it, and the next at or above it.

        The search is a bisection over float32 numbers with the operator, so that it serves every format. Both grid
        values are the same if the value is on the grid, or outside of its range.

        >>> from fakequant.functional import choose_qparams
        >>> weight = torch.tensor([[0.3, -0.7], [1.0, 5.0]])
        >>> grid = WeightGrid(QuantSpec("int3"), choose_qparams(weight[:1], "int2"), weight.shape)
        >>> [part.mul(10).round().tolist() for part in grid.neighbours(weight)]
        [[[0.0, -7.0], [7.0, 21.0]], [[7.0, -7.0], [14.0, 21.0]]]
        """
        exact = values.float()
        near = self.nearest(exact)
        rises = near < exact
        end = torch.where(rises, torch.finfo(torch.float32).max, torch.finfo(torch.float32).min)
        first, last = _order(exact), _order(end)  # ranks of numbers that round to `near`, and to another value
        for _ in range(_BITS):
            middle = torch.div(first + last, 2, rounding_mode="floor")
            same = self.nearest(_in_order(middle)) == near
            first, last = torch.where(same, middle, first), torch.where(same, last, middle)
        other = torch.where(near == exact, near, self.nearest(_in_order(last)))
        pair = torch.where(rises, near, other), torch.where(rises, other, near)
        if (zeros := self._columns.zeros) is not None:
            pair = pair[0].masked_fill(zeros.T, 0.0), pair[1].masked_fill(zeros.T, 0.0)
        return pair[0].to(values.dtype), pair[1].to(values.dtype)

    def _nearest(self, values: Tensor, runs: slice | Tensor) -> Tensor:
        scale, *others = (None if own is None else own[runs].T.contiguous() for own in self._columns[2:7])
        assert scale is not None
        return nearest(values, self._columns.spec, scale, *others)

    def of_columns(self, columns: Tensor) -> ColumnGrid:
        """The grid of the columns with these indices, in this order, for `sweep`."""
        return self._columns.columns(columns).each(lambda own: own.float() if own.is_floating_point() else own)

    def rows(self, part: slice | Tensor) -> WeightGrid:
        """The grid of some rows of the matrix."""
        grid, own = object.__new__(WeightGrid), self._columns.each(lambda own: own[:, part].contiguous())
        zeros = None if own.zeros is None else own.zeros[:, part].contiguous()
        grid._runs, grid._columns = self._runs, own._replace(zeros=zeros)
        return grid


def structured_zeros(weight: Tensor) -> Tensor | None:
    """A mask, bool [out, columns], of the structured zeros that pruning left in a weight; None if zeros are few.

    >>> structured_zeros(torch.tensor([[0.0, 1.0], [2.0, 0.0]]))
    tensor([[ True, False],
            [False,  True]])
    """
    zeros = weight.flatten(1) == 0
    return zeros if int(zeros.sum()) > STRUCTURED * zeros.numel() else None


def _if_any(mask: Tensor) -> Tensor | None:
    return mask if bool(mask.any()) else None


def _of_runs(values: Tensor, rows: int, block: int) -> Tensor:
    """Values of groups as [runs, rows], repeated for each row; a run is the columns that share a scale."""
    return values.flatten(1).T.repeat_interleave(block, 1)[:, :rows].contiguous()


def of_elements(values: Tensor, shape: torch.Size, blocks: tuple[int, ...]) -> Tensor:
    """Values of groups, repeated for each element, as a matrix [out, columns]."""
    for axis, (length, block) in enumerate(zip(shape, blocks, strict=True)):
        values = values.repeat_interleave(block, axis).narrow(axis, 0, length)
    return values.reshape(shape[0], -1)


def _order(values: Tensor) -> Tensor:
    """The ranks of float32 numbers in ascending order, int64; both zeros have rank 0."""
    bits = values.view(torch.int32).to(torch.int64)
    return torch.where(bits < 0, -(2**31) - bits, bits)


def _in_order(places: Tensor) -> Tensor:
    """The float32 numbers with these ranks: the inverse of `_order`."""
    return torch.where(places < 0, -(2**31) - places, places).to(torch.int32).view(torch.float32)


_NOT_FINITE = "the sum of x x^T over the layer's inputs x is not finite; leave out batches with very large inputs"
DAMPING = 0.05
"""The damping that serves most models: see docs/notes/improve.md."""
_PRIOR = 0.5
"""`Problem.prior` with as many rows as columns; with more rows, it falls with the fourth power of their number."""
_PANEL = 1024  # rows of moments that are put in float32 at once
_ROWS = 128  # rows of moments that are put in order at once
_VALUES = 2**22  # values of the columns that `gptq` processes at once: 16 MB
_LADDER = (1.0, 10.0, 100.0, 1000.0)  # multiples of the damping, tried until a matrix is positive definite


class Problem:
    """A weight matrix W, and the `InputSums` of its layer's inputs x.

    The error of values Q is the sum of |W (x + d) - Q x|^2, where the drift d is the float model's input minus x. With
    E = W - Q and y = W d, it is tr(E H E^T) + 2 tr(P E^T) + sum |y|^2, where H, the moments, is the sum of x x^T, and P
    the sum of y x^T. Without a drift only the first term is there.

    Args:
        damping: the number added to the diagonal of the moments, as a share of its mean; None: it follows from the
            number of rows.
        share: how much of the drift solvers correct, from 0 to 1; None: it follows from the number of rows.
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
        """What solvers add to the diagonal, as a share of its mean: the same for codes and for the drift."""
        self.share = 1 / (1 + columns_per_row) if share is None else share
        """How much of the drift solvers correct, from 0 to 1: few rows have a drift that new rows do not have."""

    def loss(self, chosen: Tensor) -> float:
        """The squared error of the output with chosen values, which have the shape of the weight."""
        error = self._error(chosen)
        found = _trace(error, self.sums.moments)
        if self._pull is None:
            return found
        # The terms cancel where the values correct the whole drift: a sum below 0 then comes from rounding.
        return max(found + 2 * float(_inner(self._pull, error)) + self._constant, 0.0)

    def _error(self, chosen: Tensor) -> Tensor:
        return self.weight - chosen.float().reshape(self._matrix_shape)

    def unseen(self, chosen: Tensor) -> float:
        """The error, in proportion to `prior`, that chosen values may have on new rows in addition to `loss`."""
        squares = self._error(chosen).square_().sum((1, 2), dtype=torch.float64)
        return float((squares * self.prior * self._mean_squares()).sum())

    def moments(self, group: int) -> Tensor:
        """A copy of the moments of a group with a damped diagonal; a diagonal value of 0 stays 0."""
        found = self.sums.moments[group].clone()
        diagonal = found.diagonal()
        diagonal.add_(torch.where(diagonal > 0, self.damping * self._mean_squares()[group], 0.0))
        return found

    def ordered(self, group: int) -> Ordered:
        """The factored moments of a group for `gptq`, cached in the `InputSums` for all outputs and shares."""
        key = group, self.damping
        if self.sums.ordered[:1] != [key]:
            self.sums.ordered[:] = [key, Ordered.of(self.sums.moments[group], self.damping)]
        return self.sums.ordered[1]

    def _mean_squares(self) -> Tensor:
        """The mean of the diagonal of the moments of each group."""
        return self.sums.moments.diagonal(dim1=1, dim2=2).mean(1)

    def energy(self) -> float:
        """The sum of squares of the output in the float model."""
        found = _trace(self.weight, self.sums.moments)
        if self._pull is not None:
            found += 2 * float(_inner(self._pull, self.weight)) + self._constant
        return max(found, torch.finfo(torch.float64).tiny)

    def pull(self, group: int) -> Tensor | None:
        """`share` times the matrix P of a group [outputs, columns], see `Problem`; None without a drift."""
        return None if self._pull is None else self._pull[group] * self.share

    def loss_of(self, solved: float, chosen: Tensor) -> float:
        """The error of chosen values, from the solver's tr(E H E^T) + 2 tr(P E^T) (`solved`) with the P of `pull`."""
        if self._pull is not None:
            solved += 2 * (1 - self.share) * float(_inner(self._pull, self._error(chosen)))
        return max(solved + self._constant, 0.0)

    def missed_mean(self, chosen: Tensor) -> Tensor:
        """The mean float output minus the mean output with chosen values [outputs of all groups]."""
        error = self.weight.double() - chosen.double().reshape(self._matrix_shape)
        missed = (error @ self.sums.mean()[:, :, None])[:, :, 0]
        if self.sums.drift is not None:
            missed += self.sums.drift.output_total / max(self.sums.count, 1)
        return missed.reshape(-1)

    def target(self, group: int) -> Tensor:
        """The float matrix [outputs, columns] of a group with the smallest error: W, changed to correct the drift.

        GPTAQ (arXiv 2504.02692) and Qronos (arXiv 2505.11695) approach it column by column.
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
    """The lower Cholesky factor of moments with a damped diagonal, and the values added to the diagonal, [columns].

    Args:
        moments: [columns, columns], float64 or float32; only the upper half is read.
        damping: what is added to the diagonal, as a share of its mean; more if the factor does not exist. A diagonal
            value of 0 is replaced by the mean.

    Raises:
        CalibrationError: the moments are not finite, or not positive semidefinite.
    """
    diagonal = moments.diagonal()
    # A sum is finite only where all values are, and takes no matrix of its own.
    if not bool(moments.sum().isfinite()):
        raise CalibrationError(_NOT_FINITE)
    mean = diagonal.mean().clamp(min=torch.finfo(moments.dtype).tiny)
    for step in _LADDER:
        damped, added = moments.clone(), step * damping * mean + (diagonal <= 0) * mean
        damped.diagonal().add_(added)
        if factored(damped.mT):
            return damped.mT, added
    raise CalibrationError(
        "the sum of x x^T over the layer's inputs x is not positive semidefinite for any damping; leave out batches "
        "with very large inputs"
    )


def factored(matrix: Tensor) -> bool:
    """Replace a symmetric matrix by its Cholesky factor, in place; returns False if it is not positive definite.

    Columns lie one after the other in memory, so that LAPACK needs no copy: a matrix of 28,672 columns takes 6.6 GB.
    """
    failed = torch.empty((), dtype=torch.int32, device=matrix.device)
    torch.linalg.cholesky_ex(matrix, out=(matrix, failed))
    return not failed


def _trace(matrix: Tensor, moments: Tensor) -> float:
    """tr(M H M^T) of `matrix` M [groups, outputs, columns] and `moments` H, by products in float32.

    The moments are sums of such products, too. They are symmetric: each product of two columns is made once.
    """
    found, unit = moments.new_zeros(()), mean_of_diagonal(moments)
    width = library.at_once(matrix) // _PANEL
    for start in range(0, matrix.shape[2], width):
        end = min(start + width, matrix.shape[2])
        panel = by_unit(moments[:, start:, start:end], unit)
        panel[:, end - start :] *= 2
        found += _inner(matrix[:, :, start:] @ panel, matrix[:, :, start:end])
    return float(found * unit)


def mean_of_diagonal(moments: Tensor) -> Tensor:
    """The mean of all diagonals, by which moments are divided to stay in the range of float32."""
    return moments.diagonal(dim1=-2, dim2=-1).mean().clamp(min=torch.finfo(torch.float64).tiny)


def by_unit(values: Tensor, unit: Tensor) -> Tensor:
    """Float64 values divided by a unit, as float32."""
    found = torch.empty_like(values, dtype=torch.float32)
    for start in range(0, values.shape[-2], _PANEL):
        part = slice(start, start + _PANEL)
        torch.div(values[..., part, :], unit, out=found[..., part, :])
    return found


def ordered(moments: Tensor, unit: Tensor, order: Tensor) -> Tensor:
    """The upper half of moments [columns, columns] over `unit`, as float32, with rows and columns as in `order`."""
    found = torch.zeros_like(moments, dtype=torch.float32)
    for start in range(0, len(order), _ROWS):
        rows = by_unit(moments[order[start : start + _ROWS]], unit)
        found[start : start + _ROWS, start:] = rows[:, order[start:]]
    return found


def _inner(one: Tensor, other: Tensor) -> Tensor:
    """The sum of elementwise products of two tensors in float64, first within rows, so that chunks change no bit."""
    size = max(library.at_once(one) // max(one.shape[-1], 1), 1)
    pairs = zip(one.flatten(0, -2).split(size), other.flatten(0, -2).split(size), strict=True)
    rows = [(x * y).sum(-1, dtype=torch.float64) for x, y in pairs]
    return torch.cat(rows).sum()


_BLOCK = 128  # columns whose errors are carried over to the other columns at once


class Ordered(NamedTuple):
    """The factor L of damped moments L L^T, with columns in reverse order, for `gptq`.

    Attributes:
        factor: L, float32.
        added: the values that the damping added to the diagonal.
    """

    order: Tensor
    unit: Tensor
    factor: Tensor
    added: Tensor

    @classmethod
    def of(cls, moments: Tensor, damping: float) -> Ordered:
        """The factor of moments [columns, columns] with a damped diagonal; raises the errors of `damped_factor`."""
        order, unit = moments.diagonal().argsort(descending=True, stable=True).flip(0), mean_of_diagonal(moments)
        return cls(order, unit, *damped_factor(ordered(moments, unit, order), damping))


def gptq(
    target: Tensor, moments: Tensor, grid: WeightGrid, damping: float = 0.05, pull: Tensor | None = None
) -> Tensor:
    """Values of a grid for a matrix [out, columns], column by column: later columns correct the errors of earlier ones.

    Columns with the largest moments come first. A column whose input is always 0 gets the nearest values.

    Args:
        target: the matrix W.
        moments: H, float64 [columns, columns].
        grid: the values that the matrix can have.
        damping: the number that is added to the diagonal, as a share of its mean.
        pull: P, the part of the drift, [out, columns], float64.

    Raises:
        CalibrationError: the moments are not finite, or not positive semidefinite.
    """
    return gptq_and_loss(target, Ordered.of(moments, damping), grid, pull)[0]


def gptq_and_loss(
    weight: Tensor, moments: Ordered, grid: WeightGrid, pull: Tensor | None = None
) -> tuple[Tensor, float]:
    """The values of `gptq`, and their error.

    With the damped moments L L^T, columns in reverse order, and the pull B L^T, the error of a row e of W - Q is
    |e L + b|^2 minus |b|^2. Column k of e L + b is e_k L_kk + b_k plus the sum S of e_i L_ik over the columns i > k,
    which are chosen before column k. So Q_k is W_k plus (S + b_k) / L_kk, rounded. These are the steps of GPTQ, but
    without its inverse of the moments (arXiv 2507.18553); the error follows from the rounding errors of the columns.
    All is float32, like the numbers that the operator rounds; the damping bounds the condition number.
    """
    order, unit, factor, added = moments
    diagonal = factor.diagonal()
    pulled = None
    if pull is not None:
        pulled = by_unit(pull[:, order], unit)
        torch.linalg.solve_triangular(factor.mT, pulled, upper=True, left=False, out=pulled)
    chosen, errors = torch.empty_like(weight), weight.new_empty(weight.T.shape, dtype=torch.float32)
    loss = weight.new_zeros((), dtype=torch.float64)
    if pulled is not None:
        loss -= _inner(pulled, pulled)
    size = max(_VALUES // max(len(weight), 1) // _BLOCK, 1) * _BLOCK
    for last in range(len(order), 0, -size):
        first = max(last - size, 0)
        columns = order[first:last]
        left, of_panel = weight[:, columns].T.float().contiguous(), grid.of_columns(columns)
        moved = left if pulled is None else left + (pulled[:, first:last] / diagonal[first:last]).T
        wanted, missed = torch.empty_like(left), torch.empty_like(left)
        for end in range(last, first, -_BLOCK):
            start = max(end - _BLOCK, first)
            own = slice(start - first, end - first)
            shares = factor.mT[start:end, start:] / diagonal[start:end, None]  # L_ik / L_kk of the error of column i
            torch.addmm(moved[own], shares[:, end - start :], errors[end:], out=wanted[own])
            sweep(wanted[own], left[own], shares, errors[start:end], missed[own], of_panel.columns(own))
        loss += _inner(missed.mul_(diagonal[first:last, None]), missed)
        spread = errors[first:last] * added[first:last, None].sqrt()
        loss -= _inner(spread, spread)
        chosen[:, columns] = wanted.T.to(weight.dtype)
    return chosen, float(loss * unit)


def descend(
    target: Tensor, chosen: Tensor, moments: Tensor, grid: WeightGrid, passes: int = 2, pull: Tensor | None = None
) -> Tensor:
    """Values of a grid with no larger loss than those chosen before, by coordinate descent: one column at a time.

    Args:
        target: the matrix W [out, columns].
        chosen: values of the grid.
        moments: H, float64 [columns, columns].
        grid: the values that the matrix can have.
        passes: how many times each column is chosen.
        pull: P, the part of the drift, [out, columns], float64.
    """
    # [columns, out], so that the values of a column lie together. What the steps of a block change in the slopes of
    # others is added when all are taken: one product in place of one update of the whole matrix per column.
    best = chosen.T.to(torch.float64, copy=True).contiguous()
    slopes = moments @ (best - target.T)
    if pull is not None:
        slopes -= pull.T
    columns = torch.nonzero(moments.diagonal() > 0).flatten()
    numbers = columns.tolist()
    for _ in range(passes):
        changed = torch.zeros((), dtype=torch.bool, device=best.device)
        for start in range(0, len(numbers), _BLOCK):
            block = columns[start : start + _BLOCK]
            rows, values, steps = moments[block], best[block], best.new_empty(len(block), best.shape[1])
            before, inside = slopes[block], rows[:, block]
            for place, column in enumerate(numbers[start : start + _BLOCK]):
                slope = torch.addmv(before[place], steps[:place].T, inside[:place, place])
                curvature = inside[place, place]
                step = grid.column(column, values[place] - slope / curvature) - values[place]
                gain = -(2 * step * slope + step * step * curvature)
                steps[place] = torch.where(gain > 0, step, 0.0)
            best[block] += steps
            slopes.addmm_(rows.T, steps)
            changed |= steps.any()
        if not bool(changed):
            break
    return best.T.to(target.dtype, copy=True).contiguous()


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
    """Values of a grid for a matrix [out, columns]: each is rounded up or down, and all are learned together.

    The loss is tr((Q - T) H (Q - T)^T) over that of `start`, plus a regularizer that drives values to the grid.
    A row keeps its values of `start` if these are better.

    Args:
        target: the matrix T.
        moments: H, float64 [columns, columns].
        grid: the values that the matrix can have.
        start: values of the grid, such as the nearest or those of `gptq`. A value that is further from the target than
            its neighbours is learned between itself and the next value towards the target.
        iterations: the steps of Adam.
        rate: the learning rate of Adam.
        weight: the weight of the regularizer.

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
        raise CalibrationError(_NOT_FINITE)
    before = _losses(start, target, moments)
    wanted, first = target.float(), start.float()
    low, high = grid.neighbours(wanted)
    further = (first < low) | (first > high)  # then the start is `low` or `high`
    low, high = grid.neighbours(torch.where(further, torch.nextafter(first, wanted), wanted))
    gap = high - low
    share = torch.where(gap > 0, (wanted - low) / gap, 0.0).clamp(0, 1)
    learned = ((share - _LOW) / (_HIGH - share)).log()  # the sigmoid's inverse, stretched
    optimizer = torch.optim.Adam([learned], rate)
    # The loss is scaled so that each row starts with 1 for each of its values, whatever the inputs' units.
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
