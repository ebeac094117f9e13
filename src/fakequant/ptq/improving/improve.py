"""Choose ranges and codes of all weights of a model by the error of its layers, in the order in which they run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fakequant.data.arguments import check_model
from fakequant.data.batches import Batches, Forward, Inputs, KeptBatches
from fakequant.data.progress import track
from fakequant.data.token_mask import Mask
from fakequant.distributed import Together, processes_of
from fakequant.errors import ConfigError, nearest, shown
from fakequant.model.modes import evaluating, off
from fakequant.model.scale_floor import raise_scales
from fakequant.nn.paths import layer_of
from fakequant.nn.products.product import MatrixProduct, Product
from fakequant.nn.quantizer import quantizers
from fakequant.nn.wrappers import unwraps
from fakequant.ptq.improving.collector import Collector
from fakequant.ptq.improving.digest import digest
from fakequant.ptq.improving.effect import Effect, Split
from fakequant.ptq.improving.finished import Finished, run_of
from fakequant.ptq.inputs.call import Call
from fakequant.ptq.inputs.float_values import FloatValues
from fakequant.ptq.inputs.stream import NOT_REPEATED, CallOrder, Stage, Stream, call_order, watched
from fakequant.ptq.results import MISSED, Improvement, LayerResult, remarks_of
from fakequant.ptq.solvers.layer import SOLVERS, write
from fakequant.ptq.solvers.parts import memory
from fakequant.ptq.weights import COMPUTED, calibrated_weights, computed_weights, fixed_parameters
from fakequant.restore import Restore, in_order, restore_on_error, state_of_parts, structure_of
from fakequant.text import listed, module_name

STEPS = ("input", "smooth", "rotate", "ranges", *SOLVERS, "drift", "bias")
"""All steps in their order."""
_NAMED_STEPS = {
    "best": ("input", "smooth", "ranges", "gptq", "descend", "drift", "bias"),
    "fast": ("input", "smooth", "ranges", "gptq", "drift", "bias"),
}
_NO_STEPS = "nearest: improve has no steps for a"
_OTHER_FORWARD = "nearest: its own forward computes something else than one product of its weight"


@unwraps
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
    group: Any = None,
    progress: bool | None = None,
) -> Improvement:
    """Lower the error that quantized weights make, without training: ranges, codes and biases, layer after layer.

    Each layer is chosen for the inputs that the layers before it give with their chosen weights. The chosen values stay
    in the weights, and their scales are fixed, so that saving, exporting and training go on from them.

    The sums over a layer's inputs are some matrices of float64 with a row and a column for each of its columns
    (`in * kh * kw` of a convolution). A convolution with more than 4,608 of them is taken in parts of its channels:
    their matrices take 32 MB together, and their errors count as independent, which a remark says.

    The batches run side by side, three times in all, however many layers there are: see `fakequant.ptq.inputs.stream`.
    A layer that a batch calls several times, and those after it, get no `drift`.

    Of two batches or more, the second of every eight chooses nothing and judges: if the error of the model's output on
    these does not fall by more than chance explains, the choices go back, except for the layers that lower it.

    Args:
        model: prepared, and calibrated if its inputs are quantized.
        batches: what a data loader gives; a few hundred examples. They are kept as a list.
        steps: "best", "fast" (no descent, one damping and one share of the drift), or names of `fakequant.ptq.STEPS`.
        inputs, forward, mask: as for `calibrate`.
        checkpoint: a folder that gets what is chosen, layer after layer. The same call after a kill goes on from there,
            so that only the other layers are chosen; the result is the same to the bit.
        judge: batches that choose nothing and judge, in place of those that are held back. `[]`: none judges, and
            nothing goes back.
        group: the processes of torch.distributed that choose together, each with its own batches, as for `calibrate`.
            The sums are those of all batches, and all processes get the same weights. The first process chooses for
            the inputs (`smooth`, `rotate`, `input`), by its own batches.
        progress: whether to show a progress bar; by default on a terminal and in a notebook.

    Returns:
        The error of the model's output on batches that were held back, before and after, and those of all layers.
        Layers without a weight matrix, that share their weight, or whose choice went back, are listed with the reason.

    Raises:
        ConfigError: an unknown step, a model without quantized weights, or a folder with several processes, or with
            batches of more than tensors, arrays, numbers and texts in lists, tuples, mappings and dataclasses.
        CalibrationError: an input that holds NaN or inf (names the layer), inputs that are not calibrated, or a batch
            on which the model fails.
        CheckpointError: the folder holds a run with another model, other batches, steps or masks, or a damaged file.
            Attributes of the model, `inputs` and `forward` are compared by the output of the first batch.
        The model is unchanged after any error or interrupt.

    >>> torch.manual_seed(0).initial_seed()
    0
    >>> model = prepare(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), "INT4_WEIGHT_ONLY")
    >>> found = fq.ptq.improve(model, [torch.randn(32, 16) for _ in range(4)])
    >>> found.left < 0.8
    True
    """
    check_model(model, "improve", "improve(model, batches)")
    processes = Together(processes_of(model, group))
    if processes.group is not None and checkpoint is not None:
        raise ConfigError("several processes keep nothing in a folder; leave out checkpoint=, or give group=False")
    with processes:  # an error of one process is raised in all
        weights, chosen_steps = calibrated_weights(model, "improve"), checked_steps(steps)
        _check_same(
            processes, {"steps=": str(chosen_steps)} | _digests(weights, processes), "got other steps or weights"
        )
        split = Split.of(Batches(batches, "improve", inputs=inputs, forward=forward, mask=mask), judge)
        given = split.all
        finished = Finished(checkpoint, {} if checkpoint is None else run_of(model, split.fit, chosen_steps))
        fixed = fixed_parameters(model, lambda: given.run_first(model))
    notes = {path: _why_not(product, fixed) for path, product in weights.items()}
    layers = {path: own for path, own in weights.items() if notes[path] is None and isinstance(own, MatrixProduct)}
    names = {path: product.row_name(path) for path, product in weights.items()}
    result = Improvement([LayerResult(names[path], note=note) for path, note in notes.items() if note])
    result.layers += [
        LayerResult(layer_of(path), note=f"nearest: {COMPUTED}") for path in computed_weights(model, weights)
    ]
    state = structure_of([model])
    with torch.inference_mode(mode=False), restore_on_error(state), processes, evaluating(model), torch.no_grad():
        layers, recorded, notes = _looked_at(model, layers, given)
        result.layers += [LayerResult(names[path], note=note) for path, note in notes.items()]
        _check_same(processes, dict.fromkeys(recorded.order, ""), "reach other layers, or reach them in another order")
        before = _states(layers.values())
        with restore_on_error(in_order(*before.values())):
            effect = Effect(model, split, recorded, processes)
            with_drift, result.notes = _with_drift(recorded, processes) if "drift" in chosen_steps else ([], [])
            collector = Collector(layers, given, recorded, processes)
            choices = _Choices(layers, chosen_steps, collector, finished, fixed)
            sums = f"in up to {memory(layers[path] for path in recorded.order) / 1e9:.1f} GB"
            with _Pass(model, layers, split.fit, recorded, with_drift) as stages:
                for stage, wanted in track(stages, f"choosing weights, {sums}", len(recorded.order), progress):
                    choices.add(stage, wanted, stages.keep)
                result.layers += choices.results.values()
            given.mask.warn_unmasked()
            now = _digests(weights, processes)
            _check_same(processes, now, "computed other weights; their processors round otherwise")
            chosen = dict.fromkeys(layers[path].layer for path in choices.results)
            undone = effect.keep_what_helps(
                {layer: before[layer] for layer in chosen},
                lambda layer: _states(own for own in layers.values() if own.layer is layer)[layer],
            )
            result.take_back(names[path] for path, own in layers.items() if own.layer in undone)
            effect.put_into(result, "improve")
            result.notes += [*stages.notes, *remarks_of(result.layers), *_chosen_by_part(stages.chosen_by_part)]
            result.layers += [LayerResult(names[path], note=MISSED) for path in layers if path not in choices.results]
            raise_scales(model)
    return result


class _Choices:
    """Chooses one layer after the other, or takes what an earlier run chose.

    Args:
        layers: what is chosen, by the paths of the quantizers.
        steps: their names.
        collector: chooses.
        finished: what an earlier run chose.
        fixed: parameters that stay, with the reason.
    """

    def __init__(
        self,
        layers: Mapping[str, MatrixProduct],
        steps: tuple[str, ...],
        collector: Collector,
        finished: Finished,
        fixed: Mapping[nn.Parameter, str],
    ) -> None:
        self._layers, self._steps, self._fixed = layers, steps, fixed
        self._collector, self._finished = collector, finished
        self.results: dict[str, LayerResult] = {}

    def add(self, stage: Stage, wanted: Stage | None, keep: Callable[[MatrixProduct], None]) -> None:
        """Choose the layer of a stage, and write what was chosen; `keep` is called with its weight before that."""
        name, product = stage.name, self._layers[stage.name]
        number, steps = len(self.results), self._steps
        bias = product.bias[0]
        no_bias = None if "bias" not in steps else product.why_no_bias if bias is None else self._fixed.get(bias)
        if no_bias is not None:
            steps = tuple(step for step in steps if step != "bias")
        earlier = self._finished.get(number, name, product)
        own, choice = earlier or self._collector.choose(stage, wanted, steps)
        if choice is None:
            return
        if earlier is not None:
            self._collector.put_input(stage, own)
        keep(product)
        write(product.row_name(name), product, choice)
        if earlier is None:
            self._finished.put(number, name, own, choice)
        remarks = [*choice.result.remarks, *([f'the step "bias" was left out: {no_bias}'] if no_bias else [])]
        self.results[name] = replace(choice.result, steps={**own.left, **choice.result.steps}, remarks=remarks)


def _with_drift(recorded: CallOrder, processes: Together) -> tuple[list[str], list[str]]:
    """The layers that may make good the drift of their inputs, and why others may not.

    When a layer is chosen, all its calls but the last have run with rounding to nearest. So the drift of its inputs,
    and of what is computed of them, is not what it will be.
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


def _chosen_by_part(paths: Sequence[str]) -> list[str]:
    if not paths:
        return []
    names = listed([layer_of(path) for path in paths])
    return [f"{names}: chosen by a part of the batches; the others call layers in another order, and reach it later"]


def _digests(weights: Mapping[str, Product], processes: Together) -> dict[str, str]:
    """By quantizer, the digest of its weight and its format; none where one process is alone."""
    if processes.group is None:
        return {}
    return {path: digest([str(own.quantizer.spec), own.parameter]) for path, own in weights.items()}


def _check_same(processes: Together, values: Mapping[str, str], else_they: str) -> None:
    """Raise if the processes have other values, or have them in another order, and name the first layer."""
    own = [*values.items()]
    for rank, others in enumerate(processes.all(own)):
        if others != own:
            places = zip([*own, (None, None)], [*others, (None, None)], strict=False)
            name = next(one[0] or other[0] for one, other in places if one != other)
            raise ConfigError(f"the processes {else_they}: rank {rank} at {module_name(name or '')}")


def checked_steps(steps: str | Sequence[str]) -> tuple[str, ...]:
    """The steps of a name, or given by their names, in their order; raises ConfigError for others."""
    if isinstance(steps, str):
        if steps not in _NAMED_STEPS:
            known = f"; write steps=[{steps!r}]" if steps in STEPS else nearest(steps, [*_NAMED_STEPS])
            raise ConfigError(f"unknown steps {steps!r}{known}")
        return _NAMED_STEPS[steps]
    if not isinstance(steps, Sequence):
        raise ConfigError(f'steps are "best", "fast" or a list of {", ".join(STEPS)}; got {shown(steps)}')
    if unknown := [step for step in steps if step not in STEPS]:
        raise ConfigError(f"unknown step {unknown[0]!r}{nearest(str(unknown[0]), list(STEPS))}")
    if "drift" in steps and not set(SOLVERS) & set(steps):
        raise ConfigError(f'the step "drift" moves what a solver comes close to; add one of {", ".join(SOLVERS)}')
    return tuple(step for step in STEPS if step in steps)


def _looked_at(
    model: nn.Module, layers: Mapping[str, MatrixProduct], batches: KeptBatches
) -> tuple[dict[str, MatrixProduct], CallOrder, dict[str, str]]:
    """The products that runs show to be what they seem, the order of their calls, and why others are not."""
    notes = _other_forwards(layers, lambda: batches.run_first(model))
    chosen = {path: own for path, own in layers.items() if path not in notes}
    recorded = call_order(model, chosen, batches)
    # The calls have shown the options of functions.
    if found := {path: f"{_NO_STEPS} {own.kind}" for path, own in chosen.items() if not own.is_matrix}:
        chosen = {path: own for path, own in chosen.items() if path not in found}
        recorded = call_order(model, chosen, batches)
    return chosen, recorded, notes | found


def _other_forwards(layers: Mapping[str, MatrixProduct], run: Callable[[], object]) -> dict[str, str]:
    """The layers whose own forward computes something else than one product of their weight in a run."""
    found = dict[str, str]()

    def see(path: str, call: Call) -> None:
        if not layers[path].computes_product(call.first):
            found[path] = _OTHER_FORWARD

    if own := {path: layer for path, layer in layers.items() if layer.has_own_forward}:
        with watched(own, see):
            run()
    return found


def _states(products: Iterable[MatrixProduct]) -> dict[nn.Module, Restore]:
    """By layer, what restores it, its weights and their biases as they are now."""
    beside: dict[nn.Module, set[nn.Parameter]] = {}
    for own in products:
        held = (own.parameter, own.bias[0])
        beside.setdefault(own.layer, set()).update(parameter for parameter in held if parameter is not None)
    return {
        layer: state_of_parts(layer, [layer, *(others - {*layer.parameters()})]) for layer, others in beside.items()
    }


def _why_not(product: Product, fixed: Mapping[nn.Parameter, str]) -> str | None:
    """Why nothing is chosen for a weight, or None."""
    if not product.is_matrix:
        return f"{_NO_STEPS} {product.kind}"
    if product.parameter is None:
        return "nearest: its weight is computed"
    if product.parameter in fixed:
        return f"nearest: {fixed[product.parameter]}"
    if product.quantizer.learned is not None or product.quantizer.dynamic:
        return "nearest: its range is not fixed"
    return None


class _Pass:
    """The stages of the quantized model, with those of the float model beside it for the layers that ask for drift."""

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, MatrixProduct],
        batches: KeptBatches,
        recorded: CallOrder,
        with_drift: Sequence[str],
    ) -> None:
        self._layers, self._with_drift = layers, frozenset(with_drift)
        self._quantized = Stream(model, layers, batches, recorded)
        self._float = Stream(model, layers, batches, recorded) if with_drift else None
        self._float_values, self._stack = FloatValues(), ExitStack()
        self._quantizers = quantizers(model).values()
        self._paths: dict[nn.Module, list[str]] = {}
        for path, layer in layers.items():
            self._paths.setdefault(layer.layer, []).append(path)
        self.notes = list[str]()
        self.chosen_by_part = list[str]()
        """The layers that other batches reach only after they were chosen."""

    def __enter__(self) -> _Pass:
        self._stack.enter_context(self._quantized)
        if self._float is not None:
            self._stack.enter_context(self._float)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def __iter__(self) -> Iterator[tuple[Stage, Stage | None]]:
        while (stage := self._quantized.advance()) is not None:
            wanted = None
            if self._float is not None:
                with off(self._quantizers), self._float_values.in_place():
                    wanted = self._float.advance()
                if not stage.is_like(wanted):
                    self._float, wanted = None, None  # it ends with the context
                    self.notes = [
                        f'"drift" was left out from {layer_of(stage.name)} on: the float model calls other layers'
                    ]
                self._forget(self._layers[stage.name].layer)
            if stage.is_first:
                yield stage, wanted if stage.name in self._with_drift else None
            elif stage.name not in self.chosen_by_part:
                self.chosen_by_part.append(stage.name)
            for seen in (stage, wanted) if wanted is not None else (stage,):
                seen.calls.clear()  # the threads free an input as soon as its layer has run

    def _forget(self, present: nn.Module) -> None:
        """Drop the float values of layers that no batch of the float model calls again, but those of a stage's."""

        def is_needed(layer: nn.Module) -> bool:
            runs = self._float is not None and any(map(self._float.will_run, self._paths.get(layer, ())))
            return layer is present or runs

        self._float_values.forget(is_needed)

    def keep(self, product: MatrixProduct) -> None:
        """Keep the float values of a layer that is about to change, for the float model's next calls of it."""
        if self._float is not None:
            own = (product.parameter, product.bias[0])
            self._float_values.keep(product.layer, [parameter for parameter in own if parameter is not None])
