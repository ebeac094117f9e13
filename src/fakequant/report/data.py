"""What a report shows, as plain values: no tensor, no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum


class Section(Enum):
    """The parts of a report, in their order; the value is the heading."""

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
        format: what the model computes in, for example "INT8".
        method: the calibrator, or what else was done to it.
        value: the metric; larger is better.
        note: what the reader should know of this row.
    """

    format: str
    method: str
    value: float
    note: str = ""


def accuracy_cells(rows: Sequence[Accuracy]) -> list[tuple[str, str, str, str, str]]:
    """Measurements as text: format, method, value, change against the first, note; all with as many decimals.

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
        edges: [bins + 1] in units of the tensor, ascending.
        counts: [bins], the values between neighbouring edges.
        ranges: lowest and highest value kept, by calibrator.
        groups: how many groups (channels, blocks) the tensor has; the counts are those of all, a range is the widest.
    """

    name: str
    edges: Sequence[float]
    counts: Sequence[int]
    ranges: Mapping[str, tuple[float, float]]
    groups: int = 1


@dataclass(frozen=True)
class Size:
    """Bytes of one thing, and of its float32 form where there is one."""

    name: str
    bytes: int
    float_bytes: int | None = None


@dataclass(frozen=True)
class NodeCheck:
    """One quantizer of an exported model, compared bit for bit.

    Args:
        name: its path.
        spec: its specification.
        elements: how many were compared.
        differing: how many of them differ.
        fault: what else is wrong with it; empty if nothing is.
    """

    name: str
    spec: str
    elements: int
    differing: int
    fault: str = ""


@dataclass(frozen=True)
class Verification:
    """The comparison of an exported model with the one it was made from.

    Args:
        title: which model.
        nodes: its quantizers.
        notes: what else was found, one sentence each.
        runtime: what ran it.
    """

    title: str
    nodes: Sequence[NodeCheck]
    notes: Sequence[str] = ()
    runtime: str = ""

    @property
    def exact(self) -> bool:
        """Whether something was compared and nothing differs."""
        return bool(self.nodes) and not any(node.differing or node.fault for node in self.nodes)


@dataclass(frozen=True)
class ReportData:
    """All that a report shows. Every part may be missing; the report then says so, and why if `missing` tells.

    Args:
        title: the heading.
        summary: sentences below the heading: what was done, to what, on which data.
        metric: what the numbers of `accuracy` are, for example "accuracy on held-out digits, %".
        accuracy: measurements; the first is the float model that the others are compared with.
        sqnr: decibels of every quantizer on its own tensor, by model and quantizer name.
        distributions: what calibration saw.
        sizes: of files and weights.
        left: operations that compute in float although others are quantized, by model; an empty list says: none.
        verifications: of the exported models.
        graphs: the captured models as SVG images, by the name that the report shows.
        environment: versions and machine.
        missing: why a section is empty.
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
