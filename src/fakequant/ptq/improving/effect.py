"""The effect of an algorithm on the error of the model's output; changes that do not help go back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from fakequant.data.batches import Batches, KeptBatches
from fakequant.distributed import Together
from fakequant.errors import CalibrationWarning, warn_user
from fakequant.model.calibration.choice import HeldBack
from fakequant.model.modes import disabled
from fakequant.model.run.outputs import OutputDistance, OutputErrors
from fakequant.ptq.inputs.order import CallOrder
from fakequant.ptq.inputs.stream import NOT_REPEATED
from fakequant.ptq.results import Improvement
from fakequant.ptq.rows import SURE, SURE_OF_PART, helps
from fakequant.restore import Restore, state_of

_EVERY = 8
"""The second of every eight batches judges: what chooses wants many."""
_MEASURED = 4
"""Batches on which the error of the output is measured if all batches choose."""
_WORSE = 1.01
"""How much larger the error may become on these without a warning."""
_GROUPS = 16
"""Parts of the layers, in order, that are judged each where all together do not help."""


class Judging(NamedTuple):
    """The batches on which the error of the output is measured, and whether they chose nothing."""

    batches: KeptBatches
    chose_nothing: bool


class Split(NamedTuple):
    """All batches; those that choose; and those that judge and choose nothing.

    >>> split = Split.of(Batches(list("abcd"), "improve"), None)
    >>> split.fit.numbered, split.held.numbered
    ({0: 'a', 2: 'c', 3: 'd'}, {1: 'b'})
    """

    all: KeptBatches
    fit: KeptBatches
    held: KeptBatches

    @classmethod
    def of(cls, batches: Batches, judge: Iterable[Any] | None) -> Split:
        """Hold batches back to judge, unless they are given; `[]`: none judges."""
        given = batches.kept()
        if judge is not None:
            both = given.followed_by(judge)
            return cls(both, given, both.part(range(len(given), len(both))))
        numbers = HeldBack(given.numbered, _EVERY)
        fit = given.part(numbers)
        return cls(given, fit, given.part(number for number in numbers.held if number not in fit.numbered))

    def judging(self, processes: Together) -> Judging:
        """The batches that judge. If a process has none, nothing goes back, and the first ones that choose measure."""
        if all(processes.all(bool(self.held))):
            return Judging(self.held, chose_nothing=True)
        return Judging(self.fit.part([*self.fit.numbered][:_MEASURED]), chose_nothing=False)


class Effect:
    """The error of a model's output before and after a change, the mean over processes; a note says why there is none.

    Args:
        model: quantized, before the change.
        judging: on which batches, see `Split.judging`.
        recorded: whether their outputs repeat.
        processes: they judge together.
    """

    def __init__(self, model: nn.Module, judging: Judging, recorded: CallOrder, processes: Together) -> None:
        self._model, self._processes, (judged, self._judges) = model, processes, judging
        self._where = f"on {len(judged)} {'batch' if len(judged) == 1 else 'batches'} that "
        self._where += "chose nothing" if self._judges else "chose, too, and new data may lose more"
        self._before, own = math.nan, None
        why_not = None if recorded.outputs_repeat else NOT_REPEATED
        if why_not is None:
            with disabled(model):
                self._outputs = OutputDistance(model, judged)
            own = self._outputs.errors_of(model)
            self._before = own.distance.mean
            if not self._outputs.has_outputs:
                why_not = "the model gives no floats"
            elif not math.isfinite(self._before):
                why_not = "it was NaN or infinite before"
        self._why_not = next(filter(None, processes.all(why_not)), None)
        if self._why_not is None and own is not None:
            self._now = self._shared(own)

    def keep_what_helps(
        self, changed: Mapping[nn.Module, Restore], state: Callable[[nn.Module], Restore] = lambda own: state_of([own])
    ) -> set[nn.Module]:
        """Take back changes of modules if they do not lower the error, but those that do in their order.

        Args:
            changed: by module, in the order of the changes, what restores it as it was before all of them.
            state: returns a function that restores a module as it is now.

        Returns:
            The modules that are as they were before.
        """
        if self._why_not:
            return set()
        before, self._now = self._now, self._measured()
        if not self._judges or helps(before.rows, self._now.rows, SURE):
            return set()
        redo, self._now = {module: state(module) for module in changed}, before
        for undo in changed.values():
            undo()
        modules, undone = [*changed], set[nn.Module]()
        size = -(-len(modules) // _GROUPS)
        for start in range(0, len(modules), size or 1):
            group = modules[start : start + size]
            for module in group:
                redo[module]()
            if helps(self._now.rows, (now := self._measured()).rows, SURE_OF_PART):
                self._now = now
                continue
            undone |= set(group)
            for module in group:
                changed[module]()
        return undone

    def put_into(self, result: Improvement, caller: str) -> None:
        """Put the error before and now into a result, or why there is none; warn where nothing judged and it grew."""
        if self._why_not:
            result.notes.append(f"the error of the model's output was not measured: {self._why_not}")
            return
        now = self._now.distance
        before, after = zip(*self._processes.all((self._before, now.mean)), strict=True)
        result.before, result.after = sum(before) / len(before), sum(after) / len(after)
        result.judged, result.is_judged, result.worst = self._where, self._judges, now.shown_worst
        if not self._judges and result.after > _WORSE * result.before:
            warn_user(
                f"{caller} made the error of the model's output larger, {result.before:.2e} -> {result.after:.2e}, "
                "though each part by itself loses no more than before; prepare the model anew, and give more batches, "
                "of which some judge, or other settings",
                CalibrationWarning,
            )

    def _measured(self) -> OutputErrors:
        return self._shared(self._outputs.errors_of(self._model))

    def _shared(self, own: OutputErrors) -> OutputErrors:
        """The errors of this process, with the rows of all."""
        return own._replace(rows=torch.cat(self._processes.all(own.rows)))
