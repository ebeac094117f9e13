"""When something counts as better: the thresholds of all trials, and the judge of a change of a model.

What is tried is judged on batches that did not make it, see `HeldOut`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fakequant.data.arguments import Metric, named
from fakequant.data.batches import KeptBatches
from fakequant.distributed import Ranks
from fakequant.errors import CalibrationWarning, ConfigError, warn_user
from fakequant.model.run.outputs import Distance, OutputDistance, OutputErrors
from fakequant.model.weights import disabled, score_of
from fakequant.ptq.results import Improvement
from fakequant.restore import Restore, state_of

CLEARLY = 0.9
"""The share of an error below which a method, a preset, `improve`, a transform or a range clearly lowers it.

On few batches a smaller difference is chance. With 0.9, calibration of four trained models chose methods with 1.004
(INT8) and 1.017 (INT8_AFFINE) times the least error; with 0.95, 1.021 and 1.050 times."""
ALIKE = 1.01
"""The share of an error up to which it is about the same: more is not rounding."""
SURE, SURE_OF_PART = 1.0, 2.0
"""How many standard errors of the mean log ratio of rows a gain must be: of all changes, and of one of many parts. Of
24 small networks with 24 rows, 14 lost on new rows without a judge, and 1 with these."""
_LEAST = 0.1
"""Rows of less error than this share of the mean count as that much: a ratio of two small errors is chance."""
MAY_LOSE = 0.01
"""The share of the float model's metric that may be lost: 99 % of it are enough."""
EVERY = 2
"""The second of every two batches judges a model. People give few batches: with fewer judges, chance would choose."""
EVERY_OF_CHOICES = 8
"""The second of every eight batches judges the choices of `improve`: what chooses wants many."""
TRIED_ON = 8
"""The most batches on which a report tries changes: half of them make a change, and half judge it."""
_PARTS = 16
"""Parts of the layers, in order, that are judged each where all together do not help."""


def helps(before: Tensor, after: Tensor, sure: float) -> bool:
    """Whether the error of rows falls, in sum and by the mean of their ratios more than chance explains."""
    if before.shape != after.shape or not bool(after.isfinite().all()):
        return False
    changed = before != after
    if not bool(changed.any()) or float(after.sum()) > float(before.sum()):
        return False
    least = _LEAST * float(before.mean())
    ratios = ((after[changed] + least) / (before[changed] + least)).log()
    chance = float(ratios.std()) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
    return float(ratios.mean()) < -sure * chance


class _Measured(NamedTuple):
    """A model in numbers.

    Attributes:
        distance: of its output from that of the float model; None where it cannot be measured.
        rows: the error of each row of all processes [rows].
        score: its metric; None without one.
    """

    distance: Distance | None
    rows: Tensor
    score: float | None

    def is_better(self, before: _Measured, sure: float) -> bool:
        """Whether the metric rose, or stayed while the error fell."""
        if self.score != before.score:
            return self.score is not None and before.score is not None and self.score > before.score
        return self.distance is None or helps(before.rows, self.rows, sure)


class OutputJudge:
    """The error of a model's output, and its metric, before and after changes, the mean over processes.

    Args:
        model: quantized, before the changes.
        batches: that judge.
        is_apart: whether these choose nothing; else they only measure, and a metric alone judges.
        why_not: why the error cannot be measured; None where it can.
        processes: they judge together.
        metric: called as metric(model), larger is better; None for none.

    Raises:
        ConfigError: the metric is NaN.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: KeptBatches,
        why_not: str | None,
        processes: Ranks,
        *,
        is_apart: bool,
        metric: Metric | None = None,
    ) -> None:
        self._model, self._processes, self._metric, self._is_apart = model, processes, metric, is_apart
        self._where = f"on {len(batches)} {'batch' if len(batches) == 1 else 'batches'} that "
        self._where += "chose nothing" if is_apart else "chose, too, and new data may lose more"
        self._outputs, errors = None, None
        if why_not is None:
            with disabled(model):
                self._outputs = OutputDistance(model, batches)
            errors = self._outputs.errors_of(model)
            if not self._outputs.has_outputs:
                why_not = "the model gives no floats"
            elif not math.isfinite(errors.distance.mean):
                why_not = "it was NaN or infinite before"
        self._why_not = next(filter(None, processes.all(why_not)), None)
        self._before = self._now = self._measured(errors)
        if metric is not None and self._before.score != self._before.score:
            raise ConfigError("metric(model) is NaN for the calibrated model; it must be a number, larger is better")

    def keep_what_helps(
        self, changed: Mapping[nn.Module, Restore], state: Callable[[nn.Module], Restore] = lambda own: state_of([own])
    ) -> set[nn.Module]:
        """Take back changes of modules if they do not help, but those that do in their order.

        Args:
            changed: by module, in the order of the changes, what restores it as it was before all of them.
            state: returns a function that restores a module as it is now.

        Returns:
            The modules that are as they were before.
        """
        self._now = self._measured()
        judges = self._metric is not None or (self._is_apart and not self._why_not)
        if not judges or self._now.is_better(self._before, SURE):
            return set()
        redo, self._now = {module: state(module) for module in changed}, self._before
        for undo in changed.values():
            undo()
        modules, undone = [*changed], set[nn.Module]()
        size = -(-len(modules) // _PARTS)
        for start in range(0, len(modules), size or 1):
            part = modules[start : start + size]
            for module in part:
                redo[module]()
            if (now := self._measured()).is_better(self._now, SURE_OF_PART):
                self._now = now
                continue
            undone |= set(part)
            for module in part:
                changed[module]()
        return undone

    def put_into(self, result: Improvement, caller: str) -> None:
        """Put the figures before and now into a result, or why there is none; warn where nothing judged and it grew."""
        if self._metric is not None and self._before.score is not None and self._now.score is not None:
            metric = named(self._metric)
            result.metric, result.metric_before = metric.name, metric.shown(self._before.score)
            result.metric_after = metric.shown(self._now.score)
        if self._before.distance is None or self._now.distance is None:
            result.notes.append(f"the error of the model's output was not measured: {self._why_not}")
            return
        means = self._processes.all((self._before.distance.mean, self._now.distance.mean))
        before, after = zip(*means, strict=True)
        result.before, result.after = sum(before) / len(before), sum(after) / len(after)
        result.judged, result.is_judged = self._where, self._is_apart
        result.worst = self._now.distance.shown_worst
        if not self._is_apart and self._metric is None and result.after > ALIKE * result.before:
            warn_user(
                f"{caller} made the error of the model's output larger, {result.before:.2e} -> {result.after:.2e}, "
                "though each part by itself loses no more than before; prepare the model anew, and give more batches, "
                "of which some judge, or other settings",
                CalibrationWarning,
            )

    def _measured(self, errors: OutputErrors | None = None) -> _Measured:
        score = None
        if self._metric is not None:
            scores = self._processes.all(score_of(self._metric, self._model))
            score = sum(scores) / len(scores)
        if self._why_not or self._outputs is None:
            return _Measured(None, torch.zeros(0, device="cpu"), score)
        errors = errors or self._outputs.errors_of(self._model)
        return _Measured(errors.distance, torch.cat(self._processes.all(errors.rows)), score)
