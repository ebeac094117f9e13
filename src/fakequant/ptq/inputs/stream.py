"""Run a model once over all batches, and stop it before each layer: no blocks to find, no tracing, linear time.

Every batch runs in a thread of its own, and one thread runs at a time. A thread waits before the last call of a layer
until the others are there too. Then the inputs that the layer gets from all batches are known, the caller changes the
layer, and the threads go on from where they are. Without threads each layer would take a run of its own from the start,
or its inputs would be kept from a run of a block, which must be found first.
"""

from __future__ import annotations

import _thread
import contextvars
import ctypes
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from queue import Empty, SimpleQueue
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fakequant.data.batches import Batches, KeptBatches
from fakequant.errors import ConfigError
from fakequant.ptq.inputs.added import operands_seen
from fakequant.ptq.inputs.call import LayerCall
from fakequant.ptq.inputs.order import CHECKED, CallOrder, Watchable, watched
from fakequant.restore import Restore, restore_after, surely

_MOST_WORKERS = 2048
"""Every thread of a batch gets its own workers from OpenMP, which ends the process where it cannot start one."""
NOT_REPEATED = "a second run gives other outputs: the model keeps values outside of its tensors and attributes"


class Stage(NamedTuple):
    """A layer before which all batches that reach it have stopped.

    Attributes:
        name: of the layer, as it was given.
        calls: by the number of the batch, the calls of the layer so far; the last one has not run yet.
        is_first: whether no stage before it was of this layer. Batches with other orders of calls come to it later.
        added: by the number of the batch, what the result of the layer is added to.
    """

    name: str
    calls: dict[int, list[LayerCall]]
    is_first: bool = True
    added: Mapping[int, Tensor] = MappingProxyType({})

    @property
    def all_calls(self) -> list[LayerCall]:
        """Those of all batches, one after the other."""
        return [call for calls in self.calls.values() for call in calls]

    def is_like(self, other: Stage | None) -> bool:
        """Whether all batches call the same layer as often."""
        return other is not None and self._counts() == other._counts()

    def _counts(self) -> tuple[str, dict[int, int]]:
        return self.name, {number: len(calls) for number, calls in self.calls.items()}


def check_side_by_side(
    model: nn.Module,
    layers: Mapping[str, Watchable],
    batches: KeptBatches,
    recorded: CallOrder,
    see: Callable[[Stage], object] = id,
) -> None:
    """Run the first two batches side by side, and compare their results with those of the recorded runs.

    Args:
        see: gets the stages.

    Raises:
        ConfigError: they are others.
    """
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
    """The stages of one run over all batches; a context, because threads wait in it.

    Args:
        model: what runs; in the mode and with the quantizers that it has at the time.
        layers: where to stop, by name.
        batches: all of them stay in memory, with what their forward pass needs at a stage.
        recorded: of the same model and these batches, or more.

    >>> from fakequant.ptq.inputs.order import call_order
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
            _Lane(
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
        surely(self._end)

    def _end(self) -> None:
        for lane in self.lanes:
            lane.end()
        self._stack.close()

    def __iter__(self) -> Iterator[Stage]:
        while (stage := self.advance()) is not None:
            yield stage

    def advance(self) -> Stage | None:
        """Let all batches run that wait before the layer of the last stage; the next stage, None at the end."""
        with restore_after(lambda: torch.set_num_threads(self._threads)):
            torch.set_num_threads(max(1, min(self._threads, _MOST_WORKERS // max(len(self.lanes), 1))))
            torch.clear_autocast_cache()  # all threads share it, and it holds what weights were before they changed
            for lane in self.lanes:
                if lane.may_go:
                    lane.go()
        _give_back()
        waiting = [lane for lane in self.lanes if lane.at is not None]
        if not waiting:
            return None
        name = self._next(waiting)
        here = [lane for lane in waiting if lane.at == name]
        for lane in here:
            lane.may_go = True
        is_first = name not in self._reached
        self._reached.add(name)
        added = {lane.number: lane.added.pop(name) for lane in here if name in lane.added}
        return Stage(name, {lane.number: lane.calls.pop(name) for lane in here}, is_first, added)

    def will_run(self, name: str) -> bool:
        """Whether a batch waits before a layer, or will call it again."""
        return any(lane.at == name or lane.reaches(name) for lane in self.lanes)

    def _next(self, waiting: list[_Lane]) -> str:
        """The earliest layer before which all batches wait that will reach it; else the earliest."""
        names = sorted({lane.at for lane in waiting if lane.at is not None}, key=self._rank.__getitem__)
        complete = (name for name in names if all(lane.at == name or not lane.reaches(name) for lane in waiting))
        return next(complete, names[0])

    def _seen(self, name: str, call: LayerCall) -> None:
        lane = _LANE.get()
        if lane in self.lanes:
            lane.see(name, call)

    def _operand_seen(self, name: str, value: Tensor) -> None:
        lane = _LANE.get()
        if lane in self.lanes:
            lane.added[name] = value


def _give_back() -> None:
    """Give freed memory back to the system: glibc keeps up to 64 MB per thread.

    Eight batches take 4.4 blocks of an encoder with it, and 6.2 without (`benchmarks.accuracy.memory --texts 64`).
    """
    with suppress(OSError, AttributeError, TypeError):  # another C library, or another system
        ctypes.CDLL(None).malloc_trim(0)


class _Ended(BaseException):
    """Ends the forward pass of a thread that is not needed any more."""


_LANE: contextvars.ContextVar[Any] = contextvars.ContextVar("lane", default=None)
"""The lane whose thread this is."""


class _Lane:
    """The forward pass of one batch in a thread.

    Threads, semaphores and events of `threading` are Python code: an interrupt in it may leave a lock held for ever.
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
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        self._context.run(_LANE.set, self)
        self._error: BaseException | None = None
        self._is_started = self._is_ended = self._is_over = False
        self._turns, self._pauses, self._ends = SimpleQueue[None](), SimpleQueue[None](), SimpleQueue[None]()

    def _run(self) -> None:
        try:
            if not self._is_ended:  # an interrupt came while the thread started
                with torch.no_grad(), self._around():
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

    @contextmanager
    def _around(self) -> Iterator[None]:
        """A context with what torch keeps for each thread: the default device, and the stream of the caller."""
        with self._device if self._device.type != "cpu" else nullcontext(), torch.cuda.stream(self._stream):
            yield

    def go(self) -> None:
        """Run until the last call of the next layer, or to the end.

        Raises:
            Exception: what the forward pass raised.
        """
        self.may_go, self.at = False, None
        with restore_after(self._state()):  # a batch finds what it finds alone, random numbers too
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
        """Keep a call of a layer; wait before its last one."""
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
        """End the forward pass where it is, and wait for it; may be called again."""
        self._is_ended = True
        self._turns.put(None)
        while self._is_started and not self._is_over:
            with suppress(Empty):  # the value is lost if an interrupt comes just after it
                self._ends.get(timeout=0.05)


def _equal(one: Any, other: Any) -> bool:
    ones, others = tree_leaves(one), tree_leaves(other)
    tensors = [(x, y) for x, y in zip(ones, others, strict=False) if isinstance(x, Tensor) and isinstance(y, Tensor)]
    return len(ones) == len(others) and all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in tensors)
