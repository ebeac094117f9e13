"""Which layers read the output of which module in a recorded run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from torch import nn

from fakequant.model.run.recorded import Recording, Step
from fakequant.model.run.traits import Trait, having


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
    through: Set[str] = having(Trait.SCALES),
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
    found, made, running = Neighbors(), dict[int, nn.Module](), list[nn.Module]()
    modules = dict(model.named_modules())
    numbers: dict[nn.Parameter | None, int] = {**recording.numbers(model)}
    owners = {numbers[p]: module for module in makers | layers for p in module._parameters.values() if p in numbers}

    def read(values: Iterable[int]) -> None:
        found.elsewhere.update(made[value] for value in values if value in made)

    for step, one in recording.steps():
        if step is Step.CALL:
            found.elsewhere.update(owners[v] for v in one.inputs if v in owners and owners[v] not in running)
            if running:
                continue
            first, rest = one.inputs[:1], one.inputs[1:]
            if one.function in through and len(one.outputs) == 1 and first and first[0] in made:
                made[one.outputs[0]] = made[first[0]]
            else:
                read(first)
            read(rest)
            continue
        module = modules[one.path]
        if module not in makers and module not in layers:
            continue
        if step is Step.ENTER:
            found.calls[module] += 1
            first, rest = one.inputs[:1], one.inputs[1:]
            if module in layers and first and first[0] in made:
                found.readers.setdefault(made[first[0]], []).append(module)
            else:
                read(first)
            read(rest)
            running.append(module)
        else:
            running.pop()
            if module in makers and one.output is not None:
                made[one.output] = module
    read({*recording.outputs, *recording.kept})
    return found
