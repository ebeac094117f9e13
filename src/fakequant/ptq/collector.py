"""Collect inputs of layers and sums over them, choose ranges and weights from them, and store choices in a folder."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fakequant.data.again import unchanged
from fakequant.data.batches import KeptBatches, input_named
from fakequant.data.digest import NoDigestError, digest
from fakequant.distributed import Ranks
from fakequant.errors import CheckpointError, ConfigError
from fakequant.files import read_whole, remove_abandoned, writable_folder, write_whole
from fakequant.model.run.outputs import named_tensors
from fakequant.model.state.plan import value_of
from fakequant.model.weights import disabled, evaluating
from fakequant.nn.products import MatrixProduct
from fakequant.nn.quantizer import Mode
from fakequant.nn.ranges import call_again
from fakequant.nn.transforms import InputTransform, make_transform
from fakequant.numerics.qparams import QParams
from fakequant.ptq.judging import LayerResult
from fakequant.ptq.solvers.layer import ENOUGH_ROWS, Choice, choose, on_device
from fakequant.ptq.solvers.problem import structured_zeros
from fakequant.ptq.solvers.sums import MOST_DRIFT, HalvedSums, InputSums, drift_share, parts_of_outputs, stacked
from fakequant.ptq.solvers.transforms import (
    ROWS_PER_CHANNEL,
    TRANSFORMS,
    WIDEST_HALVED,
    Parts,
    parts_of,
    put,
    searched_input,
    set_params,
    take_transform,
    transform,
)
from fakequant.ptq.stream import CallOrder, LayerCall, Stage
from fakequant.version import __version__

_SUFFIX = ".layer"
_DAMAGE = (AttributeError, EOFError, LookupError, RuntimeError, TypeError, ValueError, ConfigError, pickle.PickleError)
"""Errors that reading a file with unexpected content raises, even if its digest is right."""
_DIGEST = hashlib.sha256().digest_size


class InputChoice(NamedTuple):
    """The transform and range that were chosen for an input, which one or several layers read.

    Attributes:
        transform: the chosen transform, or None.
        params: the new scales of the quantizer; None if they stay.
        left: for each step, the share of the error of the layers' outputs that is left after the step.
    """

    transform: InputTransform | None
    params: QParams | None
    left: dict[str, float]

    def values(self) -> dict[str, Any]:
        """The choice as plain values and CPU tensors, for files and other processes."""
        transform, cpu = self.transform, torch.device("cpu")
        state = {} if transform is None else {name: value.to(cpu) for name, value in transform.state_dict().items()}
        return {
            "transform": transform and (transform.kind, transform.options(), state),
            "input": self.params and _on(self.params[:2], cpu)[:2],
            "left": self.left,
        }

    @classmethod
    def of(cls, values: Mapping[str, Any], product: MatrixProduct) -> InputChoice:
        """The choice from its `values`, on the device of a product's weight."""
        transform, params, left = None, values["input"], value_of(values["left"], "left", dict[str, float])
        if values["transform"] is not None:
            kind, options, state = values["transform"]
            transform = make_transform(kind, product.layer, **options)
            transform.load_state_dict(state)
        return cls(transform, None if params is None else _on(params, product.tensor.device), left)


class ChosenLayersFolder:
    """A folder with the choices of a run of `improve`: a file for each layer, written whole or not at all.

    Args:
        folder: the folder; None stores nothing.
        run: everything on which the choices depend: a text for each name. A folder of another run is refused.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, run: Mapping[str, str]) -> None:
        self._folder = None if folder is None else writable_folder(folder)
        self._run = dict(run)
        if self._folder is not None:
            for path in sorted(self._folder.glob(f"*{_SUFFIX}"))[:1]:
                self._read(path)

    def get(self, number: int, name: str, product: MatrixProduct) -> tuple[InputChoice, Choice] | None:
        """The stored choices of layer `number`; None without a file. Raises CheckpointError if the file is damaged."""
        if self._folder is None or not (path := self._path(self._folder, number)).exists():
            return None
        found = self._read(path)
        if (held := found.get("name")) != name:
            raise CheckpointError(f"{path} holds the layer {held!s:.80} in place of {name}; pass another folder")
        try:
            device, values, bias = product.tensor.device, found["values"], found["bias"]
            if values.shape != product.tensor.shape or not values.is_floating_point():
                raise ValueError(f"values of shape {list(values.shape)} for a weight of {list(product.tensor.shape)}")
            own, place = product.bias
            if bias is not None and (own is None or bias.shape != own[place].shape):
                raise ValueError("the change of a bias has another shape than the bias")
            chosen = Choice(
                _on(found["params"], device),
                values.to(device),
                None if bias is None else bias.to(device),
                value_of(found["result"], "result", LayerResult),
            )
            return InputChoice.of(found, product), chosen
        except _DAMAGE as error:
            raise CheckpointError(f"{path} is damaged: {error}; remove it, and its layer is chosen again") from error

    def put(self, number: int, name: str, own: InputChoice, choice: Choice) -> None:
        """Store the choices of layer `number` in a file."""
        if self._folder is None:
            return
        values = {
            "run": self._run,
            "name": name,
            **own.values(),
            "params": choice.params[:2],
            "values": choice.values,
            "bias": choice.bias,
            "result": asdict(choice.result),
        }
        buffer = io.BytesIO()
        torch.save(values, buffer)
        data = buffer.getvalue()
        write_whole(self._path(self._folder, number), hashlib.sha256(data).digest() + data)

    @staticmethod
    def _path(folder: Path, number: int) -> Path:
        return folder / f"{number:05}{_SUFFIX}"

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            data = read_whole(path)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}; pass another folder") from error
        if not _is_whole(data):
            raise CheckpointError(f"{path} is damaged; remove it, and the weights of its layer are chosen anew")
        try:
            found = torch.load(io.BytesIO(data[_DIGEST:]), map_location="cpu", weights_only=True)
            held = {**found["run"]}
        except _DAMAGE as error:
            raise CheckpointError(
                f"{path} is not a file of a chosen layer ({type(error).__name__}); pass another folder"
            ) from error
        if other := [what for what in self._run if held.get(what) != self._run[what]]:
            other = [what for what in other if what != _OUTPUT] or other  # the output follows from the other entries
            changed = " and ".join(f"another {what}" for what in other)
            raise CheckpointError(
                f"{path.parent} holds a run of improve with {changed}; call improve as in that run, or pass another "
                "folder"
            )
        return found


def remove_finished(folder: Path) -> None:
    """Remove the files of layers that `improve` stored in a folder, and the folder if nothing else is in it."""
    with suppress(OSError):
        remove_abandoned(folder)
        for path in folder.glob(f"*{_SUFFIX}"):
            if path.is_file() and _is_whole(path.read_bytes()):
                path.unlink()
        folder.rmdir()


def _is_whole(data: bytes) -> bool:
    """Whether the content of a file begins with the digest of the rest, as files of `ChosenLayersFolder` do."""
    return hashlib.sha256(data[_DIGEST:]).digest() == data[:_DIGEST]


def _on(params: tuple[Tensor, Tensor | None], device: torch.device) -> QParams:
    scale, zero_point = params
    return QParams(scale.to(device), None if zero_point is None else zero_point.to(device))


_OUTPUT = "output in float, from another attribute of the model, inputs= or forward="


def run_of(model: nn.Module, batches: KeptBatches, steps: Iterable[str] = ()) -> dict[str, str]:
    """Everything on which a run of `improve` or `compare` depends: for each name, a text or a digest.

    The output of the first batch stands for attributes, functions and buffers that are in no state dict.

    Raises:
        NoDigestError: a batch holds an object that is not plain.

    >>> from fakequant.data.batches import Batches
    >>> net = nn.Linear(2, 2)
    >>> one, other = (run_of(net, Batches([x], "improve").kept()) for x in (torch.ones(2), torch.zeros(2)))
    >>> [what for what in one if one[what] != other[what]][0]
    'set of batches'
    """
    try:
        of_batches = digest([*batches])
    except NoDigestError as error:
        raise NoDigestError(f"in a batch, {error}, or leave out the folder or file") from error
    with unchanged(model), evaluating(model), disabled(model), torch.no_grad():
        torch.manual_seed(0)
        output = batches.run_first(model)
    try:
        of_output = digest(output)
    except NoDigestError:  # such as a cache beside the logits
        of_output = digest(named_tensors(output))
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    return {
        "version of fakequant": __version__,
        "model": digest([repr(model), *state.items()]),
        "set of batches": of_batches,
        "list of steps": ", ".join(steps),
        "mask": digest([mask for mask in batches.masks.values() if mask is not None]),
        _OUTPUT: of_output,
    }


Calls = Mapping[int, list[LayerCall]]


class ChoicesForSiblings(NamedTuple):
    """Choices made ahead for layers that are expected to read the same inputs as an earlier layer.

    Attributes:
        calls: for the number of each batch, the calls of the earlier layer.
        wanted: the same for the earlier layer in the float model; None if the float model did not run.
        choices: for the name of each layer, its choice. All processes have the same names.
    """

    calls: Calls
    wanted: Calls | None
    choices: Mapping[str, Choice]

    @classmethod
    def of(cls, stage: Stage, wanted: Stage | None, choices: Mapping[str, Choice]) -> ChoicesForSiblings:
        """The `choices` that were made from the inputs of `stage`, with the calls of the stage if there are choices."""
        if not choices:
            return cls({}, None, {})
        return cls(dict(stage.calls), None if wanted is None else dict(wanted.calls), choices)

    def choice(self, stage: Stage, wanted: Stage | None, processes: Ranks) -> Choice | None:
        """The choice that was made ahead for a stage's layer; None if there is none, or a process sees other inputs."""
        if stage.name not in self.choices:
            return None
        is_same = _are_same(self.calls, stage.calls) and _are_same(self.wanted, wanted and wanted.calls)
        return self.choices[stage.name] if all(processes.all(is_same)) else None


def _are_same(calls: Calls | None, others: Calls | None) -> bool:
    if calls is None or others is None:
        return calls is others
    return calls.keys() == others.keys() and all(
        len(own) == len(others[number]) and all(one.has_input_of(b) for one, b in zip(own, others[number], strict=True))
        for number, own in calls.items()
    )


StepsOf = Callable[[str], Sequence[str]]
"""A function of a layer's name that returns the steps for the layer."""
_OTHER_ROWS = '"drift" was left out: the rows of its input differ too much from those in the float model'
_WIDE = f'"damping" was left out: it has more than {WIDEST_HALVED:,} columns'


class Collector:
    """Chooses a layer's weight, and its input's transform and range, at a `Stage`: all batches wait before the layer.

    Args:
        processes: the processes that choose weights together; the first alone chooses transforms and ranges of inputs.
        halves: whether to keep sums for two halves of the rows even if there are many rows; up to 2,048 columns.
    """

    def __init__(
        self,
        layers: Mapping[str, MatrixProduct],
        batches: KeptBatches,
        recorded: CallOrder,
        processes: Ranks,
        *,
        halves: bool = False,
    ) -> None:
        self._layers, self._batches, self._siblings = layers, batches, recorded.siblings
        self._added_to = recorded.added
        self._processes, self._halves = processes, halves
        self._with_input = set[str]()
        """The layers whose input is decided: chosen, or left as it is."""
        self._last: tuple[str, list[LayerCall], _ReadSums] | None = None
        self._ahead = ChoicesForSiblings({}, None, {})

    def choose(self, stage: Stage, wanted: Stage | None, steps_of: StepsOf) -> tuple[InputChoice, Choice | None]:
        """Choose the input's transform and range and the weight of a stage's layer; no weight if inputs are empty."""
        group, steps = self._processes.group, steps_of(stage.name)
        if group is None:
            own = self.choose_input(stage, steps)
        else:  # the first process chooses
            values = self.choose_input(stage, steps).values() if group.rank() == 0 else {}
            own = InputChoice.of(self._processes.all(values)[0], self._layers[stage.name])
            if group.rank():
                self.put_input(stage, own)
        product, choice = self._layers[stage.name], self._ahead.choice(stage, wanted, self._processes)
        if choice is None:
            names = [stage.name, *self._alike(stage)]

            def sums() -> Iterator[tuple[str, Iterable[InputSums]]]:
                for name in names:
                    at, other = (one and one._replace(name=name) for one in (stage, wanted))
                    assert at is not None
                    found = self.sums(at, other)
                    yield name, found if self._layers[name].is_stack else [*found]  # a stack makes them one by one

            def solve(given: tuple[str, Iterable[InputSums]], together: Ranks) -> Choice:
                name, own = given[0], self._layers[given[0]]
                return choose(own.row_name(name), own, given[1], steps_of(name), together)

            shared = self._processes.share(sums(), solve)  # processes share the weights
            choice, *others = (on_device(one, product.tensor.device) for one in shared)
            self._ahead = ChoicesForSiblings.of(stage, wanted, dict(zip(names[1:], others, strict=True)))
        if not any(choice.rows):
            return own, None
        count, without = Parts.of(product).count, choice.rows.count(0)
        remarks = [_OTHER_ROWS] if not choice.with_drift and any(self._processes.all(wanted is not None)) else []
        rows, columns = min(filter(None, choice.rows)), product.columns // count
        if rows < ROWS_PER_CHANNEL * columns:
            remarks.append(
                f"its input has {rows:,} rows for {columns:,} columns, so that new data may lose more, and "
                f'"smooth" needs {ROWS_PER_CHANNEL} rows for each channel; '
                f"give {-(-ENOUGH_ROWS * columns // rows)} times as many examples"
            )
        if (zeros := structured_zeros(product.tensor)) is not None:
            remarks.append(f"its zeros stay: they are {float(zeros.float().mean()):.0%} of its weight")
        remarks += [_WIDE] if self._halves and product.columns > WIDEST_HALVED else []
        remarks += [f"its inputs are taken in {count} parts, whose errors count as independent"] if count > 1 else []
        if without:
            remarks.append(f"{without} of its {len(choice.rows)} experts got no tokens, and keep the nearest values")
        return own, choice._replace(result=replace(choice.result, remarks=remarks))

    def _alike(self, stage: Stage) -> list[str]:
        """The later layers that will read the same inputs as the layer of a stage; [] for a single process."""
        if self._processes.group is None:
            return []
        first, names, found = self._layers[stage.name], self._siblings.get(stage.name, [stage.name]), list[str]()
        calls = stage.all_calls
        for name in names[names.index(stage.name) + 1 :] if all(call.has_input_of(call) for call in calls) else []:
            own = self._layers[name]
            is_fixed = name in self._with_input or (own.input_quantizer is None and own.input_transform is None)
            is_fixed = is_fixed and not own.is_stack and name not in self._added_to  # the operand comes later
            if is_fixed and calls and self._sees_same(first, own, calls[0]):
                found.append(name)
        everywhere = self._processes.all(found)
        return [] if first.is_stack else [name for name in everywhere[0] if all(name in own for own in everywhere)]

    def inputs(self, stage: Stage) -> dict[int, list[tuple[Tensor, ...]]]:
        """For the number of each batch: for each call of a layer, its inputs in float, without masked tokens."""
        layer = self._layers[stage.name]

        def unmasked(inputs: Sequence[Tensor], mask: Tensor | None) -> tuple[Tensor, ...]:
            selected = self._batches.mask.select
            found = {id(x): layer.with_axis(selected(stage.name, layer.layer, x, mask)) for x in inputs}
            return tuple(found[id(x)] for x in inputs)  # inputs that are the same tensor stay the same tensor

        return {
            number: [unmasked(layer.inputs(call), self._batches.masks[number]) for call in calls]
            for number, calls in stage.calls.items()
        }

    def choose_input(self, stage: Stage, steps: Sequence[str]) -> InputChoice:
        """Choose a transform and the range of a layer's input, for all layers that get the same tensor."""
        group = self._take_same_input(stage)
        if not group:
            return InputChoice(None, None, {})
        own = group[0].input_quantizer
        assert own is not None
        if own.range_group:  # other layers have the same range, too
            return InputChoice(None, None, {})
        seen = [[x for x, *_ in calls if x.numel()] for calls in self.inputs(stage).values()]
        inputs = [calls for calls in seen if calls]
        if not inputs:
            return InputChoice(None, None, {})
        if len(inputs) == 1:  # each part is judged by what the other parts choose
            inputs = parts_of(inputs[0])
        left, params = dict[str, float](), None
        if "input" in steps and not own.dynamic:
            params, before, after = searched_input(group, inputs)
            set_params(group, params)
            left["input"] = after / before if before else 1.0
        asked = [step for step in TRANSFORMS if step in steps]
        if asked and group[0].input_transform is None and take_transform(group):
            chosen = transform(group, inputs, asked)
            left |= {step: chosen.after / chosen.before if step == chosen.step else 1.0 for step in asked}
            if chosen.transform is not None:
                return InputChoice(chosen.transform, chosen.params, left)
        return InputChoice(None, params, left)

    def put_input(self, stage: Stage, chosen: InputChoice) -> None:
        """Set the chosen transform and range in the layers that read the input of a stage."""
        group = self._take_same_input(stage)
        if chosen.transform is not None:
            put(group, chosen.transform)
        if chosen.params is not None:
            set_params(group, chosen.params)

    def _take_same_input(self, stage: Stage) -> list[MatrixProduct]:
        """The layers that share the input of a stage's layer; [] if the input cannot change, or was chosen before."""
        layer, names = self._layers[stage.name], self._siblings.get(stage.name, [stage.name])
        if stage.name in self._with_input:
            return []
        own, alike = layer.input_quantizer, list[str]()
        for name in names:
            other = self._layers[name].input_quantizer
            if own is None or other is None or other.learned is not None or name in self._with_input:
                continue
            same = (other.spec, other.dynamic, other.pinned) == (own.spec, own.dynamic, own.pinned)
            if same and self._layers[name].makes_same_rows(layer):
                alike.append(name)
        self._with_input |= {stage.name, *alike}
        if own is not None and own.by_value is not None:  # `improve` says so
            return []
        if own is None or own.pinned or own.learned is not None or own.mode is Mode.OFF:
            return []
        return [self._layers[name] for name in alike]

    def sums(self, stage: Stage, wanted: Stage | None) -> Iterator[InputSums]:
        """For each matrix of a weight, the `InputSums` of its quantized inputs."""
        product, own = self._layers[stage.name], self.inputs(stage)
        seen: _ReadSums | None = None
        if self._last is not None:  # whether the last layer got the same inputs, and made the same rows of these
            last, earlier, sums = self._last
            now = stage.all_calls
            same = len(now) == len(earlier) and all(a.has_input_of(b) for a, b in zip(now, earlier, strict=True))
            if same and self._sees_same(self._layers[last], product, now[0]):
                seen = sums
            del earlier, sums
        self._last = None  # frees the old sums before new ones are made
        seen = None if None in self._processes.all(seen and True) else seen
        others = {} if wanted is None else self.inputs(wanted)
        is_alike = tree_map(_shape, others) == tree_map(_shape, own)
        if not all(self._processes.all(is_alike)):  # a process has none, or rows that cannot be compared with its own
            others = {}
        with_drift = any(self._processes.all(bool(others)))
        calls = list[_Call]()
        for number, many in own.items() if with_drift or seen is None else ():
            for place, inputs in enumerate(many):
                with call_again(stage.calls[number][place].bins):
                    rounded = product.quantized_inputs(inputs)
                calls.append(_Call(number, inputs, rounded, others[number][place] if others else None))
        if product.is_stack:  # one matrix at a time
            for place in product.reads:
                one = self._sums(stage, calls, (place,))
                yield self._with_drift(stage, calls, one, {}) if with_drift else stacked(one.sums)
            return
        if seen is None:
            # Where the tensors at two places are the same in all calls, both read the first; one place is enough
            # if all inputs are one tensor in all processes.
            read_at = [tuple(id(one.inputs[place]) for one in calls) for place in product.reads]
            everywhere = self._processes.all(first_places(read_at, product.reads))
            reads = first_places([*zip(*everywhere, strict=True)], product.reads)
            seen = self._sums(stage, calls, reads[:1] if len({*reads}) == 1 else reads)
        if self._siblings.get(stage.name, [stage.name])[-1] != stage.name:
            self._last = stage.name, stage.all_calls, seen
        if not with_drift:
            yield stacked(seen.sums)
            return
        # How far the values that the layer's result is added to are from those of the float model, by batch: rows of
        # each group of outputs [groups, rows, outputs]; none where a process does not see all of them.
        found: dict[int, Tensor] = {}
        for number, own in stage.added.items() if Parts.of(product).count == 1 else ():
            other = None if wanted is None else wanted.added.get(number)
            if other is None or other.shape != own.shape:
                continue
            masks = self._batches.mask, self._batches.masks[number]
            far = product.with_axis(masks[0].select(stage.name, product.layer, (other - own).float(), masks[1]))
            rows = product.channels_last(far).flatten(0, -2)
            found[number] = rows.unflatten(1, (product.groups, -1)).movedim(1, 0)
        is_whole = all(self._processes.all(found.keys() == stage.calls.keys()))
        yield self._with_drift(stage, calls, seen, found if is_whole else {})

    def _sums(self, stage: Stage, calls: Sequence[_Call], reads: tuple[int, ...]) -> _ReadSums:
        """The `InputSums` of the input tensors with the indices `reads`, without a `Drift`."""
        product, firsts = self._layers[stage.name], [reads.index(read) for read in reads]
        seen = sum(call.rounded[reads[0]].numel() for call in calls) if reads else 0
        is_few = any(self._processes.all(seen < ENOUGH_ROWS * product.columns**2))
        parts, count = Parts.of(product), 2 if (self._halves or is_few) and product.columns <= WIDEST_HALVED else 1
        found = {index: HalvedSums([InputSums() for _ in range(count)]) for index in dict.fromkeys(firsts)}
        for call in calls:
            with input_named(product.row_name(stage.name), call.number):
                for index, sums in found.items():
                    for x in product.pieces(call.rounded[reads[index]]):
                        sums.add(parts.rows(product.rows(x)))
        self._merge(found.values(), product)
        joined = {index: sums.joined() for index, sums in found.items()}
        return _ReadSums(reads, [joined[index] for index in firsts])

    def _merge(self, sums: Iterable[HalvedSums], product: MatrixProduct) -> None:
        self._processes.all(None)  # none of them failed
        for own in sums:
            if self._processes.group is not None:
                own.merge_processes(self._processes.group, product.tensor.device)

    def _with_drift(
        self, stage: Stage, calls: Sequence[_Call], seen: _ReadSums, added: Mapping[int, Tensor]
    ) -> InputSums:
        """The sums with the `Drift` of their rows; without the `Drift` if the drift is larger than `MOST_DRIFT`."""
        product, parts = self._layers[stage.name], Parts.of(self._layers[stage.name])
        weight = product.tensor.detach()
        groups, columns = product.groups * parts.count, product.columns // parts.count
        if product.is_stack:
            matrices: Sequence[Tensor] = [product.matrix(weight[place]) for place in seen.reads]
        else:
            matrices = parts.split(product.matrix(weight)).chunk(len(seen.reads))
        weights = [own.reshape(groups, -1, columns) for own in matrices]  # [groups, outputs, columns]

        def of_outputs(part: slice) -> list[InputSums]:
            some = [own[:, part] for own in weights]
            gathered = [HalvedSums.of_drift(*pair) for pair in zip(seen.sums, some, strict=True)]
            for call in calls:
                assert call.floats is not None
                beside = added[call.number][:, :, part] if call.number in added else None
                with input_named(product.row_name(stage.name), call.number):
                    for sums, read, weight in zip(gathered, seen.reads, some, strict=True):
                        floats = call.floats[read]
                        if product.input_transform is not None:
                            floats = product.input_transform(floats)
                        for x, wanted in zip(product.pieces(call.rounded[read]), product.pieces(floats), strict=True):
                            rows, others = (parts.rows(product.rows(own)) for own in (x, wanted))
                            count = rows.shape[1]
                            sums.add_drift(rows, others, weight, None if beside is None else beside[:, :count])
                            beside = None if beside is None else beside[:, count:]
            self._merge(gathered, product)
            return [sums.joined() for sums in gathered]

        # Processes make the sums together, so that none can make a part of them later.
        is_parted = self._processes.group is None and len(weights) == 1 and len(parts_of_outputs(weights[0].shape)) > 1
        found = of_outputs(slice(0, 0) if is_parted else slice(None))
        if any(drift_share(sums) > MOST_DRIFT for sums in found):
            return stacked(seen.sums)
        if is_parted:
            found[0].made = lambda part: of_outputs(part)[0]
        return stacked(found)

    def _sees_same(self, one: MatrixProduct, other: MatrixProduct, call: LayerCall) -> bool:
        """Whether two layers make the same quantized rows of the input of a call."""
        if not (one.makes_same_rows(other) and Parts.of(one).count == Parts.of(other).count):
            return False
        first, second = one.input_transform, other.input_transform
        if first is None or second is None:
            if first is not second:
                return False
        elif type(first) is not type(second) or not all(map(torch.equal, first.buffers(), second.buffers())):
            return False
        own, others = one.input_quantizer, other.input_quantizer
        if own is None or others is None:
            return own is others
        if (own.spec, own.dynamic, own.mode) != (others.spec, others.dynamic, others.mode):
            return False
        with call_again(call.bins):
            return own.dynamic or all(
                (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
                for a, b in zip(own.qparams(call.first)[:2], others.qparams(call.first)[:2], strict=True)
            )


class _Call(NamedTuple):
    """The inputs of a call of a layer."""

    number: int
    """The number of the batch."""
    inputs: Sequence[Tensor]
    rounded: Sequence[Tensor]
    """The quantized inputs."""
    floats: Sequence[Tensor] | None
    """The inputs in the float model; None if no `Drift` is summed."""


class _ReadSums(NamedTuple):
    """For each group of outputs: the index of the input tensor that the group reads, and the tensor's `InputSums`."""

    reads: tuple[int, ...]
    sums: list[InputSums]


def first_places(columns: Sequence[Any], places: Sequence[int]) -> tuple[int, ...]:
    """For each column, the item of `places` that belongs to the first equal column.

    >>> first_places(["a", "b", "a"], (0, 1, 2))
    (0, 1, 0)
    """
    return tuple(places[columns.index(column)] for column in columns)


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)
