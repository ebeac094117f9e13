"""Search the smallest quantized form of a float model that is good enough."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from fakequant.calibration import DEFAULT_METHOD
from fakequant.data.arguments import Metric, NamedMetric, check_float_model, check_metric, named
from fakequant.data.batches import Batches, Forward, HeldOut, Inputs, Mask, tell
from fakequant.data.digest import digest, function_digest
from fakequant.errors import ConfigError, FakeQuantError, first_line, shown
from fakequant.files import check_path, locked, writable_folder
from fakequant.model.config import find_preset
from fakequant.model.engine import find_engine
from fakequant.model.run.outputs import decibels
from fakequant.model.summary import parameter_bytes
from fakequant.nn.quantizer import quantizers
from fakequant.nn.wrappers import accepts_wrapped_model
from fakequant.ptq.allocation import check_budget
from fakequant.ptq.collector import remove_finished, run_of
from fakequant.ptq.judging import CLEARLY, EVERY, MAY_LOSE
from fakequant.ptq.next_step import kinds_of
from fakequant.ptq.trial import (
    METHODS,
    Compared,
    Preparation,
    Trials,
    Variant,
    has_static_inputs,
    keep_row,
    kept_rows,
    quantizes_inputs,
)
from fakequant.text import html_result, table


@dataclass(frozen=True)
class Code:
    """The settings with which `advise` makes models; `held` has the numbers of batches held back, or is empty."""

    preparation: Preparation
    held: Sequence[int]
    count: int
    inputs: Inputs | None = None
    forward: Forward | None = None
    mask: Mask | None = None

    def of(self, way: Variant) -> str:
        """The Python code that makes the model of a variant from the user's `model` and `batches`.

        >>> print(Code(Preparation(), [1, 3], 4).of(Variant("INT4_GROUP32", "mse", "fast")))
        import copy
        import fakequant as fq
        <BLANKLINE>
        made = [batch for number, batch in enumerate(batches) if number % 2 != 1]  # the others judged
        quantized = copy.deepcopy(model).eval()
        fq.prepare(quantized, "int4_group32")
        fq.calibrate(quantized, made, unseen="float")
        fq.ptq.improve(quantized, made, "fast")
        """
        own, made = self.preparation, "made = [*batches]"
        if self.held:
            last = f" or number > {self.held[-1]}" if self.held[-1] + EVERY < self.count else ""
            rule = f"number % {EVERY} != 1{last}"
            made = f"made = [batch for number, batch in enumerate(batches) if {rule}]  # the others judged"
        lines = ["import copy", "import fakequant as fq", "", made, "quantized = copy.deepcopy(model).eval()"]
        example, part = "", "" if own.inputs is None else f", inputs={_shown(own.inputs, 'inputs')}"
        if own.example is not None:
            is_cut = self.inputs is None and isinstance(own.example, (tuple, list))
            example = f"made[0][:{len(own.example)}]" if is_cut else "made[0]"
        if own.folds:
            lines.append(f"fq.fuse_batch_norm(quantized, {example}{part})")
        given = f", {example}{part}" if example else ""
        target = f', target="{named}"' if (named := own.target_for(way.preset)) else ""
        lines.append(f'fq.prepare(quantized, "{way.preset.lower()}"{given}{target})')
        how = {"inputs": self.inputs, "forward": self.forward, "mask": self.mask}
        rest = "".join(f", {name}={_shown(value, name)}" for name, value in how.items() if value is not None)
        method = "" if way.method == DEFAULT_METHOD else f', "{way.method}"'
        lines.append(f'fq.calibrate(quantized, made{method}{rest}, unseen="float")')
        if way.steps:
            lines.append(f'fq.ptq.improve(quantized, made, "{way.steps}"{rest})')
        return "\n".join(lines)


def _shown(value: Any, name: str) -> str:
    """A number, text or slice as Python code; for any other value, the name of the argument that takes it."""
    return repr(value) if isinstance(value, (int, str, slice)) else name


SAME_SIZE = 1.15
"""Models whose bytes differ by up to this factor are of one size: weights of 4 bits take 4.0 to 4.5 with scales."""
_NO_HOPE = 25.0
"""A size whose presets are this many decibels below the floor gets no other trial, unless one of them is the best of
all: other methods and `improve` gained at most 18 dB in the benchmarks."""
_LITTLE = 3.0
"""Up to this many decibels below the floor, "best" is tried: it takes 7 times as long as "fast" for up to 1.5 dB."""
_TWO = 2
"""How many presets of a size are tried with other methods, and with `improve`."""
TIERS = ("presets", "calibration methods", 'improve "fast"', 'improve "best"')
"""What is tried, the cheapest first."""


class SizeClass(NamedTuple):
    """Presets of a kind (see `Engine`) whose models have about the same size; `bytes` is the size of the smallest."""

    bytes: int
    presets: tuple[str, ...]


def sizes_of(bytes_of: Mapping[str, int], kinds: Iterable[Collection[str]]) -> list[SizeClass]:
    """Groups of presets whose models have about the same size: smaller sizes first, in a size the faster kind first.

    Args:
        kinds: the presets of each kind; the kind that engines run faster comes first.

    >>> [size.presets for size in sizes_of({"a": 100, "b": 112, "c": 200, "d": 201}, ["d", "abc"])]
    [('a', 'b'), ('d',), ('c',)]
    """
    found: list[list[str]] = []
    for name in sorted(bytes_of, key=bytes_of.__getitem__):
        if not found or bytes_of[name] > SAME_SIZE * bytes_of[found[-1][0]]:
            found.append([])
        found[-1].append(name)
    kinds = [*kinds]
    parts = [tuple(name for name in names if name in kind) for names in found for kind in kinds]
    return [SizeClass(bytes_of[part[0]], part) for part in parts if part]


@dataclass
class SearchOrder:
    """The search for the smallest model that meets a floor.

    Args:
        sizes: the presets by the size of their models, smallest first.
        floor: the lowest score that a model must reach.
        static: the presets that need calibration for the ranges of inputs.
        has_metric: whether the score is the user's metric, for which limits in dB mean nothing.

    Attributes:
        met: the index in `sizes` of the smallest size whose model meets the floor; `len(sizes)` if none does.
    """

    sizes: Sequence[SizeClass]
    static: Sequence[str]
    floor: float
    has_metric: bool = False
    rows: dict[Variant, Compared] = field(default_factory=dict)
    met: int = field(init=False)

    def __post_init__(self) -> None:
        self.met = len(self.sizes)

    def ways(self) -> Iterator[tuple[Variant, str]]:
        """Each variant to try, and a text on the trials that may follow at most.

        The caller adds the result of each variant to `rows` before the next variant is taken. All presets come first,
        from the smallest size up to the first that meets the floor. Then costlier variants of the smaller sizes follow,
        from the smallest size up.
        """
        for tier in range(len(TIERS)):
            for number, size in enumerate(self.sizes[: self.met]):
                tried = self._of(tier, size)
                larger = len(self.sizes[: self.met]) - number - 1
                later = [f"{larger} larger size{'s' * (larger > 1)}"] if larger else []
                later += TIERS[tier + 1 :]
                for more, way in zip(reversed(range(len(tried))), tried, strict=True):
                    parts = [*([f"{more} more of this size"] if more else []), *later]
                    yield way, f"then at most: {', '.join(parts)}" if parts else "the last"
                if self.meets(self.best_of(size.presets)):
                    self.met = number
                    break

    def score(self, row: Compared) -> float:
        """The metric of a result; without a metric, the signal over the error in dB. Larger is better."""
        if self.has_metric:
            return -math.inf if row.metric is None else row.metric
        return -math.inf if math.isnan(row.error) else decibels(row.error)

    def meets(self, row: Compared | None) -> bool:
        """Whether a result meets the floor; False for None."""
        return row is not None and self.score(row) >= self.floor

    def best_of(self, presets: Collection[str]) -> Compared | None:
        """The best result of `presets`, or None; without a metric, costlier variants need a clearly lower error."""
        best: Compared | None = None
        for row in self.rows.values():
            if row.preset in presets and not row.failed and (best is None or self._is_better(row, best)):
                best = row
        return best

    @property
    def answer(self) -> Compared | None:
        """The best result of the smallest size that meets the floor, else of all sizes; None before any result."""
        if self.met < len(self.sizes):
            return self.best_of(self.sizes[self.met].presets)
        best = [row for size in self.sizes if (row := self.best_of(size.presets)) is not None]
        return max(best, key=self.score, default=None)

    def _is_better(self, row: Compared, best: Compared) -> bool:
        if self.has_metric and self.score(row) != self.score(best):
            return self.score(row) > self.score(best)
        if self.score(best) == -math.inf:
            return self.score(row) > -math.inf
        costs_more = (row.steps, row.method != DEFAULT_METHOD) != (best.steps, best.method != DEFAULT_METHOD)
        return row.error < (CLEARLY if costs_more else 1.0) * best.error

    def _of(self, tier: int, size: SizeClass) -> list[Variant]:
        """The variants of a tier to try for a size; later tiers change the method or steps of the best results."""
        if tier == 0:
            return [Variant(preset) for preset in size.presets]
        best = self.best_of(size.presets)
        if best is None:
            return []
        if not self.has_metric and self.score(best) < self.floor - _NO_HOPE and best is not self.answer:
            return []
        if tier == 1:
            static = [preset for preset in size.presets if preset in self.static]
            return [Variant(row.preset, method) for row in self._leading(static) for method in METHODS[1:]]
        if tier == 2:
            return [row.way._replace(steps="fast") for row in self._leading(size.presets)]
        if not self.has_metric and self.score(best) < self.floor - _LITTLE:
            return []
        return [best.way._replace(steps="best")]

    def _leading(self, presets: Sequence[str]) -> list[Compared]:
        """The two best presets, each by its best result; results with equal figures count as one."""
        best = [row for preset in presets if (row := self.best_of([preset])) is not None]
        unlike = {(row.error, row.bytes, row.metric): row for row in best[::-1]}
        return sorted(unlike.values(), key=lambda row: (-self.score(row), row.error))[:_TWO]


_HEADER = ("", "preset", "method", "improve", "bits", "MB", "{}", "seconds")
_NUMBERS = range(4, len(_HEADER))


@dataclass(frozen=True)
class TriedVariant:
    """A variant that `advise` tried.

    Attributes:
        measured: the figures of the variant; `bits` count codes and scales of the quantized weights.
        score: the metric, or without a metric the signal over the error of the output in dB; -inf after a failure.
    """

    measured: Compared
    bytes: int
    score: float


@dataclass(frozen=True)
class Advice:
    """The result of `advise`; prints as a table of at most 80 columns, the smallest model first.

    Attributes:
        rows: the variants that were tried.
        best: the answer: the best variant of the smallest size that meets the floor; if none meets it, the best of all.
        meets: whether the answer meets the floor.
        floor: the least score that is good enough.
        unit: the unit of the score, "dB" without a metric.
        reason: why the answer was chosen, in a sentence or two.
        call: the code that makes the same model from the user's `model` and `batches`.
        target: the engine, "" without a target.
        speed: a sentence on the speed of the answer in the target, which is not measured.
        judged: a text on the batches that judged.
        quantizers: the paths of the quantizers of the answer.
        folds: whether batch normalisations were folded first.
        float_bytes: the bytes of the model in float.
        interrupted: whether an interrupt ended the search.
        negated: whether scores are shown negated, because smaller is better.
    """

    rows: Sequence[TriedVariant]
    best: TriedVariant
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
        stopped = ["Interrupted: the answer is chosen from the rows above."] if self.interrupted else []
        return [*failed, *stopped, self.reason, f"Judged {self.judged}.", self.speed]


def number(score: float) -> str:
    """A score as the text of a table's cell.

    >>> number(23.456), number(0.98765), number(float("inf"))
    ('23.5', '0.9877', 'inf')
    """
    return f"{score:.1f}" if 10 <= abs(score) < math.inf else f"{score:.4g}"


def shown_way(way: Variant) -> str:
    """A variant as text.

    >>> shown_way(Variant("INT8", "entropy", "fast"))
    'INT8 by entropy with improve "fast"'
    """
    method = "" if way.method == DEFAULT_METHOD else f" by {way.method}"
    return way.preset + method + (f' with improve "{way.steps}"' if way.steps else "")


def told(row: Compared, score: float, metric: NamedMetric | None) -> str:
    """A variant and its score as text."""
    return f"{shown_way(row.way)}, {_shown_score(score, metric)}"


def _shown_score(score: float, metric: NamedMetric | None) -> str:
    return f"{number(score)} dB" if metric is None else f"{number(metric.shown(score))} {metric.name}"


def reason(ladder: SearchOrder, metric: NamedMetric | None, target: str | None) -> str:
    """Sentences that say why the answer was chosen, and how good smaller models are."""
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
            found += f" Smaller or faster models are worse: {other} at best."
    else:
        found = f"None meets the floor of {floor}: {name} is nearest with {shown(score)}, and misses it by "
        found += f"{number(ladder.floor - score)}."
    if target is None and not quantizes_inputs(best.preset):
        found += " Inputs stay in float: without target=, it is not known whether the engine gains by quantized inputs."
    return found


def speed(target: str | None) -> str:
    """A sentence that says that the speed was not measured, and repeats the known facts on the target's speed."""
    if target is None:
        return "Speed: not measured, because target= is missing."
    engine = find_engine(target)
    page = f"; docs/engines/{engine.page}.md says more" if engine.page else ""
    return f"Speed in {target}: not measured{page}. {engine.known}".rstrip()


FLOOR = 20.0
"""The signal over the error of the output in dB that is enough by default: an error of 1 % of the output's energy."""
_ROWS = "rows.jsonl"


@accepts_wrapped_model
def advise(  # noqa: PLR0913  all but the first two by name
    model: nn.Module,
    batches: Iterable[Any],
    *,
    target: str | None = None,
    floor: float | None = None,
    metric: Metric | None = None,
    presets: Sequence[str] | None = None,
    inputs: Inputs | None = None,
    forward: Forward | None = None,
    mask: Mask | None = None,
    work: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> Advice:
    """Find the smallest quantized form of a model that is good enough, by trying presets, methods and `improve`.

    Every second batch, up to eight of them, is held back to judge; the other batches calibrate and improve. All presets
    are tried first, from the smallest models up, until a preset meets the floor. Then costlier variants of smaller
    models are tried: other methods of calibration, `improve` by "fast", and by "best". Models whose bytes differ by at
    most 15 % count as one size: among them the model with the least error is taken. Presets that the files of the
    target cannot hold are not tried. Ctrl-C ends the search, and the result so far is returned.

    Args:
        model: the float model; it is not changed.
        batches: as for `calibrate`; they are kept as a list.
        target: the engine that will run the model, by its name in `fakequant.known_engines()`. The engine's presets are
            tried; errors and metrics are those of the engine's arithmetic, if it is known. None: presets that quantize
            weights alone are tried.
        floor: the least metric that is good enough, by default 99 % of the float model's metric. Without a metric: the
            least signal-to-error ratio of the output in dB, by default 20 dB (1 % of the output's energy).
        metric: called as metric(model), larger is better. It should use none of the batches.
        presets: names of presets to try, in place of the target's.
        inputs, forward, mask: as for `calibrate`.
        work: a folder for the measurements; the same call with this folder resumes the search, with the same answer.
        progress: whether to name each trial before it runs, and how many may follow; by default on a terminal and in a
            notebook.

    Raises:
        ConfigError: an unknown target or preset, a prepared model, a floor or a metric of the float model that is not a
            number, no preset that the model can have, a folder of another search, or `forward` with a target that
            places quantizers, which needs an example.
        CalibrationError: no batches, or the float model fails on one or gives NaN.
        OutputError: the folder cannot be written, or another process works in it.
        KeyboardInterrupt: before the first result.

    >>> torch.manual_seed(0).initial_seed()
    0
    >>> model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    >>> advice = advise(model, [torch.randn(16, 32) for _ in range(4)], floor=30)
    >>> advice.best.measured.preset, advice.meets
    ('INT8_WEIGHT_ONLY', True)
    >>> advice.reason.split(":")[0]
    'INT8_WEIGHT_ONLY is the smallest that meets the floor of 30.0 dB'
    """
    check_float_model(model, "advise", "advise(model, batches)", "try presets on")
    check_metric(metric, "advise")
    check_budget("floor", floor, any_number=True)
    if presets is None:
        kinds: Sequence[Sequence[str]] = kinds_of(target)
    elif isinstance(presets, str) or not isinstance(presets, Sequence) or not presets:
        raise ConfigError(f"presets takes a list of names, got {shown(presets)}; write presets=['int8', 'fp8']")
    else:  # in two kinds: with inputs of few bits, and without
        names = list(dict.fromkeys(find_preset(name).name for name in presets))
        kinds = [[name for name in names if quantizes_inputs(name) is has_inputs] for has_inputs in (True, False)]
    if work is not None:
        check_path(work, "advise(model, batches, work='search')")
    folder = None if work is None else writable_folder(work)
    given = Batches(batches, "advise", inputs=inputs, forward=forward, mask=mask, progress=progress).kept()
    held_out = HeldOut.of(given, EVERY)
    preparation = Preparation.of(model, held_out.made, target, inputs, forward)
    scorer = None if metric is None else named(metric)
    trials = Trials(model, held_out, scorer, preparation, mask, times=False)
    trials.check()
    exact = trials.score(model)
    if exact is not None and not math.isfinite(exact):
        raise ConfigError(f"metric(model) gives {exact} for the float model; it must be a finite number")
    enough = float(floor) if floor is not None else FLOOR if exact is None else exact - MAY_LOSE * abs(exact)
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # warnings about copies that are not kept
        search = _VariantSearch(trials, kinds, enough, progress, scorer)
        if folder is not None:
            stack.enter_context(locked(folder, wait=False))
            measure = function_digest(metric), exact
            search.keep_in(folder, digest([run_of(model, given), measure, str(target), preparation.folds]))
        interrupted = search.run()
        code = Code(preparation, [*held_out.held.numbered], len(given), inputs, forward, mask)
        return search.advice(code, target, str(held_out), interrupted)


class _VariantSearch:
    """Runs the trials of `advise`, and keeps their results."""

    def __init__(
        self,
        trials: Trials,
        kinds: Sequence[Sequence[str]],
        floor: float,
        progress: bool | None,
        metric: NamedMetric | None,
    ) -> None:
        self.trials, self._progress, self._metric = trials, progress, metric
        self._folder: Path | None = None
        self._known: Mapping[Variant, Compared] = {}
        self.bytes: dict[str, int] = {}
        self.refused: dict[str, str] = {}
        """The reason for each preset that the model cannot have."""
        presets = [name for kind in kinds for name in kind]
        for name in presets:
            try:
                self.bytes[name] = parameter_bytes(trials.prepared(name))[1]
            except (FakeQuantError, RuntimeError) as error:  # torch raises RuntimeError, as for memory
                details = str(error).strip().splitlines()[1:2]  # of an error that lists parts, the first
                self.refused[name] = " ".join([first_line(error), *(line.strip() for line in details)])
        if not self.bytes:
            name, why = next(iter(self.refused.items()))
            raise ConfigError(f"the model can be prepared with none of {', '.join(presets)}; with {name}: {why}")
        static = [name for name in self.bytes if has_static_inputs(name)]
        self.ladder = SearchOrder(sizes_of(self.bytes, kinds), static, floor, trials.metric is not None)

    def keep_in(self, folder: Path, fingerprint: str) -> None:
        """Store results in a folder, and read those that an earlier run stored there."""
        self._folder, self._known = folder, kept_rows(folder / _ROWS, fingerprint)

    def run(self) -> bool:
        """Try the variants of the search; returns whether an interrupt ended it."""
        rows = self.ladder.rows
        try:
            for way, follows in self.ladder.ways():
                if (row := self._known.get(way)) is None:
                    best, folder, how = self.ladder.answer, self._folder, dict[str, Any]()
                    so_far = f"; best so far: {told(best, self.ladder.score(best), self._metric)}" if best else ""
                    tell(f"trying {shown_way(way)}{so_far}; {follows}", self._progress)
                    if folder is not None and way.steps:
                        how["checkpoint"] = folder / f"improve-{'-'.join(way)}"
                    try:
                        row = self.trials.of(way, **how)
                    except Exception as error:  # a user's metric, and torch, may raise anything
                        row = Compared(*way, failed=first_line(error))
                    if folder is not None:
                        keep_row(folder / _ROWS, row)
                    if how:
                        remove_finished(how["checkpoint"])
                rows[way] = row
        except KeyboardInterrupt:
            if self.ladder.answer is None:
                raise
            return True
        if self.ladder.answer is None:
            way, row = next(iter(rows.items()))
            raise ConfigError(f"all trials failed; the first, {shown_way(way)}: {row.failed}")
        return False

    def advice(self, code: Code, target: str | None, judged: str, interrupted: bool) -> Advice:
        """The Advice after the search: the answer, its reason, and the code that makes it."""
        ladder, float_bytes = self.ladder, sum(p.numel() * p.element_size() for p in self.trials.model.parameters())
        rows = {way: TriedVariant(row, self.bytes[way.preset], ladder.score(row)) for way, row in ladder.rows.items()}
        best = ladder.answer
        assert best is not None, "an answer is there after the first result"
        refused = [Compared(*Variant(name), failed=why) for name, why in self.refused.items()]
        return Advice(
            [*rows.values(), *(TriedVariant(row, 0, -math.inf) for row in refused)],
            rows[best.way],
            ladder.meets(best),
            ladder.floor,
            "dB" if self._metric is None else self._metric.name,
            reason(ladder, self._metric, target),
            code.of(best.way),
            target or "",
            speed(target),
            judged,
            [*quantizers(self.trials.prepared(best.preset))],
            self.trials.preparation.folds,
            float_bytes,
            interrupted,
            self._metric is not None and self._metric.negated,
        )
