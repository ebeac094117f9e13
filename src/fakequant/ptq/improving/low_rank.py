"""Split each weight into two thin matrices in float and a rest, where the rest loses less when it is quantized."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fakequant.data.batches import Batches, Forward, Inputs, KeptBatches, Mask, input_named
from fakequant.data.progress import track
from fakequant.errors import ConfigError
from fakequant.functional import choose_qparams as qparams_of_tensor
from fakequant.model.weights import disabled, evaluating, note_weight
from fakequant.nn.low_rank import LowRank
from fakequant.nn.paths import layer_of
from fakequant.nn.products.product import MatrixProduct, Product
from fakequant.nn.quantized.layers import QuantLinear
from fakequant.nn.wrappers import unwraps
from fakequant.numerics.spec import QuantSpec
from fakequant.ops import library
from fakequant.ptq.inputs.stream import Stage, Stream, call_order, check_side_by_side
from fakequant.ptq.results import MISSED, Improvement, LayerResult
from fakequant.ptq.solvers.problem import Problem, damped_factor, structured_zeros
from fakequant.ptq.solvers.sums import InputSums
from fakequant.ptq.weights import fixed_parameters, prepared_weights
from fakequant.restore import restore_on_error, state_of

_DAMPING = 0.01
_ROUNDS = 3  # of quantizing the rest and splitting anew


@unwraps
def low_rank(
    model: nn.Module,
    batches: Iterable[Any],
    rank: int = 16,
    *,
    inputs: Inputs | None = None,
    forward: Forward | None = None,
    mask: Mask | None = None,
    progress: bool | None = None,
) -> Improvement:
    """Give linear layers two thin matrices B A in float16 beside their weight, which becomes W - B A.

    They are the best ones of this rank for what quantizing the weight changes in the output, so that the rest loses
    less (LQER, arXiv 2402.02446; SVDQuant, arXiv 2411.05007). The float function stays, up to rounding. Call it before
    `improve`, which then chooses codes for the rest.

    Args:
        model: prepared; calibrated if its inputs are quantized.
        batches: what a data loader gives; they are kept as a list.
        rank: rows of A and columns of B.
        inputs, forward, mask, progress: as for `calibrate`.

    Returns:
        The errors of all layers by rounding to nearest, before and after. Layers that stay as they are have the reason.

    Raises:
        ConfigError: a rank below 1, or a model without quantized weights.
        CalibrationError: no batches, or an input with NaN or inf (names the layer).

    The model is unchanged after any error or interrupt.

    >>> torch.manual_seed(0).initial_seed()
    0
    >>> model = prepare(nn.Sequential(nn.Linear(64, 64)), "INT4_GROUP32")
    >>> found = fq.ptq.low_rank(model, [torch.randn(64, 64) @ torch.randn(64, 64)], rank=4)
    >>> found.remaining_error < 0.8, model[0].low_rank
    (True, LowRank(rank 4, float16))
    """
    weights = prepared_weights(model, "low_rank")
    given = Batches(batches, "low_rank", inputs=inputs, forward=forward, mask=mask).kept()
    if not isinstance(rank, int) or rank < 1:
        raise ConfigError(f"rank must be a whole number of at least 1, got {rank!r}")
    names, reached = {path: weight.row_name(path) for path, weight in weights.items()}, set[str]()
    state = state_of([model])
    with torch.inference_mode(mode=False), restore_on_error(state), evaluating(model), disabled(model), torch.no_grad():
        layers = {path: own for path, own in weights.items() if isinstance(own, MatrixProduct)}
        layers = {path: own for path, own in layers.items() if not _why_not(own, {}, rank)}
        recorded = call_order(model, layers, given)
        fixed = fixed_parameters(model, recorded.first)
        notes = {path: _why_not(weight, fixed, rank) for path, weight in weights.items()}
        result = Improvement([LayerResult(names[path], note=note) for path, note in notes.items() if note])
        layers = {path: own for path, own in layers.items() if notes[path] is None}
        recorded = recorded.of(layers)
        check_side_by_side(model, layers, given, recorded)
        with Stream(model, layers, given, recorded) as stages:
            for stage in track(stages, "splitting weights", len(recorded.order), progress):
                if stage.is_first:
                    sums = _sums(stage, layers[stage.name], given)
                    if sums.count:
                        reached.add(stage.name)
                        result.layers.append(_split(names[stage.name], weights[stage.name], sums, rank))
        given.mask.warn_unmasked()
    missed = [path for path in layers if path not in reached]
    result.layers += [LayerResult(names[path], note=MISSED) for path in missed]
    return result


def _why_not(weight: Product, fixed: Mapping[nn.Parameter, str], rank: int) -> str | None:
    """Why a weight stays as it is, or None."""
    layer, parameter = weight.layer, weight.parameter
    if not isinstance(layer, QuantLinear):
        return f"a {weight.kind} is no linear layer"
    if layer.low_rank is not None:
        return "it has a product of low rank already"
    if parameter is None or parameter in fixed:
        return "its weight is computed" if parameter is None else fixed[parameter]
    if layer.input_transform is not None or weight.has_fixed_codes:
        return "its weight is chosen already; call low_rank before improve"
    if weight.quantizer.learned is not None or weight.quantizer.dynamic:
        return "its range is not fixed"
    if structured_zeros(parameter.detach()) is not None:
        return "its zeros are a structure, which two matrices would fill"
    bits = 16 * rank * sum(parameter.shape)
    if bits >= 16 * parameter.numel():
        return f"rank {rank} would take as many bits as the weight in float16"
    return None


def _sums(stage: Stage, product: MatrixProduct, batches: KeptBatches) -> InputSums:
    found = InputSums()
    for number, calls in stage.calls.items():
        with input_named(layer_of(stage.name), number):
            for call in calls:
                x = batches.mask.select(stage.name, product.layer, call.first, batches.masks[number])
                found.add(product.rows(x))
    return found


def _split(name: str, weight: Product, sums: InputSums, rank: int) -> LayerResult:
    """Split one weight, if that lowers the error of its layer's output by rounding to nearest."""
    parameter, spec = weight.parameter, weight.quantizer.spec
    assert parameter is not None
    whole, problem = parameter.detach().clone(), Problem(parameter.detach(), sums)
    energy = problem.energy()
    if not bool(sums.moments.any()) or not bool(whole.any()):
        return LayerResult(name, note="its inputs or its weights are all zero")
    before = problem.loss(_nearest(whole, spec)) / energy
    factor, _ = damped_factor(sums.moments[0], _DAMPING)
    branch, best, chosen = LowRank.of(weight.layer, rank), before, None
    rounded = _nearest(whole, spec)
    for _ in range(_ROUNDS):
        _set(branch, whole.double() - rounded.double(), factor)
        rest = (whole - branch.product().to(whole.dtype)).detach()
        rounded = _nearest(rest, spec)
        loss = problem.loss(rounded.float() + branch.product()) / energy
        if loss < best:
            best, chosen = loss, (branch.down.data.clone(), branch.up.data.clone(), rest)
    if chosen is None:
        return LayerResult(name, before, before)
    branch.down.data, branch.up.data, rest = chosen
    parameter.data.copy_(rest)
    weight.layer.low_rank = branch
    weight.quantizer.set_qparams(qparams_of_tensor(parameter, spec))
    note_weight(weight)
    return LayerResult(name, before, best, {"low_rank": best})


def _nearest(weight: Tensor, spec: QuantSpec) -> Tensor:
    return library.fake_quantize(weight, qparams_of_tensor(weight, spec), spec)


def _set(branch: LowRank, error: Tensor, factor: Tensor) -> None:
    """Make a branch the best of its rank for an error E: that with the smallest tr((E - B A) H (E - B A)^T).

    With H = L L^T it is the singular value decomposition of E L, cut off.
    """
    left, values, right = torch.linalg.svd(error @ factor, full_matrices=False)
    size = branch.rank
    roots = values[:size].sqrt()
    down = torch.linalg.solve_triangular(factor, roots[:, None] * right[:size], upper=False, left=False)
    branch.up.data.copy_(left[:, :size] * roots)
    branch.down.data.copy_(down)
