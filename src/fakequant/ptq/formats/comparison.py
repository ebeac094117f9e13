"""The result of `compare`: a table and a curve of error and cost."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fakequant.calibration import DEFAULT_METHOD
from fakequant.errors import ConfigError
from fakequant.files import output_errors, read_whole, writable_file, write_whole
from fakequant.model.analysis.html import html_result
from fakequant.model.state.json_values import value_of
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
