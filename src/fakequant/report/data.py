"""The content of a report as plain values, without tensors or models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum


class Section(Enum):
    """The sections of a report, in order; the value is the heading."""

    ACCURACY = "Accuracy"
    SQNR = "Signal-to-noise ratio by layer"
    RANGES = "Distributions and chosen ranges"
    SIZES = "Sizes"
    LEFT = "Left in float"
    VERIFICATION = "Verification"
    GRAPH = "Graph"
    ENVIRONMENT = "Environment"


@dataclass(frozen=True)
class Accuracy:
    """One measurement of a model.

    Args:
        format: the format of the model, for example "INT8".
        method: the calibrator, or another step such as fine-tuning.
        value: the metric; larger is better.
        note: a remark on this row.
    """

    format: str
    method: str
    value: float
    note: str = ""


def accuracy_cells(rows: Sequence[Accuracy]) -> list[tuple[str, str, str, str, str]]:
    """Format measurements as rows: format, method, value, change from the first row, note.

    >>> accuracy_cells([Accuracy("float32", "", 98.5), Accuracy("INT8", "mse", 98.0)])[1]
    ('INT8', 'mse', '98.00', '-0.50', '')
    """
    # Percentages get two decimals; shares from 0 to 1 and losses get four.
    decimals = 2 if any(abs(row.value) >= 10 for row in rows) else 4
    cells = []
    for index, row in enumerate(rows):
        change = f"{row.value - rows[0].value:+.{decimals}f}" if index else ""
        cells.append((row.format, row.method, f"{row.value:.{decimals}f}", change, row.note))
    return cells


@dataclass(frozen=True)
class Distribution:
    """The values of one tensor and the ranges that calibrators chose for it.

    Args:
        name: the quantizer.
        edges: the edges of the bins [bins + 1], ascending, in units of the tensor.
        counts: the number of values in each bin [bins].
        ranges: lowest and highest value of the chosen range, by calibrator.
        groups: the number of groups (channels, blocks). The counts are the sum of all groups, a range is the widest.
    """

    name: str
    edges: Sequence[float]
    counts: Sequence[int]
    ranges: Mapping[str, tuple[float, float]]
    groups: int = 1


@dataclass(frozen=True)
class Size:
    """The size of a file or folder in bytes, and its size with float32 weights if known."""

    name: str
    bytes: int
    float_bytes: int | None = None


@dataclass(frozen=True)
class NodeCheck:
    """One quantizer of an exported model, compared bit for bit.

    Args:
        name: its path.
        spec: its specification.
        elements: the number of compared elements.
        differing: the number of elements that differ.
        fault: another fault, or "".
    """

    name: str
    spec: str
    elements: int
    differing: int
    fault: str = ""


@dataclass(frozen=True)
class Verification:
    """The comparison of an exported file with its model.

    Args:
        title: the name of the model.
        nodes: its quantizers.
        notes: other results, one sentence each.
        runtime: the runtime that executed the file.
    """

    title: str
    nodes: Sequence[NodeCheck]
    notes: Sequence[str] = ()
    runtime: str = ""

    @property
    def exact(self) -> bool:
        """Whether at least one quantizer was compared and none differs."""
        return bool(self.nodes) and not any(node.differing or node.fault for node in self.nodes)


@dataclass(frozen=True)
class ReportData:
    """The content of a report. An empty section prints that it is missing, with the reason from `missing`.

    Args:
        title: the heading.
        summary: sentences below the heading: the model, the data and the steps.
        metric: the name of the metric in `accuracy`, for example "accuracy on held-out digits, %".
        accuracy: measurements; the first is the float model, the baseline of the others.
        sqnr: signal-to-noise ratio of every quantizer in dB, by model and quantizer name.
        distributions: the histograms of calibration.
        sizes: the sizes of files and weights.
        left: operations that compute in float, by model; an empty list means none.
        verifications: the comparisons of the exported models.
        graphs: the captured graphs as SVG images, by the name that the report shows.
        environment: versions and machine.
        missing: the reason for each empty section.
    """

    title: str
    summary: Sequence[str] = ()
    metric: str = "accuracy"
    accuracy: Sequence[Accuracy] = ()
    sqnr: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    distributions: Sequence[Distribution] = ()
    sizes: Sequence[Size] = ()
    left: Mapping[str, Sequence[str]] = field(default_factory=dict)
    verifications: Sequence[Verification] = ()
    graphs: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[Section, str] = field(default_factory=dict)
