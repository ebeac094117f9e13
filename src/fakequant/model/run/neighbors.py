"""Which layers read the output of which module in a recorded run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from torch import nn

from fakequant.model.run.recorded import FunctionCall, ModuleCall, Recording, RunStep
from fakequant.model.run.traits import having
from fakequant.nn.sites.traits import Trait


@dataclass
class Neighbors:
    """The modules that make tensors, and the layers that read them.

    Attributes:
        readers: for each maker, the layers whose first argument is its output, or a function of it that is followed.
        calls: how often the makers and layers are called.
        elsewhere: makers whose output, or a parameter of theirs, something else reads or keeps, too.
    """

    readers: dict[nn.Module, list[nn.Module]] = field(default_factory=dict)
    calls: Counter[nn.Module] = field(default_factory=Counter)
    elsewhere: set[nn.Module] = field(default_factory=set)


def find_neighbors(
    model: nn.Module,
    recording: Recording,
    makers: Set[nn.Module],
    layers: Set[nn.Module],
    through: Set[str] | None = None,
) -> Neighbors:
    """Follow the outputs of makers, also through functions such as ReLU.

    Args:
        model: as it ran.
        recording: of the run.
        makers: the modules whose outputs are followed.
        layers: those that may read them.
        through: functions that outputs are followed through; by default those that keep scales.

    >>> from fakequant.model.run.recording import record
    >>> model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.ones(1, 4)
    >>> layers = {model[0], model[2]}
    >>> found = find_neighbors(model, record(model, lambda: model(x)), layers, layers)
    >>> found.readers[model[0]] == [model[2]]
    True
    """
    walk = _NeighborWalk(model, recording, makers, layers, having(Trait.SCALES) if through is None else through)
    for step, one in recording.steps():
        if step is RunStep.CALL:
            walk.call(one)
        else:
            walk.module(one, entered=step is RunStep.ENTER)
    walk.read({*recording.outputs, *recording.kept})
    return walk.found


class _NeighborWalk:
    """Goes through a run and notes which modules read the outputs of makers, as for `find_neighbors`."""

    def __init__(
        self,
        model: nn.Module,
        recording: Recording,
        makers: Set[nn.Module],
        layers: Set[nn.Module],
        through: Set[str],
    ) -> None:
        self.found = Neighbors()
        self._makers, self._layers, self._through = makers, layers, through
        self._modules = dict(model.named_modules())
        numbers: dict[nn.Parameter | None, int] = {**recording.numbers(model)}
        held = ((p, module) for module in makers | layers for p in module._parameters.values())
        self._owners = {numbers[p]: module for p, module in held if p in numbers}
        self._made: dict[int, nn.Module] = {}
        self._running: list[nn.Module] = []

    def read(self, values: Iterable[int]) -> None:
        """Note that something else than a layer reads or keeps values."""
        self.found.elsewhere.update(self._made[value] for value in values if value in self._made)

    def call(self, call: FunctionCall) -> None:
        """Note what a function reads; within makers and layers only parameters of others count."""
        owners = [self._owners[value] for value in call.read if value in self._owners]
        self.found.elsewhere.update(owner for owner in owners if owner not in self._running)
        if not self._running:
            maker = self._take(call.read, followed=call.function in self._through and len(call.outputs) == 1)
            if maker is not None:
                self._made[call.outputs[0]] = maker

    def module(self, one: ModuleCall, *, entered: bool) -> None:
        """Note the start or the end of a module's call."""
        module = self._modules[one.path]
        if module not in self._makers and module not in self._layers:
            return
        if entered:
            self.found.calls[module] += 1
            if (maker := self._take(one.inputs, followed=module in self._layers)) is not None:
                self.found.readers.setdefault(maker, []).append(module)
            self._running.append(module)
            return
        self._running.pop()
        if module in self._makers and one.output is not None:
            self._made[one.output] = module

    def _take(self, values: tuple[int, ...], *, followed: bool) -> nn.Module | None:
        """The maker of the first value, if it is followed; the others are read elsewhere."""
        maker = self._made.get(values[0]) if followed and values else None
        self.read(values if maker is None else values[1:])
        return maker
