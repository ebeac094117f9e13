"""Weights that processes chose before their layers were reached, with that of the first layer of the same inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fakequant.distributed import Together
from fakequant.ptq.inputs.call import LayerCall
from fakequant.ptq.inputs.stream import Stage
from fakequant.ptq.solvers.layer import Choice

Calls = Mapping[int, list[LayerCall]]


class Ahead(NamedTuple):
    """Choices for layers that were expected to get the inputs of an earlier one.

    Attributes:
        calls: of that layer by the number of the batch.
        wanted: its calls in the float model; None where that did not run.
        choices: by the name of the layer; the same names in all processes.
    """

    calls: Calls
    wanted: Calls | None
    choices: Mapping[str, Choice]

    @classmethod
    def of(cls, stage: Stage, wanted: Stage | None, choices: Mapping[str, Choice]) -> Ahead:
        """Choices by the inputs of a stage, whose calls are kept while there are any."""
        if not choices:
            return cls({}, None, {})
        return cls(dict(stage.calls), None if wanted is None else dict(wanted.calls), choices)

    def choice(self, stage: Stage, wanted: Stage | None, processes: Together) -> Choice | None:
        """What was chosen for the layer of a stage; None where a process sees other inputs than were expected."""
        if stage.name not in self.choices:
            return None
        is_same = _are_same(self.calls, stage.calls) and _are_same(self.wanted, wanted and wanted.calls)
        return self.choices[stage.name] if all(processes.all(is_same)) else None


def _are_same(calls: Calls | None, others: Calls | None) -> bool:
    if calls is None or others is None:
        return calls is others
    return calls.keys() == others.keys() and all(
        len(own) == len(others[number]) and all(one.has_input_of(b) for one, b in zip(own, others[number], strict=True))
        for number, own in calls.items()
    )
