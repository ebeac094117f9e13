"""Several ranges of one tensor, of which each call of the model takes one by a value of its batch, such as a timestep.

A hook of the model reads the value before its `forward`; the quantizers inside take the range of its bin. Outside of
such a call they have none to take, and say so.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame as _frames

from fakequant.errors import CalibrationError, ConfigError, ShapeError, shown
from fakequant.numerics.granularity import PerChannel, PerTensor
from fakequant.numerics.qparams import QParams, shape_of
from fakequant.numerics.spec import QuantSpec
from fakequant.ops import library
from fakequant.restore import restore_after

By = str | Callable[..., Any]
"""The name of an argument of `forward`, or a function that is called as `forward` is and gives the value."""


class _Calls(threading.local):
    """The bins of the calls that run in this thread."""

    def __init__(self) -> None:
        self.bins: dict[ByValue, Tensor] = {}


_calls = _Calls()


class ByValue:
    """Which of several ranges a call takes.

    Args:
        by: what gives the value: a number, or a tensor of one number or of one for each row of the batch.
        boundaries: rising; bin i holds the values from boundaries[i - 1] on to below boundaries[i], as float32.

    >>> by_value = ByValue("timestep", [10.0, 100.0])
    >>> by_value
    ByValue('timestep', [10, 100])
    >>> by_value.bins_of(torch.tensor([9, 10, 500]))
    tensor([0, 1, 2])
    """

    def __init__(self, by: By, boundaries: Iterable[float]) -> None:
        if not (isinstance(by, str) or callable(by)):
            raise ConfigError(f'by= takes the name of an argument, such as "timestep", or a function, got {shown(by)}')
        self.by = by
        try:
            edges = torch.tensor([float(edge) for edge in boundaries], dtype=torch.float32, device="cpu")
        except (TypeError, ValueError) as error:
            raise ConfigError(f"boundaries= are numbers, such as [250, 500, 750], got {shown(boundaries)}") from error
        if not len(edges) or not bool(edges.isfinite().all()) or bool((edges[1:] <= edges[:-1]).any()):
            raise ConfigError(
                f"boundaries= are one or more finite numbers that rise as float32, such as [250, 500, 750], got "
                f"{shown(edges.tolist())}"
            )
        self.boundaries: tuple[float, ...] = tuple(edges.tolist())

    @property
    def count(self) -> int:
        """The number of bins."""
        return len(self.boundaries) + 1

    @property
    def name(self) -> str:
        """What the value is, for messages."""
        return self.by if isinstance(self.by, str) else getattr(self.by, "__name__", "a value").strip("<>")

    def span(self, place: int) -> str:
        """The values of a bin, for messages.

        >>> ByValue("timestep", [10, 100]).span(1)
        'timestep from 10 to below 100'
        """
        edges = [f"{edge:g}" for edge in self.boundaries]
        if place == 0:
            return f"{self.name} below {edges[0]}"
        return f"{self.name} from {edges[place - 1]}" + (f" to below {edges[place]}" if place < len(edges) else " on")

    def __repr__(self) -> str:
        return f"ByValue({self.name!r}, [{', '.join(f'{edge:g}' for edge in self.boundaries)}])"

    def is_like(self, other: ByValue | None) -> bool:
        """Whether another one gives every call the same bin."""
        return other is not None and (self.by, self.boundaries) == (other.by, other.boundaries)

    def rows_of(self, value: Any) -> Tensor:
        """A value as float32 [rows, 1], one row for all of the batch; else a ConfigError."""
        if isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating, torch.SymInt, torch.SymFloat)):
            number: Any = value
            value = torch.full((1,), number, dtype=torch.float32, device="cpu")
        good = isinstance(value, Tensor) and not value.is_complex() and sum(n != 1 for n in value.shape) <= 1
        if not good or not value.numel():
            raise ConfigError(
                f"the ranges follow {self.name}, which must be a number or a tensor of one number, or of one for each "
                f"row of the batch, got {f'shape {[*value.shape]}' if isinstance(value, Tensor) else shown(value)}"
            )
        rows = value.detach().reshape(-1, 1).to(torch.float32)
        if _is_eager(rows) and bool(rows.isnan().any()):
            raise ConfigError(f"the ranges follow {self.name}, which is NaN; no range is that of NaN")
        return rows

    def bins_of(self, value: Any) -> Tensor:
        """The bin of a value, int64 [1], or those of the rows of a batch, int64 [rows]."""
        rows = self.rows_of(value)
        edges = torch.tensor(self.boundaries, dtype=torch.float32, device=rows.device)
        found = (rows >= edges).sum(-1)
        return found[:1] if _is_eager(found) and len(found) > 1 and bool((found == found[0]).all()) else found

    def check_rows(self, x: Tensor, rows: int, named: str = "") -> None:
        """Raise a ShapeError, which `named` begins, where the first axis of x is not that of the rows of a batch."""
        if not x.dim() or len(x) != rows:
            raise ShapeError(
                f"{named}got a tensor of shape {list(x.shape)} in a batch whose {rows} rows have different bins of "
                f"{self.name}: its first axis is not that of the batch; give batches of one {self.name}"
            )

    def now(self) -> Tensor | None:
        """The bins of the call that runs, see `bins_of`; None outside of one."""
        return _calls.bins.get(self)


class Reader:
    """The hook of a model that reads the value of its calls."""

    def __init__(self, model: nn.Module, by_value: ByValue) -> None:
        self.by_value, self._place, self._default = by_value, None, None
        if isinstance(by_value.by, str):
            parameters = inspect.signature(model.forward).parameters
            own = parameters.get(by_value.by)
            if own is None and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                raise ConfigError(
                    f"by={by_value.by!r} names no argument of {type(model).__name__}.forward, which takes "
                    f"{', '.join(parameters)}; or give a function that is called with the same arguments"
                )
            if own is not None:
                self._default = None if own.default is own.empty else own.default
                self._place = None if own.kind is own.KEYWORD_ONLY else [*parameters].index(by_value.by)

    def value(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The value of a call."""
        by, place = self.by_value.by, self._place
        if not isinstance(by, str):
            return by(*args, **kwargs)
        if by in kwargs:
            return kwargs[by]
        return args[place] if place is not None and place < len(args) else self._default

    def enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Read the value before `forward`."""
        bins = self.by_value.bins_of(self.value(args, kwargs))
        _calls.bins = {**_calls.bins, self.by_value: bins}

    def leave(self, *_: Any) -> None:
        """Forget it after `forward`, also after an error."""
        _calls.bins = {other: bins for other, bins in _calls.bins.items() if other is not self.by_value}

    def put(self, model: nn.Module) -> None:
        """Hook the model."""
        model.register_forward_pre_hook(self.enter, with_kwargs=True, prepend=True)
        model.register_forward_hook(self.leave, always_call=True)


# A compiled model runs its hooks before the graph of its `forward`, and torch would compile them, too; what they
# write then is not in the thread's variables, which that graph reads. In a larger graph they are a part of it.
_eager = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT)
for _hook in (Reader.enter, Reader.leave):
    _frames.set_code_exec_strategy(_hook.__code__, _eager)


def _reader(hook: object) -> Reader | None:
    owner = getattr(hook, "__self__", None)
    return owner if isinstance(owner, Reader) else None


def read_values(model: nn.Module, wanted: Iterable[ByValue]) -> None:
    """Have the calls of a model read some values, and no other one."""
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for key in [key for key, hook in hooks.items() if _reader(hook) is not None]:
            hooks.pop(key)
            for others in (model._forward_pre_hooks_with_kwargs, model._forward_hooks_always_called):
                others.pop(key, None)
    for by_value in dict.fromkeys(wanted):
        Reader(model, by_value).put(model)


class CallEnded(BaseException):
    """Ends a call of a model before its `forward`, by a hook that has seen enough."""


def bins_of_call(model: nn.Module, run: Callable[[], object]) -> dict[ByValue, Tensor]:
    """The bins of the call that a function makes of a model, without its `forward`."""
    readers = [reader for hook in model._forward_pre_hooks.values() if (reader := _reader(hook)) is not None]
    found: dict[ByValue, Tensor] = {}

    def read(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.update({own.by_value: own.by_value.bins_of(own.value(args, kwargs)) for own in readers})
        raise CallEnded

    if readers:
        handle = model.register_forward_pre_hook(read, with_kwargs=True, prepend=True)
        with restore_after(handle.remove), suppress(CallEnded):
            run()
    return found


def calls_now() -> dict[ByValue, Tensor]:
    """The bins of the calls that run in this thread, for `call_again`."""
    return dict(_calls.bins)


@contextmanager
def call_again(bins: Mapping[ByValue, Tensor]) -> Iterator[None]:
    """A context in which quantizers take the ranges of an earlier call."""
    before = _calls.bins

    def restore() -> None:
        _calls.bins = before

    with restore_after(restore):
        _calls.bins = {**before, **bins}
        yield


def params_of_call(
    by_value: ByValue, params: QParams, spec: QuantSpec, x: Tensor, named: Callable[[], str]
) -> tuple[QParams, QuantSpec]:
    """The parameters of the present call, out of those of all bins, and the specification with which they fit x.

    Where rows of x take different bins, the specification is one with a scale for each. `named` gives the start of
    messages, "the quantizer ...". Raises a CalibrationError if no call runs, a ShapeError if the parameters do not fit
    x, and a ConfigError if rows take different bins and the specification has no ranges for rows.
    """
    bins, shape, groups = by_value.now(), shape_of(x), params.scale.shape[1:]
    if bins is None:
        raise CalibrationError(
            f"{named()} has ranges by {by_value.name}, which only a call of the model that was calibrated has: call "
            "that model, not a part of it, and neither its forward nor a checkpointed part again in backward"
        )
    if bins.numel() == 1:
        expected = spec.granularity.group_shape(shape)
        groups = expected if groups.numel() == 1 == torch.Size(expected).numel() else groups
        if tuple(groups) != tuple(expected):
            raise ShapeError(
                f"{named()} has scales of shape {list(groups)} in each of {by_value.count} bins, which do not fit "
                f"{spec.granularity} on a tensor of shape {list(shape)}; calibrate it on tensors of that shape"
            )
        return _taken(params, bins, groups), spec
    granularity, axes = spec.granularity, (0,)
    if isinstance(granularity, PerChannel):
        axes = (0, *(axis % x.dim() for axis in granularity.axes))
    known = isinstance(granularity, (PerTensor, PerChannel)) and axes.count(0) == 1
    if not known or not spec.is_plain or groups.numel() not in (1, *x.shape[1:]):
        raise ConfigError(
            f"{named()} is {spec}, which has no ranges for single rows; give batches of one {by_value.name}"
        )
    by_value.check_rows(x, len(bins), f"{named()} ")
    # The axis of bins takes the place of the first axis, of which there is one group.
    own = (len(bins), *(groups[1:] if len(groups) == len(shape) else [1] * (len(shape) - 1)))
    return _taken(params, bins, own), spec.replace(granularity=PerChannel(*sorted(axes)))


def _taken(params: QParams, bins: Tensor, shape: Iterable[int]) -> QParams:
    """The parameters of some bins."""

    def taken(table: Tensor) -> Tensor:
        return table.index_select(0, bins.to(table.device)).reshape([*shape])

    return QParams(taken(params.scale), None if params.zero_point is None else taken(params.zero_point))


def _is_eager(x: Tensor) -> bool:
    """Whether the values of x can be read now: no compiler, no tracer, and not on the device meta."""
    return not (torch.compiler.is_compiling() or library.needs_tracing(x) or x.is_meta)
