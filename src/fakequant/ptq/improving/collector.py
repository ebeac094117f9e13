"""What the layers of a model get at their stages, and what is chosen by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fakequant.data.batches import KeptBatches
from fakequant.data.failures import input_named
from fakequant.distributed import Together
from fakequant.nn.operands import LayerWeight
from fakequant.nn.quantizer import Mode
from fakequant.ptq.improving.finished import InputChoice
from fakequant.ptq.inputs.call import Call
from fakequant.ptq.inputs.stream import CallOrder, Stage
from fakequant.ptq.solvers.kinds import blocks_of, makes_same_rows, rows_of, with_axis
from fakequant.ptq.solvers.layer import Choice, choose
from fakequant.ptq.solvers.parts import Parts
from fakequant.ptq.solvers.projections import first_places, inputs_of, quantized_inputs, reads_of, row_name
from fakequant.ptq.solvers.ranges import parts_of, searched_input
from fakequant.ptq.solvers.sums import MOST_DRIFT, InputSums, drift_share, stacked
from fakequant.ptq.solvers.transforms import put, rotate, set_params, smooth

_TRANSFORMS = {"smooth": smooth, "rotate": rotate}
_OTHER_ROWS = '"drift" was left out: the rows of its input are others in the float model'
_FEW_ROWS = "its input has fewer rows than columns, so that other data may lose more; give more examples"
_HELD_BACK = 4
"""Every fourth batch is held back where a setting is chosen, if there are as many."""


class Collector:
    """What the layers of a model get at their stages, and the sums over it.

    Args:
        layers: by name.
        batches: of this process, with their masks.
        recorded: of the same model and batches.
        processes: they choose together; the first one chooses transforms and ranges of inputs.
    """

    def __init__(
        self, layers: Mapping[str, Any], batches: KeptBatches, recorded: CallOrder, processes: Together
    ) -> None:
        self._layers, self._batches, self._siblings = layers, batches, recorded.siblings
        self._processes = processes
        self._with_input = set[str]()
        """The layers whose input was chosen, or will not be."""
        self._last: tuple[str, list[Call], tuple[InputSums, InputSums]] | None = None

    def choose(
        self, stage: Stage, wanted: Stage | None, weight: LayerWeight, steps: Sequence[str]
    ) -> tuple[InputChoice, Choice | None]:
        """What loses least: for the input of the layer of a stage, and for its weight; None if all inputs are empty."""
        own = self._choose_input_together(stage, steps)
        fit, held = self.sums(stage, wanted, hold_back="descend" in steps)
        if not fit.count + held.count:
            return own, None
        choice = choose(row_name(stage.name, self._layers[stage.name]), weight, fit, held, steps)
        remarks = [_OTHER_ROWS] if fit.drift is None and any(self._processes.all(wanted is not None)) else []
        remarks += [_FEW_ROWS] if fit.count + held.count < fit.moments.shape[-1] else []
        count = Parts.of(self._layers[stage.name]).count
        remarks += [f"its inputs are taken in {count} parts, whose errors count as independent"] if count > 1 else []
        return own, choice._replace(result=replace(choice.result, remarks=remarks))

    def inputs(self, stage: Stage) -> dict[int, list[tuple[Tensor, ...]]]:
        """The unmasked tokens of a layer's unquantized inputs, for each call by the number of the batch."""
        layer = self._layers[stage.name]
        return {
            number: [self._unmasked(stage.name, inputs_of(layer, call), self._batches.masks[number]) for call in calls]
            for number, calls in stage.calls.items()
        }

    def _unmasked(self, name: str, inputs: Sequence[Tensor], mask: Tensor | None) -> tuple[Tensor, ...]:
        """The unmasked tokens of the inputs of a call; those that are one tensor stay one."""
        layer = self._layers[name]
        found = {id(x): with_axis(layer, self._batches.mask.select(name, layer, x, mask)) for x in inputs}
        return tuple(found[id(x)] for x in inputs)

    def choose_input(self, stage: Stage, steps: Sequence[str]) -> InputChoice:
        """Choose a transform and the range of a layer's input, for all layers that get the same tensor."""
        group = self._take_same_input(stage)
        if not group:
            return InputChoice(None, None, {})
        own, transform = group[0].input_quantizer, None
        seen = [[x for x, *_ in calls if x.numel()] for calls in self.inputs(stage).values()]
        inputs = [calls for calls in seen if calls]
        if not inputs:
            return InputChoice(None, None, {})
        if len(inputs) == 1:  # each part is judged by what the others make, as each batch else
            inputs = parts_of(inputs[0])
        left, params = dict[str, float](), None
        if "input" in steps and not own.dynamic:
            params, before, after = searched_input(group, inputs)
            set_params(group, params)
            left["input"] = after / before if before else 1.0
        for step, find in _TRANSFORMS.items():
            if step in steps and group[0].input_transform is None:
                chosen = find(group, inputs)
                left[step] = chosen.after / chosen.before if chosen.before else 1.0
                if chosen.transform is not None:
                    transform, params = chosen.transform, chosen.params
        return InputChoice(transform, params, left)

    def _choose_input_together(self, stage: Stage, steps: Sequence[str]) -> InputChoice:
        group = self._processes.group
        if group is None:
            return self.choose_input(stage, steps)
        values = self.choose_input(stage, steps).values() if group.rank() == 0 else {}
        own = InputChoice.of(self._processes.all(values)[0], self._layers[stage.name])
        if group.rank():
            self.put_input(stage, own)
        return own

    def put_input(self, stage: Stage, chosen: InputChoice) -> None:
        """Give the layers of a stage what was chosen for their input."""
        group = self._take_same_input(stage)
        if chosen.transform is not None:
            put(group, chosen.transform)
        if chosen.params is not None:
            set_params(group, chosen.params)

    def _take_same_input(self, stage: Stage) -> list[Any]:
        """The layers whose input is chosen at a stage, this once: none if it was chosen at an earlier one."""
        layer, names = self._layers[stage.name], self._siblings.get(stage.name, [stage.name])
        if stage.name in self._with_input:
            return []
        alike = [
            name for name in names if name not in self._with_input and _takes_same_input(self._layers[name], layer)
        ]
        self._with_input |= {stage.name, *alike}
        own = layer.input_quantizer
        if own is None or own.pinned or own.learned is not None or own.mode is Mode.OFF:
            return []
        return [self._layers[name] for name in alike]

    def sums(self, stage: Stage, wanted: Stage | None, *, hold_back: bool) -> tuple[InputSums, InputSums]:
        """The sums of a layer's quantized inputs: of batches to fit, and of those that are held back."""
        seen = [call for calls in stage.calls.values() for call in calls]
        found = self._of_sibling(stage.name, seen)
        self._last = None  # what it holds is freed before new sums are made
        if None in self._processes.all(found and True):
            found = self._sums(stage, wanted, hold_back=hold_back)
        assert found is not None
        if self._siblings.get(stage.name, [stage.name])[-1] != stage.name:
            self._last = stage.name, seen, found
        return found

    def _sums(self, stage: Stage, wanted: Stage | None, *, hold_back: bool) -> tuple[InputSums, InputSums]:
        layer, own = self._layers[stage.name], self.inputs(stage)
        parts = Parts.of(layer)
        reads = self._reads(layer, [inputs for calls in own.values() for inputs in calls])
        fit, held = ({place: InputSums() for place in reads} for _ in range(2))
        others = self._float_inputs(stage, wanted, own)
        for place, (number, calls) in enumerate(own.items()):
            sums = held if hold_back and place % _HELD_BACK == _HELD_BACK - 1 else fit
            for call, inputs in enumerate(calls):
                rounded = quantized_inputs(layer, inputs)
                floats = others[number][call] if number in others else None
                for read in sums:
                    wanted_parts = None if floats is None else blocks_of(layer, _transformed(layer, floats[read]))
                    with input_named(row_name(stage.name, layer), number):
                        for part, x in enumerate(blocks_of(layer, rounded[read])):
                            rows = None if wanted_parts is None else parts.rows(rows_of(layer, wanted_parts[part]))
                            sums[read].add(parts.rows(rows_of(layer, x)), rows)
        for read in fit:
            self._merge((fit[read], held[read]), layer.weight.device)
        if any(drift_share(fit[read], held[read]) > MOST_DRIFT for read in fit):
            for sums in (*fit.values(), *held.values()):
                sums.drift = None
        return stacked([fit[read] for read in reads]), stacked([held[read] for read in reads])

    def _float_inputs(
        self, stage: Stage, wanted: Stage | None, own: Mapping[int, list[tuple[Tensor, ...]]]
    ) -> Mapping[int, list[tuple[Tensor, ...]]]:
        """The inputs in the float model; none if a process has none, or rows that cannot be compared with its own."""
        found = {} if wanted is None else self.inputs(wanted)
        is_alike = tree_map(_shape, found) == tree_map(_shape, own)
        if all(self._processes.all(is_alike)):
            return found
        return {}

    def _reads(self, layer: Any, calls: list[tuple[Tensor, ...]]) -> tuple[int, ...]:
        """The places of the inputs for which there are sums: one if all inputs are one tensor in all processes."""
        columns = [*zip(*self._processes.all(reads_of(layer, calls)), strict=True)]
        reads = first_places(columns, getattr(layer, "reads", (0,)))
        return reads[:1] if len({*reads}) == 1 else reads

    def _merge(self, found: tuple[InputSums, InputSums], device: torch.device) -> None:
        """Add what the other processes saw."""
        self._processes.all(None)  # none of them failed
        if self._processes.group is not None:
            for sums in found:
                sums.merge_processes(self._processes.group, device)

    def _of_sibling(self, name: str, calls: list[Call]) -> tuple[InputSums, InputSums] | None:
        """The sums of the last layer if it got the same inputs and made the same rows of them."""
        if self._last is None:
            return None
        last, seen, sums = self._last
        one, other = self._layers[last], self._layers[name]
        same = len(seen) == len(calls) and all(a.has_input_of(b) for a, b in zip(seen, calls, strict=True))
        alike = same and makes_same_rows(one, other) and Parts.of(one).count == Parts.of(other).count
        alike = alike and _same_transform(one, other)
        return sums if alike and _same_quantizer(one, other, calls[0].first) else None


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


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
