"""Choose the ranges, codes and bias of one layer by the error of its output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fakequant.distributed import Together
from fakequant.errors import CalibrationError
from fakequant.model.weights import note_weight
from fakequant.nn.products.product import Matrix, MatrixProduct
from fakequant.numerics.qparams import QParams
from fakequant.ops import library
from fakequant.ptq.results import LayerResult, joined_result
from fakequant.ptq.solvers.adaround import adaround
from fakequant.ptq.solvers.grid import WeightGrid, structured_zeros
from fakequant.ptq.solvers.parts import Parts
from fakequant.ptq.solvers.problem import Problem
from fakequant.ptq.solvers.ranges import searched_params
from fakequant.ptq.solvers.rounding import descend, gptq_and_loss
from fakequant.ptq.solvers.sums import InputSums
from fakequant.text import module_name

_LESS, _MORE, _MOST = 0.01, 0.2, 0.8
"""What "damping" tries beside the usual one. Models differ by up to 1.4 in the error of their output by these, see
docs/notes/improve.md."""
_ROWS = 128
"""Outputs of a matrix by which "damping" is chosen: more of them say the same."""


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
    name: str, product: MatrixProduct, sums: Iterable[InputSums], steps: Sequence[str], processes: Together
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

    def solve(given: tuple[Matrix, InputSums], _: Together) -> Choice:
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
    plain = Problem(float_weight, sums)
    solved = plain if bias is None else Problem(plain.weight, sums.about_mean())
    energy, tried = plain.energy(), dict[str, _Tried]()

    def judge(step: str, params: QParams, values: Callable[[], Tensor], loss: float | None = None) -> None:
        now = values()
        loss = solved.loss(now) if loss is None else loss
        tried[step] = _Tried(params, values, loss / energy, solved.unseen(now))

    params = parts.split_params(matrix.params)
    judge("nearest", params, lambda: parts.split(matrix.nearest))
    if "ranges" in steps:
        found = params = searched_params(float_weight, spec, solved.sums.moments, parts, params.scale)
        judge("ranges", found, lambda: library.fake_quantize(float_weight, found, spec))
    if solving := [step for step in SOLVERS if step in steps]:
        zeros = structured_zeros(float_weight)
        if zeros is not None and bool(parts.split(matrix.nearest).flatten(1)[zeros].any()):
            zeros = None  # the format has no 0
        grid = WeightGrid(spec, params, float_weight.shape, zeros)
        if "damping" in steps and sums.halves:
            solved = Problem(plain.weight, solved.sums, _best_damping(plain, grid, solving[0], bias is not None))
        for step, (values, loss) in _solved(solved, grid, solving).items():
            own = values.reshape(float_weight.shape).to(float_weight.dtype)
            judge(step, params, lambda own=own: own, loss)
    first = tried["nearest"]
    sound = [step for step, own in tried.items() if own.loss <= first.loss]
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
    def moments(self) -> Tensor:
        """Damped, with a matrix of their own."""
        return self.problem.moments(self.group)

    def start(self) -> Tensor:
        """The values to go on from."""
        return self.grid.nearest(self.weight) if self.before is None else self.before


def _gptq(p: _Part) -> tuple[Tensor, float]:
    problem = p.problem
    return gptq_and_loss(p.weight, problem.sums.moments[p.group], p.grid, problem.damping, problem.pull(p.group))


def _descend(p: _Part) -> Tensor:
    return descend(p.weight, p.start(), p.moments, p.grid, pull=p.problem.pull(p.group))


def _adaround(p: _Part) -> Tensor:
    return adaround(p.problem.target(p.group), p.moments, p.grid, p.start())


SOLVERS: dict[str, Callable[[_Part], tuple[Tensor, float] | Tensor]] = {
    "gptq": _gptq,
    "descend": _descend,
    "adaround": _adaround,
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


def _best_damping(problem: Problem, grid: WeightGrid, step: str, about_mean: bool) -> float:
    """The damping by which values that are chosen for half of the rows lose least on the other half.

    Half of the rows have twice the noise, so that they get twice the damping. Where the halves say nothing, it is the
    usual one.
    """
    groups, outputs, _ = problem.weight.shape
    part = slice(0, outputs, max(outputs // _ROWS, 1))
    weight = problem.weight[:, part]
    grid = grid.rows(torch.arange(groups * outputs).reshape(groups, -1)[:, part].flatten())
    halves = [(half.about_mean() if about_mean else half).of_outputs(part) for half in problem.sums.halves]
    judges = [Problem(weight, half) for half in reversed(halves)]

    def lost(damping: float) -> float:
        found = [_solved(Problem(weight, half, 2 * damping), grid, [step]) for half in halves]
        return sum(judge.loss(own[step][0]) for judge, own in zip(judges, found, strict=True))

    tried = {own: lost(own) for own in (problem.damping, _MORE)}
    further = _MOST if min(tried, key=tried.__getitem__) == _MORE else _LESS
    tried[further] = lost(further)
    return min(tried, key=tried.__getitem__)


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
    note_weight(product)
