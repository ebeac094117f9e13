"""Changes of a quantized model, tried before they are advised: by the error of its output, on batches held back."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fakequant.calibration import DEFAULT_METHOD
from fakequant.data.arguments import Metric
from fakequant.data.batches import Batches, Forward
from fakequant.errors import FakeQuantError
from fakequant.model.analysis.summary import parameter_bytes
from fakequant.model.calibration.calibrate import ranges_of
from fakequant.model.run.outputs import OutputDistance, OutputErrors
from fakequant.model.weights import disabled, evaluating, score_of
from fakequant.nn.quantizer import quantizers
from fakequant.ptq.weights import SURE_OF_PART, helps
from fakequant.restore import Restore, in_order, restore_after, state_of

METHODS = (DEFAULT_METHOD, "max", "percentile")
"""The methods of calibration that are tried; "entropy" was the worst of all for integers."""
CLEARLY = 0.9
"""The share of an error below which a change clearly lowers it. On few batches a smaller difference is chance: of four
trained models, the method that was chosen so left 1.004 (INT8) and 1.017 (INT8_AFFINE) of the best one's error; with
0.95 here 1.021 and 1.050."""
KEPT = 4
"""The most batches that make a change; as many more judge it."""
ALIKE = 1.01
"""The share of the error up to which it is about the same: more is not rounding."""

_LARGER = 1.25
"""The share of the bytes up to which less error is worth them: a quantized model ought to be small."""


class Halves:
    """Every second batch makes changes, and the others judge them.

    >>> halves = Halves(range(5))
    >>> halves.made, halves.judged
    ([0, 2, 4], [1, 3])
    >>> Halves(["one"]).judged
    ['one']
    """

    def __init__(self, batches: Iterable[Any] = ()) -> None:
        self._kept: tuple[list[Any], list[Any]] = ([], [])
        for number, batch in enumerate(batches):
            self.see(number, batch)

    def see(self, number: int, batch: Any) -> None:
        """Keep one of the batches, which are numbered from 0, if its half is not full."""
        if len(kept := self._kept[number % 2]) < KEPT:
            kept.append(batch)

    @property
    def made(self) -> list[Any]:
        """The batches that make changes: the first, the third, and so on."""
        return self._kept[0]

    @property
    def judged(self) -> list[Any]:
        """The batches that judge changes: the second, the fourth, and so on; a single batch also judges."""
        return self._kept[1] or self._kept[0]

    def __str__(self) -> str:
        if not self._kept[1]:
            return "on the one batch there is, which also made it"
        made, judged = (f"{len(kept)} {'batch' if len(kept) == 1 else 'batches'}" for kept in self._kept)
        return f"on {judged} held back, with {made} to make it"


class Aim(Enum):
    """The aim of a change: the criterion that judges it."""

    ERROR = "clearly less error, on more rows of the output than chance explains"
    SIZE = "clearly fewer bytes, and about the same error"
    ENGINE = "what the engine computes, and not clearly more error"

    def allows(self, error: float, size: float) -> bool:
        """Whether a change may help; error and size are shares of those before it."""
        if self is Aim.SIZE:
            return error <= ALIKE and size <= CLEARLY
        return error < CLEARLY and size <= _LARGER if self is Aim.ERROR else error <= 1 / CLEARLY


class Change(NamedTuple):
    """A change of a model: a description, the code to paste, a function of the batches to use, and the aim."""

    what: str
    code: str
    make: Callable[[list[Any]], object]
    aim: Aim = Aim.ERROR


@dataclass(frozen=True)
class Tried:
    """The result of a change.

    Attributes:
        what, code: as of the change.
        after: the error of the output, as a share of its energy.
        bytes: of all weights, quantized or not.
        metric: the user's metric, measured if the change lowers the error; None otherwise.
        failed: why there are no figures; "" where there are.
        helps: whether the change reaches its aim, and the metric is no less.
        by_chance: whether it lowers the error, but not with the halves exchanged, or on no more rows than chance.
    """

    what: str
    code: str
    after: float = math.inf
    bytes: int = 0
    metric: float | None = None
    failed: str = ""
    helps: bool = False
    by_chance: bool = False


@dataclass(frozen=True)
class NextStep:
    """The changes tried on a model, and the one that helps most.

    Attributes:
        error: of the output before each change, as a share of its energy; of several outputs the mean share. Where
            ranges come from calibration, and something was tried, the batches that made the changes gave them, too.
        bytes: of all weights, quantized or not.
        judged: the batches that judged, as a part of a sentence.
        little: whether little is lost, so that nothing was tried against the error.
        tried: in their order.
        best: the index of the change to take; None if none helps, or none was needed.
        metric: before each change; None without one.
    """

    error: float
    bytes: int
    judged: str
    little: bool = False
    tried: Sequence[Tried] = ()
    best: int | None = None
    metric: float | None = None


@dataclass
class _Side:
    """The batches that make a change, the outputs that judge it, and the errors to compare it with."""

    made: list[Any]
    outputs: OutputDistance
    before: Restore
    errors: OutputErrors


class Trial:
    """Makes changes of a model one after the other, measures each, and takes it back.

    Args:
        model: quantized; each change leaves it as it was, also after an error or an interrupt.
        parts: the batches. A change costs one run of the judging batches, besides its own work. A change that lowers
            the error is made again with the parts exchanged: ranges may fit the largest values of one part by chance.
        run: called as run(model, batch).
        metric: called as metric(model), larger is better, for changes that help by the error of the output.
        score: the metric of the unchanged model.

    Attributes:
        error: of the output before each change, as a share of its energy.
        bytes: of all weights before each change.
        score: the metric before each change; None without one, and before it is needed.
    """

    def __init__(
        self, model: nn.Module, parts: Halves, run: Forward, metric: Metric | None = None, score: float | None = None
    ) -> None:
        self._model, self._parts, self._run, self._metric = model, parts, run, metric
        self._ranges: Callable[[list[Any]], object] | None = None
        self._outputs = self._outputs_on(parts.judged)
        self._restore = state_of([model])
        self._first: _Side | None = None
        self._second: _Side | None = None
        self.error, self.bytes, self.score = self._outputs.of(model).mean, parameter_bytes(model)[1], score

    @property
    def judges(self) -> bool:
        """Whether the model has an error to lower: integer outputs and NaN have none."""
        return self._outputs.has_outputs and not any(bool(y.isnan().any()) for y in self._outputs.wanted)

    def take_ranges_by(self, ranges: Callable[[list[Any]], object]) -> None:
        """Before a comparison, calibrate the model with the batches that make the change.

        Otherwise the comparison of a change that calibrates again would measure the batches, not the change.

        Args:
            ranges: calibrates the model's inputs in place with the given batches, by its own method.
        """
        self._ranges, self._first, self._second = ranges, None, None

    def of(self, change: Change) -> Tried:
        """Make a change, measure it, and take it back."""
        what, code, model = change.what, change.code, self._model
        with warnings.catch_warnings(), restore_after(self._restore), evaluating(model):
            warnings.simplefilter("ignore")  # they speak of a model that is not kept
            try:
                side = self._started()
                side.before()
                change.make(side.made)
                errors = side.outputs.errors_of(model)
                after, size = errors.distance.mean, parameter_bytes(model)[1]
                share = after / self.error if self.error else math.inf if after else 1.0
                found = change.aim.allows(share, size / max(self.bytes, 1))
                score = self._measured() if found else None
                by_chance = found and change.aim is Aim.ERROR and not self._is_sure(change, side, errors.rows)
                found = found and not by_chance
                if found and score is not None and self.score is None:
                    side.before()
                    self.score = self._measured()
            except (FakeQuantError, RuntimeError) as error:  # torch's own are RuntimeErrors, as of memory
                return Tried(what, code, failed=f"{type(error).__name__}: {error}")
        if score is not None and self.score is not None:
            found = found and score >= self.score
        return Tried(what, code, after, size, score, helps=found, by_chance=by_chance)

    def _started(self) -> _Side:
        if self._first is None:
            self._first = self._side(self._parts.made, self._outputs)
            if self._ranges is not None:
                self.error, self.score = self._first.errors.distance.mean, None
        return self._first

    def _side(self, made: list[Any], outputs: OutputDistance) -> _Side:
        """The batches of a side; the model is what a change is compared with."""
        self._restore()
        before = self._restore
        if self._ranges is not None:
            self._ranges(made)
            before = in_order(before, ranges_of(quantizers(self._model).values()))
        return _Side(made, outputs, before, outputs.errors_of(self._model))

    def _is_sure(self, change: Change, side: _Side, after: Tensor) -> bool:
        """Whether a change lowers the error of more rows than chance would, also with the parts exchanged."""
        before = side.errors.rows
        if self._parts.judged is not self._parts.made:
            if self._second is None:
                self._restore()
                self._second = self._side(self._parts.judged, self._outputs_on(self._parts.made))
            self._second.before()
            change.make(self._second.made)
            rows, again = self._second.errors.rows, self._second.outputs.errors_of(self._model).rows
            if float(again.sum()) > float(rows.sum()):
                return False
            one, other = float(before.sum()) or 1.0, float(rows.sum()) or 1.0  # so that both parts count as much
            before, after = torch.cat([before / one, rows / other]), torch.cat([after / one, again / other])
        return float(after.sum()) < CLEARLY * float(before.sum()) and helps(before, after, SURE_OF_PART)

    def _outputs_on(self, batches: list[Any]) -> OutputDistance:
        with disabled(self._model):
            return OutputDistance(self._model, Batches(batches, "report", forward=self._run).kept())

    def _measured(self) -> float | None:
        return None if self._metric is None else score_of(self._metric, self._model)
