"""From a float model to the smallest quantized one that is good enough."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn

from fakequant.data.arguments import Metric, NamedMetric, check_float_model, check_metric, named
from fakequant.data.batches import Batches, Forward, Inputs, KeptBatches, example_arguments, example_in
from fakequant.data.digest import digest, function_digest
from fakequant.data.progress import tell
from fakequant.data.token_mask import Mask
from fakequant.errors import ConfigError, FakeQuantError, first_line, shown
from fakequant.files import check_path, locked, writable_folder
from fakequant.model.analysis.summary import parameter_bytes
from fakequant.model.calibration.choice import HeldBack
from fakequant.model.modes import evaluating
from fakequant.model.names import find_preset
from fakequant.model.training.fuse import fusions_of
from fakequant.nn.quantizer import quantizers
from fakequant.nn.wrappers import unwraps
from fakequant.ptq.advising.code import EVERY, Code
from fakequant.ptq.advising.engines import find_engine, holders, places
from fakequant.ptq.advising.ladder import Ladder, sizes_of
from fakequant.ptq.advising.result import Advice, TriedWay, judged_by, reason, shown_way, speed, told
from fakequant.ptq.formats.comparison import Compared, Way, keep_row, kept_rows
from fakequant.ptq.formats.mixes import check_budget
from fakequant.ptq.formats.task import Preparation, Task, has_static_inputs, quantizes_inputs
from fakequant.ptq.improving.finished import remove_finished, run_of

FLOOR = 20.0
"""The signal over the error of the output in dB that is enough by default: an error of 1 % of the output's energy."""
_MAY_LOSE = 0.01
"""The share of the float model's metric that may be lost by default."""
_ROWS = "rows.jsonl"


@unwraps
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

    Every second batch, up to eight of them, is held back and judges; the others make the models. All presets are
    tried first, from the smallest models up, until one meets the floor. In the sizes below it follows what costs more:
    the methods of calibration, `improve` by "fast", and by "best". Models of one size differ by at most 15 % of their
    bytes: among them the one with the least error is taken. What the files of the target cannot hold, as `deliver` and
    `export_onnx` would say, is not tried. Ctrl-C ends the search, and what was found until then is
    returned.

    Args:
        model: in float; it stays as it is.
        batches: as for `calibrate`; they are kept as a list.
        target: the engine that will run it, which decides what is tried: "onnxruntime", "openvino", "tensorrt", "qnn",
            "xnnpack", "vllm", "sglang", "llama.cpp", "transformers" or "torchao". None tries weights alone.
        floor: what is good enough, of the metric; without one, of the signal over the error of the output in dB. By
            default 99 % of the float model's metric, or 20 dB, an error of 1 % of the output's energy.
        metric: called as metric(model), larger is better. It should use none of the batches.
        presets: names of presets to try, in place of the target's.
        inputs, forward, mask: as for `calibrate`.
        work: a folder that keeps what was measured: the same call goes on from there, to the same answer.
        progress: whether to say before each trial what may follow; by default on a terminal and in a notebook.

    Raises:
        ConfigError: an unknown target or preset, a prepared model, a floor or a metric of the float model that is no
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
    kinds = find_engine(target).kinds if presets is None else _kinds_of(presets)
    if work is not None:
        check_path(work, "advise(model, batches, work='search')")
    folder = None if work is None else writable_folder(work)
    given = Batches(batches, "advise", inputs=inputs, forward=forward, mask=mask).kept()
    held = HeldBack(given.numbered, EVERY)
    made = given.part([*held])
    preparation = _preparation(model, made, inputs, forward, target)
    scorer = None if metric is None else named(metric)
    task = Task(model, made, given.part(held.held), scorer, preparation, mask, times=False)
    exact = _float_score(task)
    enough = float(floor) if floor is not None else FLOOR if exact is None else exact - _MAY_LOSE * abs(exact)
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # they speak of copies that are not kept
        search = _WaySearch(task, kinds, enough, progress, scorer, find_engine(target).files)
        if folder is not None:
            stack.enter_context(locked(folder, wait=False))
            measure = function_digest(metric), exact
            search.keep_in(folder, digest([run_of(model, given), measure, str(target), preparation.folds]))
        interrupted = search.run()
        code = Code(preparation, [*held.held] if len(given) > 1 else [], len(given), inputs, forward, mask)
        return search.advice(code, target, judged_by(held), interrupted)


def _kinds_of(presets: Sequence[str]) -> list[list[str]]:
    """Presets of the user's, in two kinds: with inputs of few bits, and without."""
    if isinstance(presets, str) or not isinstance(presets, Sequence) or not presets:
        raise ConfigError(f"presets takes a list of names, got {shown(presets)}; write presets=['int8', 'fp8']")
    names = list(dict.fromkeys(find_preset(name).name for name in presets))
    return [[name for name in names if quantizes_inputs(name) is has_inputs] for has_inputs in (True, False)]


def _preparation(
    model: nn.Module, made: KeptBatches, inputs: Inputs | None, forward: Forward | None, target: str | None
) -> Preparation:
    """What `prepare` gets for a target, with the first batch as the example."""
    if forward is not None:
        if places(target):
            raise ConfigError(
                f"the target {target} places quantizers by a run with an example, and forward= says how a model is "
                "called with a batch; give inputs= in its place"
            )
        return Preparation()
    first = next(iter(made))
    example = example_in(model, first) if inputs is None else first
    if not places(target):
        return Preparation(example, inputs)
    with evaluating(model):
        folds = bool(fusions_of(model, example_arguments(example, inputs)).fused)
    return Preparation(example, inputs, target, folds)


def _float_score(task: Task) -> float | None:
    """The metric of the float model; None without one."""
    found = task.score(task.model)
    if found is not None and not math.isfinite(found):
        raise ConfigError(f"metric(model) gives {found} for the float model; it must be a finite number")
    return found


class _WaySearch:
    """The trials of `advise`, and what they found.

    Args:
        task: makes and measures models.
        kinds: the names of presets, see `EngineFormats`.
        floor: of the score.
        progress: whether to say before each trial what may follow.
        metric: of the task, with its name.
        files: what the target reads, see `EngineFormats`.
    """

    def __init__(
        self,
        task: Task,
        kinds: Sequence[Sequence[str]],
        floor: float,
        progress: bool | None,
        metric: NamedMetric | None,
        files: str = "",
    ) -> None:
        self.task, self._progress, self._metric = task, progress, metric
        self._folder: Path | None = None
        self._known: Mapping[Way, Compared] = {}
        self.bytes: dict[str, int] = {}
        self.refused: dict[str, str] = {}
        """By preset, why the model cannot have it."""
        presets = [name for kind in kinds for name in kind]
        for name in presets:
            try:
                twin = task.prepared(name)
                for check in holders:
                    check(files, twin)
                self.bytes[name] = parameter_bytes(twin)[1]
            except (FakeQuantError, RuntimeError) as error:  # torch's own are RuntimeErrors, as of memory
                details = str(error).strip().splitlines()[1:2]  # of an error that lists parts, the first
                self.refused[name] = " ".join([first_line(error), *(line.strip() for line in details)])
        if not self.bytes:
            name, why = next(iter(self.refused.items()))
            raise ConfigError(f"the model can have none of {', '.join(presets)}; {name}: {why}")
        static = [name for name in self.bytes if has_static_inputs(name)]
        self.ladder = Ladder(sizes_of(self.bytes, kinds), static, floor, task.metric is not None)

    def keep_in(self, folder: Path, fingerprint: str) -> None:
        """Keep what is measured in a folder, and take from it what an earlier run measured."""
        self._folder, self._known = folder, kept_rows(folder / _ROWS, fingerprint)

    def run(self) -> bool:
        """Try what the ladder asks for; returns whether an interrupt ended it.

        Raises:
            KeyboardInterrupt: before the first result.
            ConfigError: every way failed.
        """
        rows = self.ladder.rows
        try:
            for way, follows in self.ladder.ways():
                if (row := self._known.get(way)) is None:
                    best = self.ladder.answer
                    so_far = (
                        "" if best is None else f"; best so far: {told(best, self.ladder.score(best), self._metric)}"
                    )
                    tell(f"trying {shown_way(way)}{so_far}; {follows}", self._progress)
                    row = self._measured(way)
                rows[way] = row
        except KeyboardInterrupt:
            if self.ladder.answer is None:
                raise
            return True
        if self.ladder.answer is None:
            way, row = next(iter(rows.items()))
            raise ConfigError(f"nothing could be measured; {shown_way(way)}: {row.failed}")
        return False

    def _measured(self, way: Way) -> Compared:
        own = None if self._folder is None or not way.steps else self._folder / f"improve-{'-'.join(way)}"
        try:
            row = self.task.measured(way, **({} if own is None else {"checkpoint": own}))
        except Exception as error:  # a user's metric, and torch, may raise anything
            row = Compared(*way, failed=first_line(error))
        if self._folder is not None:
            keep_row(self._folder / _ROWS, row)
            if own is not None:
                remove_finished(own)
        return row

    def advice(self, code: Code, target: str | None, judged: str, interrupted: bool) -> Advice:
        """The answer, with the code that makes it and its reason."""
        ladder, float_bytes = self.ladder, sum(p.numel() * p.element_size() for p in self.task.model.parameters())
        rows = {way: TriedWay(row, self.bytes[way.preset], ladder.score(row)) for way, row in ladder.rows.items()}
        best = ladder.answer
        assert best is not None, "an answer is there after the first result"
        failed = [TriedWay(Compared(*Way(name), failed=why), 0, -math.inf) for name, why in self.refused.items()]
        return Advice(
            [*rows.values(), *failed],
            rows[best.way],
            ladder.meets(best),
            ladder.floor,
            "dB" if self._metric is None else self._metric.name,
            reason(ladder, self._metric, target),
            code.of(best.way),
            target or "",
            speed(target),
            judged,
            [*quantizers(self.task.prepared(best.preset))],
            self.task.preparation.folds,
            float_bytes,
            interrupted,
            self._metric is not None and self._metric.negated,
        )
