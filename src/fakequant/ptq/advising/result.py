"""What `advise` found: the ways that were tried, the answer with its reason, and the code that makes it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from fakequant.calibration import DEFAULT_METHOD
from fakequant.data.arguments import NamedMetric
from fakequant.model.analysis.html import html_result
from fakequant.model.calibration.choice import HeldBack
from fakequant.ptq.advising.engines import ENGINES
from fakequant.ptq.advising.ladder import SAME_SIZE, Ladder
from fakequant.ptq.formats.comparison import Compared, Way
from fakequant.ptq.formats.task import has_static_inputs, quantizes_inputs
from fakequant.text import table

_HEADER = ("", "preset", "method", "improve", "bits", "MB", "{}", "seconds")
_NUMBERS = range(4, len(_HEADER))


@dataclass(frozen=True)
class TriedWay:
    """One way that `advise` tried.

    Attributes:
        measured: its figures; `bits` count codes and scales of the quantized weights.
        bytes: of all parameters, quantized or not.
        score: the metric, without one the signal over the error of the output in dB; -inf where it failed.
    """

    measured: Compared
    bytes: int
    score: float


@dataclass(frozen=True)
class Advice:
    """The result of `advise`; prints as a table of at most 80 columns, the smallest model first.

    Attributes:
        rows: what was tried.
        best: the answer: the best way of the smallest size that meets the floor, of all ways if none does.
        meets: whether it meets the floor.
        floor: of the score.
        unit: of the score, "dB" without a metric.
        reason: why it is the answer, in a sentence or two.
        call: the code that makes the same model, with `model` and `batches` as they were given.
        target: the engine, "" for none.
        speed: of the answer in the target, or that it was not measured.
        judged: the batches that judged, as text.
        quantizers: the paths of the quantizers of the answer.
        folds: whether batch normalisations were folded first.
        float_bytes: of the model in float.
        interrupted: whether an interrupt ended the search.
        negated: whether scores are shown with the other sign, as the figures of which smaller is better.
    """

    rows: Sequence[TriedWay]
    best: TriedWay
    meets: bool
    floor: float
    unit: str
    reason: str
    call: str
    target: str
    speed: str
    judged: str
    quantizers: Sequence[str]
    folds: bool
    float_bytes: int
    interrupted: bool = False
    negated: bool = False

    def __str__(self) -> str:
        return table([self._header(), *self._cells()], ["", *self._below()], numbers=_NUMBERS, width=80)

    __repr__ = __str__  # what notebooks and consoles show

    def _repr_html_(self) -> str:
        rows = [row + [""] * (len(_HEADER) - len(row)) for row in self._cells()]
        return html_result(list(self._header()), rows, self._below(), numbers=_NUMBERS)

    def _header(self) -> list[str]:
        return [name.format(self.unit) for name in _HEADER]

    def _cells(self) -> list[list[str]]:
        shown = sorted(self.rows, key=lambda row: (bool(row.measured.failed), row.bytes, -row.score))
        cells = []
        for row in shown:
            own = row.measured
            method = own.method if has_static_inputs(own.preset) else "-"
            way = ["*" if row is self.best else "", own.preset, method, own.steps or "-"]
            figures = [
                f"{own.bits:.2f}",
                f"{row.bytes / 1e6:.3g}",
                number(-row.score if self.negated else row.score),
                f"{own.seconds:.1f}",
            ]
            cells.append([*way, *(["failed"] if own.failed else figures)])
        return cells

    def _below(self) -> list[str]:
        failed = dict.fromkeys(
            f"{row.measured.preset}: {row.measured.failed}" for row in self.rows if row.measured.failed
        )
        stopped = ["Interrupted: what follows is of what was tried until then."] if self.interrupted else []
        return [*failed, *stopped, self.reason, f"Judged {self.judged}.", self.speed]


def number(score: float) -> str:
    """A score in a table.

    >>> number(23.456), number(0.98765), number(float("inf"))
    ('23.5', '0.9877', 'inf')
    """
    return f"{score:.1f}" if 10 <= abs(score) < math.inf else f"{score:.4g}"


def shown_way(way: Way) -> str:
    """A way as text.

    >>> shown_way(Way("INT8", "entropy", "fast"))
    'INT8 by entropy with improve "fast"'
    """
    method = "" if way.method == DEFAULT_METHOD else f" by {way.method}"
    return way.preset + method + (f' with improve "{way.steps}"' if way.steps else "")


def told(row: Compared, score: float, metric: NamedMetric | None) -> str:
    """A way with its score."""
    return f"{shown_way(row.way)}, {_shown_score(score, metric)}"


def _shown_score(score: float, metric: NamedMetric | None) -> str:
    return f"{number(score)} dB" if metric is None else f"{number(metric.shown(score))} {metric.name}"


def judged_by(held: HeldBack) -> str:
    """On which batches models were measured."""
    if held.count == 1:
        return "on the one batch there is, which also made them"
    count, made = len(held.held), held.count - len(held.held)
    batches = "batch" if count == 1 else "batches"
    return f"on {count} {batches} held back; {made} {'batch' if made == 1 else 'batches'} made the models"


def reason(ladder: Ladder, metric: NamedMetric | None, target: str | None) -> str:
    """Why the answer is the answer."""
    best = ladder.answer
    assert best is not None, "an answer is there after the first result"
    shown = partial(_shown_score, metric=metric)
    name, score, floor = shown_way(best.way), ladder.score(best), shown(ladder.floor)
    if ladder.meets(best):
        alike = ladder.sizes[ladder.met].presets
        smaller = [one for one in alike[: alike.index(best.preset)] if ladder.meets(ladder.best_of([one]))]
        found = f"{name} is the smallest that meets the floor of {floor}: it has {shown(score)}."
        if smaller:
            found = f"{name} meets the floor of {floor}: it has {shown(score)}, the best of the sizes within "
            found += f"{SAME_SIZE - 1:.0%} of the smallest, {smaller[0]}."
        below = next(filter(None, (ladder.best_of(size.presets) for size in ladder.sizes[: ladder.met][::-1])), None)
        if below is not None:
            other = told(below, ladder.score(below), metric)
            found += f" What is smaller, or faster, is worse: {other} at best."
    else:
        found = f"None meets the floor of {floor}: {name} is nearest with {shown(score)}, and misses it by "
        found += f"{number(ladder.floor - score)}."
    if target is None and not quantizes_inputs(best.preset):
        found += " Inputs stay in float: without target=, an engine that gains by quantizing them is not known."
    return found


def speed(target: str | None) -> str:
    """What is known of the speed of a target."""
    if target is None:
        return "Speed: not measured, for no target was given."
    engine = ENGINES[target]
    page = f"; docs/engines/{engine.page}.md says more" if engine.page else ""
    return f"Speed in {target}: not measured{page}. {engine.known}".rstrip()
