"""The result of `compare`: a table and a curve of error and cost."""

from __future__ import annotations

import copy
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from fakequant.calibration import DEFAULT_METHOD, find_method
from fakequant.data.arguments import Metric, check_float_model, check_metric, named
from fakequant.data.batches import Batches, Forward, Inputs, KeptBatches, Mask
from fakequant.data.digest import digest, function_digest
from fakequant.data.progress import track
from fakequant.errors import ConfigError, FakeQuantError, FusionWarning, shown, warn_renamed
from fakequant.files import check_path, output_errors, read_whole, writable_file, write_whole
from fakequant.model.analysis.summary import html_result
from fakequant.model.calibration.calibrate import calibrate
from fakequant.model.execution import set_execution
from fakequant.model.prepare import prepare
from fakequant.model.presets import find_preset
from fakequant.model.run.outputs import OutputDistance
from fakequant.model.sizes import bits_of_all, weight_bits
from fakequant.model.state.plan import value_of
from fakequant.model.training.fuse import fuse_batch_norm
from fakequant.model.weights import evaluating, quantized_weights, score_of
from fakequant.nn import cached_weights
from fakequant.nn.wrappers import accepts_wrapped_model
from fakequant.ptq.collector import run_of
from fakequant.ptq.improvement import checked_steps, improve
from fakequant.text import table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HEADER = ["preset", "method", "steps", "metric", "error", "bits", "MB", "ms", "seconds"]


class Way(NamedTuple):
    """One way to quantize a model: a preset, a method of calibration, and steps of `improve`, "" for none."""

    preset: str
    method: str = DEFAULT_METHOD
    steps: str = ""


@dataclass(frozen=True)
class Compared:
    """One way to quantize a model.

    Attributes:
        preset: the name of the preset.
        method: of calibration.
        steps: of `improve`; "" for none.
        error: of the model's output, as a share of its energy; the mean of several outputs; NaN if none are floats.
        metric: what `metric` gives; None without one.
        bits: per quantized weight, with scales.
        bytes: of the quantized weights.
        milliseconds: of one forward pass of the first batch, with integers where layers can compute in them
            (`set_execution(model, "auto")`); other layers simulate, which is slower than float.
        seconds: to prepare, calibrate and improve.
        failed: why there are no figures; "" where there are.
        worst: of several outputs the one with the largest error, and this error.
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
        """The error as text, with the worst of several outputs."""
        return "-" if math.isnan(self.error) else f"{self.error:.2e}" + (f" ({self.worst})" if self.worst else "")

    @property
    def way(self) -> Way:
        """The preset, the method and the steps."""
        return Way(self.preset, self.method, self.steps)


def read_rows(path: Path, lines: Iterable[str]) -> list[Compared]:
    """The rows in a file of `compare`; lines start after the header.

    Raises:
        ConfigError: a line is damaged; the message has its number and the reason.
    """
    rows = []
    for number, line in enumerate(lines, 2):
        try:
            rows.append(value_of(json.loads(line), "the row", Compared))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is damaged in line {number}: {error}; remove it") from error
    return rows


def kept_rows(file: Path, fingerprint: str, *, negated: bool = False) -> dict[Way, Compared]:
    """The rows of a file, by way; a new file gets the fingerprint, and whether metrics are shown with the other sign.

    The last line may be cut off by a kill.

    Raises:
        ConfigError: the file has another fingerprint, or is damaged.
    """
    header = json.dumps({"fingerprint": fingerprint} | ({"negated": True} if negated else {}))
    with output_errors(file):
        lines = read_whole(file).decode("utf-8", "replace").splitlines(keepends=True) if file.exists() else []
        if not lines:
            file.write_text(header + "\n", encoding="utf-8")
            return {}
    if lines[0].strip() != header:
        raise ConfigError(
            f"{file} is no comparison of this model and these batches with this metric=, inputs= and forward=; give "
            "another path, or remove it"
        )
    if not lines[-1].endswith("\n"):
        lines.pop()
        write_whole(file, "".join(lines).encode())
    return {row.way: row for row in read_rows(file, lines[1:])}


def keep_row(file: Path, row: Compared) -> None:
    """Append a row to a file that `kept_rows` has read."""
    with output_errors(file), open(file, "a", encoding="utf-8") as opened:
        opened.write(json.dumps(asdict(row)) + "\n")


@dataclass
class Comparison:
    """The result of `compare`; prints as a table, the best first.

    Attributes:
        rows: the largest metric first, without one the smallest error; then those that failed.
        float_metric: the metric of the model in float; None without one.
        float_milliseconds: of one forward pass of the first batch by the model in float.
        metric: what it is called.
        negated: whether it is shown with the other sign, as a figure of which smaller is better.
    """

    rows: list[Compared] = field(default_factory=list)
    float_metric: float | None = None
    float_milliseconds: float = 0.0
    metric: str = "metric"
    negated: bool = False

    @property
    def best(self) -> Compared:
        """The first row.

        Raises:
            ConfigError: every way failed.
        """
        if not self.rows or self.rows[0].failed:
            raise ConfigError(f"no way succeeded: {self.rows[0].failed if self.rows else 'none was tried'}")
        return self.rows[0]

    def curve(self, over: str = "bits") -> list[Compared]:
        """The rows that none surpasses: the best of all that are as small, or as fast, from the smallest on.

        Args:
            over: "bits" per weight or "milliseconds".
        """
        check_axis(over)
        kept: list[Compared] = []
        for row in sorted(self.rows, key=lambda row: (getattr(row, over), _cost(row))):
            if not row.failed and (not kept or _cost(row) < _cost(kept[-1])):
                kept.append(row)
        return kept

    def _cells(self) -> list[list[str]]:
        cells = []
        for row in self.rows:
            metric = "-"
            if row.metric is not None:
                moved = row.metric - (self.float_metric or 0.0)
                metric = f"{self._shown(row.metric):.4g} ({self._shown(moved):+.3g})"
            size = [f"{row.bits:.2f}", f"{row.bytes / 1e6:.2f}", f"{row.milliseconds:.3g}"]
            figures = [metric, row.shown_error, *size, f"{row.seconds:.1f}"]
            cells.append([row.preset, row.method, row.steps or "-", *([row.failed] if row.failed else figures)])
        return cells

    def _shown(self, value: float) -> float:
        return -value if self.negated else value

    def _height(self, row: Compared) -> float:
        return row.error if row.metric is None else self._shown(row.metric)

    @property
    def _header(self) -> list[str]:
        return [self.metric if name == "metric" else name for name in _HEADER]

    def __str__(self) -> str:
        return table([self._header, *self._cells()])

    __repr__ = __str__  # what notebooks and consoles show

    def _repr_html_(self) -> str:
        rows = [row + [""] * (len(_HEADER) - len(row)) for row in self._cells()]
        return html_result(self._header, rows, numbers=range(3, len(_HEADER)))

    def plot(self, path: str | os.PathLike[str], over: str = "bits") -> Path:
        """Draw the metric, without one the error, over bits per weight or over time, into an image file.

        A line joins the rows of `curve`.

        Args:
            path: of the file.
            over: "bits" per weight or "milliseconds".

        Raises:
            ConfigError: another `over`, a kind of file that matplotlib does not write, or matplotlib is missing.
            OutputError: the file cannot be written.
        """
        path = checked_picture(path, over)
        from matplotlib.figure import Figure  # without pyplot, whose backend a notebook has chosen

        figure = Figure(figsize=(8, 5))
        self.draw(figure.subplots(), over)
        with output_errors(path):
            figure.savefig(path, bbox_inches="tight")
        return path

    def draw(self, axes: Axes, over: str = "bits") -> None:
        """Draw what `plot` writes on axes of matplotlib.

        Raises:
            ConfigError: another `over`.
        """
        check_axis(over)
        shown = [row for row in self.rows if not row.failed]
        axes.scatter([getattr(row, over) for row in shown], [self._height(row) for row in shown])
        for row in shown:
            text, place = " ".join(filter(None, row.way)), (getattr(row, over), self._height(row))
            axes.annotate(text, place, (5, 0), textcoords="offset points", va="center", fontsize=7)
        axes.margins(x=0.2)  # for the texts on the right
        curve = self.curve(over)
        axes.plot([getattr(row, over) for row in curve], [self._height(row) for row in curve])
        if self.float_metric is None:
            axes.set_yscale("log")
        else:
            axes.axhline(self._shown(self.float_metric), linestyle="--", label="float")
            axes.legend()
        axes.set_xlabel(_AXES[over])
        axes.set_ylabel(self.metric if self.float_metric is not None else "error of the output")


_AXES = {"bits": "bits per weight, with scales", "milliseconds": "milliseconds of a forward pass"}


def checked_picture(path: str | os.PathLike[str], over: str) -> Path:
    """Check that `Comparison.plot` can draw a file, and create its folder.

    Raises:
        ConfigError: another `over`, a file of a kind that matplotlib does not write, or matplotlib is not installed.
        OutputError: the file cannot be written.
    """
    check_axis(over)
    if find_spec("matplotlib") is None:
        raise ConfigError("a plot needs matplotlib, not installed here; run pip install 'fakequant[report]'")
    from matplotlib.backend_bases import FigureCanvasBase

    kind, known = Path(path).suffix.lower(), sorted(FigureCanvasBase.get_supported_filetypes())
    if kind.lstrip(".") not in known:
        raise ConfigError(
            f"matplotlib does not write {kind or 'a file without an ending'}: {path}; give a name that ends in "
            f".{', .'.join(known)}"
        )
    return writable_file(path)


def check_axis(over: str) -> None:
    """Raise if `over` is none of "bits" and "milliseconds"."""
    if over not in _AXES:
        raise ConfigError(f"over must be one of {', '.join(map(repr, _AXES))}, got {over!r}")


def _cost(row: Compared) -> float:
    return row.error if row.metric is None else -row.metric


def best_first(row: Compared) -> tuple[bool, float]:
    """A key for sorting; rows that failed come last."""
    return bool(row.failed), _cost(row)


class Preparation(NamedTuple):
    """What `prepare` gets besides the preset.

    Attributes:
        example: one input of the model; None for none.
        inputs: which part of the example the model gets.
        target: the engine that places quantizers where inputs get ranges by calibration.
        folds: whether batch normalisations go into the layers before them first.
    """

    example: Any = None
    inputs: Inputs | None = None
    target: str | None = None
    folds: bool = False


def has_static_inputs(preset: str) -> bool:
    """Whether a preset gives inputs ranges that calibration finds."""
    return any(rule.input is not None and not rule.input.dynamic for rule in find_preset(preset).rules)


def quantizes_inputs(preset: str) -> bool:
    """Whether a preset quantizes inputs."""
    return any(rule.input is not None for rule in find_preset(preset).rules)


LAYERS_ALONE = Preparation()
"""Without an example: layers get quantizers, and functions have none."""


class Task:
    """A float model, the batches that make its quantized copies, and those that measure them.

    Args:
        model: in float; it stays as it is.
        batches: to calibrate and improve on.
        judged: to measure on.
        metric: called as metric(model); None for none.
        preparation: of each copy.
        mask: which tokens count.
        times: whether a forward pass is timed, too.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: KeptBatches,
        judged: KeptBatches,
        metric: Metric | None = None,
        preparation: Preparation = LAYERS_ALONE,
        mask: Mask | None = None,
        *,
        times: bool = True,
    ) -> None:
        self.model, self.batches, self.judged, self.metric = model, batches, judged, metric
        self.preparation, self._mask, self._times = preparation, mask, times
        self.outputs = OutputDistance(model, judged)
        self.outputs.check(has_metric=metric is not None)

    def prepared(self, preset: str) -> nn.Module:
        """A copy of the model with the quantizers of a preset, without ranges."""
        own = self.preparation
        twin = copy.deepcopy(self.model).eval()
        if own.folds:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FusionWarning)  # the engine keeps the others, too
                twin = fuse_batch_norm(twin, own.example, inputs=own.inputs)
        target = own.target if has_static_inputs(preset) else None
        return prepare(twin, find_preset(preset), own.example, inputs=own.inputs, target=target)

    def quantized(self, way: Way, **how: Any) -> nn.Module:
        """A copy of the model, quantized; `how` goes to `improve`."""
        twin = self.prepared(way.preset)
        given: dict[str, Any] = {"forward": self.batches.run, "mask": self._mask, "progress": False}
        calibrate(twin, self.batches, way.method, unseen="float", **given)
        if way.steps:
            improve(twin, self.batches, way.steps, **given, **how)
        return twin

    def measured(self, way: Way, **how: Any) -> Compared:
        """Measure one way; an error of this package becomes the reason in its row."""
        started = time.perf_counter()
        try:
            twin = self.quantized(way, **how)
            seconds = time.perf_counter() - started
            distance = self.outputs.of(twin)
            error = distance.mean if self.outputs.has_outputs else math.nan
            found = self.score(twin)
        except FakeQuantError as reason:
            return Compared(*way, failed=f"{type(reason).__name__}: {reason}")
        if found is not None and math.isnan(found):
            return Compared(*way, failed="the metric is NaN")
        total = bits_of_all(filter(None, map(weight_bits, quantized_weights(twin).values())))
        size = (total.codes + total.scales) / 8
        speed = self.milliseconds(set_execution(twin, "auto")) if self._times else 0.0
        figures = (error, found, total.per_weight, size, speed, round(seconds, 2))
        return Compared(*way, *figures, worst=distance.shown_worst)

    def score(self, model: nn.Module) -> float | None:
        """The metric of a model; None without one."""
        return None if self.metric is None else score_of(self.metric, model)

    def milliseconds(self, model: nn.Module) -> float:
        """The time of a forward pass of the first batch: the shortest of up to five, or of those that fit in 0.2 s."""
        times: list[float] = []
        with evaluating(model), cached_weights(model), torch.no_grad():
            self.judged.run_first(model)
            while len(times) < 5 and sum(times) < 0.2:
                started = time.perf_counter()
                self.judged.run_first(model)
                times.append(time.perf_counter() - started)
        return round(1e3 * min(times), 4)


class Ways(NamedTuple):
    """The combinations for `compare`: every preset with every calibration method and every choice of steps."""

    presets: Sequence[str] = ("INT8", "FP8", "INT4_GROUP32", "NVFP4", "MXFP4")
    methods: Sequence[str] = (DEFAULT_METHOD,)
    steps: Sequence[str | None] = (None, "fast")


USUAL_WAYS = Ways()
"""What `compare` tries if nothing is said."""


@accepts_wrapped_model
def compare(  # noqa: PLR0913  all but the first three by name
    model: nn.Module,
    batches: Iterable[Any],
    ways: Ways | Sequence[str] = USUAL_WAYS,
    *,
    metric: Metric | None = None,
    path: str | os.PathLike[str] | None = None,
    inputs: Inputs | None = None,
    forward: Forward | None = None,
    on_row: Callable[[Compared], object] | None = None,
    told: Callable[[Compared], object] | None = None,
) -> Comparison:
    """Quantize copies of a model in many ways, and measure the error and the cost of each.

    Args:
        model: in float; it stays as it is.
        batches: to calibrate, improve and measure the error of the output on.
        ways: names of presets, or `Ways(presets, methods, steps)`: presets without static inputs run with the first
            method alone; steps are those of `improve`, "best" or "fast", None for none.
        metric: called as metric(model), larger is better; also for the float model.
        path: a file of JSON lines; each row is appended when it is measured. Rows in the file for the same model,
            batches, `metric`, `inputs` and `forward` are not measured again. Functions, and attributes of the model,
            count as the same if the float model gives the same output for the first batch and the same metric.
        inputs, forward: as for `calibrate`.
        on_row: called with each new row when it is measured.
        told: the old name of `on_row`, which goes with the next release.

    Raises:
        ConfigError: an unknown preset, method or steps, or a file of another model, batches or metric.
        CalibrationError: no batches, or the model in float gives NaN for one or fails on it (names it, and the layer).
        OutputError: the file cannot be written; raised before the work.

    If one way fails, its row has the reason, and the others run.

    >>> torch.manual_seed(0).initial_seed()
    0
    >>> model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    >>> found = compare(model, [torch.randn(16, 32) for _ in range(4)], Ways(["INT8", "INT4_GROUP32"], steps=[None]))
    >>> [row.preset for row in found.rows]
    ['INT8', 'INT4_GROUP32']
    """
    check_float_model(model, "compare", "compare(model, batches)", "compare presets on")
    check_metric(metric, "compare")
    if told is not None:
        warn_renamed("told= of compare", "on_row=")
        on_row = told
    tried = _combined(ways if isinstance(ways, Ways) else Ways([ways] if isinstance(ways, str) else ways))
    if path is not None:
        check_path(path, "compare(model, batches, path='rows.jsonl')")
        path = writable_file(path)
    given = Batches(batches, "compare", inputs=inputs, forward=forward).kept()
    task = Task(model, given, given, metric)
    result = Comparison(float_metric=task.score(model), float_milliseconds=task.milliseconds(model))
    if metric is not None:
        result.metric, result.negated = named(metric).name, named(metric).negated
    known = {}
    if path is not None:
        measure = function_digest(metric), result.float_metric
        known = kept_rows(path, digest([run_of(model, given), measure]), negated=result.negated)
    for way in track(tried, "comparing", len(tried)):
        row = known.get(way)
        if row is None:
            row = task.measured(way)
            if path is not None:
                keep_row(path, row)
            if on_row is not None:
                on_row(row)
        result.rows.append(row)
    result.rows.sort(key=best_first)
    return result


def _combined(ways: Ways) -> list[Way]:
    names = list(dict.fromkeys(find_preset(name).name for name in ways.presets))
    methods = [find_method(method) for method in ways.methods]
    for step in ways.steps:
        if not isinstance(step, str | None):
            raise ConfigError(f'steps of compare are "best", "fast" or None, got {shown(step)}')
        checked_steps(step or "fast")
    ways = Ways(names, methods, ways.steps)
    found = [Way(name, method, step or "") for name, method, step in product(*ways)]
    return [way for way in found if way.method == ways.methods[0] or has_static_inputs(way.preset)]
