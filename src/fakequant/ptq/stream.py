"""Run a model once over all batches, in linear time and without tracing, and stop the run before each layer.

Every batch has its thread, and one thread runs at a time. A thread waits before the last call of a layer until the
other threads wait there, too: this is a stage. Then the inputs that the layer gets from all batches are known, the
caller changes the layer, and the threads go on. Without threads each layer would need a run from the start, or the
stored inputs of its block, and blocks would have to be found first.
"""

from __future__ import annotations

import _thread
import contextvars
import ctypes
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fakequant.data.again import Changes, accelerator, random_state
from fakequant.data.batches import Batches, KeptBatches
from fakequant.distributed import Ranks
from fakequant.errors import ConfigError
from fakequant.model.run.outputs import watching
from fakequant.model.run.recorded import Recording, has
from fakequant.model.run.recorder import tensors_in
from fakequant.model.weights import off
from fakequant.nn.functions import Trait
from fakequant.nn.paths import layer_of
from fakequant.nn.quantizer import quantizers
from fakequant.nn.ranges import ByValue, call_again, calls_now
from fakequant.restore import Restore, in_order, restore_after


class LayerCall(NamedTuple):
    """The arguments of one call of a layer.

    Attributes:
        writes: how often the first argument was written in place before the call; None if torch does not count writes.
        autocast: the device type and the dtype of autocast around the call; None if it is off.
        bins: for each value that chooses ranges, such as a timestep, the bins of this call.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    writes: int | None = None
    autocast: tuple[str, torch.dtype] | None = None
    bins: Mapping[ByValue, Tensor] = MappingProxyType({})

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerCall:
        """A LayerCall with the present number of writes, autocast and bins."""
        first = cls(args, kwargs).first
        if not isinstance(first, Tensor):
            return cls(args, kwargs, bins=calls_now())
        device = first.device.type
        autocast = (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
        return cls(args, kwargs, None if first.is_inference() else first._version, autocast, calls_now())

    @property
    def first(self) -> Any:
        """The first argument, which is the input of a layer with a weight."""
        return self.args[0] if self.args else next(iter(self.kwargs.values()), None)

    def kept(self) -> LayerCall:
        """The call with copies of its tensors, because the model may write into them later, as in `x += layer(x)`."""
        tensors = {id(leaf): leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)}
        copies = {place: tensor.clone() for place, tensor in tensors.items()}
        args, kwargs = tree_map_only(Tensor, lambda x: copies[id(x)], (self.args, self.kwargs))
        return LayerCall(args, kwargs, autocast=self.autocast, bins=self.bins)

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        """A context in which autocast and the choice of ranges are as they were around the call."""
        autocast = nullcontext() if self.autocast is None else torch.autocast(self.autocast[0], self.autocast[1])
        with call_again(self.bins), autocast:
            yield

    def has_input_of(self, other: LayerCall) -> bool:
        """Whether the first argument of both calls is the same tensor, with no write between the calls."""
        return self.first is other.first and self.writes is not None and self.writes == other.writes


class ResidualInput(NamedTuple):
    """Says where a run shows the value to which a layer's result is added, before the layer is called.

    Attributes:
        module: the path of a module that takes or returns the value, and is called once.
        place: the index of the value among the tensors that the module takes or returns.
        is_result: whether the module returns the value.
    """

    module: str
    place: int
    is_result: bool = False


def added_operands(recording: Recording, layers: Mapping[str, str]) -> dict[str, ResidualInput]:
    """For each layer whose result is added to a value of the same shape, the place where a run shows this value.

    Args:
        layers: for the name of each layer, the path of its module.

    >>> from fakequant.model.run.outputs import record
    >>> class Residual(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.up, self.down = nn.Linear(2, 4), nn.Linear(4, 2)
    ...     def forward(self, x):
    ...         return x + self.down(self.up(x).relu())
    >>> model = Residual()
    >>> recording = record(model, lambda: model(torch.ones(1, 2)))
    >>> added_operands(recording, {"up": "up", "down": "down"})
    {'down': ResidualInput(module='', place=0, is_result=False)}
    """
    once = {path: number for number, path in enumerate(one.path for one in recording.modules)}
    once = {path: number for path, number in once.items() if recording.visits[path] == 1}
    found = dict[str, ResidualInput]()
    for name, path in layers.items():
        if path not in once:
            continue
        layer = recording.modules[once[path]]
        other = _added_to(recording, layer.results[0]) if layer.results else None
        if other is None:
            continue
        for one in recording.modules[: once[path]]:
            if one.path in once and other in one.inputs:
                found[name] = ResidualInput(one.path, one.inputs.index(other))
                break
            if one.path in once and other in one.results and one.end <= once[path]:
                found[name] = ResidualInput(one.path, one.results.index(other), is_result=True)
                break
    return found


def _added_to(recording: Recording, value: int) -> int | None:
    """The number of the value to which `value` is added; None if this addition is not the only use of `value`."""
    shape = recording.values[value].shape
    while len(calls := recording.consumers.get(value, ())) == 1:
        (call,) = calls
        if has(call.function, Trait.IDENTITY) and len(call.outputs) == 1:
            value = call.outputs[0]
            continue
        if call.function != "add" or len(call.inputs) != 2:
            return None
        other = call.inputs[call.inputs[0] == value]
        return other if other != value and recording.values[other].shape == shape else None
    return None


@contextmanager
def operands_seen(
    model: nn.Module, operands: Mapping[str, ResidualInput], see: Callable[[str, Tensor], object]
) -> Iterator[None]:
    """A context in which `see` is called with a layer's name and the value to which the layer's result is added."""
    hooks = []

    def show(names: Iterable[str], values: Any) -> None:
        tensors = tensors_in(values)
        for name in names:
            place = operands[name].place
            if place < len(tensors):
                see(name, tensors[place])

    by_module = dict[ResidualInput, list[str]]()
    for name, operand in operands.items():
        by_module.setdefault(operand, []).append(name)
    try:
        for operand, names in by_module.items():
            module = model.get_submodule(operand.module)
            if operand.is_result:
                hooks.append(module.register_forward_hook(lambda _, __, y, names=names: show(names, y)))
            else:
                hooks.append(
                    module.register_forward_pre_hook(
                        lambda _, args, kwargs, names=names: show(names, (args, kwargs)), with_kwargs=True
                    )
                )
        yield
    finally:
        for hook in hooks:
            hook.remove()


CHECKED = 2
"""How many batches run alone, and once more side by side, before anything is changed."""


class Watchable(Protocol):
    """A module, or a product of a weight: hooks see its calls before they run."""

    def register_forward_pre_hook(self, hook: Callable[..., Any], *, with_kwargs: bool) -> Any:
        """Register a hook, called as hook(self, args, kwargs); returns a handle with `remove()`."""


@dataclass
class CallOrder:
    """How a model calls its layers.

    Attributes:
        order: the layers in the order of their last calls.
        counts: for each batch, how often it calls each layer.
        siblings: for each layer, the layers that get the same first argument in every call, in order.
        first: the run of the first batch.
        starts: for the number of each batch, a function that restores the state and random numbers from before its run.
        outputs_repeat: whether a second run of the first batch gives the same outputs.
    """

    order: list[str] = field(default_factory=list)
    counts: list[Counter[str]] = field(default_factory=list)
    siblings: dict[str, list[str]] = field(default_factory=dict)
    first: Recording = field(default_factory=Recording)
    starts: dict[int, Restore] = field(default_factory=dict)
    outputs_repeat: bool = True
    added: dict[str, ResidualInput] = field(default_factory=dict)
    """By layer, where a run shows the value to which the layer's result is added."""
    checked: dict[int, Any] = field(default_factory=dict)
    """By number of a batch, the outputs of the first batches, for `check_side_by_side`."""

    def of(self, layers: Container[str]) -> CallOrder:
        """A CallOrder that contains only these layers."""
        return replace(
            self,
            order=[name for name in self.order if name in layers],
            counts=[Counter({name: n for name, n in own.items() if name in layers}) for own in self.counts],
            siblings={
                name: [other for other in group if other in layers]
                for name, group in self.siblings.items()
                if name in layers
            },
        )

    def parts(self, processes: Ranks) -> tuple[list[str], list[str]]:
        """The layers in order, in two lists: the second begins with the first layer that a batch calls several times.

        A layer is changed before its last call. So its earlier calls, and all values that depend on them, were made
        without the change.
        """
        own = {name for counted in self.counts for name, count in counted.items() if count > 1}
        repeated = set().union(*processes.all(own))
        first = next((place for place, name in enumerate(self.order) if name in repeated), len(self.order))
        return self.order[:first], self.order[first:]


def call_order(model: nn.Module, layers: Mapping[str, Watchable], batches: KeptBatches) -> CallOrder:
    """Run all batches once and count the calls of the layers."""
    found = CallOrder()
    last: dict[str, int] = {}
    readers: dict[Any, tuple[LayerCall, list[str]]] = {}  # a kept call keeps the tensor's id unique
    seen: list[dict[str, list[list[str]]]] = []  # for each batch and call, the layers that read a layer's input
    step = 0

    def count(name: str, call: LayerCall) -> None:
        nonlocal step
        step += 1
        last[name] = step
        found.counts[-1][name] += 1
        readers.setdefault((id(call.first), call.writes), (call, []))[1].append(name)

    with watched(layers, count), torch.no_grad(), batches.one_pass(model) as values:
        left = Changes()
        for number, batch in batches.numbered.items():
            found.counts.append(Counter())
            found.starts[number] = in_order(random_state(), left.capture())
            with nullcontext(found.first) if seen else watching(model) as found.first:
                result = batches.run(model, batch)
            seen.append({name: [] for name in found.counts[-1]})
            for _, names in readers.values():
                for name in dict.fromkeys(names):
                    seen[-1][name].append(names)
            readers.clear()
            if len(seen) <= CHECKED:
                found.checked[number] = tree_map_only(Tensor, Tensor.clone, result)
            if left.things or len(seen) == 1:  # a model that has written nothing by then writes nothing
                left = values.changes()
    found.order = sorted(last, key=last.__getitem__)
    groups: dict[Any, list[str]] = {}
    for name in dict.fromkeys(name for own in seen for name in own):
        groups.setdefault(tuple(tuple(map(tuple, own.get(name, ()))) for own in seen), []).append(name)
    found.siblings = {name: group for group in groups.values() for name in group}
    return found


@contextmanager
def watched(layers: Mapping[str, Watchable], see: Any) -> Iterator[None]:
    """A context in which `see` is called with the name of a layer and the LayerCall before each call of the layer."""

    def show(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch._C._are_functorch_transforms_active():
            name = layer_of(name) if name.endswith("_quantizer") else name
            raise ConfigError(
                f"the model calls {name or 'itself'} within torch.vmap or another transform of torch.func, out of "
                "which no input can be kept. Let it call the layer on the whole batch, or prepare the model with "
                f"skip=({name!r},)"
            )
        see(name, LayerCall.of(args, kwargs))

    hooks = []
    try:
        for name, layer in layers.items():
            hooks.append(
                layer.register_forward_pre_hook(
                    lambda _, args, kwargs, name=name: show(name, args, kwargs), with_kwargs=True
                )
            )
        yield
    finally:
        for hook in hooks:
            hook.remove()


_MOST_WORKERS = 2048
"""The most workers of OpenMP in the threads of all batches: OpenMP ends the process where it cannot start a worker."""
NOT_REPEATED = "a second run gives other outputs: the model keeps values outside of its tensors and attributes"


class Stage(NamedTuple):
    """A moment of a run at which all batches that reach a layer wait before it.

    Attributes:
        name: the name of the layer, a key of the `layers` of the stream.
        calls: for the number of each batch, the calls of the layer so far; the last call has not run yet.
        is_first: whether this is the layer's first stage; a batch with another order of calls reaches a later stage.
        added: for the number of each batch, the value to which the result of the layer is added.
    """

    name: str
    calls: dict[int, list[LayerCall]]
    is_first: bool = True
    added: Mapping[int, Tensor] = MappingProxyType({})

    @property
    def all_calls(self) -> list[LayerCall]:
        """The calls of all batches, one after the other."""
        return [call for calls in self.calls.values() for call in calls]

    def is_like(self, other: Stage | None) -> bool:
        """Whether another stage is of the same layer, with the same number of calls by each batch."""
        if other is None or self.name != other.name or self.calls.keys() != other.calls.keys():
            return False
        return all(len(calls) == len(other.calls[number]) for number, calls in self.calls.items())


def check_side_by_side(
    model: nn.Module,
    layers: Mapping[str, Watchable],
    batches: KeptBatches,
    recorded: CallOrder,
    see: Callable[[Stage], object] = id,
) -> None:
    """Run the first two batches side by side; raises ConfigError if results differ from those of the recorded runs."""
    results: dict[int, Any] = {}

    def store(model: nn.Module, numbered: tuple[int, Any]) -> None:
        number = numbered[0]
        results[number] = batches.run(model, batches.numbered[number], alone=False)

    checked = Batches(list(batches.numbered.items())[:CHECKED], "", forward=store).kept()
    checked.runs = batches.runs
    with Stream(model, layers, checked, recorded) as stream:
        for stage in stream:
            see(stage)
    outputs, recorded.checked = recorded.checked, {}
    if all(_equal(results[number], output) for number, output in outputs.items()):
        return
    with torch.no_grad():
        recorded.outputs_repeat = _equal(batches.run_first(model), next(iter(outputs.values())))
    if recorded.outputs_repeat:
        raise ConfigError(
            "the model gives other results when its batches run side by side, so it keeps values of a call outside of "
            "its modules or depends on a context of this thread such as autocast; give all examples as one batch, or "
            "enter the context in forward="
        )


class Stream:
    """Iterates over the stages of one run over all batches. A stream is a context, because threads wait in it.

    Args:
        batches: the batches; all stay in memory, with the tensors of their forward passes.
        recorded: the order of calls of the same model with at least these batches.

    >>> from fakequant.ptq.stream import call_order
    >>> model, batches = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), [torch.ones(3, 2), torch.ones(1, 2)]
    >>> layers = {"first": model[0], "second": model[1]}
    >>> batches = Batches(batches, "improve").kept()
    >>> with Stream(model, layers, batches, call_order(model, layers, batches)) as stream:
    ...     for stage in stream:
    ...         print(stage.name, [list(calls[0].args[0].shape) for calls in stage.calls.values()])
    first [[3, 2], [1, 2]]
    second [[3, 2], [1, 2]]
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, Watchable],
        batches: KeptBatches,
        recorded: CallOrder,
    ) -> None:
        self._rank = {name: place for place, name in enumerate(recorded.order)}
        self._layers, self._stack, self._reached = layers, ExitStack(), set[str]()
        self._model, self._added = model, recorded.added
        self.lanes = [
            _BatchThread(
                number,
                recorded.counts[number],
                lambda batch=batch: batches.run(model, batch, alone=False),
                lambda: batches.runs.state(model),
                recorded.starts[number],
            )
            for number, batch in batches.numbered.items()
        ]

    def __enter__(self) -> Stream:
        self._threads = torch.get_num_threads()
        self._stack.enter_context(watched(self._layers, self._seen))
        self._stack.enter_context(operands_seen(self._model, self._added, self._operand_seen))
        return self

    def __exit__(self, *error: Any) -> None:
        for lane in self.lanes:
            lane.end()
        self._stack.close()

    def __iter__(self) -> Iterator[Stage]:
        while (stage := self.advance()) is not None:
            yield stage

    def advance(self) -> Stage | None:
        """Continue the batches that wait before the last stage's layer; returns the next stage, None at the end."""
        with restore_after(lambda: torch.set_num_threads(self._threads)):
            torch.set_num_threads(max(1, min(self._threads, _MOST_WORKERS // max(len(self.lanes), 1))))
            torch.clear_autocast_cache()  # all threads share this cache, and it holds weights from before their change
            for lane in self.lanes:
                if lane.may_go:
                    lane.go()
        # Glibc keeps up to 64 MB of freed memory per thread: eight batches take 4.4 blocks of an encoder if it is given
        # back, and 6.2 otherwise (`benchmarks.accuracy.memory --texts 64`).
        with suppress(OSError, AttributeError, TypeError):  # another C library, or another system
            ctypes.CDLL(None).malloc_trim(0)
        waiting = [lane for lane in self.lanes if lane.at is not None]
        if not waiting:
            return None
        # The earliest layer before which all batches wait that will reach it; else the earliest.
        names = sorted({lane.at for lane in waiting if lane.at is not None}, key=self._rank.__getitem__)
        complete = (one for one in names if all(lane.at == one or not lane.reaches(one) for lane in waiting))
        name = next(complete, names[0])
        here = [lane for lane in waiting if lane.at == name]
        for lane in here:
            lane.may_go = True
        is_first = name not in self._reached
        self._reached.add(name)
        added = {lane.number: lane.added.pop(name) for lane in here if name in lane.added}
        return Stage(name, {lane.number: lane.calls.pop(name) for lane in here}, is_first, added)

    def will_run(self, name: str) -> bool:
        """Whether a batch waits before a layer, or will call the layer again."""
        return any(lane.at == name or lane.reaches(name) for lane in self.lanes)

    def _seen(self, name: str, call: LayerCall) -> None:
        lane = _LANE.get()
        if lane in self.lanes:
            lane.see(name, call)

    def _operand_seen(self, name: str, value: Tensor) -> None:
        lane = _LANE.get()
        if lane in self.lanes:
            lane.added[name] = value


class _Ended(BaseException):
    """Ends the forward pass of a thread that is not needed any more."""


_LANE: contextvars.ContextVar[Any] = contextvars.ContextVar("lane", default=None)
"""The _BatchThread that this thread runs; None in other threads."""


class _BatchThread:
    """The forward pass of one batch in a thread.

    It uses `_thread` and queues in C. `threading` is Python code, in which an interrupt may leave a lock held for ever.
    """

    def __init__(
        self, number: int, counted: Counter[str], call: Any, state: Callable[[], Restore], start: Restore
    ) -> None:
        self.number, self.may_go = number, True
        self.at: str | None = None
        self.calls: dict[str, list[LayerCall]] = {}
        self.added: dict[str, Tensor] = {}
        self._left, self._call, self._context = Counter(counted), call, contextvars.copy_context()
        self._state, self._own = state, start
        self._device = torch.get_default_device()
        self._stream = None if accelerator() is None else torch.accelerator.current_stream()
        self._context.run(_LANE.set, self)
        self._error: BaseException | None = None
        self._is_started = self._is_ended = self._is_over = False
        self._turns, self._pauses, self._ends = SimpleQueue[None](), SimpleQueue[None](), SimpleQueue[None]()

    def _run(self) -> None:
        try:
            if not self._is_ended:  # an interrupt came while the thread started
                device = self._device if self._device.type != "cpu" else nullcontext()
                if self._stream is not None:
                    torch.accelerator.set_stream(self._stream)
                with torch.no_grad(), device:  # torch keeps all three for each thread
                    self._context.run(self._call)
        except _Ended:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self.at = None
            self.calls.clear()
            self.added.clear()
            self._is_over = True
            self._pauses.put(None)
            self._ends.put(None)

    def go(self) -> None:
        """Run until the last call of the next layer, or to the end."""
        self.may_go, self.at = False, None
        with restore_after(self._state()):  # a batch reads the values and random numbers that it reads alone
            self._own()
            if self._is_started:
                self._turns.put(None)
            else:
                _thread.start_new_thread(self._run, ())
                self._is_started = True
            self._pauses.get()
            self._own = self._state()
        if self._error is not None:
            raise self._error

    def see(self, name: str, call: LayerCall) -> None:
        """Keep a call of a layer, and wait before the layer's last call."""
        if self._is_ended:
            raise _Ended
        self._left[name] -= 1
        is_last = not self._left[name]
        self.calls.setdefault(name, []).append(call if is_last else call.kept())
        if not is_last:
            return
        self.at = name
        self._pauses.put(None)
        self._turns.get()
        if self._is_ended:
            raise _Ended

    def reaches(self, name: str) -> bool:
        """Whether the batch will call a layer again."""
        return self._left[name] > 0

    def end(self) -> None:
        """End the forward pass at its present layer, and wait for the thread; may be called again."""
        self._is_ended = True
        self._turns.put(None)
        while self._is_started and not self._is_over:
            with suppress(Empty):  # the value is lost if an interrupt comes just after it
                self._ends.get(timeout=0.05)


def _equal(one: Any, other: Any) -> bool:
    ones, others = tree_leaves(one), tree_leaves(other)
    tensors = [(x, y) for x, y in zip(ones, others, strict=False) if isinstance(x, Tensor) and isinstance(y, Tensor)]
    return len(ones) == len(others) and all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in tensors)


T = TypeVar("T")


class FloatTwin:
    """Iterates over the first stage of each layer in the quantized model, with its stage in the float model or None.

    Args:
        parts: for the name of each layer, the module whose parameters the caller changes at the layer's stage.
        with_float: the layers that need a stage of the float model; without any, the float model does not run.
        floats: the batches for the float model, in the same order, if they differ from `batches`.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, Watchable],
        parts: Mapping[str, nn.Module],
        batches: KeptBatches,
        recorded: CallOrder,
        with_float: Iterable[str],
        floats: KeptBatches | None = None,
    ) -> None:
        self._with_float, self._parts = frozenset(with_float), parts
        self._quantized = Stream(model, layers, batches, recorded)
        self._float = Stream(model, layers, floats or batches, recorded) if self._with_float else None
        self._quantizers, self._stack = quantizers(model).values(), ExitStack()
        self._values: dict[nn.Module, dict[nn.Parameter, Tensor]] = {}
        self._names: dict[nn.Module, list[str]] = {}
        for name, part in parts.items():
            self._names.setdefault(part, []).append(name)
        self.parted = ""
        """The layer from which on the float model calls other layers; "" if both models call the same layers."""
        self.reached_later: dict[str, None] = {}
        """The layers that some batches reach only after the first stage of the layer."""

    def __enter__(self) -> FloatTwin:
        for stream in filter(None, (self._quantized, self._float)):
            self._stack.enter_context(stream)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def __iter__(self) -> Iterator[tuple[Stage, Stage | None]]:
        while (stage := self._quantized.advance()) is not None:
            wanted = None  # the float model's stage, if of the same layer
            if self._float is not None:
                wanted = self.in_float(self._float.advance)
                if not stage.is_like(wanted):
                    self._float, wanted, self.parted = None, None, stage.name  # the stream ends with the context
                present = self._parts[stage.name]
                later = self._float
                self._values = {
                    part: own
                    for part, own in self._values.items()
                    if part is present or (later is not None and any(map(later.will_run, self._names[part])))
                }
            if stage.is_first:
                yield stage, wanted if stage.name in self._with_float else None
            else:
                self.reached_later[stage.name] = None
            for seen in filter(None, (stage, wanted)):
                seen.calls.clear()  # the threads free an input as soon as its layer has run

    def in_float(self, run: Callable[[], T]) -> T:
        """The result of a function that is called while the model has its float weights, with quantizers off."""
        kept = [pair for own in self._values.values() for pair in own.items()]
        values = {parameter: value.to(parameter.device) for parameter, value in kept}
        with off(self._quantizers), with_data(values):
            return run()

    def keep(self, name: str, parameters: Iterable[nn.Parameter | None]) -> None:
        """Copy parameters to the CPU for the float model, before the first change of each."""
        if self._float is not None:
            own = self._values.setdefault(self._parts[name], {})
            for parameter in parameters:
                if parameter is not None and parameter not in own:
                    own[parameter] = parameter.detach().to("cpu", copy=True)


class with_data(AbstractContextManager[None]):
    """A context in which parameters have other values.

    It is a class because an interrupt may end a generator later than the context that restores the model.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> with with_data({layer.weight: torch.full((1, 1), 3.0)}):
    ...     layer.weight.item()
    3.0
    >>> layer.weight.item() == 3.0
    False
    """

    def __init__(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        self._values, self._own = values, {parameter: parameter.data for parameter in values}

    def __enter__(self) -> None:
        for parameter, data in self._values.items():
            parameter.data = data

    def __exit__(self, *_: object) -> None:
        for parameter, data in self._own.items():
            parameter.data = data
