"""Choose the ranges, codes and bias of one layer by the error of its output: what the steps of `improve` do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
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
from fakequant.ptq.judging import LayerResult, joined_result
from fakequant.ptq.solvers.problem import Problem, WeightGrid, adaround, descend, gptq_and_loss, structured_zeros
from fakequant.ptq.solvers.sums import InputSums, parts_of_outputs
from fakequant.ptq.solvers.transforms import Parts, searched_params
from fakequant.text import module_name

_LESS, _MORE, _MOST = 0.01, 0.2, 0.8
"""Values that "damping" tries besides the usual one. The error of a model's output differs by a factor of up to 1.4
between them, see docs/notes/improve.md."""
_ROWS = 128
"""Outputs of a matrix on which "damping" is chosen: more outputs lead to the same choice."""
_HALF = 0.9
"""The error on new rows of values chosen by all rows, relative to that of values chosen by half of the rows."""
ENOUGH_ROWS = 16
"""Rows per column from which on the gain of all steps holds on new rows; with fewer, halves of the rows judge steps."""


class Choice(NamedTuple):
    """The chosen values of a weight with their scales, the change of the layer's bias, and the errors of the layer.

    Attributes:
        rows: for each matrix of the weight, the number of rows of inputs from which its values were chosen.
        with_drift: whether the `InputSums` of all matrices had a `Drift`.
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
    """The values of a weight with the smallest error, which is never larger than that of the nearest values.

    Args:
        sums: for each matrix of the weight, the `InputSums` of its rows. A matrix without rows is rounded to
            nearest.

    Raises:
        CalibrationError: the sum of x x^T is not finite, or not positive semidefinite (names the layer).
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
    """The choice with all tensors moved to a device."""
    return tree_map_only(Tensor, lambda x: x.to(device), choice)


def _chosen(name: str, product: MatrixProduct, matrix: Matrix, sums: InputSums, steps: Sequence[str]) -> Choice:
    seen = (sums.count,), sums.drift is not None
    if not sums.count:
        return Choice(matrix.params, matrix.nearest(), None, LayerResult(name), *seen)
    parts, spec = Parts.of(product), matrix.spec
    float_weight = parts.split(matrix.weight)
    bias = product.bias[0] if "bias" in steps else None
    own, about = parts.split_params(matrix.params), sums if bias is None else sums.with_drift(None).about_mean()

    def ranges(about: InputSums) -> QParams:
        return searched_params(float_weight, spec, about.moments, parts, own.scale) if "ranges" in steps else own

    searched = ranges(about)
    solving = [step for step in SOLVERS if step in steps]
    zeros = structured_zeros(float_weight)
    if zeros is not None and bool(parts.split(matrix.nearest()).flatten(1)[zeros].any()):
        zeros = None  # the format has no 0
    grid, how = WeightGrid(spec, searched, float_weight.shape, zeros), _How(bias is not None, share=1.0)
    if sums.halves:
        grids = [grid, grid]
        if _is_few(sums):  # ranges chosen by all rows would have seen the half that judges
            halves = [half if bias is None else half.with_drift(None).about_mean() for half in sums.halves]
            grids = [WeightGrid(spec, ranges(half), float_weight.shape, zeros) for half in halves]
        held_out = _HeldOut(float_weight, sums, WeightGrid(spec, own, float_weight.shape), grids)
        how = held_out.best(steps, next(iter(solving), ""), with_bias=bias is not None)
    elif sums.count == 1:
        how = _How(False, "nearest")  # no other row can judge
    bias = bias if how.with_bias else None
    tried, energy = {"nearest": _Tried(own, parts.split(matrix.nearest()).__getitem__)}, 0.0
    if "ranges" in steps:
        plain_grid = grid if zeros is None else WeightGrid(spec, searched, float_weight.shape)
        tried["ranges"] = _Tried(searched, lambda part: plain_grid.rows(part).nearest_of(float_weight[part]))
    for step in solving:
        tried[step] = _Tried(searched, torch.empty_like(float_weight).__getitem__)
    for part in parts_of_outputs((len(sums.moments), len(float_weight) // len(sums.moments), sums.moments.shape[-1])):
        weight, of_part = float_weight[part], sums.of_outputs(part)
        plain = Problem(weight, of_part)
        solved = Problem(
            weight, of_part if bias is None else about.with_drift_about_mean(of_part), how.damping, how.share
        )
        energy += plain.energy()
        found = _solved(solved, grid.rows(part), solving) if solving else {}
        for step, one in tried.items():
            values, loss = found.get(step, (one.values(part), None))
            if step in found:
                one.values(part).copy_(values.reshape(weight.shape))
            now = one.values(part)
            one.loss += solved.loss(now) if loss is None else loss
            one.unseen += solved.unseen(now)
            if bias is not None:
                one.missed.append(plain.missed_mean(now))
    losses = {step: one.loss / energy for step, one in tried.items()}
    sound = [step for step, loss in losses.items() if loss <= losses["nearest"] and how.allows(step)]
    best = min(sound, key=lambda step: losses[step] * energy + tried[step].unseen)
    before, change = losses["nearest"], None
    if bias is not None:  # the bias corrects the part of the error that the mean makes
        before += sums.count * float(torch.cat(tried["nearest"].missed).square().sum()) / energy
        change = torch.cat(tried[best].missed).reshape(parts.count, -1).sum(0)
    shown = {
        ("bias" if k == "nearest" else k): loss for k, loss in losses.items() if k != "nearest" or bias is not None
    }
    values, result = tried[best].values(slice(None)), LayerResult(name, before, losses[best], shown)
    return Choice(parts.join_params(tried[best].params), parts.join(values), change, result, *seen)


@dataclass
class _Tried:
    """The result of a step, and the error of its values, summed over parts of the outputs.

    Attributes:
        values: returns the values of a slice of outputs; they are computed again if that is fast.
        missed: `Problem.missed_mean` of each part; empty without a bias.
    """

    params: QParams
    values: Callable[[slice], Tensor]
    loss: float = 0.0
    unseen: float = 0.0
    missed: list[Tensor] = field(default_factory=list)


class _Part(NamedTuple):
    """The arguments of a solver: the `Problem` and the `WeightGrid` of one group of a layer."""

    problem: Problem
    group: int
    grid: WeightGrid
    before: Tensor | None
    """The values of the previous solver; None for the first solver."""

    @property
    def weight(self) -> Tensor:
        """The float weight of the group [outputs, columns]."""
        return self.problem.weight[self.group]

    @property
    def start(self) -> Tensor:
        """The values to start from: those of the previous solver, or else the nearest values."""
        return self.grid.nearest(self.weight) if self.before is None else self.before


SOLVERS: dict[str, Callable[[_Part], tuple[Tensor, float] | Tensor]] = {
    "gptq": lambda p: gptq_and_loss(p.weight, p.problem.ordered(p.group), p.grid, p.problem.pull(p.group)),
    "descend": lambda p: descend(p.weight, p.start, p.problem.moments(p.group), p.grid, pull=p.problem.pull(p.group)),
    "adaround": lambda p: adaround(p.problem.target(p.group), p.problem.moments(p.group), p.grid, p.start),
}
"""The steps that choose codes, in their order; "descend" and "adaround" start from the previous step's values."""


def _solved(problem: Problem, grid: WeightGrid, steps: Sequence[str]) -> dict[str, tuple[Tensor, float | None]]:
    """For each step: its values [groups, outputs, columns], and their error, None if the solver computes no error."""
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
    """The settings with which the values of a weight are chosen.

    Attributes:
        with_bias: whether the bias corrects the mean of the error.
        kind: the values that may be chosen: "nearest" alone, "ranges" too, or those of all steps ("solved").
        damping, share: arguments of `Problem`; None: chosen from the number of rows.
    """

    with_bias: bool
    kind: str = "solved"
    damping: float | None = None
    share: float | None = None

    def allows(self, step: str) -> bool:
        """Whether the values of a step may be chosen."""
        return step in ("nearest", self.kind) or self.kind == "solved"


def _is_few(sums: InputSums) -> bool:
    return sums.count < ENOUGH_ROWS * sums.moments.shape[-1]


class _HeldOut:
    """Judges settings: each half of the rows chooses values, and the other half measures their error.

    A half of the rows has twice the noise, and gets twice the damping. A few outputs are enough to judge.

    Args:
        nearest: the `WeightGrid` of the quantizer's present scales.
        ranges: for each half of the rows, the `WeightGrid` of searched ranges.
    """

    def __init__(self, weight: Tensor, sums: InputSums, nearest: WeightGrid, ranges: Sequence[WeightGrid]) -> None:
        groups, columns = len(sums.moments), sums.moments.shape[-1]
        outputs = len(weight) // groups
        part = slice(0, outputs, max(outputs // _ROWS, 1))
        rows = torch.arange(groups * outputs, device="cpu").reshape(groups, -1)[:, part].flatten()
        self._weight = weight.reshape(groups, outputs, columns)[:, part].float()
        self._nearest, self._ranges = [nearest.rows(rows)] * 2, [grid.rows(rows) for grid in ranges]
        some = sums.of_outputs(part)
        self._usual, self._halves = Problem(self._weight, some).damping, some.halves
        self._about_means = list[InputSums]()
        self._judges = [Problem(self._weight, half) for half in reversed(self._halves)]
        self._chance = min(columns, sums.count) ** 0.5 / sums.count
        """The share by which an error may fall by chance."""
        self._is_few = _is_few(sums)

    def best(self, steps: Sequence[str], solver: str, *, with_bias: bool) -> _How:
        """The settings with the least error on the rows that did not choose; with many rows only dampings vary."""

        def rounded(_: InputSums, grid: WeightGrid) -> Tensor:
            return grid.nearest(self._weight.flatten(0, 1)).reshape(self._weight.shape)

        self._solver, tried, bias = solver, dict[_How, float](), with_bias
        if self._is_few or not solver:
            for own in (with_bias, False) if with_bias else (False,):
                tried[_How(own, "nearest")] = self._lost(own, self._nearest, rounded)
                tried[_How(own, "ranges")] = self._lost(own, self._ranges, rounded)
            bias = min(tried, key=tried.__getitem__).with_bias
        has_drift = self._halves[0].drift is not None
        for share in ((1.0, None, 0.0) if self._is_few and has_drift else (None,)) if solver else ():
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
        """The error on the other half of the rows, for values that a solver chose on each half."""
        assert how.damping is not None
        damping = 2 * how.damping

        def solved(half: InputSums, grid: WeightGrid) -> Tensor:
            return _solved(Problem(self._weight, half, damping, how.share), grid, [self._solver])[self._solver][0]

        return self._lost(how.with_bias, self._ranges, solved)

    def _lost(
        self, with_bias: bool, grids: Sequence[WeightGrid], make: Callable[[InputSums, WeightGrid], Tensor]
    ) -> float:
        if with_bias and not self._about_means:
            self._about_means = [half.about_mean() for half in self._halves]
        total, given = 0.0, self._about_means if with_bias else self._halves
        for judge, half, own, grid in zip(self._judges, self._halves, given, grids, strict=True):
            values = make(own, grid)
            total += judge.loss(values)
            if with_bias:
                shift, count = Problem(self._weight, half).missed_mean(values), judge.sums.count
                total += count * float((shift * (shift - 2 * judge.missed_mean(values))).sum())
        return total


def write(name: str, product: MatrixProduct, choice: Choice) -> None:
    """Fix the codes and scales of a weight's chosen values; raises CalibrationError if quantizing changes a value."""
    spec, values = product.quantizer.spec, choice.values
    codes = library.quantize(values, choice.params, spec)
    if not torch.equal(library.dequantize(codes, choice.params, spec, values.dtype), values):
        raise CalibrationError(
            f"{module_name(name)}: its quantizer ({spec}) changes values in {values.dtype} that it has rounded before; "
            "convert the model to float32 first"
        )
    product.fix_codes(codes, choice.params)
    if choice.bias is not None:
        bias, place = product.bias
        assert bias is not None
        bias.data[place] += choice.bias.to(bias.dtype)
    mark_range_current(product)
