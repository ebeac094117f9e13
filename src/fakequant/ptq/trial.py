"""Quantize copies of a model and judge them; make changes of a quantized model and judge the changes.

Batches that are held back (`HeldOut`) judge by the error of the model's output (`OutputDistance`) and by the user's
metric. `compare`, `search`, `verify`, `advise` and `next_step` run these trials.
"""

from __future__ import annotations

import copy
import json
import math
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fakequant.calibration import DEFAULT_METHOD
from fakequant.data.arguments import Metric
from fakequant.data.batches import Forward, HeldOut, Inputs, KeptBatches, Mask, example_arguments, example_in
from fakequant.errors import ConfigError, FakeQuantError, FusionWarning
from fakequant.files import output_errors, read_whole, write_whole
from fakequant.model.calibrate import calibrate, ranges_of
from fakequant.model.config import Config
from fakequant.model.engine import executed_by, find_engine, set_execution
from fakequant.model.prepare import prepare
from fakequant.model.presets import find_preset
from fakequant.model.run.outputs import OutputDistance, OutputErrors
from fakequant.model.state.plan import value_of
from fakequant.model.summary import parameter_bytes
from fakequant.model.training.fuse import fuse_batch_norm, fusions_of
from fakequant.model.weights import bits_of_all, disabled, evaluating, quantized_weights, score_of, weight_bits
from fakequant.nn import cached_weights
from fakequant.nn.quantizer import quantizers
from fakequant.ptq.improvement import improve
from fakequant.ptq.judging import ALIKE, CLEARLY, SURE_OF_PART, helps
from fakequant.restore import Restore, in_order, restore_after, state_of

METHODS = (DEFAULT_METHOD, "max", "percentile")
"""The methods of calibration that are tried; "entropy" was the worst of all for integers."""
_WORTH = 1.25
"""A change that lowers the error may enlarge the model by at most this factor, as models ought to be small."""


class Variant(NamedTuple):
    """A way to quantize a model: a preset, a method of calibration, and steps of `improve` ("": no steps)."""

    preset: str
    method: str = DEFAULT_METHOD
    steps: str = ""


@dataclass(frozen=True)
class Compared:
    """The figures of a way to quantize a model, measured on batches that did not calibrate or improve the model.

    Attributes:
        preset: the name of the preset.
        method: the method of calibration.
        steps: the steps of `improve`; "" without steps.
        error: the error of the output, as a share of the output's energy; for several outputs the mean share; NaN
            without float outputs.
        metric: the user's metric; None without a metric.
        bits: the bits per quantized weight, with scales.
        bytes: the bytes of the quantized weights.
        milliseconds: the time of one forward pass of the first batch, on integers where layers can
            (`set_execution(model, "auto")`); other layers simulate, which is slower than float.
        seconds: the time to prepare, calibrate and improve.
        failed: why there are no figures; "" if there are.
        worst: a text with the output that has the largest error, and this error; "" for a single output.
    """

    preset: str
    method: str
    steps: str
    error: float = float("inf")
    metric: float | None = None
    bits: float = 0.0
    bytes: float = 0.0
    milliseconds: float = 0.0
    seconds: float = 0.0
    failed: str = ""
    worst: str = ""

    def __str__(self) -> str:
        metric = "" if self.metric is None else f"metric {self.metric:.4g}, "
        found = (
            self.failed or f"{metric}error {self.shown_error}, {self.bits:.2f} bits per weight, {self.seconds:.1f} s"
        )
        return f"{' '.join(filter(None, self.way))}: {found}"

    __repr__ = __str__  # what notebooks and consoles show

    @property
    def shown_error(self) -> str:
        """The error as text; of several outputs the worst is named."""
        return "-" if math.isnan(self.error) else f"{self.error:.2e}" + (f" ({self.worst})" if self.worst else "")

    @property
    def way(self) -> Variant:
        """The preset, the method and the steps."""
        return Variant(self.preset, self.method, self.steps)


def read_rows(path: Path, lines: Iterable[str]) -> list[Compared]:
    """The rows of a file of `compare`; `lines` follow its header. Raises ConfigError for a damaged line."""
    rows = []
    for number, line in enumerate(lines, 2):
        try:
            rows.append(value_of(json.loads(line), "the row", Compared))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is damaged in line {number}: {error}; remove that line") from error
    return rows


def kept_rows(file: Path, fingerprint: str, *, negated: bool = False) -> dict[Variant, Compared]:
    """For each variant, its row in a file. A new file gets a header with `fingerprint` and `negated`.

    The last line may be cut off by a kill. Raises ConfigError if the file has another fingerprint or is damaged.
    """
    header = json.dumps({"fingerprint": fingerprint} | ({"negated": True} if negated else {}))
    with output_errors(file):
        lines = read_whole(file).decode("utf-8", "replace").splitlines(keepends=True) if file.exists() else []
        if not lines:
            file.write_text(header + "\n", encoding="utf-8")
            return {}
    if lines[0].strip() != header:
        raise ConfigError(
            f"{file} is no comparison, or was made with another model, other batches, metric=, inputs= or forward=; "
            "pass another path, or remove the file"
        )
    if not lines[-1].endswith("\n"):
        lines.pop()
        write_whole(file, "".join(lines).encode())
    return {row.way: row for row in read_rows(file, lines[1:])}


def keep_row(file: Path, row: Compared) -> None:
    """Append a row to a file that `kept_rows` has read."""
    with output_errors(file), open(file, "a", encoding="utf-8") as opened:
        opened.write(json.dumps(asdict(row)) + "\n")


class Preparation(NamedTuple):
    """The arguments of `prepare` besides the model and the preset.

    Attributes:
        inputs: which part of the example the model gets.
        target: the engine that runs the models; None if no engine is chosen.
        folds: whether batch normalisations are folded into the layers before them first.
    """

    example: Any = None
    inputs: Inputs | None = None
    target: str | None = None
    folds: bool = False

    @classmethod
    def of(
        cls, model: nn.Module, batches: KeptBatches, target: str | None, inputs: Inputs | None, forward: Forward | None
    ) -> Preparation:
        """A Preparation with the first batch as the example, or without an example if `forward` calls the model.

        Raises ConfigError for `forward` with an engine that places quantizers.
        """
        placed, example, folds = places(target), None, False
        if forward is not None and placed:
            raise ConfigError(
                f"the target {target} places quantizers by a run that calls the model itself, without forward=; "
                "pass inputs= in place of forward="
            )
        if forward is None:
            example = next(iter(batches))
            example = example_in(model, example) if inputs is None else example
        if placed:
            with evaluating(model):
                folds = bool(fusions_of(model, example_arguments(example, inputs)).fused)
        return cls(example, inputs, target, folds)

    def target_for(self, preset: str | Config) -> str | None:
        """The target for a preset; None if the engine places quantizers and the preset has no static inputs."""
        return self.target if not places(self.target) or has_static_inputs(preset) else None


def places(target: str | None) -> bool:
    """Whether the engine of a target places quantizers, and folds batch normalisations; False for None."""
    return target is not None and find_engine(target).placement is not None


def has_static_inputs(preset: str | Config) -> bool:
    """Whether a preset quantizes inputs with ranges from calibration."""
    rules = (find_preset(preset) if isinstance(preset, str) else preset).rules
    return any(rule.input is not None and not rule.input.dynamic for rule in rules)


def quantizes_inputs(preset: str) -> bool:
    """Whether a preset quantizes inputs."""
    return any(rule.input is not None for rule in find_preset(preset).rules)


LAYERS_ALONE = Preparation()
"""Without an example: layers get quantizers, and functions have none."""


class Trials:
    """Quantized copies of a float model, made by some batches and judged by others; with `times`, also timed."""

    def __init__(
        self,
        model: nn.Module,
        batches: HeldOut,
        metric: Metric | None = None,
        preparation: Preparation = LAYERS_ALONE,
        mask: Mask | None = None,
        *,
        times: bool = True,
    ) -> None:
        self.model, self.metric, self.preparation = model, metric, preparation
        self._made, self._judging, self._mask, self._times = batches.made, batches.judging, mask, times

    @cached_property
    def outputs(self) -> OutputDistance:
        """Measures outputs against those of the float model, on the batches that judge."""
        return OutputDistance(self.model, self._judging)

    def check(self) -> None:
        """Raise if the float model cannot be judged, see `OutputDistance.check`."""
        self.outputs.check(has_metric=self.metric is not None)

    def prepared(self, preset: str | Config) -> nn.Module:
        """A copy of the model with the quantizers of a preset, without ranges."""
        own, twin = self.preparation, copy.deepcopy(self.model).eval()
        if own.folds:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FusionWarning)  # the engine does not fold other norms, either
                twin = fuse_batch_norm(twin, own.example, inputs=own.inputs)
        config = find_preset(preset) if isinstance(preset, str) else preset
        target = own.target_for(config)
        prepare(twin, config, own.example, inputs=own.inputs, target=target)
        if own.target is not None and target is None:  # `prepare` has not asked it
            find_engine(own.target).refuse(twin, config.name)
        return twin

    def quantized(self, preset: str | Config, method: str = DEFAULT_METHOD, steps: str = "", **how: Any) -> nn.Module:
        """A copy of the model, prepared, calibrated and improved; `how` goes to `improve`."""
        twin = self.prepared(preset)
        given: dict[str, Any] = {"forward": self._made.run, "mask": self._mask, "progress": False}
        calibrate(twin, self._made, method, unseen="float", **given)
        if steps:
            improve(twin, self._made, steps, **given, **how)
        return twin.eval()

    def of(self, variant: Variant, **how: Any) -> Compared:
        """The figures of a variant; an error of this package becomes the reason in its row."""
        started = time.perf_counter()
        try:
            twin = self.quantized(*variant, **how)
            seconds = time.perf_counter() - started
            with executed_by(twin, self.preparation.target):
                distance = self.outputs.of(twin)
                error = distance.mean if self.outputs.has_outputs else math.nan
                found = self.score(twin)
        except FakeQuantError as reason:
            return Compared(*variant, failed=f"{type(reason).__name__}: {reason}")
        if found is not None and math.isnan(found):
            return Compared(*variant, failed="the metric is NaN")
        total = bits_of_all(filter(None, map(weight_bits, quantized_weights(twin).values())))
        size = (total.codes + total.scales) / 8
        speed = self.milliseconds(set_execution(twin, "auto")) if self._times else 0.0
        figures = (error, found, total.per_weight, size, speed, round(seconds, 2))
        return Compared(*variant, *figures, worst=distance.shown_worst)

    def score(self, model: nn.Module) -> float | None:
        """The user's metric of a model; None without a metric."""
        return None if self.metric is None else score_of(self.metric, model)

    def milliseconds(self, model: nn.Module) -> float:
        """The time of a forward pass of the first batch: the shortest of up to five, or of those that fit in 0.2 s."""
        times: list[float] = []
        with evaluating(model), cached_weights(model), torch.no_grad():
            self._judging.run_first(model)
            while len(times) < 5 and sum(times) < 0.2:
                started = time.perf_counter()
                self._judging.run_first(model)
                times.append(time.perf_counter() - started)
        return round(1e3 * min(times), 4)


class Aim(Enum):
    """The aim of a change: the criterion that judges it."""

    ERROR = "clearly less error, on more rows of the output than chance explains"
    SIZE = "clearly fewer bytes, and about the same error"
    ENGINE = "what the engine computes, and not clearly more error"

    def allows(self, error: float, size: float) -> bool:
        """Whether a change may reach its aim; `error` and `size` are multiples of the values before the change."""
        if self is Aim.SIZE:
            return error <= ALIKE and size <= CLEARLY
        return error < CLEARLY and size <= _WORTH if self is Aim.ERROR else error <= 1 / CLEARLY


class Change(NamedTuple):
    """A change of a model: a description, the code to paste, a function that makes it with some batches, the aim."""

    what: str
    code: str
    make: Callable[[KeptBatches], object]
    aim: Aim = Aim.ERROR


@dataclass(frozen=True)
class Tried:
    """The result of a change.

    Attributes:
        what, code: the description and the code of the change.
        after: the error of the output after the change, as a share of the output's energy.
        bytes: the bytes of all weights, quantized or not.
        metric: the user's metric, measured if the change lowers the error; None otherwise.
        failed: why there are no figures; "" if there are.
        helps: whether the change reaches its aim, and does not lower the metric.
        by_chance: whether the error falls perhaps by chance: not on other batches, or on too few rows of the output.
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
        error: the error of the output before each change, as a share of the output's energy; for several outputs the
            mean share. If changes were tried, static ranges come from the batches that make the changes.
        bytes: the bytes of all weights, quantized or not.
        judged: a part of a sentence that says on which batches the changes were judged.
        little: whether the error is small, so that no change was tried that lowers it.
        tried: the results of the changes, in their order.
        best: the index of the change to take; None if none helps, or none was needed.
        metric: the metric before each change; None without a metric.
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
    """The batches that make a change, the outputs that judge the change, and the errors before the change."""

    made: KeptBatches
    outputs: OutputDistance
    before: Restore
    errors: OutputErrors


class ChangeTrials:
    """Makes changes of a quantized model one after the other, measures each change, and undoes it.

    A change costs one run of the judging batches, besides its own work. A change that lowers the error is made again
    with the judging batches and judged by the others, as ranges may fit the largest values of some batches by chance.

    Args:
        model: a quantized model, which is restored after each change, also after an error or an interrupt.
        metric: called as metric(model), larger is better, for changes that help by the error of the output.

    Attributes:
        error: the error of the output before each change, as a share of the output's energy.
        bytes: the bytes of all weights before each change.
    """

    def __init__(
        self, model: nn.Module, batches: HeldOut, metric: Metric | None = None, score: float | None = None
    ) -> None:
        self._model, self._metric, self._is_apart = model, metric, bool(batches.held)
        self._made, self._judging = batches.made, batches.judging
        self._ranges: Callable[[KeptBatches], object] | None = None
        self._outputs = self._outputs_on(self._judging)
        self._restore = state_of([model])
        self._first: _Side | None = None
        self._second: _Side | None = None
        self.error, self.bytes, self.score = self._outputs.of(model).mean, parameter_bytes(model)[1], score

    @property
    def judges(self) -> bool:
        """Whether the model has an error to lower: integer outputs and NaN have no error."""
        return self._outputs.has_outputs and not any(bool(y.isnan().any()) for y in self._outputs.wanted)

    def take_ranges_by(self, ranges: Callable[[KeptBatches], object]) -> None:
        """Before each comparison, call `ranges` to calibrate the model in place, on the batches that make the change.

        Otherwise a change that calibrates again would be compared with ranges from other batches.
        """
        self._ranges, self._first, self._second = ranges, None, None

    def of(self, change: Change) -> Tried:
        """Make a change, measure it, and undo it."""
        what, code, model = change.what, change.code, self._model
        with warnings.catch_warnings(), restore_after(self._restore), evaluating(model):
            warnings.simplefilter("ignore")  # warnings about a model that is not kept
            try:
                if self._first is None:
                    self._first = self._side(self._made, self._outputs)
                    if self._ranges is not None:
                        self.error, self.score = self._first.errors.distance.mean, None
                side = self._first
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
            except (FakeQuantError, RuntimeError) as error:  # torch raises RuntimeError, as for memory
                return Tried(what, code, failed=f"{type(error).__name__}: {error}")
        if score is not None and self.score is not None:
            found = found and score >= self.score
        return Tried(what, code, after, size, score, helps=found, by_chance=by_chance)

    def _side(self, made: KeptBatches, outputs: OutputDistance) -> _Side:
        """Calibrate the model by `ranges` with the batches `made`, and measure its errors before a change."""
        self._restore()
        before = self._restore
        if self._ranges is not None:
            self._ranges(made)
            before = in_order(before, ranges_of(quantizers(self._model).values()))
        return _Side(made, outputs, before, outputs.errors_of(self._model))

    def _is_sure(self, change: Change, side: _Side, after: Tensor) -> bool:
        """Whether a change lowers the error of more rows than by chance, also if both sets of batches are swapped."""
        before = side.errors.rows
        if self._is_apart:
            if self._second is None:
                self._restore()
                self._second = self._side(self._judging, self._outputs_on(self._made))
            self._second.before()
            change.make(self._second.made)
            rows, again = self._second.errors.rows, self._second.outputs.errors_of(self._model).rows
            if float(again.sum()) > float(rows.sum()):
                return False
            one, other = float(before.sum()) or 1.0, float(rows.sum()) or 1.0  # so that both sides count as much
            before, after = torch.cat([before / one, rows / other]), torch.cat([after / one, again / other])
        return float(after.sum()) < CLEARLY * float(before.sum()) and helps(before, after, SURE_OF_PART)

    def _outputs_on(self, batches: KeptBatches) -> OutputDistance:
        with disabled(self._model):
            return OutputDistance(self._model, batches)

    def _measured(self) -> float | None:
        return None if self._metric is None else score_of(self._metric, self._model)
