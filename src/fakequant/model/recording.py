"""What a run of a model calls: every torch function, by the module whose `forward` calls it, and the data flow.

Nothing is traced: the model runs once as it is, so that everything that runs can be recorded. Which call made a tensor
is known by the identity of the tensor, for which all tensors of the run are kept until it ends. A write to a tensor
makes a new value of it, and of all tensors that share the memory.
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
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fakequant.model.functions import counted, factors_of, is_product
from fakequant.model.memory import Memory, largest, version_of
from fakequant.model.modes import evaluating, not_compiled
from fakequant.model.outputs import float_tensors
from fakequant.model.recorded import EXTREME, IN_A_BRANCH, OF_A_CACHE, QUANTIZED, WITHOUT_FLOATS, Call, Recording, Value
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
    extreme: bool
    factors: tuple[int, ...] = ()


_PLAIN = _Detail({}, (), "", False)


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
        recorder.following(),
        not_compiled(),
        restore_after(stack_without(recorder)),
        recorder,
    ):
        result = run()
    returned = [*_tensors(result), *float_tensors(result)]  # torch's trees end at a dataclass
    recorder.recording.outputs = tuple(dict.fromkeys(recorder.value_of(tensor) for tensor in returned))
    return recorder.recording


def _with_buffers(model: nn.Module) -> Restore:
    """As `structure_of`, with the values of buffers, to which a module may write in eval mode, too."""
    structure = structure_of([model])
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]

    def restore() -> None:
        structure()
        with torch.no_grad():
            for buffer, value in buffers:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)

    return restore


class _Recorder(TorchFunctionMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.recording = Recording()
        self.modules = {
            name: module for name, module in model.named_modules() if not isinstance(module, torch.jit.ScriptModule)
        }
        self.numbers: dict[int, int] = {}
        self.alive: list[Tensor] = []
        self.memory = Memory()
        self.running: list[tuple[str | None, int]] = []
        self.branching: list[tuple[str | None, int]] | None = None
        """The owner that calls control flow of torch, which calls what runs now."""
        self.followed: CodeType | None = None
        self.counts: Counter[tuple[str | None, int, str]] = Counter()
        for parameter in model.parameters():
            self._new(parameter, None, constant=True)
        self.elsewhere = [  # where hooks put weights for the time of a call
            (module._parameters, name, self.numbers[id(parameter)])
            for module in self.modules.values()
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.is_meta
        ]
        self.recording.buffers = frozenset(self._new(buffer, None, constant=False) for buffer in model.buffers())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        called = called_as(func)
        if called is not None and not takes_floats(args, kwargs):
            called = None  # as in a prepared model, which does not count such calls
            name = _name_of(func) + WITHOUT_FLOATS
        elif called is not None and self._is_of_cache():
            called = None
            name = _name_of(func) + OF_A_CACHE
        else:
            name = _name_of(func) if called is None else called.function.name
        product = name if is_product(name) else ""
        if called is not None and self.running[-1:] == self.branching:
            called, name = None, name + IN_A_BRANCH  # which a prepared model does not count either
        if isinstance(func, HigherOrderOperator) and not product:
            args = tree_map_only((FunctionType, partial, nn.Module), self._branch, args)
        arguments = _tensors((args, {key: value for key, value in kwargs.items() if key != "out"}))
        inputs = tuple(self.value_of(tensor) for tensor in arguments)
        detail, count = _PLAIN if called is None else self._detail(called, args, kwargs), 0
        versions = [version_of(tensor) for tensor in arguments]
        if product:
            if called is None:
                detail = _PLAIN._replace(factors=tuple(map(self.value_of, factors_of(product, args, kwargs))))
            result, count = counted(
                product, lambda: func(*args, **kwargs), [x for x in arguments if x.is_floating_point()]
            )
        else:
            result = func(*args, **kwargs)
        written = [x for x, version in zip(arguments, versions, strict=True) if version_of(x) != version]
        made = [*_tensors(result)]
        made += [x for x in written if all(x is not other for other in made)]  # by `x[i] = y`
        if made or called is not None:
            self._note(name, inputs, made, count, detail)
            for one in (*written, *_tensors(kwargs.get("out"))):
                self._note_shared(made, one)
        return result

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
        extreme = not called.function.is_product and any(largest(x) >= EXTREME for x in operands.values())
        factors = tuple(numbers.values()) if called.function.is_product else ()
        return _Detail(numbers, self._where(), equation, extreme, factors)

    def _is_of_cache(self) -> bool:
        """Whether a cache of transformers makes the call."""
        frame: FrameType | None = sys._getframe(2)
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
        for other, share in self.memory.sharing(written):
            if all(other is not tensor for tensor in made):
                inputs = self.value_of(other), self.value_of(written)
                self._note("copy" if share == 1 else "setitem", inputs, [other], 0, _PLAIN)

    def value_of(self, tensor: Tensor) -> int:
        """The number of a tensor's value as it is now."""
        number = next((known for own, name, known in self.elsewhere if own[name] is tensor), None)
        number = self.numbers.get(id(tensor)) if number is None else number
        return self._new(tensor, None, constant=False) if number is None else number

    def _new(self, tensor: Tensor, producer: int | None, *, constant: bool) -> int:
        number = self.numbers[id(tensor)] = len(self.recording.values)
        self.alive.append(tensor)
        self.memory.add(tensor)
        with torch._C.DisableTorchFunction():
            if not constant and not math.isfinite(largest(tensor)):
                self.recording.infinite.add(number)
        shape, is_float = tuple(tensor.shape), tensor.is_floating_point()
        self.recording.values.append(Value(number, constant, shape, is_float, producer))
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
                handles.append(module.register_forward_pre_hook(lambda *_: self._enter_hooks(), prepend=True))
                handles.append(module.register_forward_hook(lambda *_: self._leave(), always_call=True))
                is_quantizer = hasattr(type(module), "quantizes")
                vars(module)["forward"] = (
                    self._quantized(module) if is_quantizer else self._followed(path, module.forward)
                )
            yield

    def _quantized(self, quantizer: Any) -> Callable[[Tensor], Tensor]:
        """A call of a quantizer, which gives a new value with the same numbers: it needs no range and no time."""

        def run(x: Tensor) -> Tensor:
            if not quantizer.quantizes:
                return x
            with torch._C.DisableTorchFunction():
                # The result may be written, that of a weight is not, and weights are large.
                is_weight = isinstance(quantizer, Quantizer) and quantizer.kind is Kind.WEIGHT
                result = x.detach() if is_weight else x.clone()
            self._note(QUANTIZED, (self.value_of(x),), [result], 0, _PLAIN)
            return result

        return run

    def _followed(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            caller = next((owner for owner, _ in reversed(self.running) if owner is not None), None)
            if caller is not None:
                self.recording.called.setdefault(caller, []).append(path)
            self.running.append((path, self.recording.visits[path]))
            self.recording.visits[path] += 1
            try:
                return forward(*args, **kwargs)
            finally:
                self._leave()

        self.followed = run.__code__  # type: ignore[attr-defined]  one code for all modules
        return run

    def _enter_hooks(self) -> None:
        self.running.append((None, 0))

    def _leave(self) -> None:
        self.running.pop()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _name_of(func: Any) -> str:
    """The name of a function of torch without what tells that it is in place or an operator."""
    name: str = getattr(func, "__name__", str(func))
    if name == "__get__":  # a property, as `x.mT`
        return func.__self__.__name__  # type: ignore[no-any-return]
    name = name.partition(".")[0]  # of an operator's overload
    if str(getattr(func, "namespace", "")).startswith("fakequant") and name.startswith(("fake_quantize", "checked")):
        return QUANTIZED  # by a function of this package
    return name.strip("_") if name.startswith("__") else name.rstrip("_")
