"""Many ways to quantize a model, side by side: a table and a curve of error and cost."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from fakequant.calibration import DEFAULT_METHOD, find_method
from fakequant.data.arguments import Metric, check_float_model, check_metric, named
from fakequant.data.batches import Batches, Forward, HeldOut, Inputs, track
from fakequant.data.digest import digest, function_digest
from fakequant.errors import ConfigError, shown, warn_renamed
from fakequant.files import check_path, output_errors, writable_file
from fakequant.model.presets import find_preset
from fakequant.nn.wrappers import accepts_wrapped_model
from fakequant.ptq.collector import run_of
from fakequant.ptq.improvement import checked_steps
from fakequant.ptq.judging import EVERY
from fakequant.ptq.next_step import kinds_of
from fakequant.ptq.trial import (
    LAYERS_ALONE,
    Compared,
    Preparation,
    Trials,
    Variant,
    has_static_inputs,
    keep_row,
    kept_rows,
)
from fakequant.text import html_result, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HEADER = ["preset", "method", "steps", "metric", "error", "bits", "MB", "ms", "seconds"]


@dataclass
class Comparison:
    """The result of `compare`; prints as a table, the best first.

    Attributes:
        rows: the results, the best metric first, or without a metric the least error; failed rows come last.
        float_metric: the metric of the float model; None without a metric.
        float_milliseconds: the time of one forward pass of the first batch by the model in float.
        metric: the name of the metric.
        negated: whether the metric is shown negated, because smaller is better.
    """

    rows: list[Compared] = field(default_factory=list)
    float_metric: float | None = None
    float_milliseconds: float = 0.0
    metric: str = "metric"
    negated: bool = False

    @property
    def best(self) -> Compared:
        """The best row, which is the first.

        Raises:
            ConfigError: all rows failed, or there are no rows.
        """
        if not self.rows or self.rows[0].failed:
            raise ConfigError(f"no row has a result: {self.rows[0].failed if self.rows else 'nothing was tried'}")
        return self.rows[0]

    def curve(self, over: str = "bits") -> list[Compared]:
        """The Pareto-optimal rows of cost and quality, the smallest or the fastest first.

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
        """Draw the metric (the error if there is no metric) over bits per weight or over time, into an image file.

        A line joins the rows of `curve`.

        Args:
            path: the file.
            over: "bits" per weight or "milliseconds".

        Raises:
            ConfigError: `over` is unknown, or matplotlib is not installed or cannot write a file with this ending.
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
        """Draw the picture of `plot` on axes of matplotlib.

        Raises:
            ConfigError: `over` is unknown.
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
    """Check that `Comparison.plot` can write the file `path`, and create the file's folder."""
    check_axis(over)
    if find_spec("matplotlib") is None:
        raise ConfigError("a plot needs matplotlib, not installed here; run pip install 'fakequant[report]'")
    from matplotlib.backend_bases import FigureCanvasBase

    kind, known = Path(path).suffix.lower(), sorted(FigureCanvasBase.get_supported_filetypes())
    if kind.lstrip(".") not in known:
        raise ConfigError(
            f"matplotlib does not write {kind or 'a file without an ending'}: {path}; pass a name that ends in "
            f".{', .'.join(known)}"
        )
    return writable_file(path)


def check_axis(over: str) -> None:
    """Raise ConfigError unless `over` is "bits" or "milliseconds"."""
    if over not in _AXES:
        raise ConfigError(f"over must be one of {', '.join(map(repr, _AXES))}, got {over!r}")


def _cost(row: Compared) -> float:
    return row.error if row.metric is None else -row.metric


def best_first(row: Compared) -> tuple[bool, float]:
    """A sort key that puts the best row first, and failed rows last."""
    return bool(row.failed), _cost(row)


class Ways(NamedTuple):
    """What `compare` tries: every preset with every calibration method and every item of `steps`."""

    presets: Sequence[str] = ("INT8", "FP8", "INT4_GROUP32", "NVFP4", "MXFP4")
    methods: Sequence[str] = (DEFAULT_METHOD,)
    steps: Sequence[str | None] = (None, "fast")


USUAL_WAYS = Ways()
"""The presets, methods and steps that `compare` tries by default."""


def presets_for(target: str | None) -> Sequence[str]:
    """The presets that `compare` tries by default: those of the target; without a target, the usual presets.

    >>> presets_for("qnn")
    ['INT8_AFFINE']
    """
    return USUAL_WAYS.presets if target is None else [name for kind in kinds_of(target) for name in kind]


@accepts_wrapped_model
def compare(  # noqa: PLR0913  all but the first three by name
    model: nn.Module,
    batches: Iterable[Any],
    ways: Ways | Sequence[str] = USUAL_WAYS,
    *,
    metric: Metric | None = None,
    target: str | None = None,
    path: str | os.PathLike[str] | None = None,
    inputs: Inputs | None = None,
    forward: Forward | None = None,
    progress: bool | None = None,
    on_row: Callable[[Compared], object] | None = None,
    told: Callable[[Compared], object] | None = None,
) -> Comparison:
    """Quantize copies of a model in many ways, and measure the error and the cost of each.

    Args:
        model: the float model; it is not changed.
        batches: every second batch, up to eight, is held back to judge; the others calibrate and improve the copies of
            the model. A single batch does both.
        ways: names of presets, or `Ways(presets, methods, steps)`: presets without static inputs run with the first
            method alone; steps are those of `improve`, "best" or "fast", or None for a model without `improve`.
        metric: called as metric(model), larger is better; also for the float model.
        target: the engine that will run the model, by its name in `fakequant.known_engines()`: it places quantizers,
            its presets are the default of `ways`, and errors and metrics are those of its arithmetic, if it is known.
        path: a file of JSON lines; each row is appended when it is measured. Rows in the file for the same model,
            batches, `metric`, `target`, `inputs` and `forward` are not measured again. Functions, and attributes of the
            model, count as the same if the float model gives the same output for the first batch and the same metric.
        inputs, forward, progress: as for `calibrate`.
        on_row: called with each new row when it is measured.
        told: the old name of `on_row`, which the next release removes.

    Raises:
        ConfigError: an unknown preset, method, steps or target, a file of another model, batches or metric, or
            `forward` with a target that places quantizers, which needs an example.
        CalibrationError: no batches, or the float model gives NaN or fails on a batch (the batch and layer are named).
        OutputError: the file cannot be written; raised before the work.

    If a combination fails, its row has the reason, and the others run.

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
    if ways is USUAL_WAYS:
        ways = Ways(presets_for(target))
    ways = ways if isinstance(ways, Ways) else Ways([ways] if isinstance(ways, str) else ways)
    names = list(dict.fromkeys(find_preset(name).name for name in ways.presets))
    methods = [find_method(method) for method in ways.methods]
    for step in ways.steps:
        if not isinstance(step, str | None):
            raise ConfigError(f'steps of compare are "best", "fast" or None, got {shown(step)}')
        checked_steps(step or "fast")
    every = [Variant(name, method, step or "") for name, method, step in product(names, methods, ways.steps)]
    tried = [way for way in every if way.method == methods[0] or has_static_inputs(way.preset)]
    if path is not None:
        check_path(path, "compare(model, batches, path='rows.jsonl')")
        path = writable_file(path)
    given = Batches(batches, "compare", inputs=inputs, forward=forward, progress=progress).kept()
    held_out = HeldOut.of(given, EVERY)
    by = LAYERS_ALONE if target is None else Preparation.of(model, held_out.made, target, inputs, forward)
    trials = Trials(model, held_out, metric, by)
    trials.check()
    result = Comparison(float_metric=trials.score(model), float_milliseconds=trials.milliseconds(model))
    if metric is not None:
        result.metric, result.negated = named(metric).name, named(metric).negated
    known = {}
    if path is not None:
        measure = function_digest(metric), result.float_metric
        run = [run_of(model, given), measure, EVERY, *([] if target is None else [target])]
        known = kept_rows(path, digest(run), negated=result.negated)
    for way in track(tried, "comparing", len(tried), progress):
        row = known.get(way)
        if row is None:
            row = trials.of(way)
            if path is not None:
                keep_row(path, row)
            if on_row is not None:
                on_row(row)
        result.rows.append(row)
    result.rows.sort(key=best_first)
    return result
