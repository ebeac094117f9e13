"""What the layers of a model get at their stages, and what is chosen by it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fakequant.data.batches import KeptBatches
from fakequant.data.failures import input_named
from fakequant.distributed import Together
from fakequant.nn.products.product import MatrixProduct
from fakequant.nn.quantizer import Mode
from fakequant.ptq.improving.finished import InputChoice
from fakequant.ptq.inputs.call import LayerCall
from fakequant.ptq.inputs.order import CallOrder
from fakequant.ptq.inputs.stream import Stage
from fakequant.ptq.solvers.layer import Choice, choose
from fakequant.ptq.solvers.parts import Parts
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
        layers: what multiplies, by the path of the weight's quantizer.
        batches: of this process, with their masks.
        recorded: of the same model and batches.
        processes: they choose together; the first one chooses transforms and ranges of inputs.
    """

    def __init__(
        self, layers: Mapping[str, MatrixProduct], batches: KeptBatches, recorded: CallOrder, processes: Together
    ) -> None:
        self._layers, self._batches, self._siblings = layers, batches, recorded.siblings
        self._processes = processes
        self._with_input = set[str]()
        """The layers whose input was chosen, or will not be."""
        self._last: tuple[str, list[LayerCall], tuple[InputSums, InputSums]] | None = None

    def choose(self, stage: Stage, wanted: Stage | None, steps: Sequence[str]) -> tuple[InputChoice, Choice | None]:
        """What loses least: for the input of the layer of a stage, and for its weight; None if all inputs are empty."""
        own, product = self._choose_input_together(stage, steps), self._layers[stage.name]
        sums = self.sums(stage, wanted, hold_back="descend" in steps)
        choice = choose(product.row_name(stage.name), product, sums, steps)
        if not any(choice.rows):
            return own, None
        count, without = Parts.of(product).count, choice.rows.count(0)
        remarks = [_OTHER_ROWS] if not choice.with_drift and any(self._processes.all(wanted is not None)) else []
        remarks += [_FEW_ROWS] if min(filter(None, choice.rows)) < product.columns // count else []
        remarks += [f"its inputs are taken in {count} parts, whose errors count as independent"] if count > 1 else []
        if without:
            remarks.append(f"{without} of its {len(choice.rows)} experts got no tokens, and keep the nearest values")
        return own, choice._replace(result=replace(choice.result, remarks=remarks))

    def inputs(self, stage: Stage) -> dict[int, list[tuple[Tensor, ...]]]:
        """The unmasked tokens of a layer's unquantized inputs, for each call by the number of the batch."""
        layer = self._layers[stage.name]
        return {
            number: [self._unmasked(stage.name, layer.inputs(call), self._batches.masks[number]) for call in calls]
            for number, calls in stage.calls.items()
        }

    def _unmasked(self, name: str, inputs: Sequence[Tensor], mask: Tensor | None) -> tuple[Tensor, ...]:
        """The unmasked tokens of the inputs of a call; those that are one tensor stay one."""
        layer = self._layers[name]
        found = {id(x): layer.with_axis(self._batches.mask.select(name, layer.layer, x, mask)) for x in inputs}
        return tuple(found[id(x)] for x in inputs)

    def choose_input(self, stage: Stage, steps: Sequence[str]) -> InputChoice:
        """Choose a transform and the range of a layer's input, for all layers that get the same tensor."""
        group = self._take_same_input(stage)
        if not group:
            return InputChoice(None, None, {})
        own, transform = group[0].input_quantizer, None
        assert own is not None
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

    def _take_same_input(self, stage: Stage) -> list[MatrixProduct]:
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

    def sums(self, stage: Stage, wanted: Stage | None, *, hold_back: bool) -> Iterator[tuple[InputSums, InputSums]]:
        """For each matrix of a weight the sums of its quantized inputs: of batches to fit, and of those held back."""
        product, seen = self._layers[stage.name], stage.all_calls
        found = self._of_sibling(stage.name, seen)
        self._last = None  # what it holds is freed before new sums are made
        if None in self._processes.all(found and True):
            inputs = self._rounded(stage, wanted)
            if product.is_stack:  # one matrix at a time
                for place in product.reads:
                    fit, held = self._sums(stage, inputs, (place,), hold_back=hold_back)
                    yield fit[0], held[0]
                return
            reads = self._reads(product, [one.inputs for one in inputs])
            fit, held = self._sums(stage, inputs, reads, hold_back=hold_back)
            found = stacked(fit), stacked(held)
        assert found is not None
        if self._siblings.get(stage.name, [stage.name])[-1] != stage.name:
            self._last = stage.name, seen, found
        yield found

    def _rounded(self, stage: Stage, wanted: Stage | None) -> list[_Inputs]:
        """The inputs of each call, as the product sees them, and those of the float model."""
        product, own = self._layers[stage.name], self.inputs(stage)
        others = self._float_inputs(stage, wanted, own)
        return [
            _Inputs(place, number, inputs, product.quantized_inputs(inputs), others[number][call] if others else None)
            for place, (number, calls) in enumerate(own.items())
            for call, inputs in enumerate(calls)
        ]

    def _sums(
        self, stage: Stage, given: Sequence[_Inputs], reads: Sequence[int], *, hold_back: bool
    ) -> tuple[list[InputSums], list[InputSums]]:
        """The sums of the inputs at some places, those to fit and those held back."""
        product = self._layers[stage.name]
        parts, name = Parts.of(product), product.row_name(stage.name)
        fit, held = ({place: InputSums() for place in reads} for _ in range(2))
        for own in given:
            sums = held if hold_back and own.place % _HELD_BACK == _HELD_BACK - 1 else fit
            for read in sums:
                floats = None if own.floats is None else product.pieces(_transformed(product, own.floats[read]))
                with input_named(name, own.number):
                    for piece, x in enumerate(product.pieces(own.rounded[read])):
                        rows = None if floats is None else parts.rows(product.rows(floats[piece]))
                        sums[read].add(parts.rows(product.rows(x)), rows)
        for read in fit:
            self._merge((fit[read], held[read]), product.tensor.device)
        if any(drift_share(fit[read], held[read]) > MOST_DRIFT for read in fit):
            for sums in (*fit.values(), *held.values()):
                sums.drift = None
        return [fit[read] for read in reads], [held[read] for read in reads]

    def _float_inputs(
        self, stage: Stage, wanted: Stage | None, own: Mapping[int, list[tuple[Tensor, ...]]]
    ) -> Mapping[int, list[tuple[Tensor, ...]]]:
        """The inputs in the float model; none if a process has none, or rows that cannot be compared with its own."""
        found = {} if wanted is None else self.inputs(wanted)
        is_alike = tree_map(_shape, found) == tree_map(_shape, own)
        if all(self._processes.all(is_alike)):
            return found
        return {}

    def _reads(self, product: MatrixProduct, calls: Sequence[Sequence[Tensor]]) -> tuple[int, ...]:
        """The places of the inputs for which there are sums: one if all inputs are one tensor in all processes.

        Where the tensors at two places are the same in all calls, it is the first of them.
        """
        own = first_places([tuple(id(inputs[place]) for inputs in calls) for place in product.reads], product.reads)
        reads = first_places([*zip(*self._processes.all(own), strict=True)], product.reads)
        return reads[:1] if len({*reads}) == 1 else reads

    def _merge(self, found: tuple[InputSums, InputSums], device: torch.device) -> None:
        """Add what the other processes saw."""
        self._processes.all(None)  # none of them failed
        if self._processes.group is not None:
            for sums in found:
                sums.merge_processes(self._processes.group, device)

    def _of_sibling(self, name: str, calls: list[LayerCall]) -> tuple[InputSums, InputSums] | None:
        """The sums of the last layer if it got the same inputs and made the same rows of them."""
        if self._last is None:
            return None
        last, seen, sums = self._last
        one, other = self._layers[last], self._layers[name]
        same = len(seen) == len(calls) and all(a.has_input_of(b) for a, b in zip(seen, calls, strict=True))
        alike = same and one.makes_same_rows(other) and Parts.of(one).count == Parts.of(other).count
        alike = alike and _same_transform(one, other)
        return sums if alike and _same_quantizer(one, other, calls[0].first) else None


class _Inputs(NamedTuple):
    """The inputs of one call."""

    place: int
    """That of the batch among all batches that call the layer."""
    number: int
    """That of the batch."""
    inputs: Sequence[Tensor]
    rounded: Sequence[Tensor]
    """As the product sees them."""
    floats: Sequence[Tensor] | None
    """In the float model."""


def first_places(columns: Sequence[Any], places: Sequence[int]) -> tuple[int, ...]:
    """For each column, the place of the first one that equals it.

    >>> first_places(["a", "b", "a"], (0, 1, 2))
    (0, 1, 0)
    """
    return tuple(places[columns.index(column)] for column in columns)


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def _transformed(layer: MatrixProduct, x: Tensor) -> Tensor:
    return x if layer.input_transform is None else layer.input_transform(x)


def _takes_same_input(one: MatrixProduct, other: MatrixProduct) -> bool:
    """Whether two layers with the same input tensor can have one transform and one range for it."""
    first, second = one.input_quantizer, other.input_quantizer
    return (
        first is not None
        and second is not None
        and (first.spec, first.dynamic, first.pinned) == (second.spec, second.dynamic, second.pinned)
        and first.learned is None
        and one.makes_same_rows(other)
    )


def _same_transform(one: MatrixProduct, other: MatrixProduct) -> bool:
    first, second = one.input_transform, other.input_transform
    if first is None or second is None:
        return first is second
    return type(first) is type(second) and all(map(torch.equal, first.buffers(), second.buffers()))


def _same_quantizer(one: MatrixProduct, other: MatrixProduct, x: Tensor) -> bool:
    first, second = one.input_quantizer, other.input_quantizer
    if first is None or second is None:
        return first is second
    if (first.spec, first.dynamic, first.mode) != (second.spec, second.dynamic, second.mode):
        return False
    return first.dynamic or all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(first.qparams(x)[:2], second.qparams(x)[:2], strict=True)
    )
