"""Changes of a quantized model, tried before they are advised: by the error of its output, on batches held back."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from fakequant.errors import FakeQuantError
from fakequant.model.analysis import Metric
from fakequant.model.arguments import measured
from fakequant.model.batches import Forward
from fakequant.model.modes import disabled, evaluating
from fakequant.model.outputs import OutputDistance
from fakequant.model.summary import parameter_bytes
from fakequant.nn.contexts import cached_weights
from fakequant.restore import restore_after, state_of

KEPT = 4
"""Batches that make a change, and batches that judge it: at most so many of each."""
CLEARLY = 0.9
"""The share of the error below which a change helps: on few batches a smaller difference is chance."""

ALIKE = 1.01
"""The share of the error up to which it is about the same: more is not rounding."""

_LARGER = 1.25
"""The share of the bytes up to which less error is worth them: a quantized model ought to be small."""


class Parts:
    """Of the batches that pass by, those that make changes and those that judge them, which make none.

    >>> parts = Parts(range(5))
    >>> parts.made, parts.judged
    ([0, 2, 4], [1, 3])
    >>> Parts(["one"]).judged
    ['one']
    """

    def __init__(self, batches: Iterable[Any] = ()) -> None:
        self._kept: tuple[list[Any], list[Any]] = ([], [])
        for number, batch in enumerate(batches):
            self.see(number, batch)

    def see(self, number: int, batch: Any) -> None:
        """Keep a batch, if there are not enough; the first has number 0."""
        if len(kept := self._kept[number % 2]) < KEPT:
            kept.append(batch)

    @property
    def made(self) -> list[Any]:
        """The first, the third, and so on."""
        return self._kept[0]

    @property
    def judged(self) -> list[Any]:
        """The second, the fourth, and so on; of a single batch that one."""
        return self._kept[1] or self._kept[0]

    def __str__(self) -> str:
        if not self._kept[1]:
            return "on the one batch there is, which also made it"
        made, judged = (f"{len(kept)} {'batch' if len(kept) == 1 else 'batches'}" for kept in self._kept)
        return f"on {judged} held back, with {made} to make it"


def lowers_error(error: float, size: float) -> bool:
    """Whether a change helps, by the error and the bytes after it as shares of those before: clearly less error."""
    return error < CLEARLY and size <= _LARGER


def makes_smaller(error: float, size: float) -> bool:
    """Clearly fewer bytes, and about the same error."""
    return error <= ALIKE and size <= CLEARLY


def keeps_error(error: float, size: float) -> bool:
    """Not clearly more error, of a change that is for the engine; fewer batches made it than made the model."""
    return error <= 1 / CLEARLY


class Change(NamedTuple):
    """A change of a model: what it is, the code to paste, a function of the batches to use, and when it helps."""

    what: str
    code: str
    make: Callable[[list[Any]], object]
    helps: Callable[[float, float], bool] = lowers_error


@dataclass(frozen=True)
class Tried:
    """What a change did.

    Attributes:
        what, code: as of the change.
        after: the error of the output, as a share of its energy.
        bytes: of all weights, quantized or not.
        metric: what the user's metric gives, where the change helps by the error; None without one.
        failed: why there are no figures; "" where there are.
        helps: whether the change does what it is for, and the metric is no less.
    """

    what: str
    code: str
    after: float = math.inf
    bytes: int = 0
    metric: float | None = None
    failed: str = ""
    helps: bool = False


@dataclass(frozen=True)
class Advice:
    """What was tried on a model, and the change that helps most.

    Attributes:
        error: of the output as it is, as a share of its energy; of several outputs the mean share.
        bytes: of all weights, quantized or not.
        judged: on which batches, as a part of a sentence.
        little: whether little is lost, so that nothing was tried against the error.
        tried: in their order.
        best: the number of the one to take; None where none helps, or none was needed.
        metric: as it is; None without one.
    """

    error: float
    bytes: int
    judged: str
    little: bool = False
    tried: Sequence[Tried] = ()
    best: int | None = None
    metric: float | None = None


class Trial:
    """Makes changes of a model one after the other, measures each, and takes it back.

    Args:
        model: quantized; each change leaves it as it was, also after an error or an interrupt.
        parts: the batches. A change costs one run of those that judge, besides what makes it.
        run: called as run(model, batch).
        metric: called as metric(model), larger is better, for changes that help by the error of the output.
        score: what it gives for the model as it is.
    """

    def __init__(
        self, model: nn.Module, parts: Parts, run: Forward, metric: Metric | None = None, score: float | None = None
    ) -> None:
        self._model, self._parts, self._metric = model, parts, metric
        with disabled(model):
            self._outputs = OutputDistance(model, parts.judged, run)
        self._restore = state_of([model])
        self.error, self.bytes, self.score = self._outputs.of(model).mean, parameter_bytes(model)[1], score

    @property
    def judges(self) -> bool:
        """Whether there is an error to lower: outputs of whole numbers have none, nor have those that are NaN."""
        return self._outputs.has_outputs and not any(bool(y.isnan().any()) for y in self._outputs.wanted)

    def of(self, change: Change) -> Tried:
        """Make a change, measure it, and take it back."""
        what, code = change.what, change.code
        with warnings.catch_warnings(), restore_after(self._restore), evaluating(self._model):
            warnings.simplefilter("ignore")  # they speak of a model that is not kept
            try:
                change.make(self._parts.made)
                after, size = self._outputs.of(self._model).mean, parameter_bytes(self._model)[1]
                share = after / self.error if self.error else math.inf if after else 1.0
                score = self._measured() if (helps := change.helps(share, size / max(self.bytes, 1))) else None
            except (FakeQuantError, RuntimeError) as error:  # torch's own are RuntimeErrors, as of memory
                return Tried(what, code, failed=f"{type(error).__name__}: {error}")
        if score is not None and self.score is not None:
            helps = score >= self.score
        return Tried(what, code, after, size, score, helps=helps)

    def _measured(self) -> float | None:
        if self._metric is None:
            return None
        with cached_weights(self._model), torch.no_grad():
            return measured(self._metric, self._model)
