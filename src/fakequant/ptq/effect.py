"""The effect of an algorithm on the whole model's error: changes that do not help on held-back batches go back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fakequant.distributed import Together
from fakequant.model.batches import Forward
from fakequant.model.choice import HeldBack
from fakequant.model.modes import disabled
from fakequant.model.outputs import OutputDistance, Place, shown_place
from fakequant.ptq.results import Improvement
from fakequant.ptq.stream import NOT_REPEATED, Record
from fakequant.restore import Restore, state_of, structure_of

_SURE, _SURE_OF_PART = 1.0, 2.0
"""How many times its standard error the gain must be: of all changes together, and of one of many parts. With 8 rows
that judge, a gain of a third is chance: of 24 small networks 11 lost on new rows by a plain comparison."""
_GROUPS = 16
"""Parts of the layers, in order, that are judged each where all together do not help."""


class Batches(NamedTuple):
    """Batches by their number: those that choose, and those that judge. A single one does both."""

    fit: Mapping[int, Any]
    held: Mapping[int, Any]

    @classmethod
    def of(cls, batches: Sequence[Any]) -> Batches:
        """The second of every four is held back.

        >>> Batches.of("abcdef")
        Batches(fit={0: 'a', 2: 'c', 3: 'd', 4: 'e'}, held={1: 'b', 5: 'f'})
        """
        split = HeldBack(range(len(batches)))
        fit = {number: batches[number] for number in split}
        return cls(fit, {number: batches[number] for number in split.held})


class Effect:
    """The error of a model's output on held-back batches, before and after a change, the mean over processes.

    A note says why where it is not measured.

    Args:
        model: quantized, before the change.
        batches: the held-back ones judge.
        run: called as run(model, batch).
        recorded: of the same model and batches.
        processes: they judge together.
        counts: for each batch the tokens that count; None: all.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Batches,
        run: Forward,
        recorded: Record,
        processes: Together,
        counts: Sequence[Tensor | None] | None = None,
    ) -> None:
        self._model, self._processes = model, processes
        why_not = None if recorded.outputs_repeat else NOT_REPEATED
        self._where = _shown(len(batches.held), chosen=any(number in batches.fit for number in batches.held))
        if why_not is None:
            held = None if counts is None else [counts[number] for number in batches.held]
            with disabled(model):
                self._outputs = OutputDistance(model, [*batches.held.values()], run, held)
            if not self._outputs.has_outputs:
                why_not = "the model gives no floats"
        self._why_not = next(filter(None, processes.all(why_not)), None)
        self._before = {} if self._why_not else self._shares()
        if not math.isfinite(_mean(self._before)):
            self._why_not = "it was NaN or infinite before"
        self._rows_before = torch.zeros(0) if self._why_not else self._rows()

    def keep_what_helps(self, changed: Mapping[nn.Module, Restore]) -> set[nn.Module]:
        """Take back changes of modules if they do not clearly lower the error, but those that do in their order.

        Args:
            changed: by module, in the order of the changes, what restores it as it was before all of them.

        Returns:
            The modules that are as they were before.
        """
        if self._why_not or not changed:
            return set()
        best, now = self._rows_before, self._rows()
        if _helps(best, now, _SURE):
            return set()
        redo = {module: state_of([module]) for module in changed}
        for undo in changed.values():
            undo()
        modules, undone = [*changed], set[nn.Module]()
        size = -(-len(modules) // _GROUPS)
        for start in range(0, len(modules), size):
            group = modules[start : start + size]
            for module in group:
                redo[module]()
            if _helps(best, now := self._rows(), _SURE_OF_PART):
                best = now
                continue
            undone |= set(group)
            for module in group:
                changed[module]()
        return undone

    def put_into(self, result: Improvement) -> None:
        """Put the error before and now into a result; or why there is none."""
        if self._why_not:
            result.notes.append(f"the error of the model's output was not measured: {self._why_not}")
            return
        now = self._shares()
        result.before, result.after, result.judged = _mean(self._before), _mean(now), self._where
        if len(now) > 1:
            worst = max(now, key=now.__getitem__)
            result.worst = f"worst output: {shown_place(worst)} {self._before.get(worst, 0.0):.2e} -> {now[worst]:.2e}"

    def _shares(self) -> dict[Place, float]:
        """The error of each output as a share of its energy."""
        found = self._processes.all(self._outputs.of(self._model).shares)
        places = dict.fromkeys(place for shares in found for place in shares)
        return {place: sum(shares.get(place, 0.0) for shares in found) / len(found) for place in places}

    def _rows(self) -> Tensor:
        """The error of each row of the outputs, over all processes."""
        return torch.cat(self._processes.all(self._outputs.by_row(self._model)))


def _helps(before: Tensor, after: Tensor, sure: float) -> bool:
    """Whether the error of rows falls by more than chance explains, or nothing changes it."""
    if before.shape != after.shape or not bool(after.isfinite().all()):
        return False
    gain = before - after
    if not bool(gain.any()):
        return True
    chance = float(gain.std()) * len(gain) ** 0.5 if len(gain) > 1 else 0.0
    return float(gain.sum()) > sure * chance


def states_of(model: nn.Module, touched: Iterable[nn.Module]) -> tuple[dict[nn.Module, Restore], Restore]:
    """Functions that restore each module that will be touched, and one for the model, of which only these change."""
    structure, before = structure_of([model]), {module: state_of([module]) for module in dict.fromkeys(touched)}

    def restore() -> None:
        structure()
        for one in before.values():
            one()

    return before, restore


def _mean(shares: Mapping[Place, float]) -> float:
    return sum(shares.values()) / max(len(shares), 1)


def _shown(count: int, *, chosen: bool) -> str:
    if chosen:
        return "on the only batch, which chose, too"
    return f"on {count} held-back {'batch' if count == 1 else 'batches'}"
