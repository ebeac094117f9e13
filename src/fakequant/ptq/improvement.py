"""Choose the ranges and codes of weights by the errors of layers' outputs, layer by layer as the model calls them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fakequant.data.arguments import Metric, check_metric, check_model
from fakequant.data.batches import Batches, Forward, HeldOut, Inputs, KeptBatches, Mask, track
from fakequant.data.digest import digest
from fakequant.distributed import Ranks, processes_of
from fakequant.errors import ConfigError, nearest, shown
from fakequant.model.summary import warn_of_new_layers
from fakequant.model.weights import evaluating, exact_products, raise_scales, tie_scales
from fakequant.nn.paths import layer_of
from fakequant.nn.products import MatrixProduct, Product
from fakequant.nn.wrappers import accepts_wrapped_model
from fakequant.ptq.collector import ChosenLayersFolder, Collector, run_of
from fakequant.ptq.judging import EVERY_OF_CHOICES, MISSED, Improvement, LayerResult, OutputJudge, remarks_of
from fakequant.ptq.solvers.layer import SOLVERS, write
from fakequant.ptq.solvers.transforms import TRANSFORMS, memory
from fakequant.ptq.stream import (
    NOT_REPEATED,
    CallOrder,
    FloatTwin,
    Stage,
    added_operands,
    call_order,
    check_side_by_side,
)
from fakequant.ptq.weights import COMPUTED, calibrated_weights, computed_weights, fixed_parameters
from fakequant.restore import Restore, in_order, restore_on_error, state_of_parts, structure_of
from fakequant.text import listed, module_name

STEPS = ("input", *TRANSFORMS, "ranges", "damping", *SOLVERS, "drift", "bias")
"""All steps of `improve`, in the order in which they run."""
_NAMED_STEPS = {
    "best": ("input", "smooth", "rotate", "ranges", "damping", "gptq", "descend", "drift", "bias"),
    "fast": ("input", "smooth", "ranges", "gptq", "drift", "bias"),
}
_NO_STEPS = "nearest: improve has no steps for a"
_OTHER_FORWARD = "nearest: its own forward computes something else than one product of its weight"


@accepts_wrapped_model
def improve(  # noqa: PLR0913  all but the first three by name
    model: nn.Module,
    batches: Iterable[Any],
    steps: str | Sequence[str] = "best",
    *,
    inputs: Inputs | None = None,
    forward: Forward | None = None,
    mask: Mask | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    judge: Iterable[Any] | None = None,
    metric: Metric | None = None,
    group: Any = None,
    progress: bool | None = None,
) -> Improvement:
    """Lower the error that quantized weights make, without training: ranges, codes and biases, layer after layer.

    Each layer is chosen for the inputs that the layers before it give with their chosen weights. The chosen values stay
    in the weights, and their scales are fixed, so that saving, exporting and training go on from them.

    The sums over a layer's inputs are some matrices of float64 with a row and a column for each column of its weight
    matrix (`in * kh * kw` of a convolution). A convolution with more than 4,608 columns is taken in parts of its
    channels: the matrices of all parts take 32 MB, and the errors of the parts count as independent, which a remark
    says.

    All batches run three times, however many layers there are, and side by side while layers are chosen: see
    `fakequant.ptq.stream`. A model that keeps values from batch to batch, or draws random numbers, reads the same
    values and numbers in each run. The first two batches run once more, to check that outputs are the same side by
    side, and the batches that judge run once more. Where no batch judges, as with `judge=[]` or a single batch, up to
    four batches run three times more; a `checkpoint` runs the first batch once more. The step "drift", which corrects
    the errors of earlier layers, is left out for a layer that a batch calls several times, and for all later layers.

    The 2nd, 10th, 18th batch and so on, at most eight, are held back to judge: if the error of the model's output on
    these batches does not fall by more than chance explains, choices are undone, except in layers whose choice lowers
    the error. To find these layers, the batches that judge run once more for each of up to 16 parts of the layers.

    Args:
        model: a prepared model; calibrated, if its inputs are quantized.
        batches: as from a data loader, a few hundred examples; they are stored in a list.
        steps: "best", "fast" (without "rotate", "damping" and "descend"), or names of `fakequant.ptq.STEPS`.
        inputs, forward, mask: as for `calibrate`.
        checkpoint: a folder that stores the choices, layer after layer. After a kill, the same call reads them and
            chooses only the other layers; the result is the same to the bit.
        judge: batches that only judge, in place of batches that are held back. `[]`: no batch judges, and no choice
            is undone.
        metric: called as metric(model), larger is better, before and after, and for each part that is tried; several
            processes take the mean. A choice that lowers the metric is undone, also without batches that judge; where
            the metric stays, the error of the output decides. It should not use the data of the final evaluation.
        group: the processes of torch.distributed that choose together, each with its own batches, as for `calibrate`.
            Inputs of all batches are summed, and all processes get the same weights. The first process chooses for the
            inputs (`smooth`, `rotate`, `input`), by the batches of that process.
        progress: whether to show a progress bar; by default on a terminal and in a notebook.

    Returns:
        The error of the model's output on batches that were held back, before and after, and the errors of all layers.
        Layers without a weight matrix, with a shared weight, or whose choice was undone, are listed with the reason.

    Raises:
        ConfigError: a step is unknown; the model has no quantized weights; the metric is NaN, or no number; or there is
            a `checkpoint`, but there are several processes, or batches hold other things than tensors, arrays, numbers
            and texts in lists, tuples, mappings and dataclasses.
        CalibrationError: NaN or inf in an input of a batch that chooses (the layer is named), inputs without
            calibration, or a batch on which the model fails.
        CheckpointError: the folder holds a run with another model, other batches, steps or masks, or a damaged file.
            Attributes of the model, `inputs` and `forward` are compared by the output of the first batch.

    The model is unchanged after any error or interrupt.

    >>> torch.manual_seed(0).initial_seed()
    0
    >>> model = prepare(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), "INT4_WEIGHT_ONLY")
    >>> found = fq.ptq.improve(model, [torch.randn(32, 16) for _ in range(4)])
    >>> found.remaining_error < 0.8
    True
    """
    check_model(model, "improve", "improve(model, batches)")
    check_metric(metric, "improve")
    warn_of_new_layers(model)
    processes = Ranks(processes_of(model, group))
    with processes:  # an error of one process is raised in all
        if processes.group is not None and checkpoint is not None:
            raise ConfigError("checkpoint= is for a single process; leave checkpoint= out, or pass group=False")
        weights, chosen_steps = calibrated_weights(model, "improve"), checked_steps(steps)
        check_same(
            processes, {"steps=": str(chosen_steps)} | _digests(weights, processes), "have different steps or weights"
        )
        kept = Batches(batches, "improve", inputs=inputs, forward=forward, mask=mask, progress=progress).kept()
        distinct = kept.distinct()  # a repeated batch would judge choices that its twin made
        held_out = HeldOut.of(distinct, EVERY_OF_CHOICES, judge)
        finished = ChosenLayersFolder(
            checkpoint, {} if checkpoint is None else run_of(model, held_out.made, chosen_steps)
        )
    undo = [structure_of([model])]
    with torch.inference_mode(mode=False), restore_on_error(lambda: in_order(*undo)()), processes:
        result = improved(
            model,
            weights,
            held_out,
            chosen_steps,
            processes,
            finished=finished,
            metric=metric,
            progress=progress,
            undo=undo,
        )
        if repeats := len(kept) - len(distinct):
            result.notes.append(f"{repeats} of {len(kept)} batches repeat earlier ones, and count once")
        raise_scales(model)
    return result


def improved(  # noqa: PLR0913  all but the first five by name
    model: nn.Module,
    weights: Mapping[str, Product],
    held_out: HeldOut,
    steps: tuple[str, ...],
    processes: Ranks,
    *,
    finished: ChosenLayersFolder | None = None,
    floats: KeptBatches | None = None,
    metric: Metric | None = None,
    progress: bool | None = None,
    undo: list[Restore] | None = None,
) -> Improvement:
    """Choose the weights of a model or a block. Unlike `improve`, scales too small for an int32 bias are not raised.

    Args:
        floats: the batches for the float model, in the same order, if it needs other batches than the quantized model.
        undo: a list to which a function is added that restores the weights after an error; with None there is no such
            function, and the error of the output is not measured.
    """
    names = {path: own.row_name(path) for path, own in weights.items()}
    with evaluating(model), exact_products(), torch.no_grad():
        layers, recorded, fixed, result = _looked_at(model, weights, held_out.all)
        check_same(processes, dict.fromkeys(recorded.order, ""), "reach other layers, or reach them in another order")
        before = {} if undo is None else _states(layers.values())
        if undo is not None:
            undo.insert(0, in_order(*before.values()))
        tie_scales(model, weights)
        judge = None if undo is None else judge_of(model, held_out, recorded, processes, metric)
        with_drift, result.notes = _with_drift(recorded, processes) if "drift" in steps else ([], [])
        own = {name: layer_of(name) for name in with_drift if layers[name].is_result}
        recorded.added = added_operands(recorded.first, own)
        collector = Collector(layers, held_out.all, recorded, processes, halves="damping" in steps)
        choices = _LayerLoop(layers, steps, collector, finished or ChosenLayersFolder(None, {}), fixed)
        stages = FloatTwin(model, layers, choices.parts, held_out.made, recorded, with_drift, floats)
        choices.make(stages, recorded.order, progress)
        result.layers += choices.results.values()
        held_out.all.mask.warn_unmasked()
        now = _digests(weights, processes)
        check_same(processes, now, "computed other weights; their processors round otherwise")
        if judge is not None:
            changed = {choices.parts[path]: before[choices.parts[path]] for path in choices.results}
            undone = judge.keep_what_helps(changed, choices.state_of)
            judge.put_into(result, "improve")
            result.take_back(names[path] for path, part in choices.parts.items() if part in undone)
        own_inputs = [one.input_quantizer for one in layers.values() if one.input_quantizer is not None]
        by = {one.by_value.name for one in own_inputs if one.by_value is not None}
        if by and (left := [f'"{step}"' for step in steps if step in ("input", *TRANSFORMS)]):
            where = f"inputs with ranges by {', '.join(sorted(by))}"
            result.notes.append(f"{', '.join(left)}: left out for {where}; call improve before calibrate with by=")
        if stages.parted:
            first = layer_of(stages.parted)
            result.notes.append(f'"drift" was left out from {first} on: the float model calls other layers')
        result.notes += remarks_of(result.layers)
        if later := listed([layer_of(path) for path in stages.reached_later]):
            result.notes.append(
                f"{later}: chosen by a part of the batches; the others call layers in another order, and reach it later"
            )
        result.layers += [LayerResult(names[path], note=MISSED) for path in layers if path not in choices.results]
    return result


def judge_of(
    model: nn.Module, held_out: HeldOut, recorded: CallOrder, processes: Ranks, metric: Metric | None = None
) -> OutputJudge:
    """A judge with the held-back batches. If a process has none, the first batches judge, and undo nothing."""
    is_apart = all(processes.all(bool(held_out.held)))
    why_not = None if recorded.outputs_repeat else NOT_REPEATED
    batches = held_out.held if is_apart else held_out.measuring
    return OutputJudge(model, batches, why_not, processes, is_apart=is_apart, metric=metric)


class _LayerLoop:
    """Chooses the weights of layers one after the other, or reads the choices of an earlier run from its folder."""

    def __init__(
        self,
        layers: Mapping[str, MatrixProduct],
        steps: tuple[str, ...],
        collector: Collector,
        finished: ChosenLayersFolder,
        fixed: Mapping[nn.Parameter, str],
    ) -> None:
        self._layers, self._steps, self._fixed = layers, steps, fixed
        self._collector, self._finished = collector, finished
        self.parts: dict[str, nn.Module] = {path: own.layer for path, own in layers.items()}
        self.results: dict[str, LayerResult] = {}

    def make(self, stages: FloatTwin, order: Sequence[str], progress: bool | None) -> None:
        """Choose the weight of each stage's layer, and write it into the model."""

        def steps_of(name: str) -> tuple[str, ...]:
            no_bias = self._why_no_bias(name) is not None
            return tuple(step for step in self._steps if not (no_bias and step == "bias"))

        sums = f"in up to {memory(self._layers[path] for path in order) / 1e9:.1f} GB"
        with stages:
            for stage, wanted in track(stages, f"choosing weights, {sums}", len(order), progress):
                name, product = stage.name, self._layers[stage.name]
                number, no_bias = len(self.results), self._why_no_bias(name)
                earlier = self._finished.get(number, name, product)
                own, choice = earlier or self._collector.choose(stage, wanted, steps_of)
                if choice is None:
                    continue
                if earlier is not None:
                    self._collector.put_input(stage, own)
                stages.keep(name, [product.parameter, product.bias[0]])
                write(product.row_name(name), product, choice)
                if earlier is None:
                    self._finished.put(number, name, own, choice)
                remarks = [*choice.result.remarks, *([f'the step "bias" was left out: {no_bias}'] if no_bias else [])]
                self.results[name] = replace(choice.result, steps={**own.left, **choice.result.steps}, remarks=remarks)

    def state_of(self, layer: nn.Module) -> Restore:
        """A function that restores a layer, its weights and their biases to their present values."""
        return _states(own for own in self._layers.values() if own.layer is layer)[layer]

    def _why_no_bias(self, name: str) -> str | None:
        product = self._layers[name]
        bias = product.bias[0]
        return None if "bias" not in self._steps else product.why_no_bias if bias is None else self._fixed.get(bias)


def _with_drift(recorded: CallOrder, processes: Ranks) -> tuple[list[str], list[str]]:
    """The layers that can use the step "drift", and notes on why the others cannot.

    The weights of a layer are chosen at its last call. Its earlier calls in a batch then ran with weights rounded to
    nearest, so that the drift after them would be measured with other weights than the final ones.
    """
    if not all(processes.all(recorded.outputs_repeat)):
        return [], [f'"drift" was left out: {NOT_REPEATED}']
    before, after = recorded.parts(processes)
    if not after:
        return before, []
    return before, [
        f'"drift" was left out for {len(after)} of {len(recorded.order)} layers, from {layer_of(after[0])} on: a batch '
        "calls it several times, and its weight is chosen before the last call"
    ]


def _digests(weights: Mapping[str, Product], processes: Ranks) -> dict[str, str]:
    """For the path of each weight's quantizer, a digest of the weight and its format; {} for a single process."""
    if processes.group is None:
        return {}
    return {path: digest([str(own.quantizer.spec), own.parameter]) for path, own in weights.items()}


def check_same(processes: Ranks, values: Mapping[str, str], difference: str) -> None:
    """Raise ConfigError if processes have different values, or another order; the first layer that differs is named."""
    own = [*values.items()]
    for rank, others in enumerate(processes.all(own)):
        if others != own:
            places = zip([*own, (None, None)], [*others, (None, None)], strict=False)
            name = next(one[0] or other[0] for one, other in places if one != other)
            raise ConfigError(f"the processes {difference}: rank {rank} differs at {module_name(name or '')}")


def checked_steps(steps: str | Sequence[str]) -> tuple[str, ...]:
    """The steps of "best", "fast" or a list of names, in the order of STEPS; raises ConfigError for unknown names."""
    if isinstance(steps, str):
        if steps not in _NAMED_STEPS:
            known = f"; write steps=[{steps!r}]" if steps in STEPS else nearest(steps, [*_NAMED_STEPS])
            raise ConfigError(f"unknown steps {steps!r}{known}")
        return _NAMED_STEPS[steps]
    if not isinstance(steps, Sequence):
        raise ConfigError(f'steps are "best", "fast" or a list of {", ".join(STEPS)}; got {shown(steps)}')
    if unknown := [step for step in steps if step not in STEPS]:
        raise ConfigError(f"unknown step {unknown[0]!r}{nearest(str(unknown[0]), list(STEPS))}")
    for step, what in (("drift", "changes the target of a solver"), ("damping", "sets the damping of a solver")):
        if step in steps and not set(SOLVERS) & set(steps):
            raise ConfigError(f'the step "{step}" {what}; add one of {", ".join(SOLVERS)}')
    return tuple(step for step in STEPS if step in steps)


def _looked_at(
    model: nn.Module, weights: Mapping[str, Product], batches: KeptBatches
) -> tuple[dict[str, MatrixProduct], CallOrder, dict[nn.Parameter, str], Improvement]:
    """Run all batches; returns the weights to choose, their order, the parameters that cannot change (each with the
    reason), and a result that lists the weights that stay."""
    layers = {path: own for path, own in weights.items() if isinstance(own, MatrixProduct) and not _why_not(own, {})}
    recorded = call_order(model, layers, batches)
    fixed = fixed_parameters(model, recorded.first)
    notes = {path: _why_not(product, fixed) for path, product in weights.items()}  # the run shows functions' weights
    layers = {path: own for path, own in layers.items() if notes[path] is None}

    def see(stage: Stage) -> None:
        own = layers[stage.name]
        if own.has_own_forward and not all(own.computes_product(call.first) for call in stage.all_calls):
            others[stage.name] = _OTHER_FORWARD

    others, recorded = dict[str, str](), recorded.of(layers)
    check_side_by_side(model, layers, batches, recorded, see)
    computed = dict.fromkeys(computed_weights(model, weights), f"nearest: {COMPUTED}")
    result = Improvement(
        [
            LayerResult(weights[path].row_name(path) if path in weights else layer_of(path), note=note)
            for path, note in (*notes.items(), *computed.items(), *others.items())
            if note
        ]
    )
    layers = {path: own for path, own in layers.items() if path not in others}
    return layers, recorded.of(layers), fixed, result


def _states(products: Iterable[MatrixProduct]) -> dict[nn.Module, Restore]:
    """For each layer, a function that restores the present values of the layer, its weights and their biases."""
    beside: dict[nn.Module, set[nn.Parameter]] = {}
    for own in products:
        held = (own.parameter, own.bias[0])
        beside.setdefault(own.layer, set()).update(parameter for parameter in held if parameter is not None)
    return {
        layer: state_of_parts(layer, [layer, *(others - {*layer.parameters()})]) for layer, others in beside.items()
    }


def _why_not(product: Product, fixed: Mapping[nn.Parameter, str]) -> str | None:
    """Why no values are chosen for a weight; None if values are chosen."""
    if not product.is_matrix:
        return f"{_NO_STEPS} {product.kind}"
    if product.parameter is None:
        return "nearest: its weight is computed"
    if product.parameter in fixed:
        return f"nearest: {fixed[product.parameter]}"
    if product.quantizer.learned is not None or product.quantizer.dynamic:
        return "nearest: its range is not fixed"
    return None
