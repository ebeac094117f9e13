"""Choose ranges and codes of all weights of a model by the error of its layers, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fakequant.errors import CalibrationError, ConfigError, nearest
from fakequant.model.batches import Forward, Inputs, refuse_tensor, runner
from fakequant.model.modes import evaluating
from fakequant.model.progress import track
from fakequant.model.ties import tied_weights
from fakequant.model.weights import note_weight, quantized_weights
from fakequant.nn.operands import LayerWeight
from fakequant.nn.quantizer import quantizers
from fakequant.numerics.qparams import QParams
from fakequant.ops import library
from fakequant.ptq.grid import Grid
from fakequant.ptq.ranges import searched_params
from fakequant.ptq.rounding import descend, gptq, loss
from fakequant.ptq.sums import InputSums, has_rows, rows_of
from fakequant.restore import restore_on_error, state_of

STEPS = ("ranges", "gptq", "descend", "bias")
"""All steps in their order."""
_NAMED_STEPS = {"best": STEPS, "fast": ("ranges", "gptq", "bias")}
_DAMPINGS = (0.01, 0.05, 0.2)
"""Of these, "best" takes the one with the smallest error on the batches that are held back."""
_HELD_BACK = 4
"""Every fourth batch is held back, if there are as many."""

Mask = Callable[[Any], Tensor]


@dataclass(frozen=True)
class LayerResult:
    """What a layer lost before and after.

    Attributes:
        layer: its path.
        before: the error of its output by rounding to nearest, as a share of the output's energy.
        after: the same by the chosen ranges and codes.
        note: why nothing was chosen; "" where something was.
    """

    layer: str
    before: float = 0.0
    after: float = 0.0
    note: str = ""


@dataclass
class Improvement:
    """The result of `improve`; prints as a table, the largest remaining error first."""

    layers: list[LayerResult] = field(default_factory=list)

    @property
    def left(self) -> float:
        """The share of the errors of rounding to nearest that is left, summed over the layers."""
        before = sum(found.before for found in self.layers)
        return sum(found.after for found in self.layers) / before if before else 1.0

    def __str__(self) -> str:
        rows = [("layer", "nearest", "chosen", "left")]
        for found in sorted(self.layers, key=lambda found: -found.after):
            share = f"{found.after / found.before:.0%}" if found.before else "-"
            numbers = ("-", "-", found.note) if found.note else (f"{found.before:.2e}", f"{found.after:.2e}", share)
            rows.append((found.layer or "(model)", numbers[0], numbers[1], numbers[2]))
        widths = [max(len(row[place]) for row in rows) for place in range(3)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), row[1].rjust(widths[1]), row[2].rjust(widths[2]), row[3]])
            for row in rows
        ]
        return "\n".join([*lines, f"{self.left:.0%} of the error of rounding to nearest is left"])


def improve(
    model: nn.Module,
    batches: Iterable[Any],
    steps: str | Sequence[str] = "best",
    *,
    inputs: Inputs | None = None,
    forward: Forward | None = None,
    mask: Mask | None = None,
    progress: bool | None = None,
) -> Improvement:
    """Lower the error that quantized weights make, without training: ranges, codes and biases, layer after layer.

    Each layer is chosen for the inputs that the layers before it give with their chosen weights. The chosen values stay
    in the weights, and their scales are fixed, so that saving, exporting and training go on from them.

    The batches run once for every layer, up to that layer: a model with twice the layers takes four times as long.

    Args:
        model: prepared, and calibrated if its inputs are quantized.
        batches: what a data loader gives; a few hundred examples. They are kept as a list.
        steps: "best", "fast" (one damping, no descent), or names of `fakequant.ptq.STEPS`.
        inputs: which part of a batch the model gets, as for `calibrate`.
        forward: called as forward(model, batch) instead of the model.
        mask: from a batch to which positions count, bool [n, length]: for batches with padding.
        progress: whether to show a progress bar; by default on a terminal.

    Returns:
        The errors of all layers before and after. Layers without a weight matrix, or that share their weight, are
        listed with the reason.

    Raises:
        ConfigError: an unknown step, or a model without quantized weights.
        CalibrationError: an input that holds NaN or inf (names the layer), or inputs that are not calibrated.
        The model is unchanged after any error or interrupt.

    >>> torch.manual_seed(0).initial_seed()
    0
    >>> model = prepare(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), "INT4_WEIGHT_ONLY")
    >>> found = fq.ptq.improve(model, [torch.randn(32, 16) for _ in range(4)])
    >>> found.left < 0.8
    True
    """
    refuse_tensor(batches, "improve")
    chosen_steps = _checked_steps(steps)
    given = list(batches)
    if not given:
        raise CalibrationError("improve needs batches, and got none")
    weights = _weights(model)
    run = runner(inputs, forward)
    layers = {path: weight.layer for path, weight in weights.items()}
    with restore_on_error(state_of([model])), evaluating(model), torch.no_grad():
        result, shared = Improvement(), {path for tie in tied_weights(model) for path in tie}
        for path in track(_in_order(model, weights, run, given[0]), "choosing weights", len(weights), progress):
            name, weight = path.rpartition(".")[0], weights[path]
            if (note := _why_not(weight, path in shared)) is not None:
                result.layers.append(LayerResult(name, note=note))
                continue
            sums = _collect(model, layers[path], run, given, mask, name)
            if sums is None:
                result.layers.append(LayerResult(name, note="no batch reaches it"))
                continue
            result.layers.append(_choose(name, weight, *sums, chosen_steps))
    return result


def _checked_steps(steps: str | Sequence[str]) -> tuple[str, ...]:
    if isinstance(steps, str):
        if steps not in _NAMED_STEPS:
            raise ConfigError(f"unknown steps {steps!r}{nearest(steps, [*_NAMED_STEPS])}")
        return _NAMED_STEPS[steps]
    if unknown := [step for step in steps if step not in STEPS]:
        raise ConfigError(f"unknown step {unknown[0]!r}{nearest(str(unknown[0]), list(STEPS))}")
    return tuple(step for step in STEPS if step in steps)


def _weights(model: nn.Module) -> dict[str, LayerWeight]:
    weights = quantized_weights(model)
    if not weights:
        raise ConfigError("the model has no quantized weights; call fakequant.prepare(model, config) first")
    if missing := [name for name, quantizer in quantizers(model).items() if quantizer.needs_calibration]:
        raise CalibrationError(
            f"{len(missing)} input quantizers are not calibrated, the first is {missing[0]}; call "
            "fakequant.calibrate(model, batches) first"
        )
    return weights


def _why_not(weight: LayerWeight, shared: bool) -> str | None:
    """Why nothing is chosen for a weight, or None."""
    if not has_rows(weight.layer):
        return f"nearest: a {type(weight.layer).__name__} has no weight matrix"
    if weight.parameter is None:
        return "nearest: its weight is computed"
    if shared:
        return "nearest: layers share its weight"
    if weight.quantizer.learned is not None or weight.quantizer.dynamic:
        return "nearest: its range is not fixed"
    return None


def _in_order(model: nn.Module, weights: dict[str, LayerWeight], run: Forward, batch: Any) -> list[str]:
    """The paths of the weights' quantizers in the order in which their layers are first called, then the others."""
    called: dict[str, None] = {}
    hooks = []
    for path, weight in weights.items():
        hooks.append(weight.layer.register_forward_pre_hook(lambda *_, path=path: called.setdefault(path)))
    try:
        run(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return [*called, *(path for path in weights if path not in called)]


def _collect(
    model: nn.Module, layer: Any, run: Forward, batches: list[Any], mask: Mask | None, name: str
) -> tuple[InputSums, InputSums] | None:
    """The sums of a layer's quantized inputs: of batches to fit, and of those that are held back."""
    fit, held = InputSums(), InputSums()
    for number, batch in enumerate(batches):
        counted = None if mask is None else mask(batch)
        sums = held if number % _HELD_BACK == _HELD_BACK - 1 else fit

        def see(_: nn.Module, args: tuple[Any, ...], sums: InputSums = sums, counted: Tensor | None = counted) -> None:
            x = layer.quantized_input(args[0])
            if counted is not None and counted.shape == x.shape[:-1]:
                x = x[counted]
            try:
                sums.add(rows_of(layer, x.detach()))
            except CalibrationError as error:
                raise CalibrationError(f"{name or 'the model'}: {error}") from error

        hook = layer.register_forward_pre_hook(see)
        try:
            run(model, batch)
        finally:
            hook.remove()
    if not fit.count:
        return (held, held) if held.count else None
    return fit, held if held.count else fit


def _choose(name: str, weight: LayerWeight, fit: InputSums, held: InputSums, steps: tuple[str, ...]) -> LayerResult:
    """Choose range, codes and bias of one layer, and write them into it; its error never becomes larger."""
    quantizer, parameter = weight.quantizer, weight.parameter
    assert parameter is not None
    float_weight = parameter.detach().clone()
    bias = weight.layer._parameters.get("bias") if "bias" in steps else None
    moments, tested = (sums.moments if bias is None else sums.about_mean() for sums in (fit, held))
    plain = quantizer.qparams(float_weight)
    tried = [(plain, quantizer(float_weight))]
    params = (
        searched_params(float_weight, quantizer.spec, _importance(weight.layer, moments))
        if "ranges" in steps
        else plain
    )
    tried.append((params, _nearest(float_weight, params, quantizer)))
    if "gptq" in steps or "descend" in steps:
        dampings = _DAMPINGS if {"gptq", "descend"} <= set(steps) else _DAMPINGS[1:2]
        rounded = [_rounded(float_weight, params, quantizer, moments, damping, steps) for damping in dampings]
        tried.append((params, min(rounded, key=lambda chosen: _loss(float_weight, chosen, tested))))
    losses = [_loss(float_weight, chosen, moments) for _, chosen in tried]
    best = min(range(len(tried)), key=losses.__getitem__)
    energy = max(_loss(torch.zeros_like(float_weight), float_weight, fit.moments), torch.finfo(torch.float64).tiny)
    before = _loss(float_weight, tried[0][1], fit.moments) / energy
    params, chosen = tried[best]
    _write(name, weight, params, chosen)
    if bias is not None:
        difference = (float_weight.double() - chosen.double()).reshape(len(fit.mean()), -1, fit.mean().shape[-1])
        bias.data += torch.einsum("gok,gk->go", difference, fit.mean()).reshape(-1).to(bias.dtype)
    return LayerResult(name, before, losses[best] / energy)


def _write(name: str, weight: LayerWeight, params: QParams, chosen: Tensor) -> None:
    """Put chosen values into a weight, with the scales by which its quantizer leaves them as they are."""
    quantizer, parameter = weight.quantizer, weight.parameter
    assert parameter is not None
    parameter.data.copy_(chosen)
    quantizer.set_qparams(params)
    if not torch.equal(quantizer(parameter), parameter):
        raise CalibrationError(
            f"{name or 'the model'}: its quantizer changes values that it gave, {quantizer.spec} in {parameter.dtype}; "
            "convert the model to float32 first"
        )
    note_weight(weight)


def _importance(layer: Any, moments: Tensor) -> Tensor:
    """The diagonal of the moments in the shape of the weight [out, ...]."""
    diagonal = moments.diagonal(dim1=1, dim2=2)
    outputs = layer.weight.shape[0] // len(diagonal)
    return diagonal.repeat_interleave(outputs, 0).reshape(layer.weight.shape)


def _nearest(weight: Tensor, params: QParams, quantizer: Any) -> Tensor:
    return library.fake_quantize(weight, params, quantizer.spec)


def _rounded(
    weight: Tensor, params: QParams, quantizer: Any, moments: Tensor, damping: float, steps: tuple[str, ...]
) -> Tensor:
    """Codes by GPTQ, and by descent from there, for every group of a convolution by itself."""
    grid = Grid(quantizer.spec, params, weight.shape)
    matrix = weight.reshape(weight.shape[0], -1)
    nearest_values = _nearest(weight, params, quantizer).reshape(matrix.shape)
    outputs = len(matrix) // len(moments)
    parts = []
    for group, own in enumerate(moments):
        rows = slice(group * outputs, (group + 1) * outputs)
        chosen = gptq(matrix[rows], own, grid.rows(rows), damping) if "gptq" in steps else nearest_values[rows]
        parts.append(descend(matrix[rows], chosen, own, grid.rows(rows)) if "descend" in steps else chosen)
    return torch.cat(parts).reshape(weight.shape)


def _loss(weight: Tensor, chosen: Tensor, moments: Tensor) -> float:
    """`loss` over the groups of a convolution."""
    shape = len(moments), -1, moments.shape[-1]
    pairs = zip(weight.reshape(shape), chosen.reshape(shape), moments, strict=True)
    return sum(loss(one, other, own) for one, other, own in pairs)
