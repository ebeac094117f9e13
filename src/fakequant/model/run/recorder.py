"""Records a run of a model: every call of a torch function or a module, and the data flow.

Nothing is traced: the model runs once, unchanged, so that everything that runs can be recorded. Tensors are recognised
by their identity, and may be freed during the run. A write to a tensor makes a new value of this tensor and of all
tensors that share its memory. A call that returns its argument unchanged, as `x.float()` may, is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from types import CodeType, FunctionType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only

from fakequant.memory import memory_of
from fakequant.model.run.recorded import (
    FAKE_QUANTIZE,
    IN_A_BRANCH,
    QUANTIZER,
    TIMES_A_NUMBER,
    FunctionCall,
    ModuleCall,
    Recording,
    Value,
    factors_of,
    has,
    is_number,
)
from fakequant.model.weights import not_compiled
from fakequant.nn.functions import CalledAs, Trait, called_as
from fakequant.restore import restore_after

_functorch: Any = torch._C._functorch  # type: ignore[attr-defined]  a room of torch without type stubs
_ADDED = 1000  # tensors after which dead ones are dropped; as many as living ones, where those are more


class Tensors:
    """A table of the tensors of a run and their numbers. A tensor is known by its id and memory, and may be freed.

    >>> found, x = Tensors(), torch.zeros(4)
    >>> views = x[:2], x[2:]
    >>> for number, tensor in enumerate((x, *views)):
    ...     found.add(tensor, number)
    >>> found.number(views[1]), [(other.tolist(), share) for other, share in found.sharing(x[1:3])]
    (2, [([0.0, 0.0, 0.0, 0.0], 0.5), ([0.0, 0.0], 0.5), ([0.0, 0.0], 0.5)])
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[ref[Tensor], int]] = {}
        self._by_memory: dict[int | None, dict[int, ref[Tensor]]] = {}
        self._left = _ADDED

    def add(self, tensor: Tensor, number: int) -> None:
        """Give a tensor a number, which replaces an earlier number of the tensor."""
        self._left -= 1
        if not self._left:
            self._held = {key: own for key, own in self._held.items() if own[0]() is not None}
            alive = {
                memory: {key: one for key, one in held.items() if one() is not None}
                for memory, held in self._by_memory.items()
            }
            self._by_memory = {memory: held for memory, held in alive.items() if held}
            self._left = max(_ADDED, len(self._held))
        one = ref(tensor)  # Python swallows an interrupt in a callback of a reference, so there is none
        self._held[id(tensor)] = one, number
        self._by_memory.setdefault(memory_of(tensor), {})[id(tensor)] = one

    def number(self, tensor: Tensor) -> int | None:
        """The last number of a tensor; None for an unknown tensor."""
        one, number = self._held.get(id(tensor), (None, None))
        return number if one is not None and one() is tensor else None

    def numbers(self) -> frozenset[int]:
        """The last numbers of all tensors that are still in memory."""
        return frozenset(number for one, number in self._held.values() if one() is not None)

    def sharing(self, written: Tensor) -> list[tuple[Tensor, float]]:
        """Other tensors that overlap `written` in memory, each with the share of its elements that overlap."""
        memory = memory_of(written)
        held = [] if memory is None else [one() for one in self._by_memory.get(memory, {}).values()]
        others = [x for x in held if x is not None and x is not written]
        if not others:
            return []
        marks = torch.zeros(
            written.untyped_storage().nbytes() // written.element_size(), dtype=torch.bool, device="cpu"
        )
        _elements(marks, written).fill_(True)
        # A view of another dtype has other elements; all of them count.
        shares = [
            _elements(marks, other).float().mean().item() if other.dtype is written.dtype else 1.0 for other in others
        ]
        return [(other, share) for other, share in zip(others, shares, strict=True) if share > 0]


def version_of(tensor: Tensor) -> int | None:
    """A number that changes with every write to a tensor; None for inference tensors, which have no such number."""
    return None if is_lazy(tensor) or tensor.is_inference() else tensor._version


def _elements(marks: Tensor, tensor: Tensor) -> Tensor:
    """A view of `marks` [elements of the storage] with the shape of the tensor: the marks of its elements."""
    return marks.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def largest(tensor: Tensor) -> float:
    """The largest magnitude in a float tensor, NaN if it holds NaN; 0 for other tensors and dtypes without `aminmax`.

    >>> largest(torch.tensor([1.0, -torch.inf])), largest(torch.ones(2, dtype=torch.int64))
    (inf, 0.0)
    """
    tensor = unwrapped(tensor)
    is_plain = tensor.layout is torch.strided and not (tensor.is_nested or is_traceable_wrapper_subclass(tensor))
    # torch finds no extremes of floats with 8 bits.
    if not (is_plain and tensor.is_floating_point() and tensor.numel()) or tensor.is_meta or tensor.itemsize == 1:
        return 0.0
    return max(abs(limit.item()) for limit in tensor.aminmax())


def holds_mask(tensor: Tensor, extreme: float) -> bool:
    """Whether a float tensor has zeros and extreme numbers only, or the same negative extreme number everywhere.

    >>> holds_mask(torch.tensor([0.0, -1e9, 0.0]), 1e4), holds_mask(torch.tensor([0.5, -1e9]), 1e4)
    (True, False)
    """
    tensor = unwrapped(tensor)
    is_zero = tensor == 0
    if not bool((is_zero | (tensor.abs() >= extreme)).all()):
        return False
    return bool(is_zero.any()) or bool((tensor == tensor.flatten()[0]).all() and tensor.flatten()[0] < 0)


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor inside the wrappers of vmap, because the values of a wrapper cannot be read."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


class Detail(NamedTuple):
    """The attributes of a `FunctionCall` for functions that can be quantized."""

    operands: dict[str, int]
    where: tuple[tuple[CodeType, int], ...]
    equation: str
    factors: tuple[int, ...] = ()


PLAIN = Detail({}, (), "")
_NOT_IN_PLACE = frozenset({"__index__", "__int__", "__invert__", "__iter__"})


class Recorder(TorchFunctionMode):
    """Fills a recording while a model runs unchanged.

    Modules that the model calls in other threads are recorded without their functions, which this thread does not see.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.recording = Recording()
        self.modules = {
            name: module for name, module in model.named_modules() if not isinstance(module, torch.jit.ScriptModule)
        }
        self.tensors = Tensors()
        self.running: list[tuple[str | None, int]] = []
        self.branching: list[tuple[str | None, int]] | None = None
        """The module call that runs `torch.cond` or a loop of torch; None outside of `torch.cond` and loops."""
        self.open: list[ModuleCall] = []
        self.paused = self.over = False
        self.thread = get_ident()
        self.counts: Counter[tuple[str | None, int, str]] = Counter()
        numbers = {parameter: self._new(parameter, None, constant=True) for parameter in model.parameters()}
        self.recording.parameters = {
            name: numbers[parameter] for name, parameter in model.named_parameters(remove_duplicate=False)
        }
        self.elsewhere = [  # where hooks put weights for the time of a call
            (module._parameters, name, numbers[parameter])
            for module in self.modules.values()
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.is_meta
        ]
        self.recording.buffers = frozenset(self._new(buffer, None, constant=False) for buffer in model.buffers())

    @contextmanager
    def recording_on(self) -> Iterator[None]:
        """A context in which calls are recorded."""
        handles: list[Any] = []
        with restore_after(lambda: [handle.remove() for handle in handles]):
            for path, module in self.modules.items():
                self._hook(path, module, handles.append)
            with not_compiled(), self:
                try:
                    yield
                finally:
                    self.over = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        called, name = self._named(func, args, kwargs)
        if called is not None and self.running[-1:] == self.branching:
            called, name = None, name + IN_A_BRANCH  # which a prepared model does not count either
        is_product = has(name, Trait.PRODUCT)
        if isinstance(func, HigherOrderOperator) and not is_product:
            args = tree_map_only((FunctionType, partial, nn.Module), self._branch, args)
        arguments = tensors_in((args, {key: value for key, value in kwargs.items() if key != "out"}))
        plain = name.partition(" ")[0]
        factors = factors_of(func, plain, args, kwargs) if is_product else []
        inputs = tuple(self.value_of(tensor) for tensor in arguments)
        detail = PLAIN if called is None else self._detail(called, args, kwargs)
        versions = [version_of(tensor) for tensor in arguments]
        if factors:
            detail = detail._replace(factors=tuple(map(self.value_of, factors)))
        result, count = self._computed(plain, lambda: func(*args, **kwargs), factors)
        written = [x for x, version in zip(arguments, versions, strict=True) if version_of(x) != version]
        if versions[:1] == [None] and _overwrites(func, called, args, kwargs):  # an inference tensor has no version
            written = arguments[:1]
        if called is None and not written and any(result is x for x in arguments):
            return result
        made = [*tensors_in(result)]
        made += [x for x in written if all(x is not other for other in made)]  # by `x[i] = y`
        if made or called is not None or not (getattr(func, "__name__", "") == "__get__" or has(name, Trait.SHAPE)):
            self._note(name, inputs, made, count, detail)
            for one in (*written, *tensors_in(kwargs.get("out"))):
                for other, share in self.tensors.sharing(one):
                    if all(other is not tensor for tensor in made):
                        pair = self.value_of(other), self.value_of(one)
                        self._note("copy" if share == 1 else "setitem", pair, [other], 0, PLAIN)
        return result

    def _named(self, func: Any, args: Any, kwargs: Any) -> tuple[CalledAs | None, str]:
        """The entry of `func` in the table of functions (None: it cannot be quantized), and the name to record."""
        called = called_as(func)
        name = name_of(func) if called is None else called.function.name
        return called, name if kwargs.get("alpha", 1) == 1 else name + TIMES_A_NUMBER

    def _detail(self, called: CalledAs, args: Any, kwargs: Any) -> Detail:
        return PLAIN

    def _computed(self, product: str, run: Callable[[], Any], factors: list[Tensor]) -> tuple[Any, int]:
        """The result of `run`, and its multiply-accumulates: 0 here, because only a subclass counts them."""
        return run(), 0

    def _size(self, tensor: Tensor, number: int) -> float:
        """The largest magnitude of a new value: 0 here, because only a subclass measures it."""
        return 0.0

    def _branch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function for `torch.cond` or a loop of torch: its calls are recorded, but cannot be quantized."""
        branching = self.running[-1:]

        def run(*args: Any) -> Any:
            outer, self.branching = self.branching, branching
            try:
                with self:
                    return function(*args)
            finally:
                self.branching = outer

        return run

    def _note(self, name: str, inputs: tuple[int, ...], made: list[Tensor], count: int, detail: Detail) -> None:
        recording = self.recording
        owner, visit = self.running[-1] if self.running else (None, 0)
        number = len(recording.calls)
        values = recording.values
        constant = bool(inputs) and all(values[value].constant for value in inputs)
        outputs = tuple(self._new(tensor, number, constant=constant) for tensor in made)
        index = self.counts[owner, visit, name]
        self.counts[owner, visit, name] += 1
        recording.calls.append(
            FunctionCall(number, owner, visit, name, index, inputs, outputs, multiplications=count, **detail._asdict())
        )

    def value_of(self, tensor: Tensor) -> int:
        """The number of a tensor's present value; for a tensor that vmap wraps, the number of the tensor inside."""
        number = next((known for own, name, known in self.elsewhere if own[name] is tensor), None)
        number = self.tensors.number(tensor) if number is None else number
        number = self.tensors.number(unwrapped(tensor)) if number is None else number
        return self._new(tensor, None, constant=False) if number is None else number

    def _new(self, tensor: Tensor, producer: int | None, *, constant: bool) -> int:
        number = len(self.recording.values)
        with torch._C.DisableTorchFunction():
            self.tensors.add(tensor, number)
            size = 0.0 if constant or is_lazy(tensor) else self._size(tensor, number)
            is_float, has_shape = is_number(tensor), not (is_lazy(tensor) or tensor.is_nested)
            shape = tuple(tensor.shape) if has_shape else ()
        self.recording.values.append(Value(number, constant, shape, is_float, producer, size))
        return number

    def _hook(self, path: str, module: nn.Module, keep: Callable[[Any], None]) -> None:
        """Put hooks around the calls of a module. Hooks are lambdas: a copy of the module would copy bound methods.

        Args:
            keep: gets the handle of each hook right after it is added, so that an interrupt leaves no hook behind.
        """
        if quantizes(module):
            keep(module.register_forward_pre_hook(lambda *_: self._pause()))
            keep(module.register_forward_hook(lambda _, args, y: self._resume(args, y), always_call=True))
            return
        keep(module.register_forward_pre_hook(lambda _, args, kw: self.enter(path, args, kw), with_kwargs=True))
        keep(module.register_forward_hook(lambda _, __, y: self.leave(y), always_call=True))

    def is_here(self) -> bool:
        """Whether the run goes on, and the calling thread is the thread of the run."""
        return not self.over and get_ident() == self.thread

    def _pause(self) -> None:
        self.paused = self.paused or self.is_here()

    def _resume(self, args: tuple[Tensor, ...], result: Any) -> None:
        """Record that a quantizer returned; if it returns its input unchanged, there is no new value."""
        if self.is_here():
            self.paused = False
            made = [] if result is args[0] or not isinstance(result, Tensor) else [result]
            self._note(QUANTIZER, (self.value_of(args[0]),), made, 0, PLAIN)

    def enter(self, path: str, args: Any, kwargs: Any) -> None:
        """Record that the call of a module begins."""
        calls, modules = self.recording.calls, self.recording.modules
        if self.is_here():
            self.running.append((path, self.recording.visits[path]))
            self.recording.visits[path] += 1
            self.open.append(ModuleCall(path, tuple(map(self.value_of, tensors_in((args, kwargs)))), len(calls)))
            modules.append(self.open[-1])
        elif not self.over:
            self.recording.threads.add(path)
            modules.append(ModuleCall(path, (), len(calls), len(calls), len(modules) + 1))

    def leave(self, result: Any) -> None:
        """Record that the innermost running call of a module ends."""
        if self.is_here():
            self.running.pop()
            one = self.open.pop()
            one.last, one.end = len(self.recording.calls), len(self.recording.modules)
            one.results = tuple(map(self.value_of, tensors_in(result)))
            one.output = one.results[0] if isinstance(result, Tensor) else None


def _overwrites(func: Any, called: CalledAs | None, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function overwrites its first tensor, by its name and its arguments."""
    if kwargs.get("inplace") or (called is not None and called.writes([*args], kwargs)):
        return True
    name = str(getattr(func, "__name__", ""))
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NOT_IN_PLACE)
    return name.partition(".")[0].endswith("_")


def quantizes(module: nn.Module) -> bool:
    """Whether a module is a quantizer."""
    return hasattr(type(module), "quantizes")


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors in containers that torch's pytree knows, however they are nested."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def name_of(func: Any) -> str:
    """The name of a function of torch, without the underscores of in-place functions and operators."""
    name: str = getattr(func, "__name__", str(func))
    if name == "__get__":  # a property, as `x.mT`
        return func.__self__.__name__  # type: ignore[no-any-return]
    name = name.partition(".")[0]  # of an operator's overload
    if str(getattr(func, "namespace", "")).startswith("fakequant") and name.startswith(("fake_quantize", "checked")):
        return FAKE_QUANTIZE  # by a function of this package
    return name.strip("_") if name.startswith("__") else name.rstrip("_")
