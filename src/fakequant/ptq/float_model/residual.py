"""Residual streams and heads of attention in a recorded run: which modules make their values, and which read them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from fakequant.model.run.recorded import FunctionCall, ModuleCall, Recording, RunStep
from fakequant.model.run.traits import has
from fakequant.nn.sites.functions import SITE_FUNCTIONS
from fakequant.nn.sites.traits import Trait


@dataclass(eq=False)
class Residual:
    """Values with the same channels: sums of what its makers give.

    Attributes:
        makers: linear layers, convolutions, embeddings and parameters whose last results are added up.
        readers: linear layers that multiply the values, with the normalisation between, if there is one.
        norms: the normalisations that read the values.
        read_by: what else reads the values.
    """

    makers: dict[nn.Module | nn.Parameter, None] = field(default_factory=dict)
    readers: dict[nn.Module, nn.Module | None] = field(default_factory=dict)
    norms: dict[nn.Module, None] = field(default_factory=dict)
    read_by: list[str] = field(default_factory=list)


class Heads(NamedTuple):
    """A layer that makes the values of attention, and the one that reads the heads' results."""

    maker: nn.Linear
    reader: nn.Linear
    size: int
    """Channels of a head."""


class Streams(NamedTuple):
    """The residual streams and heads of a run."""

    residuals: list[Residual]
    heads: list[Heads]


def follow(model: nn.Module, recording: Recording) -> Streams:
    """Follow the results of linear layers, convolutions, embeddings and parameters.

    Args:
        model: as it ran.
        recording: of the run.

    >>> from fakequant.model.run.recording import record
    >>> model, x = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)), torch.ones(1, 4)
    >>> found = follow(model, record(model, lambda: model(x)))
    >>> [len(one.readers) for one in found.residuals]
    [1]
    """
    walk = _StreamWalk(model, recording)
    for step, one in recording.steps():
        walk.call(one) if step is RunStep.CALL else walk.module(one, entered=step is RunStep.ENTER)
    for value in recording.outputs:
        walk.read(value, "the model's output")
    found = list(dict.fromkeys(walk.root(group) for group in walk.groups))
    uses = Counter(layer for one in walk.heads for layer in (one.maker, one.reader))
    heads = [one for one in walk.heads if one.maker not in walk.not_heads and uses[one.maker] == uses[one.reader] == 1]
    return Streams([one for one in found if one.readers], heads)


class _Value(NamedTuple):
    """What is known of a value."""

    group: Residual
    norm: nn.Module | None = None
    maker: nn.Module | None = None
    """The layer whose values these are, as long as heads may be cut from them."""
    head: int = 0
    """Channels of a head behind attention."""


class _StreamWalk:
    """Goes through a run and notes what is made of values."""

    def __init__(self, model: nn.Module, recording: Recording) -> None:
        self.groups: list[Residual] = []
        self.heads: list[Heads] = []
        self.not_heads: set[nn.Module] = set()
        self._shapes: list[tuple[int, ...]] = [value.shape if value.is_float else () for value in recording.values]
        self._modules = dict(model.named_modules())
        self._parameters = {number: parameter for parameter, number in recording.numbers(model).items()}
        self._into: dict[Residual, Residual] = {}
        self._values: dict[int, _Value] = {}
        self._of: dict[nn.Module | nn.Parameter, Residual] = {}
        self._running = 0  # layers and normalisations

    def root(self, group: Residual) -> Residual:
        """The group that a group has become a part of."""
        while group in self._into:
            group = self._into[group]
        return group

    def read(self, value: int, what: str) -> None:
        """Note that something reads a value that no rotation can follow."""
        if (known := self._values.get(value)) is not None:
            self.root(known.group).read_by.append(what)
            self._drop_heads(known)

    def module(self, one: ModuleCall, *, entered: bool) -> None:
        """Note the start or the end of a module's call."""
        module = self._modules[one.path]
        if not (_makes(module) or is_vector_norm(module)):
            return
        if entered:
            self._enter(one, module)
            self._running += 1
            return
        self._running -= 1
        if one.output is None:
            return
        if _makes(module):
            self._values[one.output] = _Value(self._group_of(module), maker=module)
            return
        value = self._values.get(one.inputs[0]) if one.inputs else None
        if value is not None and value.norm is None:
            self._values[one.output] = _Value(value.group, norm=module)

    def _enter(self, one: ModuleCall, module: nn.Module) -> None:
        first, rest = one.inputs[:1], one.inputs[1:]
        value = self._values.get(first[0]) if first else None
        if value is not None:
            group = self.root(value.group)
            if isinstance(module, nn.Linear) and value.head and isinstance(value.maker, nn.Linear):
                self.heads.append(Heads(value.maker, module, value.head))
            elif isinstance(module, nn.Linear):
                if group.readers.get(module, value.norm) is not value.norm:
                    group.read_by.append(f"{one.path}, with and without a normalisation before it,")
                group.readers[module] = value.norm
                self._drop_heads(value)
            elif is_vector_norm(module) and value.norm is None:
                group.norms[module] = None
                self._drop_heads(value)
            else:
                self.read(first[0], one.path)
        for other in rest:
            self.read(other, one.path)

    def call(self, call: FunctionCall) -> None:
        """Note what a function makes of values; within layers nothing needs to be known."""
        if self._running:
            return
        name = call.function.partition(" ")[0]
        if has(name, Trait.SUMS) or has(name, Trait.CHANNELS):
            for value in call.inputs:
                if value in self._parameters and value not in self._values:
                    self._values[value] = _Value(self._group_of(self._parameters[value]))
        known = [value for value in call.inputs if value in self._values]
        if not known:
            return
        result = self._result(name, call, known) if len(call.outputs) == 1 else None
        if result is not None:
            self._values[call.outputs[0]] = result
            return
        for value in known:
            self.read(value, f"torch.{name}")

    def _result(self, name: str, call: FunctionCall, known: list[int]) -> _Value | None:
        """What is known of a function's result; None where no rotation can follow it."""
        if has(name, Trait.CHANNELS):
            others = [value for value in call.inputs if value != known[0]]
            divides = name == "div" and "input" not in call.operands  # `1 / x`
            alone = len(known) == 1 and not divides and not any(self._shapes[value] for value in others)
            return self._values[known[0]] if alone else None
        if has(name, Trait.SUMS):
            return self._sum(call, known)
        if has(name, Trait.HEADS):
            return self._attention(name, call, known)
        return None

    def _attention(self, name: str, call: FunctionCall, known: list[int]) -> _Value | None:
        values = {operand.name for operand in SITE_FUNCTIONS[name].operands if operand.reduction == -2}
        number = next((value for operand, value in call.operands.items() if operand in values), None)
        for one in known:
            if one != number:
                self.read(one, f"torch.{name}")
        value = None if number is None else self._values.get(number)
        if number is None or value is None or value.maker is None or value.head:
            return None
        self.root(value.group).read_by.append("attention")
        return value._replace(head=self._shapes[number][-1])

    def _sum(self, call: FunctionCall, known: list[int]) -> _Value | None:
        values = [self._values[value] for value in known]
        groups = [self.root(value.group) for value in values]
        if len(known) < len(call.inputs) or any(value.norm is not None or value.head for value in values):
            return None
        first = groups[0]
        for other in groups[1:]:
            if other is not first:
                self._into[other] = first
                first.makers |= other.makers
                first.readers |= other.readers
                first.norms |= other.norms
                first.read_by += other.read_by
        for value in values:
            self._drop_heads(value)
        return _Value(first)

    def _group_of(self, maker: nn.Module | nn.Parameter) -> Residual:
        if maker not in self._of:
            self._of[maker] = Residual({maker: None})
            self.groups.append(self._of[maker])
        return self.root(self._of[maker])

    def _drop_heads(self, value: _Value) -> None:
        if value.maker is not None:
            self.not_heads.add(value.maker)


def _makes(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d))


def is_vector_norm(module: nn.Module) -> bool:
    """Whether a module may be a normalisation: all that it holds are vectors of one length."""
    held = [p for p in module._parameters.values() if p is not None]
    own = next(module.children(), None) is None and "weight" in module._parameters
    return own and bool(held) and all(p.dim() == 1 and p.shape == held[0].shape for p in held)
