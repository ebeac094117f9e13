"""What choosing weights by their error gained, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fakequant.errors import renamed
from fakequant.text import html_result, listed, module_name, table

MISSED = "no batch that chooses weights reaches it"
TAKEN_BACK = "nearest: its choice does not lower the error of the output on the batches that judge"
TAKEN_BACK_BY_METRIC = "nearest: its choice does not raise the metric, or keep it and lower the error of the output"


@dataclass(frozen=True)
class LayerResult:
    """What a layer lost before and after.

    Attributes:
        layer: its path.
        before: the error of its output by rounding to nearest, as a share of the output's energy.
        after: the same by the chosen ranges and codes.
        steps: the error after each step, by its name; of "smooth", "rotate" and "input", the share that is left of
            the error that these look at, where the layer was the first one of those that get its input. That of "bias"
            is of the nearest values with a bias that makes good their mean error, as it does after all later steps.
            "drift" has none: it moves what "gptq" and the other solvers come close to.
        note: why nothing was chosen; "" where something was.
        remarks: what one should know about how it was chosen.
    """

    layer: str
    before: float = 0.0
    after: float = 0.0
    steps: dict[str, float] = field(default_factory=dict)
    note: str = ""
    remarks: list[str] = field(default_factory=list)


def remarks_of(layers: Iterable[LayerResult]) -> list[str]:
    """A sentence for each remark, with the layers that it is about.

    >>> remarks_of([LayerResult("a", remarks=["has few rows"]), LayerResult("b", remarks=["has few rows"])])
    ['a, b: has few rows']
    """
    return [f"{names}: {remark}" for remark, names in _layers_by((own.layer, own.remarks) for own in layers).items()]


def _layers_by(said: Iterable[tuple[str, Iterable[str]]]) -> dict[str, str]:
    """For each text the layers of which it is said, as a list."""
    found: dict[str, list[str]] = {}
    for layer, texts in said:
        for text in texts:
            found.setdefault(text, []).append(module_name(layer))
    return {text: listed(names) for text, names in found.items()}


@dataclass
class Improvement:
    """The result of `improve`; prints as a table, the largest remaining error first.

    Attributes:
        layers: what was chosen for each.
        before: the error of the model's output on the batches that judge, as a share of its energy, of several outputs
            the mean share; None where it was not measured.
        after: the same with what was chosen.
        notes: what else was decided, as sentences.
        judged: on which batches the error of the model's output was measured, as text.
        is_judged: whether these chose nothing.
        worst: of several outputs the one with the largest error, as text.
        metric: the name of the metric that judged; "" without one.
        metric_before, metric_after: its figures; None without one.
        path: of what `improve_folder` wrote; None of `improve`, and in all processes but the first.
    """

    layers: list[LayerResult] = field(default_factory=list)
    before: float | None = None
    after: float | None = None
    notes: list[str] = field(default_factory=list)
    judged: str = ""
    is_judged: bool = False
    worst: str = ""
    metric: str = ""
    metric_before: float | None = None
    metric_after: float | None = None
    path: Path | None = None

    left = renamed("left", "remaining_error")
    left_of_layers = renamed("left_of_layers", "remaining_error_of_layers")

    @property
    def remaining_error(self) -> float:
        """The share of the error of the model's output that is left; of the layers where it was not measured."""
        if not self.before or self.after is None:
            return self.remaining_error_of_layers
        return self.after / self.before

    @property
    def remaining_error_of_layers(self) -> float:
        """The share of the errors of rounding weights to nearest that is left, summed over the layers.

        It is 1 where only inputs were chosen, or where nothing was. Errors of layers are no error of the model.
        """
        before = sum(found.before for found in self.layers)
        return sum(found.after for found in self.layers) / before if before else 1.0

    def __str__(self) -> str:
        rows = self._rows()
        shown = table(rows, self.conclusions[len(self._headlines) :], numbers=range(1, len(rows[0]) - 1))
        return "\n".join([*(table([[line]]) for line in self._headlines), shown])

    __repr__ = __str__  # what notebooks and consoles show

    def _repr_html_(self) -> str:
        header, *rows = self._rows()
        return html_result(header, rows, self.conclusions, numbers=range(1, len(header) - 1))

    @property
    def conclusions(self) -> list[str]:
        """The error of the model's output, what is left of the errors of layers, and the notes, a sentence each."""
        line = f"layers: {self.remaining_error_of_layers:.0%} of the error of rounding to nearest is left"
        if stay := [(found.layer, [found.note]) for found in self.layers if found.note]:
            reasons = "; ".join(f"{names} ({note})" for note, names in _layers_by(stay).items())
            line += f"; nothing was chosen for {len(stay)} of {len(self.layers)}: {reasons}"
        return [*self._headlines, *filter(None, [self.worst]), line, *self.notes]

    @property
    def _headlines(self) -> list[str]:
        """The metric, and the error of the model's output, as far as they were measured."""
        lines = list[str]()
        if self.metric_before is not None and self.metric_after is not None:
            lines.append(f"{self.metric}: {self.metric_before:.6g} -> {self.metric_after:.6g}")
        if self.before is not None and self.after is not None:
            share = f", {self.remaining_error:.0%} is left" if self.before and self.is_judged else ""
            lines.append(f"error of the model's output {self.judged}: {self.before:.2e} -> {self.after:.2e}{share}")
        return lines

    def take_back(self, names: Iterable[str]) -> None:
        """Say of layers that their choice did not stay."""
        undone, note = set(names), TAKEN_BACK_BY_METRIC if self.metric else TAKEN_BACK
        self.layers = [
            replace(row, after=row.before, steps={}, remarks=[], note=note) if row.layer in undone else row
            for row in self.layers
        ]

    def _rows(self) -> list[list[str]]:
        """The header and the rows of the table, the largest remaining error first."""
        by_length = sorted(self.layers, key=lambda found: -len(found.steps))  # those with all steps give the order
        steps = list(dict.fromkeys(step for found in by_length for step in found.steps))
        rows = [["layer", "nearest", *steps, "chosen", "left"]]
        for found in sorted(self.layers, key=lambda found: -found.after):
            share = found.note or (f"{found.after / found.before:.0%}" if found.before else "-")
            numbers = [found.before, *(found.steps.get(step) for step in steps), found.after]
            shown = ["-" if found.note or number is None else f"{number:.2e}" for number in numbers]
            rows.append([found.layer or "(model)", *shown, share])
        return rows


def joined_result(results: Sequence[LayerResult]) -> LayerResult:
    """The mean of the results of several matrices of one weight, without those that saw no rows."""
    seen = [one for one in results if one.steps or one.before]
    if len(seen) < 2:
        return next(iter(seen), results[0])

    def mean(values: Iterable[float]) -> float:
        return sum(values) / len(seen)

    steps = {step: mean(one.steps[step] for one in seen) for step in seen[0].steps}
    return LayerResult(seen[0].layer, mean(one.before for one in seen), mean(one.after for one in seen), steps)
