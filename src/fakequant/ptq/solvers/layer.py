"""Choose the ranges, codes and bias of one layer by the error of its output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fakequant.distributed import Ranks
from fakequant.errors import CalibrationError
from fakequant.model.weights import mark_range_current
from fakequant.nn.products import Matrix, MatrixProduct
from fakequant.numerics.qparams import QParams
from fakequant.ops import library
from fakequant.ptq.results import LayerResult, joined_result
from fakequant.ptq.solvers.adaround import adaround
from fakequant.ptq.solvers.problem import Problem, WeightGrid, descend, gptq_and_loss, structured_zeros
from fakequant.ptq.solvers.sums import InputSums
from fakequant.ptq.solvers.transforms import Parts, searched_params
from fakequant.text import module_name

_LESS, _MORE, _MOST = 0.01, 0.2, 0.8
"""What "damping" tries beside the usual one. Models differ by up to 1.4 in the error of their output by these, see
docs/notes/improve.md."""
_ROWS = 128
"""Outputs of a matrix by which "damping" is chosen: more of them say the same."""
_HALF = 0.9
"""What a solution of all rows loses on others, as a share of what that of half of the rows does."""
ENOUGH_ROWS = 16
"""Rows for each column from which on all steps hold on other rows; with fewer, halves of the rows say which do."""


class Choice(NamedTuple):
    """Values of a weight, the parameters that give them, and what they make of the layer.

    Attributes:
        rows: by how many rows each matrix was chosen.
        with_drift: whether their sums had a drift.
    """

    params: QParams
    values: Tensor
    bias: Tensor | None
    result: LayerResult
    rows: tuple[int, ...] = ()
    with_drift: bool = False


def choose(
    name: str, product: MatrixProduct, sums: Iterable[InputSums], steps: Sequence[str], processes: Ranks
) -> Choice:
    """The values of one weight that lose least, never more than the nearest ones.

    Args:
        name: of the weight.
        product: in float.
        sums: for each matrix of the weight those over the rows of its inputs. A matrix without rows keeps the nearest
            values.
        steps: names of `fakequant.ptq.STEPS`.
        processes: that share the matrices.

    Raises:
        CalibrationError: the sums have no solution (names the layer).
    """

    def solve(given: tuple[Matrix, InputSums], _: Ranks) -> Choice:
        try:
            return _chosen(name, product, *given, steps)
        except CalibrationError as error:
            raise CalibrationError(f"{module_name(name)}: {error}") from error

    found = processes.share(zip(product.matrices(), sums, strict=True), solve)
    chosen = [on_device(own, product.tensor.device) for own in found]
    params, values = [own.params for own in chosen], [own.values for own in chosen]
    values, params = product.joined(values, params)
    rows, with_drift = tuple(n for own in chosen for n in own.rows), all(own.with_drift for own in chosen)
    return Choice(params, values, chosen[0].bias, joined_result([own.result for own in chosen]), rows, with_drift)


def on_device(choice: Choice, device: torch.device) -> Choice:
    """A choice with all its tensors on a device."""
    return tree_map_only(Tensor, lambda x: x.to(device), choice)


def _chosen(name: str, product: MatrixProduct, matrix: Matrix, sums: InputSums, steps: Sequence[str]) -> Choice:
    seen = (sums.count,), sums.drift is not None
    if not sums.count:
        return Choice(matrix.params, matrix.nearest, None, LayerResult(name), *seen)
    parts, spec = Parts.of(product), matrix.spec
    float_weight = parts.split(matrix.weight)
    bias = product.bias[0] if "bias" in steps else None
    plain, own = Problem(float_weight, sums), parts.split_params(matrix.params)
    about = sums if bias is None else sums.about_mean()

    def ranges(about: InputSums) -> QParams:
        return searched_params(float_weight, spec, about.moments, parts, own.scale) if "ranges" in steps else own

    searched = ranges(about)
    solving = [step for step in SOLVERS if step in steps]
    zeros = structured_zeros(float_weight)
    if zeros is not None and bool(parts.split(matrix.nearest).flatten(1)[zeros].any()):
        zeros = None  # the format has no 0
    grid, how = WeightGrid(spec, searched, float_weight.shape, zeros), _How(bias is not None, share=1.0)
    if sums.halves:
        nearest, grids = WeightGrid(spec, own, float_weight.shape), [grid, grid]
        if _is_few(plain):  # ranges of all rows would know those that judge
            halves = sums.halves if bias is None else [half.about_mean() for half in sums.halves]
            grids = [WeightGrid(spec, ranges(half), float_weight.shape, zeros) for half in halves]
        how = _HeldOut(plain, nearest, grids, next(iter(solving), "")).best(steps, with_bias=bias is not None)
    elif sums.count == 1:
        how = _How(False, "nearest")  # no other row can judge
    bias, about = (bias, about) if how.with_bias else (None, sums)
    solved = Problem(plain.weight, about, how.damping, how.share)
    energy, tried = plain.energy(), dict[str, _Tried]()

    def judge(step: str, params: QParams, values: Callable[[], Tensor], loss: float | None = None) -> None:
        now = values()
        loss = solved.loss(now) if loss is None else loss
        tried[step] = _Tried(params, values, loss / energy, solved.unseen(now))

    judge("nearest", own, lambda: parts.split(matrix.nearest))
    if "ranges" in steps:
        judge("ranges", searched, lambda: library.fake_quantize(float_weight, searched, spec))
    for step, (values, loss) in _solved(solved, grid, solving).items() if solving else ():
        own_values = values.reshape(float_weight.shape).to(float_weight.dtype)
        judge(step, searched, lambda own_values=own_values: own_values, loss)
    first = tried["nearest"]
    sound = [step for step, own in tried.items() if own.loss <= first.loss and how.allows(step)]
    best = min(sound, key=lambda step: tried[step].loss * energy + tried[step].unseen)
    params, values = tried[best].params, tried[best].values()
    before = first.loss
    if bias is not None:  # what the bias makes good is what the mean adds
        before += sums.count * float(plain.missed_mean(first.values()).square().sum()) / energy
    result = LayerResult(
        name,
        before,
        tried[best].loss,
        {("bias" if k == "nearest" else k): v.loss for k, v in tried.items() if k != "nearest" or bias is not None},
    )
    change = None if bias is None else plain.missed_mean(values).reshape(parts.count, -1).sum(0)
    return Choice(parts.join_params(params), parts.join(values), change, result, *seen)


class _Tried(NamedTuple):
    """Parameters and values of a weight, and what they lose."""

    params: QParams
    values: Callable[[], Tensor]
    """Makes them anew where that is fast: as many as columns times outputs."""
    loss: float
    """The error as a share of the energy."""
    unseen: float


class _Part(NamedTuple):
    """What a solver gets: one group of a layer."""

    problem: Problem
    group: int
    grid: WeightGrid
    before: Tensor | None
    """The values that the solver before gave."""

    @property
    def weight(self) -> Tensor:
        """The values [outputs, columns] in float."""
        return self.problem.weight[self.group]

    @property
    def start(self) -> Tensor:
        """The values to go on from."""
        return self.grid.nearest(self.weight) if self.before is None else self.before


SOLVERS: dict[str, Callable[[_Part], tuple[Tensor, float] | Tensor]] = {
    "gptq": lambda p: gptq_and_loss(
        p.weight, p.problem.sums.moments[p.group], p.grid, p.problem.damping, p.problem.pull(p.group)
    ),
    "descend": lambda p: descend(p.weight, p.start, p.problem.moments(p.group), p.grid, pull=p.problem.pull(p.group)),
    "adaround": lambda p: adaround(p.problem.target(p.group), p.problem.moments(p.group), p.grid, p.start),
}
"""The steps that choose codes, in their order; each goes on from the values of the one before it."""


def _solved(problem: Problem, grid: WeightGrid, steps: Sequence[str]) -> dict[str, tuple[Tensor, float | None]]:
    """The values [groups, outputs, columns] after each step, and their error where the step gives it."""
    groups, outputs, _ = problem.weight.shape
    found: dict[str, list[Tensor]] = {step: [] for step in steps}
    losses = dict[str, float]()
    for group in range(groups):
        rows, values = grid.rows(slice(group * outputs, (group + 1) * outputs)), None
        for step in steps:
            own = SOLVERS[step](_Part(problem, group, rows, values))
            values, loss = own if isinstance(own, tuple) else (own, None)
            if loss is not None:
                losses[step] = losses.get(step, 0.0) + loss
            found[step].append(values)
    # `stack` copies, which the one group of most layers does not need.
    whole = {step: torch.stack(own) if groups > 1 else own[0][None] for step, own in found.items()}
    return {step: (own, problem.loss_of(losses[step], own) if step in losses else None) for step, own in whole.items()}


class _How(NamedTuple):
    """How a weight is chosen.

    Attributes:
        with_bias: whether its bias makes good the mean of the error.
        kind: what is chosen at most: "nearest", "ranges" or "solved" values.
        damping, share: of the problem; None: by the number of rows.
    """

    with_bias: bool
    kind: str = "solved"
    damping: float | None = None
    share: float | None = None

    def allows(self, step: str) -> bool:
        """Whether the values of a step may be chosen."""
        return step in ("nearest", self.kind) or self.kind == "solved"


def _is_few(problem: Problem) -> bool:
    return problem.sums.count < ENOUGH_ROWS * problem.weight.shape[2]


class _HeldOut:
    """What is chosen for one half of the rows is judged on the other half, and the other way round.

    Half of the rows have twice the noise, so that they get twice the damping. A few outputs tell as much as all.

    Args:
        problem: of all rows.
        nearest: the grid of the quantizer as it is.
        ranges: for each half that by searched ranges.
        solver: the step that solves; "" for none.
    """

    def __init__(self, problem: Problem, nearest: WeightGrid, ranges: Sequence[WeightGrid], solver: str) -> None:
        groups, outputs, _ = problem.weight.shape
        part = slice(0, outputs, max(outputs // _ROWS, 1))
        rows = torch.arange(groups * outputs).reshape(groups, -1)[:, part].flatten()
        self._weight, self._usual, self._solver = problem.weight[:, part], problem.damping, solver
        self._nearest, self._ranges = [nearest.rows(rows)] * 2, [grid.rows(rows) for grid in ranges]
        self._halves = [half.of_outputs(part) for half in problem.sums.halves]
        self._judges = [Problem(self._weight, half) for half in reversed(self._halves)]
        self._chance = min(problem.weight.shape[2], problem.sums.count) ** 0.5 / problem.sums.count
        """The share of an error by which it may fall on few rows by chance."""
        self._is_few = _is_few(problem)

    def best(self, steps: Sequence[str], *, with_bias: bool) -> _How:
        """How values lose least on rows that did not choose them. With many rows only the damping is in question."""

        def rounded(_: InputSums, grid: WeightGrid) -> Tensor:
            return grid.nearest(self._weight.flatten(0, 1)).reshape(self._weight.shape)

        tried, solves, bias = dict[_How, float](), bool(self._solver), with_bias
        if self._is_few or not solves:
            for own in (with_bias, False) if with_bias else (False,):
                tried[_How(own, "nearest")] = self._lost(own, self._nearest, rounded)
                tried[_How(own, "ranges")] = self._lost(own, self._ranges, rounded)
            bias = min(tried, key=tried.__getitem__).with_bias
        has_drift = self._halves[0].drift is not None
        for share in ((1.0, None, 0.0) if self._is_few and has_drift else (None,)) if solves else ():
            tried[_How(bias, "solved", None, share)] = _HALF * self._lost_by(_How(bias, "", self._usual, share))
        found, plain = min(tried, key=tried.__getitem__), _How(False, "nearest")
        if self._is_few and tried[found] > (1 - self._chance) * tried[plain]:
            return plain
        if "damping" not in steps or found.kind != "solved":
            return found
        dampings = {self._usual: tried[found] / _HALF}
        for further in (lambda: _MORE, lambda: _MOST if min(dampings, key=dampings.__getitem__) == _MORE else _LESS):
            damping = further()
            dampings[damping] = self._lost_by(found._replace(damping=damping))
        return found._replace(damping=min(dampings, key=dampings.__getitem__))

    def _lost_by(self, how: _How) -> float:
        """The error of solved values on the rows of the other halves."""
        assert how.damping is not None
        damping = 2 * how.damping

        def solved(half: InputSums, grid: WeightGrid) -> Tensor:
            return _solved(Problem(self._weight, half, damping, how.share), grid, [self._solver])[self._solver][0]

        return self._lost(how.with_bias, self._ranges, solved)

    def _lost(
        self, with_bias: bool, grids: Sequence[WeightGrid], make: Callable[[InputSums, WeightGrid], Tensor]
    ) -> float:
        total = 0.0
        for judge, half, grid in zip(self._judges, self._halves, grids, strict=True):
            values = make(half.about_mean() if with_bias else half, grid)
            total += judge.loss(values)
            if with_bias:
                shift, count = Problem(self._weight, half).missed_mean(values), judge.sums.count
                total += count * float((shift * (shift - 2 * judge.missed_mean(values))).sum())
        return total


def write(name: str, product: MatrixProduct, choice: Choice) -> None:
    """Fix the codes of chosen values of a weight, with their scales.

    Raises:
        CalibrationError: they are not those of codes, because the weight has a dtype that cannot hold them.
    """
    spec, values = product.quantizer.spec, choice.values
    codes = library.quantize(values, choice.params, spec)
    if not torch.equal(library.dequantize(codes, choice.params, spec, values.dtype), values):
        raise CalibrationError(
            f"{module_name(name)}: its quantizer changes values that it gave, {spec} in {values.dtype}; "
            "convert the model to float32 first"
        )
    product.fix_codes(codes, choice.params)
    if choice.bias is not None:
        bias, place = product.bias
        assert bias is not None
        bias.data[place] += choice.bias.to(bias.dtype)
    mark_range_current(product)
