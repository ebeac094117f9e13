"""Thresholds by which a change counts as better, the judge of changes of a model, and the results of `improve`.

A change is judged on batches that did not make it, see `HeldOut`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fakequant.data.arguments import Metric, named
from fakequant.data.batches import KeptBatches
from fakequant.distributed import Ranks
from fakequant.errors import CalibrationWarning, ConfigError, renamed, warn_user
from fakequant.model.run.outputs import Distance, OutputDistance, OutputErrors
from fakequant.model.weights import disabled, score_of
from fakequant.restore import Restore, state_of
from fakequant.text import html_result, listed, module_name, table

CLEARLY = 0.9
"""A method, preset, transform, range or `improve` is clearly better if it leaves less than this share of an error.

On few batches a smaller difference is chance. With 0.9, calibration of four trained models chose methods with 1.004
(INT8) and 1.017 (INT8_AFFINE) times the least error; with 0.95, 1.021 and 1.050 times."""
ALIKE = 1.01
"""The multiple up to which an error counts as unchanged: rounding explains no more."""
SURE, SURE_OF_PART = 1.0, 2.0
"""By how many standard errors the mean log ratio of rows' errors must fall: for all changes, and for one of many.
Of 24 small networks with 24 rows, 14 lost on new rows without a judge, and 1 with these thresholds."""
_LEAST = 0.1
"""This share of the mean error is added to rows' errors before ratios are taken: a ratio of small errors is chance."""
MAY_LOSE = 0.01
"""The share of the float model's metric that may be lost: the other 99 % are enough."""
EVERY = 2
"""The second of every two batches judges a model. People give few batches: with fewer judges, chance would choose."""
EVERY_OF_CHOICES = 8
"""The second of every eight batches judges the choices of `improve`: choices need many batches."""
TRIED_ON = 8
"""The most batches on which a report tries changes: half of them make a change, and half judge it."""
_PARTS = 16
"""The most parts of the layers that are judged separately where all changes together do not help."""


def helps(before: Tensor, after: Tensor, sure: float) -> bool:
    """Whether errors of rows fall: the sum does not rise, and the mean log ratio is `sure` standard errors below 0."""
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
    """The measurements of a model by a judge.

    Attributes:
        distance: how far the model's output is from the float model's; None if it cannot be measured.
        rows: the error of each row of all processes [rows].
        score: the user's metric; None without a metric.
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
    """Measures the error of a model's output, and the metric, before and after changes; undoes those that do not help.

    Args:
        why_not: why the error of the output cannot be measured; None if it can.
        is_apart: whether the changes were made without the batches of the judge; if not, their error undoes nothing.
        metric: called as metric(model), larger is better; None without a metric.

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
        self._where += "chose nothing" if is_apart else "also chose, so that new data may lose more"
        self._outputs, errors = None, None
        if why_not is None:
            with disabled(model):
                self._outputs = OutputDistance(model, batches)
            errors = self._outputs.errors_of(model)
            if not self._outputs.has_outputs:
                why_not = "the model returns no floats"
            elif not math.isfinite(errors.distance.mean):
                why_not = "it was NaN or infinite before"
            elif errors.distance.is_silent:  # NaN in float and quantized counts as no error
                why_not = "all values of the output are NaN or 0 on the batches that judge"
        self._why_not = next(filter(None, processes.all(why_not)), None)
        self._before = self._now = self._measured(errors)
        if metric is not None and self._before.score != self._before.score:
            raise ConfigError("metric(model) is NaN for the calibrated model; it must be a number, larger is better")

    def keep_what_helps(
        self, changed: Mapping[nn.Module, Restore], state: Callable[[nn.Module], Restore] = lambda own: state_of([own])
    ) -> set[nn.Module]:
        """Undo all changes if they do not help together; then make them again part by part, and keep parts that help.

        Args:
            changed: for each module, in the order of the changes, a function that undoes its changes.

        Returns:
            The modules whose changes were undone.
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
        """Write error and metric, before and after, into a result; warn if nothing judged and the error grew."""
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
                "though each part by itself loses no more than before; prepare the model again, and give more batches, "
                "some of them as judge=, or other settings",
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


MISSED = "no batch that chooses weights reaches it"
TAKEN_BACK = "nearest: its choice does not lower the error of the output on the batches that judge"
TAKEN_BACK_BY_METRIC = "nearest: its choice does not raise the metric, or keep it and lower the error of the output"


@dataclass(frozen=True)
class LayerResult:
    """The error of a layer's output before and after the choice of its weight.

    Attributes:
        layer: the path of the layer.
        before: the error of the output if the weight is rounded to nearest, as a share of the output's energy.
        after: the same error with the chosen ranges and codes.
        steps: for the name of each step, the error after the step. For "smooth", "rotate" and "input", the entry is
            the part of the error that the step leaves, in the first layer that reads the input. For "bias", it is the
            error of the nearest values with a bias that corrects the mean error; later steps have such a bias, too.
            "drift" has no entry: it changes the target of "gptq" and the other solvers.
        note: why no values were chosen; "" otherwise.
        remarks: notes on how the values were chosen.
    """

    layer: str
    before: float = 0.0
    after: float = 0.0
    steps: dict[str, float] = field(default_factory=dict)
    note: str = ""
    remarks: list[str] = field(default_factory=list)


def remarks_of(layers: Iterable[LayerResult]) -> list[str]:
    """A sentence for each remark, with the names of its layers.

    >>> remarks_of([LayerResult("a", remarks=["has few rows"]), LayerResult("b", remarks=["has few rows"])])
    ['a, b: has few rows']
    """
    return [f"{names}: {remark}" for remark, names in _layers_by((own.layer, own.remarks) for own in layers).items()]


def _layers_by(said: Iterable[tuple[str, Iterable[str]]]) -> dict[str, str]:
    """For each text, the names of the layers that it is about, joined with commas."""
    found: dict[str, list[str]] = {}
    for layer, texts in said:
        for text in texts:
            found.setdefault(text, []).append(module_name(layer))
    return {text: listed(names) for text, names in found.items()}


@dataclass
class Improvement:
    """The result of `improve`; prints as a table, the largest remaining error first.

    Attributes:
        layers: a result for each layer.
        before: the error of the model's output on the batches that judge, as a share of the output's energy (for
            several outputs the mean share); None if it was not measured.
        after: the same error with the chosen values.
        notes: other decisions, as sentences.
        judged: a text that says on which batches the error of the model's output was measured.
        is_judged: whether the values were chosen without these batches.
        worst: a text on the output with the largest error; "" for a single output.
        metric: the name of the metric that judged; "" without a metric.
        metric_before, metric_after: the values of the metric; None without a metric.
        path: the path of the result of `improve_folder`; None for `improve`, and in all processes but the first.
    """

    layers: list[LayerResult] = field(default_factory=list)
    before: float | None = None
    after: float | None = None
    notes: list[str] = field(default_factory=list)
    judged: str = ""
    is_judged: bool = False
    worst: str = ""
    metric: str = ""
    metric_before: float | None = None
    metric_after: float | None = None
    path: Path | None = None

    left = renamed("left", "remaining_error")
    left_of_layers = renamed("left_of_layers", "remaining_error_of_layers")

    @property
    def remaining_error(self) -> float:
        """The share of the output's error that is left; if that was not measured, `remaining_error_of_layers`."""
        if not self.before or self.after is None:
            return self.remaining_error_of_layers
        return self.after / self.before

    @property
    def remaining_error_of_layers(self) -> float:
        """The error with the chosen weights over the error with weights rounded to nearest, both summed over layers.

        It is 1 if no weights were chosen. The errors of layers are not the error of the model.
        """
        before = sum(found.before for found in self.layers)
        return sum(found.after for found in self.layers) / before if before else 1.0

    def __str__(self) -> str:
        rows = self._rows()
        shown = table(rows, self.conclusions[len(self._headlines) :], numbers=range(1, len(rows[0]) - 1))
        return "\n".join([*(table([[line]]) for line in self._headlines), shown])

    __repr__ = __str__  # what notebooks and consoles show

    def _repr_html_(self) -> str:
        header, *rows = self._rows()
        return html_result(header, rows, self.conclusions, numbers=range(1, len(header) - 1))

    @property
    def conclusions(self) -> list[str]:
        """One sentence for the error of the model's output, one for the layers' errors that are left, and the notes."""
        line = f"layers: {self.remaining_error_of_layers:.0%} of the error of rounding to nearest is left"
        if stay := [(found.layer, [found.note]) for found in self.layers if found.note]:
            reasons = "; ".join(f"{names} ({note})" for note, names in _layers_by(stay).items())
            line += f"; nothing was chosen for {len(stay)} of {len(self.layers)}: {reasons}"
        return [*self._headlines, *filter(None, [self.worst]), line, *self.notes]

    @property
    def _headlines(self) -> list[str]:
        """Lines with the metric and the error of the model's output, as far as they were measured."""
        lines = list[str]()
        if self.metric_before is not None and self.metric_after is not None:
            lines.append(f"{self.metric}: {self.metric_before:.6g} -> {self.metric_after:.6g}")
        if self.before is not None and self.after is not None:
            share = f", {self.remaining_error:.0%} is left" if self.before and self.is_judged else ""
            lines.append(f"error of the model's output {self.judged}: {self.before:.2e} -> {self.after:.2e}{share}")
        return lines

    def take_back(self, names: Iterable[str]) -> None:
        """Rewrite the rows of these layers to say that their choice was undone."""
        undone, note = set(names), TAKEN_BACK_BY_METRIC if self.metric else TAKEN_BACK
        self.layers = [
            replace(row, after=row.before, steps={}, remarks=[], note=note) if row.layer in undone else row
            for row in self.layers
        ]

    def _rows(self) -> list[list[str]]:
        """The header and the rows of the table, the largest remaining error first."""
        by_length = sorted(self.layers, key=lambda found: -len(found.steps))  # those with all steps give the order
        steps = list(dict.fromkeys(step for found in by_length for step in found.steps))
        rows = [["layer", "nearest", *steps, "chosen", "left"]]
        for found in sorted(self.layers, key=lambda found: -found.after):
            share = found.note or (f"{found.after / found.before:.0%}" if found.before else "-")
            numbers = [found.before, *(found.steps.get(step) for step in steps), found.after]
            shown = ["-" if found.note or number is None else f"{number:.2e}" for number in numbers]
            rows.append([found.layer or "(model)", *shown, share])
        return rows


def joined_result(results: Sequence[LayerResult]) -> LayerResult:
    """The mean of the results of a weight's matrices; matrices without rows do not count."""
    seen = [one for one in results if one.steps or one.before]
    if len(seen) < 2:
        return next(iter(seen), results[0])

    def mean(values: Iterable[float]) -> float:
        return sum(values) / len(seen)

    steps = {step: mean(one.steps[step] for one in seen) for step in seen[0].steps}
    return LayerResult(seen[0].layer, mean(one.before for one in seen), mean(one.after for one in seen), steps)
