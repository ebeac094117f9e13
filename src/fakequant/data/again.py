"""Run a model so that the next run starts from the same values of the model, batch and random numbers."""

from __future__ import annotations

import copy
import random
import sys
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from fakequant.distributed import is_moved
from fakequant.memory import memory_of, write_back
from fakequant.nn.quantizer import Quantizer
from fakequant.ops.waiting import are_equal, read_flags
from fakequant.restore import Restore, in_order, restore_after, set_to

_ROOT = __name__.partition(".")[0]
_WITHOUT_STATE = {*sys.stdlib_module_names, "torch", "numpy", _ROOT} - {"types"}
"""Packages whose objects are not searched: they hold no state of a model, or have a rule by their type."""
_VALUES = (Tensor, np.ndarray, torch.Generator)
_MISSING = object()
_LEAVES = (str, bytes, int, float, complex, type, type(None), FunctionType, MethodType, ModuleType)
_OF_MODULES = ("_parameters", "_buffers", "_modules")
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GIVEN = "the batch"
_KEPT: ContextVar[frozenset[int]] = ContextVar("kept", default=frozenset())
"""The models that an outer `unchanged` restores."""


class Changes(NamedTuple):
    """The tensors, arrays and containers that runs of a model write.

    Attributes:
        things: for each name, the tensor, array or container, and for a dict the keys that are written.
    """

    things: tuple[tuple[str, Any, tuple[Any, ...] | None], ...] = ()

    @property
    def names(self) -> list[str]:
        """The names of the tensors, arrays, attributes and items that are written."""
        return [*self.values]

    @property
    def values(self) -> dict[str, Any]:
        """The present values by name; a value is a tensor, an attribute, an item of a dict, or a list."""
        found = {}
        for path, one, keys in self.things:
            found |= {path: one} if keys is None else {_joined(path, key) or "the model": one.get(key) for key in keys}
        return found

    def of_model(self) -> Changes:
        """The changes of the model, without the changes of a batch."""
        return Changes(tuple(own for own in self.things if own[0].partition(".")[0] != _GIVEN))

    def capture(self) -> Restore:
        """A function that restores the present values of all tensors, arrays and containers in `things`."""
        with _plainly():
            found = [(one, keys, _captured(one, keys)) for _, one, keys in self.things]

        def restore() -> None:
            with _plainly():
                for one, keys, value in found:
                    _put(one, keys, value)

        return restore


class Values:
    """The stored values of all tensors, arrays and containers that can be reached from some objects, for `restore`.

    Modules, dicts, lists, sets, tuples and plain objects are searched. Quantizers are not, so that the data that a run
    collects in them stay.

    Args:
        roots: the objects by name.
        tensors: whether to store values of tensors, arrays and generators; else only attributes and items.

    Attributes:
        changed: the changes that `restore` found.

    >>> batch, layer = {"x": torch.zeros(2), "cache": []}, nn.BatchNorm1d(2)
    >>> values = Values({"batch": batch, "": layer})
    >>> batch["x"] += 1
    >>> batch["cache"].append(1)
    >>> layer.running_mean.data[0] = 3.0
    >>> values.restore()
    >>> batch, layer.running_mean, sorted(values.changed.names)
    ({'x': tensor([0., 0.]), 'cache': []}, tensor([0., 0.]), ['batch.cache', 'batch.x', 'running_mean'])
    """

    def __init__(self, roots: dict[str, Any], *, tensors: bool = True) -> None:
        self.changed, self._tensors = Changes(), tensors
        self._held: list[tuple[str, Any, Any]] = []
        seen: dict[int, Any] = {}
        stack = [*roots.items()]
        with _plainly():
            while stack:
                path, one = stack.pop()
                if not isinstance(one, _LEAVES) and id(one) not in seen:
                    seen[id(one)] = one
                    stack += self._add(path, one)

    def _add(self, path: str, one: Any) -> Iterable[tuple[str, Any]]:
        """Store the value of an object, and return the objects in it, with their names."""
        if isinstance(one, tuple):
            return [(path, item) for item in one]
        held = one if isinstance(one, _VALUES) else _contents_of(one)
        if isinstance(held, _VALUES) and not self._tensors:
            return []
        if held is None or (value := _captured(held, None)) is None:
            return []
        self._held.append((path, held, value))
        if isinstance(one, nn.Module):  # a lazy one gets another class
            self._held.append((path, one, type(one)))
        if isinstance(held, _VALUES):
            return []
        if isinstance(held, dict):
            return [(_joined(path, key), item) for key, item in held.items()]
        return [(path, item) for item in held]

    def changes(self) -> Changes:
        """The tensors, arrays and containers whose values differ from the stored values."""
        with _plainly():
            flags = [(own, _is_same(*own[1:])) for own in self._held]
            read = iter(read_flags([flag for _, flag in flags if isinstance(flag, Tensor)]))
            found = [own for own, flag in flags if not (next(read) if isinstance(flag, Tensor) else flag)]
        keys = [_written_keys(one, value) if isinstance(one, dict) else None for _, one, value in found]
        return Changes(tuple((path, one, own) for (path, one, _), own in zip(found, keys, strict=True)))

    def restore(self) -> None:
        """Restore all stored values; may be called again."""
        now = self.changes()
        self.changed = self.changed if self.changed.things else now
        places = {id(one) for _, one, _ in now.things}
        with _plainly():
            for _, one, value in self._held:
                if id(one) in places:
                    _put(one, None, value)

    def apart(self, result: Any) -> Any:
        """A result of the run; tensors whose memory `restore` will write are copied."""
        kept: dict[int | None, list[tuple[Any, Any]]] = {}
        for _, one, value in self._held:
            if isinstance(one, Tensor) and (memory := memory_of(_local(one))) is not None:
                kept.setdefault(memory, []).append((one, value))

        def copied(y: Tensor) -> Tensor:
            held = kept.get(memory_of(_local(y)), ())
            with _plainly():
                is_written = any(not same_bits(one, value) for one, value in held)
            return y.clone() if is_written else y

        return tree_map_only(Tensor, copied, result)


def _joined(path: str, key: Any) -> str:
    if key in _OF_MODULES:
        return path
    return f"{path}.{key}" if path else str(key)


def _contents_of(one: Any) -> Any:
    """The dict, list, set or deque with the state of an object; None for objects that are not searched."""
    if isinstance(one, (dict, list, set, deque)):
        return one
    if isinstance(one, (Quantizer, torch.jit.ScriptModule)) or (
        isinstance(one, Mapping) and not isinstance(one, UserDict)
    ):
        return None  # a mapping of another kind may be a disk
    package = type(one).__module__.partition(".")[0]
    if package in _WITHOUT_STATE and not isinstance(one, (nn.Module, SimpleNamespace)):
        return None
    held = getattr(one, "__dict__", None)
    return held if isinstance(held, dict) else None


def _captured(one: Any, keys: tuple[Any, ...] | None) -> Any:
    """The value of a tensor or array, the state of a generator, or the items of a container (at `keys`); else None."""
    if isinstance(one, nn.Module):
        return type(one)
    if isinstance(one, torch.Generator):
        return one.get_state()
    if isinstance(one, np.ndarray):
        return one.copy() if type(one) is np.ndarray and one.dtype != object else None  # a memory map may be a disk
    if isinstance(one, dict):
        return dict(one) if keys is None else {key: one[key] for key in keys if key in one}
    if not isinstance(one, Tensor):
        return [*one]
    if one.is_meta or is_lazy(one) or one.layout is not torch.strided or one.is_nested or one.is_quantized:
        return None
    return one.detach().clone()


def _is_same(one: Any, value: Any) -> bool | Tensor:
    """Whether an object still has the value from `_captured`, as a bool or as a tensor for `read_flags`."""
    if isinstance(one, nn.Module):
        return type(one) is value
    if isinstance(one, torch.Generator):
        return torch.equal(one.get_state(), value)
    if isinstance(one, np.ndarray):
        return one.tobytes() == value.tobytes()
    if isinstance(one, Tensor):
        bits = bits_of(one, value)
        return bits is not None and are_equal(*bits)
    return len(one) == len(value) and (
        not _written_keys(one, value) if isinstance(one, dict) else all(map(_is_same_item, one, value))
    )


def _written_keys(one: dict[Any, Any], value: dict[Any, Any]) -> tuple[Any, ...]:
    gone = [key for key in value if key not in one]
    return tuple(gone + [key for key, item in one.items() if not _is_same_item(value.get(key, _MISSING), item)])


def _is_same_item(one: Any, other: Any) -> bool:
    """Whether two items are the same object or equal numbers: `forward` may compute a number anew each time."""
    return one is other or (type(one) is type(other) and isinstance(one, (int, float)) and repr(one) == repr(other))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits: NaN equals NaN, and the sign of a zero counts."""
    bits = bits_of(one, other)
    return bits is not None and torch.equal(*bits)


def bits_of(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor] | None:
    """Two tensors as integers of their bits; None if dtype, device or shape differ."""
    one, other = (_local(x.detach()) for x in (one, other))
    if (one.dtype, one.device, one.shape) != (other.dtype, other.device, other.shape):
        return None
    if one.is_complex():
        one, other = (torch.view_as_real(x.resolve_conj()) for x in (one, other))
    if one.is_floating_point():
        one, other = (x.contiguous().view(_BITS[x.element_size()]) for x in (one, other))
    return one, other


def _local(x: Tensor) -> Tensor:
    """The part of a DTensor that this process has; any other tensor unchanged."""
    return getattr(x, "_local_tensor", x)


def _put(one: Any, keys: tuple[Any, ...] | None, value: Any) -> None:
    """Give an object the value from `_captured`."""
    if isinstance(one, nn.Module):
        one.__class__ = value
    elif isinstance(one, torch.Generator):
        one.set_state(value)
    elif isinstance(one, np.ndarray):
        np.copyto(one, value)
    elif isinstance(one, dict):
        for key in [key for key in one if keys is None or key in keys]:
            del one[key]
        one.update(value)
    elif isinstance(one, Tensor):
        with torch.inference_mode(one.is_inference()), torch.no_grad():
            if one.grad_fn is not None:  # of a model that writes a buffer with a gradient
                one.detach_()
            if (one.shape, one.dtype, one.device) == (value.shape, value.dtype, value.device):
                write_back(one, value)
            else:
                one.data = value.clone()
    else:
        one.clear()
        (one.update if isinstance(one, set) else one.extend)(value)


@contextmanager
def _plainly() -> Iterator[None]:
    """A context without dispatch modes, `__torch_function__` and gradients: nothing observes its computations."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def accelerator() -> Any | None:
    """torch's module of the accelerator that this process uses, such as `torch.cuda`; None if it uses none."""
    device = torch.accelerator.current_accelerator()
    module: Any = None if device is None else torch.get_device_module(device)
    is_used = getattr(module, "is_initialized", lambda: module is not None)
    return module if is_used() else None


def random_state() -> Restore:
    """A function that restores the states of the random generators of torch, NumPy and Python."""
    cpu, module = torch.get_rng_state(), accelerator()
    # With one device, no argument: torch.mps takes none.
    count = 0 if module is None else torch.accelerator.device_count()
    indices = [()] if count == 1 else [(index,) for index in range(count)]
    of_devices = [(own, module.get_rng_state(*own)) for own in indices if module is not None]
    of_python, of_numpy = random.getstate(), np.random.get_state()

    def restore() -> None:
        torch.set_rng_state(cpu)
        for own, state in of_devices:
            module.set_rng_state(state, *own)  # type: ignore[union-attr]  there are none without a module
        random.setstate(of_python)
        np.random.set_state(of_numpy)

    return restore


def state_before(model: nn.Module) -> Restore:
    """A function that restores all present values of a model; may be called several times."""
    return Values({"": model}).restore


@contextmanager
def unchanged(model: nn.Module, given: Any = None, *, is_pure: bool = False) -> Iterator[Values]:
    """A context for a run of a model, which restores the model, the arguments of the run, and random numbers.

    Inside of another `unchanged` of the same model, only the arguments are restored: so the model's state goes on from
    batch to batch, and the outer context restores it.

    Args:
        model: the model; its parameters, buffers, attributes and containers are restored.
        given: the arguments or the batch of the run.
        is_pure: whether an earlier run changed nothing of the model, so that the model need not be searched.

    >>> model = nn.Sequential(nn.BatchNorm1d(2)).train()
    >>> with unchanged(model) as values:
    ...     y = model(torch.randn(8, 2))
    >>> model[0].running_mean, sorted(values.changed.names)
    (tensor([0., 0.]), ['0.num_batches_tracked', '0.running_mean', '0.running_var'])
    """
    is_inner = id(model) in _KEPT.get()
    roots = {} if is_inner or is_pure else {"": dict(model.named_buffers()) if is_moved(model) else model}
    values = Values({**roots, _GIVEN: given})
    back = [values.restore] if is_inner else [values.restore, random_state()]
    with _kept(model), restore_after(lambda: [restore() for restore in back]):
        yield values


def _kept(model: nn.Module) -> AbstractContextManager[None]:
    """A context in which `unchanged` does not restore a model after a run."""
    return set_to(_KEPT, _KEPT.get() | {id(model)})


class Runs:
    """Runs models on the batches of a `Batches`, and keeps a record of what the runs write.

    Attributes:
        written: for each model, what its first run or pass changes, without changes of the batches.
    """

    def __init__(self) -> None:
        self.written: WeakKeyDictionary[nn.Module, Changes] = WeakKeyDictionary()
        self._copies = False
        """Whether a model wrote into a batch: then later runs get copies, so that several may run side by side."""

    @contextmanager
    def one_pass(self, model: nn.Module) -> Iterator[Values]:
        """A context for a pass over the batches, in which the model's state goes on from batch to batch, as in use."""
        with self._unchanged(model, None) as values:
            yield values

    @contextmanager
    def _unchanged(self, model: nn.Module, batch: Any) -> Iterator[Values]:
        known = self.written.get(model)
        is_new = known is None and id(model) not in _KEPT.get()
        with unchanged(model, batch, is_pure=known is not None and not known.things) as values:
            yield values
        own = values.changed.of_model()
        self._copies = self._copies or own != values.changed
        if is_new:
            self.written[model] = own

    def run(self, model: nn.Module, batch: Any, call: Callable[[nn.Module, Any], Any], *, alone: bool) -> Any:
        """The outputs of a model for a batch; model, batch and random numbers are restored.

        With `alone=False` the changes of the model stay, for a caller that changes the model itself.
        """
        with _copied(batch) if self._copies else nullcontext(batch) as own:
            if not alone:
                with _kept(model):
                    return call(model, own)
            with self._unchanged(model, None if self._copies else batch) as values:
                return values.apart(call(model, own))

    def state(self, model: nn.Module) -> Restore:
        """A function that restores the present values that runs of a model write, and random numbers."""
        return in_order(random_state(), self.written.get(model, Changes()).capture())


_ORIGINALS: dict[int, Any] = {}
"""The original of each copied batch, by the id of the copy, while a model runs with the copy."""


def original(batch: Any) -> Any:
    """The original of a batch that was copied for a run; any other batch is returned unchanged."""
    return _ORIGINALS.get(id(batch), batch)


@contextmanager
def _copied(batch: Any) -> Iterator[Any]:
    with _plainly():
        own = copy.deepcopy(batch)
    _ORIGINALS[id(own)] = original(batch)
    try:
        yield own
    finally:
        _ORIGINALS.pop(id(own), None)


class SeveralPasses:
    """Several passes of a model over the same batches, in turns: a pass goes on from the state after its last run."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._left = model, dict[str, Restore]()
        self._is_pure = False

    def run(self, name: str, call: Callable[[], Any]) -> Any:
        """The result of the next run of the pass called `name`."""
        if self._is_pure:
            return call()
        with unchanged(self._model) as values:
            before = torch.get_rng_state()
            if name in self._left:
                self._left[name]()
            result = values.apart(call())
            self._left[name] = in_order(values.changes().capture(), random_state())
            draws = not torch.equal(before, torch.get_rng_state())
        self._is_pure = not (draws or values.changed.things) and len(self._left) == 1
        return result
