"""What a run of a model calls: every torch function, by the module whose `forward` calls it, and the data flow.

Nothing is traced: the model runs once as it is, so that everything that runs can be recorded. Which call made a tensor
is known by the identity of the tensor; no tensor is kept alive for it. A write to a tensor makes a new value of it, and
of all tensors that share the memory. A function that returns its argument unwritten is no call: `x.float()`.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fakequant.model.modes import evaluating, not_compiled
from fakequant.model.run.memory import Tensors, holds_mask, largest, version_of
from fakequant.model.run.outputs import float_tensors
from fakequant.model.run.recorded import (
    EXTREME,
    FAKE_QUANTIZE,
    IN_A_BRANCH,
    OF_A_CACHE,
    QUANTIZER,
    WITHOUT_FLOATS,
    Call,
    ModuleCall,
    Recording,
    Value,
)
from fakequant.model.run.traits import Trait, counted, factors_of, has, is_number
from fakequant.nn.quantizer import Kind, Quantizer
from fakequant.nn.site_functions import CalledAs, called_as
from fakequant.nn.sites import operands_of, takes_floats
from fakequant.nn.unseen import OF_CACHE, hide_caches
from fakequant.restore import Restore, restore_after, stack_without, structure_of


class _Detail(NamedTuple):
    """Attributes that only calls that can be quantized have: see `Call`."""

    operands: dict[str, int]
    where: tuple[tuple[CodeType, int], ...]
    equation: str
    factors: tuple[int, ...] = ()


_PLAIN = _Detail({}, (), "")
_NOT_IN_PLACE = frozenset({"__index__", "__int__", "__invert__", "__iter__"})


def record(model: nn.Module, run: Callable[[], object], mode: Callable[..., Any] = evaluating) -> Recording:
    """Run a model in eval mode without gradients, and note what it calls; the model is as before.

    Args:
        model: a float model, or a prepared one, whose quantizers only mark what they return.
        run: calls it.
        mode: the context in which it runs; `evaluating` or `training`.

    >>> class Residual(nn.Module):
    ...     def forward(self, x):
    ...         return x + torch.relu(x)
    >>> model, x = nn.Sequential(Residual()), torch.ones(2, 4)
    >>> recording = record(model, lambda: model(x))
    >>> [(call.owner, call.function, sorted(call.operands)) for call in recording.calls]
    [('0', 'relu', ['input']), ('0', 'add', ['input', 'other'])]
    """
    hide_caches()
    recorder = _Recorder(model)
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    with (
        restore_after(_with_buffers(model)),
        torch.random.fork_rng(devices),
        mode(model),
        torch.no_grad(),
        recorder.recording_on(),
    ):
        result = run()
        recorder.recording.kept = recorder.tensors.numbers()
    returned = [*_tensors(result), *float_tensors(result)]  # torch's trees end at a dataclass
    recorder.recording.outputs = tuple(dict.fromkeys(recorder.value_of(tensor) for tensor in returned))
    return recorder.recording


@contextmanager
def watching(model: nn.Module) -> Iterator[Recording]:
    """A context that fills a recording while a model runs as it is: quantizers run, and nothing is counted.

    >>> model, x = nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4)
    >>> with watching(model) as found:
    ...     y = model(x)
    >>> [call.path for call in found.modules]
    ['', '0']
    """
    recorder = _Recorder(model, whole=False)
    with recorder.recording_on():
        yield recorder.recording


def _with_buffers(model: nn.Module) -> Restore:
    """As `structure_of`, with the values of buffers, to which a module may write in eval mode, too."""
    structure = structure_of([model])
    held = [buffer for buffer in model.buffers() if not (buffer.is_meta or is_lazy(buffer))]
    buffers = [(buffer, version_of(buffer), buffer.detach().clone()) for buffer in held]

    def restore() -> None:
        structure()
        for buffer, version, value in buffers:
            written = version_of(buffer) != version if version is not None else not torch.equal(buffer, value)
            if written:
                with torch.no_grad(), torch.inference_mode(buffer.is_inference()):
                    buffer.copy_(value)

    return restore


class _Recorder(TorchFunctionMode):
    """Fills a recording.

    Args:
        model: what runs.
        whole: whether to count products and look at numbers, and to take quantizers for marks; if not, they run.
    """

    def __init__(self, model: nn.Module, *, whole: bool = True) -> None:
        super().__init__()
        self.recording = Recording()
        self.whole = whole
        self.modules = {
            name: module for name, module in model.named_modules() if not isinstance(module, torch.jit.ScriptModule)
        }
        self.tensors = Tensors()
        self.running: list[tuple[str | None, int]] = []
        self.branching: list[tuple[str | None, int]] | None = None
        """The owner that calls control flow of torch, which calls what runs now."""
        self.open: list[ModuleCall] = []
        self.ended: dict[str, ModuleCall] = {}
        """The last call of each module that its hooks have not seen."""
        self.paused = self.over = False
        self.followed: CodeType | None = None
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
        with self.following(), not_compiled(), restore_after(stack_without(self)), self:
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
        arguments = _tensors((args, {key: value for key, value in kwargs.items() if key != "out"}))
        numbers = [x for x in arguments if is_number(x)] if is_product else []
        inputs = tuple(self.value_of(tensor) for tensor in arguments)
        detail, count = _PLAIN if called is None else self._detail(called, args, kwargs), 0
        versions = [version_of(tensor) for tensor in arguments]
        plain = name.partition(" ")[0]
        if numbers and called is None:
            detail = _PLAIN._replace(factors=tuple(map(self.value_of, factors_of(plain, args, kwargs))))
        if numbers and self.whole:
            result, count = counted(plain, lambda: func(*args, **kwargs), numbers)
        else:
            result = func(*args, **kwargs)
        written = [x for x, version in zip(arguments, versions, strict=True) if version_of(x) != version]
        if versions[:1] == [None] and _overwrites(func, called, args, kwargs):  # an inference tensor has no version
            written = arguments[:1]
        if called is None and not written and any(result is x for x in arguments):
            return result
        made = [*_tensors(result)]
        made += [x for x in written if all(x is not other for other in made)]  # by `x[i] = y`
        if made or called is not None or not (getattr(func, "__name__", "") == "__get__" or has(name, Trait.SHAPE)):
            self._note(name, inputs, made, count, detail)
            for one in (*written, *_tensors(kwargs.get("out"))):
                self._note_shared(made, one)
        return result

    def _named(self, func: Any, args: Any, kwargs: Any) -> tuple[CalledAs | None, str]:
        """What a function is in the table of sites, if the call could be one, and its name in the recording."""
        called = called_as(func)
        if called is None:
            return None, _name_of(func)
        if not takes_floats(args, kwargs):
            return None, _name_of(func) + WITHOUT_FLOATS  # as in a prepared model, which does not count such calls
        if self._is_of_cache():
            return None, _name_of(func) + OF_A_CACHE
        return called, called.function.name

    def _branch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What `torch.cond` or a loop of torch calls, recorded; calls of the owner itself cannot be sites."""
        branching = self.running[-1:]

        def run(*args: Any) -> Any:
            outer, self.branching = self.branching, branching
            try:
                with self:
                    return function(*args)
            finally:
                self.branching = outer

        return run

    def _detail(self, called: CalledAs, args: Any, kwargs: Any) -> _Detail:
        operands = operands_of(called, args, kwargs)
        numbers = {operand: self.value_of(tensor) for operand, tensor in operands.items()}
        equation = args[0] if called.function.name == "einsum" and args and isinstance(args[0], str) else ""
        factors = tuple(numbers.values()) if called.function.is_product else ()
        return _Detail(numbers, self._where(), equation, factors)

    def _is_of_cache(self) -> bool:
        """Whether a cache of transformers makes the call."""
        frame: FrameType | None = sys._getframe(3)
        while frame is not None and frame.f_code is not self.followed:
            if frame.f_code is OF_CACHE:
                return True
            frame = frame.f_back
        return False

    def _where(self) -> tuple[tuple[CodeType, int], ...]:
        """The places in the code that run, from the call of the function up to the `forward` of its owner."""
        places = []
        frame: FrameType | None = sys._getframe(3)
        while frame is not None and frame.f_code is not self.followed:
            places.append((frame.f_code, frame.f_lasti))
            frame = frame.f_back
        return tuple(places)

    def _note(self, name: str, inputs: tuple[int, ...], made: list[Tensor], count: int, detail: _Detail) -> None:
        recording = self.recording
        owner, visit = self.running[-1] if self.running else (None, 0)
        number = len(recording.calls)
        values = recording.values
        constant = bool(inputs) and all(values[value].constant for value in inputs)
        outputs = tuple(self._new(tensor, number, constant=constant) for tensor in made)
        index = self.counts[owner, visit, name]
        self.counts[owner, visit, name] += 1
        recording.calls.append(
            Call(number, owner, visit, name, index, inputs, outputs, multiplications=count, **detail._asdict())
        )

    def _note_shared(self, made: list[Tensor], written: Tensor) -> None:
        """Tensors that share memory with one that was written have new values, too."""
        for other, share in self.tensors.sharing(written):
            if all(other is not tensor for tensor in made):
                inputs = self.value_of(other), self.value_of(written)
                self._note("copy" if share == 1 else "setitem", inputs, [other], 0, _PLAIN)

    def value_of(self, tensor: Tensor) -> int:
        """The number of a tensor's value as it is now."""
        number = next((known for own, name, known in self.elsewhere if own[name] is tensor), None)
        number = self.tensors.number(tensor) if number is None else number
        return self._new(tensor, None, constant=False) if number is None else number

    def _new(self, tensor: Tensor, producer: int | None, *, constant: bool) -> int:
        number, size = len(self.recording.values), 0.0
        with torch._C.DisableTorchFunction():
            self.tensors.add(tensor, number)
            if self.whole and not constant and not is_lazy(tensor):
                size = largest(tensor)
                if EXTREME <= size < math.inf and holds_mask(tensor, EXTREME):
                    self.recording.masks.add(number)
            is_float, has_shape = is_number(tensor), not (is_lazy(tensor) or tensor.is_nested)
            shape = tuple(tensor.shape) if has_shape else ()
        self.recording.values.append(Value(number, constant, shape, is_float, producer, size))
        return number

    @contextmanager
    def following(self) -> Iterator[None]:
        """A context in which it is known which module's `forward` runs; hooks of modules belong to none."""
        handles: list[Any] = []

        def unfollow() -> None:
            for handle in handles:
                handle.remove()
            for module, own in held:
                vars(module).pop("forward", None)
                vars(module).update(own)

        held = [
            (module, {"forward": vars(module)["forward"]} if "forward" in vars(module) else {})
            for module in self.modules.values()
        ]
        with restore_after(unfollow):
            for path, module in self.modules.items():
                is_quantizer = hasattr(type(module), "quantizes")
                handles += self._hooks(path, module, is_quantizer=is_quantizer)
                if self.whole:
                    vars(module)["forward"] = (
                        self._quantized(module) if is_quantizer else self._followed(path, module.forward)
                    )
            yield

    def _hooks(self, path: str, module: nn.Module, *, is_quantizer: bool) -> list[Any]:
        """Hooks around the calls of a module. They are lambdas: a copy that a model makes of it would copy methods."""
        if self.whole:
            before = module.register_forward_pre_hook(lambda *_: self.running.append((None, 0)), prepend=True)
            after = module.register_forward_hook(lambda _, __, y: self._leave_hooks(path, y), always_call=True)
        elif is_quantizer:
            before = module.register_forward_pre_hook(lambda *_: self._pause())
            after = module.register_forward_hook(lambda _, args, y: self._resume(args, y), always_call=True)
        else:
            # Without a `forward` of its own, which copies of the module would keep.
            before = module.register_forward_pre_hook(
                lambda _, args, kwargs: None if self.over else self._enter(path, args, kwargs), with_kwargs=True
            )
            after = module.register_forward_hook(
                lambda _, __, y: None if self.over else self._leave(y), always_call=True
            )
        return [before, after]

    def _quantized(self, quantizer: Any) -> Callable[[Tensor], Tensor]:
        """A call of a quantizer, which gives a new value with the same numbers: it needs no range and no time."""

        def run(x: Tensor) -> Tensor:
            if not quantizer.quantizes:
                return x
            with torch._C.DisableTorchFunction():
                # The result may be written, that of a weight is not, and weights are large.
                is_weight = isinstance(quantizer, Quantizer) and quantizer.kind is Kind.WEIGHT
                result = x.detach() if is_weight else x.clone()
            self._note(QUANTIZER, (self.value_of(x),), [result], 0, _PLAIN)
            return result

        return run

    def _pause(self) -> None:
        self.paused = not self.over

    def _resume(self, args: tuple[Tensor, ...], result: Any) -> None:
        """Note the call of a quantizer as one call; one that observes returns its input."""
        self.paused = False
        if not self.over:
            made = [] if result is args[0] or not isinstance(result, Tensor) else [result]
            self._note(QUANTIZER, (self.value_of(args[0]),), made, 0, _PLAIN)

    def _followed(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            caller = next((owner for owner, _ in reversed(self.running) if owner is not None), None)
            if caller is not None:
                self.recording.called.setdefault(caller, []).append(path)
            self._enter(path, args, kwargs)
            result = None
            try:
                result = forward(*args, **kwargs)
                return result
            finally:
                self._leave(result)

        self.followed = run.__code__  # type: ignore[attr-defined]  one code for all modules
        return run

    def _enter(self, path: str, args: Any, kwargs: Any) -> None:
        self.running.append((path, self.recording.visits[path]))
        self.recording.visits[path] += 1
        inputs = tuple(map(self.value_of, _tensors((args, kwargs))))
        self.open.append(ModuleCall(path, inputs, len(self.recording.calls)))
        self.recording.modules.append(self.open[-1])

    def _leave(self, result: Any) -> None:
        self.running.pop()
        one = self.open.pop()
        self.ended[one.path] = one
        one.last, one.end = len(self.recording.calls), len(self.recording.modules)
        one.output = self.value_of(result) if isinstance(result, Tensor) else None

    def _leave_hooks(self, path: str, result: Any) -> None:
        self.running.pop()
        if (one := self.ended.pop(path, None)) is not None and isinstance(result, Tensor):
            one.output = self.value_of(result)  # a hook may have given another one


def _overwrites(func: Any, called: CalledAs | None, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function overwrites its first tensor, by its name and its arguments."""
    if kwargs.get("inplace") or (called is not None and called.writes([*args], kwargs)):
        return True
    name = str(getattr(func, "__name__", ""))
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NOT_IN_PLACE)
    return name.partition(".")[0].endswith("_")


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _name_of(func: Any) -> str:
    """The name of a function of torch without what tells that it is in place or an operator."""
    name: str = getattr(func, "__name__", str(func))
    if name == "__get__":  # a property, as `x.mT`
        return func.__self__.__name__  # type: ignore[no-any-return]
    name = name.partition(".")[0]  # of an operator's overload
    if str(getattr(func, "namespace", "")).startswith("fakequant") and name.startswith(("fake_quantize", "checked")):
        return FAKE_QUANTIZE  # by a function of this package
    return name.strip("_") if name.startswith("__") else name.rstrip("_")
