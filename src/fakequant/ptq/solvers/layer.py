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
from fakequant.ptq.solvers.grid import WeightGrid
from fakequant.ptq.solvers.parts import Parts
from fakequant.ptq.solvers.problem import Problem
from fakequant.ptq.solvers.ranges import searched_params
from fakequant.ptq.solvers.rounding import descend, gptq
from fakequant.ptq.solvers.sums import InputSums
from fakequant.text import module_name


class Setting(NamedTuple):
    """How far a solver may trust the sums of few rows."""

    damping: float
    """What is added to the diagonal of the moments that GPTQ inverts, as a share of its mean."""
    ridge: float | None
    """The same for the moments by which the target makes up for the drift of earlier layers; None: it does not."""


_ONE = Setting(0.1, 0.2)
_MANY = (Setting(0.01, None), Setting(0.05, None), Setting(0.2, None))
_WITH_DRIFT = (*_MANY, Setting(0.05, 0.1), _ONE, Setting(0.2, 0.5), Setting(0.5, 1.0))


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
    name: str,
    product: MatrixProduct,
    sums: Iterable[tuple[InputSums, InputSums]],
    steps: Sequence[str],
    processes: Together,
) -> Choice:
    """The values of one weight that lose least, never more than the nearest ones.

    Args:
        name: of the weight.
        product: in float.
        sums: for each matrix of the weight those over the rows by which values are chosen, and those over other rows,
            by which a setting is chosen; empty where there are too few. A matrix without rows keeps the nearest values.
        steps: names of `fakequant.ptq.STEPS`.
        processes: that share the matrices, or the settings of a single one.

    Raises:
        CalibrationError: the sums have no solution (names the layer).
    """

    def solve(given: tuple[Matrix, tuple[InputSums, InputSums]], together: Together) -> Choice:
        try:
            return _chosen(name, product, given[0], *given[1], steps, together)
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


def _chosen(
    name: str,
    product: MatrixProduct,
    matrix: Matrix,
    fit: InputSums,
    held: InputSums,
    steps: Sequence[str],
    processes: Together,
) -> Choice:
    seen = (fit.count + held.count,), fit.drift is not None
    if not any(seen[0]):
        return Choice(matrix.params, matrix.nearest, None, LayerResult(name), *seen)
    parts, spec = Parts.of(product), matrix.spec
    float_weight = parts.split(matrix.weight)
    whole = InputSums()
    whole.merge(fit)
    whole.merge(held)
    bias = product.bias[0] if "bias" in steps else None
    plain = Problem(float_weight, whole)
    solved = plain if bias is None else Problem(plain.weight, whole.about_mean())
    energy, tried = plain.energy(), dict[str, _Tried]()

    def judge(step: str, params: QParams, values: Callable[[], Tensor]) -> None:
        now = values()
        tried[step] = _Tried(params, values, solved.loss(now) / energy, solved.unseen(now))

    params = parts.split_params(matrix.params)
    judge("nearest", params, lambda: parts.split(matrix.nearest))
    if "ranges" in steps:
        found = params = searched_params(float_weight, spec, solved.sums.moments, parts)
        judge("ranges", found, lambda: library.fake_quantize(float_weight, found, spec))
    if solving := [step for step in SOLVERS if step in steps]:
        grid = WeightGrid(spec, params, float_weight.shape)
        setting = _setting(plain.weight, grid, solving, fit, held, processes, centred=bias is not None)
        for step, values in _solved(solved, grid, solving, setting).items():
            own = values.reshape(float_weight.shape).to(float_weight.dtype)
            judge(step, params, lambda own=own: own)
    first = tried["nearest"]
    sound = [step for step, own in tried.items() if own.loss <= first.loss]
    best = min(sound, key=lambda step: tried[step].loss * energy + tried[step].unseen)
    params, values = tried[best].params, tried[best].values()
    result = LayerResult(
        name,
        first.loss if solved is plain else plain.loss(first.values()) / energy,
        tried[best].loss,
        {("bias" if k == "nearest" else k): v.loss for k, v in tried.items() if k != "nearest" or bias is not None},
    )
    change = None if bias is None else _bias_change(plain, values).reshape(parts.count, -1).sum(0)
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
    """What a solver gets: one group of a layer, and how far to trust its sums."""

    problem: Problem
    group: int
    wanted: Tensor
    """The values [outputs, columns] to come close to."""
    grid: WeightGrid
    before: Tensor | None
    """The values that the solver before gave."""
    setting: Setting

    def start(self) -> Tensor:
        """The values to go on from."""
        return self.grid.nearest(self.wanted) if self.before is None else self.before


class _Solver(NamedTuple):
    values: Callable[[_Part], Tensor]
    """Gives the chosen values [outputs, columns]."""
    tries_settings: bool = True
    """Whether it is fast enough to run once for each setting."""


SOLVERS = {
    # The damping and the prior are both added to the diagonal.
    "gptq": _Solver(
        lambda p: gptq(p.wanted, p.problem.sums.moments[p.group], p.grid, p.setting.damping + p.problem.prior)
    ),
    "descend": _Solver(lambda p: descend(p.wanted, p.start(), p.problem.moments(p.group), p.grid)),
    "adaround": _Solver(
        lambda p: adaround(p.wanted, p.problem.moments(p.group), p.grid, p.start()), tries_settings=False
    ),
}
"""The steps that choose codes, in their order; each goes on from the values of the one before it."""


def _solved(problem: Problem, grid: WeightGrid, steps: Sequence[str], setting: Setting) -> dict[str, Tensor]:
    """The values [groups, outputs, columns] after each step."""
    groups, outputs, _ = problem.weight.shape
    target = problem.target(setting.ridge)
    found: dict[str, list[Tensor]] = {step: [] for step in steps}
    for group in range(groups):
        rows, values = grid.rows(slice(group * outputs, (group + 1) * outputs)), None
        for step in steps:
            values = SOLVERS[step].values(_Part(problem, group, target[group], rows, values, setting))
            found[step].append(values)
    # `stack` copies, which the one group of most layers does not need.
    return {step: torch.stack(parts) if groups > 1 else parts[0][None] for step, parts in found.items()}


def _setting(
    weight: Tensor,
    grid: WeightGrid,
    steps: Sequence[str],
    fit: InputSums,
    held: InputSums,
    processes: Together,
    *,
    centred: bool,
) -> Setting:
    """The setting with the smallest error on the rows that are held back; without such rows the middle one."""
    quick = [step for step in steps if SOLVERS[step].tries_settings]
    if not held.count or not fit.count or not quick:
        return _ONE
    seen, tested = (Problem(weight, sums.about_mean() if centred else sums) for sums in (fit, held))
    settings = _MANY if fit.drift is None else _WITH_DRIFT
    losses = [*processes.share(settings, lambda one, _: tested.loss(_solved(seen, grid, quick, one)[quick[-1]]))]
    return settings[min(range(len(losses)), key=losses.__getitem__)]


def _bias_change(problem: Problem, values: Tensor) -> Tensor:
    """What the bias must make good: the mean of the wanted output less that of the output."""
    wanted, mean = problem.sums.wanted_mean()[:, :, None], problem.sums.mean()[:, :, None]
    values = values.reshape(problem.weight.shape)
    return (problem.weight.double() @ wanted - values.double() @ mean).reshape(-1)


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
