"""The content of a report as plain values, without tensors or models."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from fakequant.errors import OutputError
from fakequant.export import VerifyReport
from fakequant.files import writable_file, write_whole
from fakequant.model.state.plan import UnexpectedValue, mapping_of, value_of
from fakequant.ptq.comparison import Comparison
from fakequant.ptq.judging import LayerResult
from fakequant.ptq.trial import NextStep


class Section(Enum):
    """The headings of sections; `ReportData.missing` has the reason for an empty section under its heading."""

    ACCURACY = "Accuracy"
    LAYERS = "Layers"
    RANGES = "Distributions and chosen ranges"
    IMPROVEMENT = "Weights chosen by their error"
    CURVE = "Metric over bits per weight"
    SIZES = "Sizes"
    LEFT = "Left in float"
    VERIFICATION = "Verification"
    ENVIRONMENT = "Environment"


@dataclass(frozen=True)
class Accuracy:
    """One measurement of a model.

    Args:
        format: the format of the model, for example "INT8".
        method: the calibrator, or another step such as fine-tuning.
        value: the metric; larger is better.
        note: a remark on this row.
        margin: half the width of the 95 % interval of the change from the first row; None if it is not known.
        negated: whether the value is shown negated, because smaller is better.
    """

    format: str
    method: str
    value: float
    note: str = ""
    margin: float | None = None
    negated: bool = False


def accuracy_cells(rows: Sequence[Accuracy]) -> list[tuple[str, str, str, str, str]]:
    """Format measurements as rows: format, method, value, change from the first row, note.

    >>> accuracy_cells([Accuracy("float32", "", 98.5), Accuracy("INT8", "mse", 98.0, margin=0.3)])[1]
    ('INT8', 'mse', '98.00', '-0.50 ± 0.30', '')
    """
    # Percentages get two decimals; shares from 0 to 1 and losses get four.
    decimals = 2 if any(abs(row.value) >= 10 for row in rows) else 4
    cells = []
    for index, row in enumerate(rows):
        sign = -1 if row.negated else 1
        moved = round(sign * (row.value - rows[0].value), decimals) or 0.0  # never "-0.00"
        change = (f"{moved:+.{decimals}f}" if moved else f"{0:.{decimals}f}") if index else ""
        if index and row.margin is not None:
            change += f" ± {row.margin:.{decimals}f}"
        cells.append((row.format, row.method, f"{sign * row.value:.{decimals}f}", change, row.note))
    return cells


class Checked(NamedTuple):
    """A compared quantizer or output: name, specification, numbers of elements and differing elements, other fault."""

    name: str
    spec: str
    elements: int
    differing: int
    fault: str


def verdict_of(checks: Sequence[VerifyReport]) -> str:
    """The verdict on all files: "exact", "not as deployed" or "not the model"."""
    if all(check.passed for check in checks):
        return "exact"
    return "not as deployed" if all(check.exact for check in checks) else "not the model"


def checked_in(check: VerifyReport) -> list[Checked]:
    """A row for each quantizer or output that a verification compared, or could not compare."""
    rows = [Checked(row.quantizer, row.spec, row.elements, row.differing, row.note) for row in check.rows]
    rows += [Checked(name, "", 0, 0, "belongs to no quantizer of the file") for name in check.uncovered]
    rows += [Checked(name, "", 0, 0, "is an input that the file does not read") for name in check.ignored]
    return rows + [Checked(span.name, "", span.elements, 0, str(span)) for span in check.spans if not span.fits]


@dataclass(frozen=True)
class Layer:
    """One quantized layer, or one function with quantizers.

    Args:
        name: its path in the model.
        type: the class of the layer, or the function.
        input: how its inputs are quantized; "" for float.
        weight: how its weights are quantized; "" for float or no weight.
        alone: the signal-to-noise ratio in dB of the model's output with only this layer quantized; None if it was not
            measured.
        input_sqnr: the signal-to-noise ratio in dB of the quantized inputs; the worst if there are several.
        weight_sqnr: the signal-to-noise ratio in dB of the quantized weights.
        elements: the number of quantized weights.
        bytes: the bytes of the codes and scales.
        float_bytes: the bytes of the same weights in float.
    """

    name: str
    type: str
    input: str = ""
    weight: str = ""
    alone: float | None = None
    input_sqnr: float | None = None
    weight_sqnr: float | None = None
    elements: int = 0
    bytes: int = 0
    float_bytes: int = 0

    @property
    def worst(self) -> float:
        """The measure that layers are compared by: `alone`, else the lower of the other ratios; inf without any."""
        if self.alone is not None:
            return self.alone
        return min((v for v in (self.input_sqnr, self.weight_sqnr) if v is not None), default=math.inf)


@dataclass(frozen=True)
class Clip:
    """The cost of a range for the values of a tensor.

    Args:
        share: the share of the values that lie outside of the range.
        sqnr: the signal over the noise by clipping and rounding, in dB.
    """

    share: float
    sqnr: float


@dataclass(frozen=True)
class Distribution:
    """The values of one tensor and the ranges that were chosen for it.

    Args:
        name: the layer and its tensor, such as "head, input".
        edges: the edges of the bins [bins + 1], ascending, in units of the tensor.
        counts: the number of values in each bin [bins].
        ranges: the lowest and highest value of the chosen range, by calibrator.
        groups: the number of groups (channels, blocks). Counts are sums over all groups; a range is the widest group's.
        clips: the cost of each range, by calibrator, if it is known.
        whole: the signal-to-noise ratio in dB if the range held all values; None if it is not known.
    """

    name: str
    edges: Sequence[float]
    counts: Sequence[int]
    ranges: Mapping[str, tuple[float, float]]
    groups: int = 1
    clips: Mapping[str, Clip] = field(default_factory=dict)
    whole: float | None = None


@dataclass(frozen=True)
class Channels:
    """The smallest and the largest weight of every output channel; if there are many channels, neighbours are joined.

    Args:
        name: the layer.
        lowest, highest: the values for each channel, or for each few neighbours.
        channels: the number of channels.
        spread: the largest magnitude of a channel over the median magnitude of all channels.
    """

    name: str
    lowest: Sequence[float]
    highest: Sequence[float]
    channels: int
    spread: float


@dataclass(frozen=True)
class Size:
    """The size of a file or folder in bytes, and its size with float32 weights if known."""

    name: str
    bytes: int
    float_bytes: int | None = None


@dataclass(frozen=True)
class ReportData:
    """The content of a report. An empty section prints that it is missing, with the reason from `missing`.

    Args:
        title: the heading.
        summary: sentences below the heading: the model, the data and the steps.
        metric: the name of the metric in `accuracy`, for example "accuracy on held-out digits, %".
        accuracy: measurements; the first is the float model, the baseline of the others.
        reported: the index in `accuracy` of the model that the report is about; the last by default.
        layers: the quantized layers in the order in which they run.
        alone_on: the examples on which layers are measured alone, as a sentence.
        distributions: the histograms of inputs.
        channels: the weights of layers by channel.
        improvement: the results of choosing weights by their error, by layer.
        curve: a comparison of forms of the model, or None.
        sizes: the sizes of files and weights.
        unquantized: operations that compute in float, by model; an empty list means none.
        verifications: the comparisons of the exported models, each under the name of its file.
        environment: versions and machine.
        advice: the changes that were tried on the model; None if none were tried.
        next: what to do next, in one sentence.
        code: the lines of code for the next step.
        unfinished: the step that a running or interrupted job has reached; "" for a complete report.
        missing: the reason for each empty section, by its heading.
        source: the recipe of a job, as an absolute path.
    """

    title: str
    summary: Sequence[str] = ()
    metric: str = "accuracy"
    accuracy: Sequence[Accuracy] = ()
    reported: int = -1
    layers: Sequence[Layer] = ()
    alone_on: str = ""
    distributions: Sequence[Distribution] = ()
    channels: Sequence[Channels] = ()
    improvement: Sequence[LayerResult] = ()
    curve: Comparison | None = None
    sizes: Sequence[Size] = ()
    unquantized: Mapping[str, Sequence[str]] = field(default_factory=dict)
    verifications: Sequence[VerifyReport] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    advice: NextStep | None = None
    next: str = ""
    code: str = ""
    unfinished: str = ""
    missing: Mapping[Section, str] = field(default_factory=dict)
    source: str = ""

    @property
    def lost(self) -> float:
        """The share of the float model's metric that the reported model lost; 0.0 if it is not measured."""
        if len(self.accuracy) < 2 or not self.accuracy[0].value:
            return 0.0
        first = self.accuracy[0].value
        return (first - self.accuracy[self.reported].value) / abs(first)


RESULTS = "results.json"
"""The name of the file with the report's content in the folder of a job."""
_FORM = 2
DECIBELS = "signal over noise of the output, dB"


def to_json(data: ReportData) -> str:
    """The content of a report as JSON; infinite numbers are the texts "inf" and "-inf", because JSON has none.

    >>> from_json(to_json(ReportData("A model", environment={"torch": "2.13"}))).environment
    {'torch': '2.13'}
    """
    return json.dumps({"fakequant_report": _FORM, **_plain(asdict(data))}, indent=1)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name.name if isinstance(name, Enum) else name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@dataclass
class _Read(VerifyReport):
    """A verification of an export or a delivery, read from a file; `verdict`: as the first file format stored it."""

    far: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    verdict: bool | None = None

    @property
    def as_deployed(self) -> bool | None:
        """The same as in `VerifyReport`."""
        return super().as_deployed if self.verdict is None else self.verdict

    @property
    def passed(self) -> bool:
        """The same as in `DeliveryReport`."""
        return super().passed and not self.far and not self.failed


@dataclass(frozen=True)
class _ReadData(ReportData):
    verifications: Sequence[_Read] = ()


def from_json(text: str) -> ReportData:
    """The content that `to_json` of this or an earlier release wrote.

    Raises:
        ValueError, RecursionError: `to_json` did not write the text.
    """
    values = mapping_of(json.loads(text), "the file", lambda item, place: item)
    form = values.pop("fakequant_report", None)
    if form not in (1, _FORM):
        raise UnexpectedValue("fakequant_report is of another version")
    if form != _FORM:
        try:
            rows, metric = values.get("curve") or [], values.pop("curve_metric", "")
            for row in rows:
                row |= {"preset": row.pop("label"), "method": "", "steps": ""}
                if metric == DECIBELS and not row["failed"]:
                    row |= {"error": 10 ** (-float(row["metric"]) / 10), "metric": None}
            negated = [row.pop("negated", False) for row in rows]
            values["curve"] = {"rows": rows, "negated": any(negated)} if rows else None
            for one in values.get("verifications") or []:
                nodes, deployed = one.pop("nodes"), one.pop("as_deployed", None)
                one["rows"] = [
                    {
                        "quantizer": node["name"],
                        "spec": node["spec"],
                        "kind": "",
                        "elements": node["elements"],
                        "differing": node["differing"],
                        "intact": not node.get("fault"),
                    }
                    for node in nodes
                ]
                faults = [f"{node['name']}: {node['fault']}" for node in nodes if node.get("fault")]
                one |= {"path": one.pop("title"), "inputs": "", "not_run": [*one.pop("notes", ()), *faults]}
                one |= {"verdict": deployed, "style": "portable" if deployed is not None else "standard"}
        except (KeyError, TypeError, AttributeError) as error:
            raise UnexpectedValue(f"curve or verifications lack {error}") from error
    found: ReportData = value_of(values, "the file", _ReadData)
    if found.accuracy and not -len(found.accuracy) <= found.reported < len(found.accuracy):
        raise UnexpectedValue(f"`reported` is {found.reported}, but `accuracy` has {len(found.accuracy)} rows")
    for row in found.distributions:
        rises = all(map(math.isfinite, row.edges)) and len(row.edges) > 1 and row.edges[0] < row.edges[-1]
        if len(row.edges) != len(row.counts) + 1 or not rises or min(row.counts, default=-1) < 0:
            raise UnexpectedValue(f"{row.name!r:.80} has edges and counts that are not a histogram")
    for row in found.channels:
        if len(row.lowest) != len(row.highest) or not all(map(math.isfinite, (*row.lowest, *row.highest))):
            raise UnexpectedValue(f"{row.name!r:.80} needs a finite lowest and highest value for each channel")
    return found


def write_results(path: Path, data: ReportData) -> None:
    """Write the content as JSON.

    Raises:
        OutputError: the file cannot be written.
    """
    write_whole(writable_file(path), to_json(data).encode("utf-8", "backslashreplace"))


def read_results(path: Path) -> ReportData:
    """Read the content of a report from its JSON file, from a page beside such a file, or from the folder of a job.

    Raises:
        OutputError: there is no such file, or it is damaged.
    """
    file = path / RESULTS if path.is_dir() else path.with_suffix(".json")
    if not file.is_file():
        raise OutputError(
            f"there is no {file}; give the folder of `fakequant quantize`, or the page that fakequant.report wrote"
        )
    try:
        return from_json(file.read_text())
    except OSError as error:
        raise OutputError(f"cannot read {file}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise OutputError(
            f"{file} holds no results of a report: {error}; write it again by `fakequant quantize`"
        ) from error
