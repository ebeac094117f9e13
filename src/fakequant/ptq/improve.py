"""Choose ranges and codes of all weights of a model by the error of its layers, in the order in which they run."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fakequant.errors import CalibrationError, ConfigError, nearest
from fakequant.model.batches import Forward, Inputs, refuse_tensor, runner
from fakequant.model.modes import disabled, evaluating
from fakequant.model.positions import Mask, Positions
from fakequant.model.progress import track
from fakequant.model.weights import quantized_weights
from fakequant.nn.operands import LayerWeight
from fakequant.nn.quantizer import quantizers
from fakequant.numerics.qparams import QParams, choose_qparams
from fakequant.ptq.finished import Finished, InputChoice, run_of
from fakequant.ptq.layer import choose, write
from fakequant.ptq.ranges import searched_input, whole_range
from fakequant.ptq.results import Improvement, LayerResult
from fakequant.ptq.stream import Record, Stage, Stream, record
from fakequant.ptq.sums import InputSums, has_rows, makes_same_rows, rows_of
from fakequant.ptq.transforms import put, rotate, smooth
from fakequant.restore import restore_on_error, state_of

STEPS = ("smooth", "rotate", "input", "ranges", "gptq", "descend", "drift", "bias")
"""All steps in their order."""
_NAMED_STEPS = {
    "best": ("smooth", "input", "ranges", "gptq", "descend", "drift", "bias"),
    "fast": ("smooth", "input", "ranges", "gptq", "drift", "bias"),
}
_TRANSFORMS = {"smooth": smooth, "rotate": rotate}
_HELD_BACK = 4
"""Every fourth batch is held back where a setting is chosen, if there are as many."""


def improve(  # noqa: PLR0913  all but the first three by name
    model: nn.Module,
    batches: Iterable[Any],
    steps: str | Sequence[str] = "best",
    *,
    inputs: Inputs | None = None,
    forward: Forward | None = None,
    mask: Mask | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> Improvement:
    """Lower the error that quantized weights make, without training: ranges, codes and biases, layer after layer.

    Each layer is chosen for the inputs that the layers before it give with their chosen weights. The chosen values stay
    in the weights, and their scales are fixed, so that saving, exporting and training go on from them.

    The batches run side by side, three times in all, however many layers there are: see `fakequant.ptq.stream`.

    Args:
        model: prepared, and calibrated if its inputs are quantized.
        batches: what a data loader gives; a few hundred examples. They are kept as a list.
        steps: "best", "fast" (one damping, no descent, no drift), or names of `fakequant.ptq.STEPS`.
        inputs: which part of a batch the model gets, as for `calibrate`.
        forward: called as forward(model, batch) instead of the model.
        mask: which tokens count, where batches have padding, as for `calibrate`.
        checkpoint: a folder that gets what is chosen, layer after layer. The same call after a kill goes on from there,
            so that only the other layers are chosen; the result is the same to the bit.
        progress: whether to show a progress bar; by default on a terminal.

    Returns:
        The errors of all layers before and after. Layers without a weight matrix, or that share their weight, are
        listed with the reason.

    Raises:
        ConfigError: an unknown step, or a model without quantized weights.
        CalibrationError: an input that holds NaN or inf (names the layer), or inputs that are not calibrated.
        CheckpointError: the folder holds a run with another model, other batches, steps or masks, or a damaged file.
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
    run, masked = runner(inputs, forward), Positions(mask)
    result, shared = Improvement(), _shared_parameters(model)
    notes = {path: _why_not(weight, shared) for path, weight in weights.items()}
    result.layers += [LayerResult(path.rpartition(".")[0], note=note) for path, note in notes.items() if note]
    layers = {path: weight.layer for path, weight in weights.items() if notes[path] is None}
    masks = [] if mask is None else [masked.of(batch) for batch in given]
    finished = Finished(checkpoint, {} if checkpoint is None else run_of(model, given, chosen_steps, masks))
    with restore_on_error(state_of([model])), evaluating(model), torch.no_grad():
        recorded = record(model, layers, run, given)
        collector = _Collector(layers, given, masked, recorded)
        with _Pass(model, layers, run, given, recorded, float_too="drift" in chosen_steps) as stages:
            found = track(stages, "choosing weights", len(recorded.order), progress)
            for number, (stage, wanted) in enumerate(found):
                name, weight = stage.name.rpartition(".")[0], weights[stage.name]
                known = finished.get(number, stage.name, weight.layer)
                if known is not None:
                    own, choice = known
                    collector.put_input(stage, own)
                else:
                    own = collector.choose_input(stage, chosen_steps)
                    fit, held = collector.sums(stage, wanted, hold_back="descend" in chosen_steps)
                    choice = choose(name, weight, fit, held, chosen_steps)
                stages.keep(weight)
                write(name, weight, choice)
                if known is None:
                    finished.put(number, stage.name, own, choice)
                result.layers.append(replace(choice.result, steps={**own.left, **choice.result.steps}))
        masked.say_whole()
    missed = [path for path in layers if path not in recorded.order]
    result.layers += [LayerResult(path.rpartition(".")[0], note="no batch reaches it") for path in missed]
    return result


def _checked_steps(steps: str | Sequence[str]) -> tuple[str, ...]:
    if isinstance(steps, str):
        if steps not in _NAMED_STEPS:
            raise ConfigError(f"unknown steps {steps!r}{nearest(steps, [*_NAMED_STEPS])}")
        return _NAMED_STEPS[steps]
    if unknown := [step for step in steps if step not in STEPS]:
        raise ConfigError(f"unknown step {unknown[0]!r}{nearest(str(unknown[0]), list(STEPS))}")
    if "drift" in steps and not {"gptq", "descend"} & set(steps):
        raise ConfigError('the step "drift" moves what "gptq" and "descend" come close to; add one of them')
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
    for path, weight in weights.items():
        if weight.parameter is not None and not bool(weight.parameter.isfinite().all()):
            raise CalibrationError(f"{path.rpartition('.')[0] or 'the model'}: its weight holds NaN or inf")
    return weights


def _shared_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The parameters that several modules hold, quantized or not."""
    holders = Counter(
        parameter for module in model.modules() for parameter in module._parameters.values() if parameter is not None
    )
    return {parameter for parameter, count in holders.items() if count > 1}


def _why_not(weight: LayerWeight, shared: set[nn.Parameter]) -> str | None:
    """Why nothing is chosen for a weight, or None."""
    if not has_rows(weight.layer):
        return f"nearest: a {type(weight.layer).__name__} has no weight matrix"
    if weight.parameter is None:
        return "nearest: its weight is computed"
    if weight.parameter in shared:
        return "nearest: layers share its weight"
    if weight.quantizer.learned is not None or weight.quantizer.dynamic:
        return "nearest: its range is not fixed"
    return None


class _Collector:
    """What the layers of a model get at their stages, and the sums over it."""

    def __init__(self, layers: Mapping[str, Any], batches: Sequence[Any], mask: Positions, recorded: Record) -> None:
        self._layers, self._mask, self._siblings = layers, mask, recorded.siblings
        self._counts = [mask.of(batch) for batch in batches]
        self._last: tuple[str, Stage, tuple[InputSums, InputSums]] | None = None

    def inputs(self, stage: Stage) -> dict[int, list[Tensor]]:
        """What counts of a layer's inputs, before its quantizer, by the number of the batch."""
        name, layer = stage.name, self._layers[stage.name]
        return {
            number: [self._mask.counted(name, layer, call.first, self._counts[number]) for call in calls]
            for number, calls in stage.calls.items()
        }

    def choose_input(self, stage: Stage, steps: Sequence[str]) -> InputChoice:
        """Choose a transform and the range of a layer's input, for all layers that get the same tensor."""
        group = self._same_input(stage)
        if not group:
            return InputChoice(None, None, {})
        own, transform = group[0].input_quantizer, None
        inputs = [x for calls in self.inputs(stage).values() for x in calls if x.numel()]
        if not inputs:
            return InputChoice(None, None, {})
        left, params = dict[str, float](), None
        for step, find in _TRANSFORMS.items():
            if step in steps and group[0].input_transform is None:
                chosen = find(group, inputs)
                left[step] = chosen.after / chosen.before if chosen.before else 1.0
                if chosen.transform is not None:
                    transform = chosen.transform
                    inputs = [transform(x) for x in inputs]
                    if not own.dynamic:
                        params = choose_qparams(whole_range(inputs, own), own.spec)
                        _set_params(group, params)
        if "input" in steps and not own.dynamic:
            params, before, after = searched_input(group, inputs)
            _set_params(group, params)
            left["input"] = after / before if before else 1.0
        return InputChoice(transform, params, left)

    def put_input(self, stage: Stage, chosen: InputChoice) -> None:
        """Give the layers of a stage what was chosen for their input."""
        group = self._same_input(stage)
        if chosen.transform is not None:
            put(group, chosen.transform)
        if chosen.params is not None:
            _set_params(group, chosen.params)

    def _same_input(self, stage: Stage) -> list[Any]:
        """The layers whose input is chosen at a stage: none if it is not, or was chosen at an earlier one."""
        group = [self._layers[name] for name in self._siblings.get(stage.name, [stage.name])]
        own = self._layers[stage.name].input_quantizer
        if own is None or own.pinned or own.learned is not None or group[0] is not self._layers[stage.name]:
            return []
        return [layer for layer in group if _takes_same_input(layer, group[0])]

    def sums(self, stage: Stage, wanted: Stage | None, *, hold_back: bool) -> tuple[InputSums, InputSums]:
        """The sums of a layer's quantized inputs: of batches to fit, and of those that are held back."""
        if (shared := self._of_sibling(stage)) is not None:
            return shared
        layer, fit, held = self._layers[stage.name], InputSums(), InputSums()
        others = {} if wanted is None else self.inputs(wanted)
        try:
            for place, (number, own) in enumerate(self.inputs(stage).items()):
                sums = held if hold_back and place % _HELD_BACK == _HELD_BACK - 1 else fit
                for call, x in enumerate(own):
                    floats = rows_of(layer, _transformed(layer, others[number][call])) if number in others else None
                    sums.add(rows_of(layer, layer.quantized_input(x)), floats)
        except CalibrationError as error:
            raise CalibrationError(f"{stage.name.rpartition('.')[0] or 'the model'}: {error}") from error
        self._last = stage.name, stage, (fit, held)
        return fit, held

    def _of_sibling(self, stage: Stage) -> tuple[InputSums, InputSums] | None:
        """The sums of the last layer if it got the same tensors and made the same rows of them."""
        if self._last is None:
            return None
        name, last, sums = self._last
        one, other = self._layers[name], self._layers[stage.name]
        tensors = [[call.first for calls in of.calls.values() for call in calls] for of in (last, stage)]
        same = len(tensors[0]) == len(tensors[1]) and all(x is y for x, y in zip(*tensors, strict=True))
        alike = same and makes_same_rows(one, other) and _same_transform(one, other)
        return sums if alike and _same_quantizer(one, other, tensors[0][0]) else None


def _set_params(layers: Iterable[Any], params: QParams) -> None:
    for layer in layers:
        layer.input_quantizer.set_qparams(params)


def _transformed(layer: Any, x: Tensor) -> Tensor:
    return x if layer.input_transform is None else layer.input_transform(x)


def _takes_same_input(one: Any, other: Any) -> bool:
    """Whether two layers with the same input tensor can have one transform and one range for it."""
    first, second = one.input_quantizer, other.input_quantizer
    return (
        first is not None
        and (first.spec, first.dynamic, first.pinned) == (second.spec, second.dynamic, second.pinned)
        and first.learned is None
        and makes_same_rows(one, other)
    )


def _same_transform(one: Any, other: Any) -> bool:
    first, second = one.input_transform, other.input_transform
    if first is None or second is None:
        return first is second
    return type(first) is type(second) and all(map(torch.equal, first.buffers(), second.buffers()))


def _same_quantizer(one: Any, other: Any, x: Tensor) -> bool:
    first, second = one.input_quantizer, other.input_quantizer
    if first is None or second is None:
        return first is second
    if (first.spec, first.dynamic, first.mode) != (second.spec, second.dynamic, second.mode):
        return False
    return first.dynamic or all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(first.qparams(x), second.qparams(x), strict=True)
    )


class _Pass:
    """The stages of the quantized model, with those of the float model beside it if asked."""

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, Any],
        run: Forward,
        batches: Sequence[Any],
        recorded: Record,
        *,
        float_too: bool,
    ) -> None:
        self._model = model
        self._quantized = Stream(model, layers, run, batches, recorded)
        self._float = Stream(model, layers, run, batches, recorded) if float_too else None
        self._originals: dict[nn.Parameter, Tensor] = {}
        self._stack = ExitStack()

    def __enter__(self) -> _Pass:
        self._stack.enter_context(self._quantized)
        if self._float is not None:
            self._stack.enter_context(self._float)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def __iter__(self) -> Iterator[tuple[Stage, Stage | None]]:
        done: set[str] = set()
        while (stage := self._quantized.advance()) is not None:
            wanted = None
            if self._float is not None:
                with disabled(self._model), _Exchanged(self._originals):
                    wanted = self._float.advance()
                if wanted is None or _counts(wanted) != _counts(stage):
                    raise CalibrationError(
                        f"the float model calls other layers than the quantized one, at {stage.name}; leave out the "
                        'step "drift"'
                    )
                self._originals.clear()  # of the last stage: no batch of the float model calls its layer again
            if stage.name not in done:  # batches with other orders of calls come to a layer that is chosen
                done.add(stage.name)
                yield stage, wanted

    def keep(self, weight: LayerWeight) -> None:
        """Keep the float values of a layer that is about to change, for the float model's next calls of it."""
        if self._float is not None:
            for parameter in (weight.parameter, weight.layer._parameters.get("bias")):
                if parameter is not None:
                    self._originals[parameter] = parameter.detach().clone()


class _Exchanged:
    """A context in which parameters have other values.

    A class, because an interrupt may end a generator after the context that gives the model its first values back.
    """

    def __init__(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        self._values, self._own = values, {parameter: parameter.data for parameter in values}

    def __enter__(self) -> None:
        for parameter, data in self._values.items():
            parameter.data = data

    def __exit__(self, *_: object) -> None:
        for parameter, data in self._own.items():
            parameter.data = data


def _counts(stage: Stage) -> tuple[str, dict[int, int]]:
    return stage.name, {number: len(calls) for number, calls in stage.calls.items()}
