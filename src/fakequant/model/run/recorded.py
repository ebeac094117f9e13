"""The calls and values of a recorded run, and queries on them: see `recording.record`.

Which layers a recorded run calls, and which weights it reads without a call of their layer.

The weights that a recorded run does not reach.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from itertools import accumulate
from types import CodeType
from typing import Any

import torch
from torch import nn

from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.sites.functions import SITE_FUNCTIONS

WITHOUT_FLOATS, OF_A_CACHE, IN_A_BRANCH = " without floats", " of a cache", " in a branch"
"""Suffixes of the names of functions whose calls cannot be sites for this reason."""
TIMES_A_NUMBER = " times a number"
"""The suffix of the names of sums whose second operand is multiplied, in runs of `watching`."""
QUANTIZER, FAKE_QUANTIZE = "quantizer", "fake_quantize"
"""The functions of calls that quantize: of a quantizer in a prepared model, and of this package's functions."""
QUANTIZED = frozenset({QUANTIZER, FAKE_QUANTIZE})
EXTREME = 1e4
"""The size of numbers from which on they may be those of a mask: older models of transformers add -10000."""


@dataclass(frozen=True)
class Value:
    """One state of a tensor: a function that writes to a tensor makes a new one.

    Attributes:
        number: by which calls name it.
        constant: whether it is a parameter, or computed from parameters alone.
        shape: of the tensor.
        is_float: whether it holds floats or complex numbers.
        producer: the number of the call that made it; None for parameters, inputs and what no function made.
        size: its largest magnitude, NaN where it has one; 0 for constants and where it holds no floats.
    """

    number: int
    constant: bool
    shape: tuple[int, ...]
    is_float: bool
    producer: int | None
    size: float = 0.0


@dataclass(frozen=True)
class FunctionCall:
    """One call of a torch function.

    Attributes:
        number: its place in the run.
        owner: the path of the module whose `forward` calls it; None where a hook calls it.
        visit: which call of the owner it belongs to.
        function: the canonical name, or the name of torch for functions that cannot be quantized; see `OF_A_CACHE`.
        index: how many calls of the function came before in the same visit.
        inputs: all tensor arguments.
        outputs: all tensors of the result, and those that the call writes to.
        operands: the values that a site could quantize, by operand; empty for functions that cannot be quantized.
        multiplications: the multiply-accumulates of a product; 0 for other functions, and for tables.
        where: the places in the code, from the call up to the owner's `forward`; empty for functions that cannot be
            quantized.
        equation: the `einsum` that it computes, of a function whose axes depend on its arguments; empty of others.
        factors: of a product, without its bias; empty for other functions.
    """

    number: int
    owner: str | None
    visit: int
    function: str
    index: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    operands: dict[str, int]
    multiplications: int = 0
    where: tuple[tuple[CodeType, int], ...] = ()
    equation: str = ""
    factors: tuple[int, ...] = ()

    @property
    def read(self) -> tuple[int, ...]:
        """The inputs whose values it may read: `zeros_like` and `x.to(other)` ask for a shape or a dtype."""
        name = self.function.partition(" ")[0]
        if name.endswith("_like") or name.startswith("new_"):
            return ()
        return self.inputs[:1] if name == "to" or name.endswith("_as") else self.inputs

    @property
    def is_product(self) -> bool:
        """Whether it computes a product: an `einsum` of one tensor does not."""
        return bool(self.factors)

    @property
    def site(self) -> tuple[str | None, str, int]:
        """What names the call in every run."""
        return self.owner, self.function, self.index


@dataclass
class ModuleCall:
    """One call of a module.

    Attributes:
        path: of the module, the first one where it has several.
        inputs: the values of all tensor arguments of its `forward`.
        first: the number of the first function call that it may have made: it made `calls[first:last]`.
        last: that of the first one after it.
        end: its own calls of modules, and theirs, are `modules[number + 1 : end]`, where `number` is its own place.
        output: the value of its result, as hooks leave it; None where it is no tensor.
        results: the values of all tensors of the result.
    """

    path: str
    inputs: tuple[int, ...]
    first: int
    last: int = 0
    end: int = 0
    output: int | None = None
    results: tuple[int, ...] = ()


class RunStep(Enum):
    """What happens in a run: see `Recording.steps`."""

    CALL = auto()
    ENTER = auto()
    LEAVE = auto()


@dataclass
class Recording:
    """The calls of one run in their order, and the values that they take and make.

    Attributes:
        calls: of torch functions.
        modules: calls of modules, without quantizers, in the order of their starts.
        values: by number.
        parameters: the values of parameters, by every name.
        threads: the paths of modules that are called in other threads.
        visits: how often every module was called, by path.
        outputs: the values that the model returns.
        kept: the values of tensors that something still holds when the run ends.
        buffers: the values of buffers.
        masks: the values of zeros and numbers as large as those of masks alone.
    """

    calls: list[FunctionCall] = field(default_factory=list)
    modules: list[ModuleCall] = field(default_factory=list)
    parameters: dict[str, int] = field(default_factory=dict)
    values: list[Value] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    visits: Counter[str] = field(default_factory=Counter)
    outputs: tuple[int, ...] = ()
    kept: frozenset[int] = frozenset()
    buffers: frozenset[int] = frozenset()
    masks: set[int] = field(default_factory=set)

    def is_constant(self, call: FunctionCall) -> bool:
        """Whether a call computes with parameters alone: engines compute it once, and quantize what comes of it."""
        return bool(call.outputs) and all(self.values[value].constant for value in call.outputs)

    def numbers(self, model: nn.Module) -> dict[nn.Parameter, int]:
        """The values of the parameters that a model had before the run."""
        held = model.named_parameters(remove_duplicate=False)
        return {parameter: self.parameters[name] for name, parameter in held if name in self.parameters}

    @cached_property
    def called(self) -> dict[str, list[str]]:
        """For every module of a complete run, the paths of the modules that its `forward` calls."""
        found: dict[str, list[str]] = {}
        running: list[ModuleCall] = []
        for number, one in enumerate(self.modules):
            while running and running[-1].end <= number:
                running.pop()
            if running:
                found.setdefault(running[-1].path, []).append(one.path)
            running.append(one)
        return found

    @cached_property
    def calls_of(self) -> dict[str | None, list[FunctionCall]]:
        """The calls of a complete run, by their owner."""
        found: dict[str | None, list[FunctionCall]] = {}
        for call in self.calls:
            found.setdefault(call.owner, []).append(call)
        return found

    @cached_property
    def consumers(self) -> dict[int, list[FunctionCall]]:
        """The calls of a complete run that make something of a value, each once."""
        found: dict[int, list[FunctionCall]] = {}
        for call in filter(_makes, self.calls):
            for value in dict.fromkeys(call.inputs):
                found.setdefault(value, []).append(call)
        return found

    def steps(self) -> Iterator[tuple[RunStep, Any]]:
        """Calls in their order, as (CALL, a `FunctionCall`) and (ENTER or LEAVE, a `ModuleCall`)."""
        done, running = 0, list[ModuleCall]()
        for number, module in enumerate([*self.modules, None]):
            while running and (module is None or running[-1].end <= number):
                ended = running.pop()
                yield from ((RunStep.CALL, call) for call in self.calls[done : ended.last])
                done = ended.last
                yield RunStep.LEAVE, ended
            first = len(self.calls) if module is None else module.first
            yield from ((RunStep.CALL, call) for call in self.calls[done:first])
            done = first
            if module is not None:
                yield RunStep.ENTER, module
                running.append(module)

    @cached_property
    def multiplications(self) -> Counter[str]:
        """The multiply-accumulates of all calls of a complete run within a module, by its path."""
        before = [0, *accumulate(call.multiplications for call in self.calls)]
        found = Counter[str]()
        for one in self.modules:
            found[one.path] += before[one.last] - before[one.first]
        return found

    def of_owner(self, owner: str) -> list[list[FunctionCall]]:
        """The calls of functions that can be quantized, for every visit of an owner."""
        visits: list[list[FunctionCall]] = [[] for _ in range(self.visits[owner])]
        for call in self.calls_of.get(owner, []):
            if call.function in SITE_FUNCTIONS:
                visits[call.visit].append(call)
        return visits


def _makes(call: FunctionCall) -> bool:
    """Whether a call gives a tensor, and not a number, a text or a shape."""
    return bool(call.outputs)


def modules_called(model: nn.Module, recording: Recording) -> set[nn.Module]:
    """The modules that a run of a model calls.

    >>> from fakequant.model.run.outputs import record
    >>> model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(1, 4)
    >>> modules_called(model, record(model, lambda: model[0](x))) == {model[0]}
    True
    """
    modules = dict(model.named_modules())
    return {modules[call.path] for call in recording.modules}


def weight_readers(model: nn.Module, recording: Recording, others: Iterable[nn.Module] = ()) -> dict[nn.Module, str]:
    """The quantized layers whose weight a run reads without a call of them, and the path of the module that reads it.

    Args:
        model: as it ran.
        recording: of the run.
        others: layers in float to look for, too, which have one weight.

    >>> from fakequant.model.run.outputs import record
    >>> class Projects(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.inner = nn.Linear(4, 4)
    ...     def forward(self, x):
    ...         return nn.functional.linear(x, self.inner.weight)
    >>> model = prepare(nn.Sequential(Projects()), presets.INT8_WEIGHT_ONLY)
    >>> weight_readers(model, record(model, lambda: model(torch.ones(1, 4)))) == {model[0].inner: "0"}
    True
    """
    numbers = recording.numbers(model)
    modules = dict(model.named_modules())
    # Parameters alone: a parametrization would compute an unused weight, and may change its buffers.
    held = {m: [w.parameter for w in m.products()] for m in modules.values() if isinstance(m, QuantizedLayer)}
    held |= {layer: [layer._parameters.get("weight")] for layer in others}
    holders: dict[int, list[nn.Module]] = {}
    for layer, parameters in held.items():
        for parameter in parameters:
            if parameter is not None and parameter in numbers:
                holders.setdefault(numbers[parameter], []).append(layer)
    found: dict[nn.Module, str] = {}
    quantized: set[nn.Module] = set()
    running: list[str] = []
    for step, one in recording.steps():
        if step is RunStep.ENTER:
            running.append(one.path)
        elif step is RunStep.LEAVE:
            running.pop()
        else:
            # A call without a result asks for a shape or a dtype; a quantizer that observes has none.
            read = one.read if one.outputs or one.function == QUANTIZER else ()
            layers = [layer for value in read for layer in holders.get(value, ())]
            if not layers or any(modules[path] in layers for path in running):
                continue
            if one.function == QUANTIZER:  # that of a function, which takes the weight next
                quantized.update(layers)
            else:
                path = running[-1] if running else ""
                found.update((layer, path) for layer in layers if layer not in found and layer not in quantized)
    return found


def read_together(recording: Recording, paths: Iterable[str]) -> dict[str, list[str]]:
    """For each of these modules that a run calls, the ones with the same first inputs in all calls, itself among them.

    >>> from fakequant.model.run.outputs import record
    >>> model, x = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), torch.ones(1, 4)
    >>> read_together(record(model, lambda: model[0](x) + model[1](x)), ["0", "1"])
    {'0': ['0', '1'], '1': ['0', '1']}
    """
    wanted, first = set(paths), dict[str, tuple[int, ...]]()
    for call in recording.modules:
        if call.path in wanted:
            first[call.path] = (*first.get(call.path, ()), *call.inputs[:1])
    groups: dict[tuple[int, ...], list[str]] = {}
    for path, values in first.items():
        groups.setdefault(values, []).append(path)
    return {path: groups[values] for path, values in first.items()}


class Unreached:
    """The weights that a run of a model does not reach: no function reads them, and their layer is not called.

    One run shows which layers read a value. An expert that got no rows, or a head for training, may read it in another
    run.

    Args:
        model: as it ran.
        recording: of the run.

    >>> from fakequant.model.run.outputs import record
    >>> model, x = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 2)]), torch.ones(1, 4)
    >>> found = Unreached(model, record(model, lambda: model[1](model[0](x))))
    >>> found.why_not(8)
    'this batch does not reach 2.weight, which may belong to the same values; give a batch that does, or remove it'
    >>> found.why_not(4) is None
    True
    """

    def __init__(self, model: nn.Module, recording: Recording) -> None:
        read = {value for call in recording.calls for value in call.inputs}
        leaves = [module for module in modules_called(model, recording) if next(module.children(), None) is None]
        reached = {id(p) for module in leaves for p in module.parameters()}
        reached |= {id(p) for p, number in recording.numbers(model).items() if number in read}
        hidden = [module for module in model.modules() if isinstance(module, torch.jit.ScriptModule)]
        scripted = {id(parameter) for module in hidden for parameter in module.parameters()}
        self._scripted = {name for name, parameter in model.named_parameters() if id(parameter) in scripted}
        self._shapes = {
            name: tuple(parameter.shape)
            for name, parameter in model.named_parameters()
            if id(parameter) not in reached and parameter.dim() > 1 and bool(parameter.any())
        }

    def why_not(self, width: int) -> str | None:
        """Why values with `width` channels cannot be changed, or None."""
        name = next((name for name, shape in self._shapes.items() if width in shape), None)
        if name is None:
            return None
        if name in self._scripted:
            return (
                f"{name} may belong to the same values, and torch.jit does not show whether a run reads it; change the "
                "weights first, and script the module afterwards"
            )
        return (
            f"this batch does not reach {name}, which may belong to the same values; give a batch that does, or remove "
            "it"
        )
