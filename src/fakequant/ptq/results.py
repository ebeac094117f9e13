"""What choosing weights by their error gained, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass, field

from fakequant.model.html import html_result

_NAMED = 4


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
    """

    layer: str
    before: float = 0.0
    after: float = 0.0
    steps: dict[str, float] = field(default_factory=dict)
    note: str = ""


@dataclass
class Improvement:
    """The result of `improve`; prints as a table, the largest remaining error first."""

    layers: list[LayerResult] = field(default_factory=list)

    @property
    def left(self) -> float:
        """The share of the errors of rounding to nearest that is left, summed over the layers."""
        before = sum(found.before for found in self.layers)
        return sum(found.after for found in self.layers) / before if before else 1.0

    def __str__(self) -> str:
        rows = self._rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:-1], widths[1:-1]), row[-1]]) for row in rows
        ]
        return "\n".join([*lines, self._last_line])

    __repr__ = __str__  # what notebooks and consoles show

    def _repr_html_(self) -> str:
        header, *rows = self._rows()
        return html_result(header, rows, [self._last_line], numbers=range(1, len(header) - 1))

    @property
    def _last_line(self) -> str:
        line = f"{self.left:.0%} of the error of rounding to nearest is left"
        stay = [found.layer or "(model)" for found in self.layers if found.note]
        if not stay:
            return line
        more = f" and {len(stay) - _NAMED} more" if len(stay) > _NAMED else ""
        return f"{line}; nothing was chosen for {len(stay)} of {len(self.layers)}: {', '.join(stay[:_NAMED])}{more}"

    def _rows(self) -> list[list[str]]:
        """The header and the rows of the table, the largest remaining error first."""
        steps = list(dict.fromkeys(step for found in self.layers for step in found.steps))
        rows = [["layer", "nearest", *steps, "chosen", "left"]]
        for found in sorted(self.layers, key=lambda found: -found.after):
            share = found.note or (f"{found.after / found.before:.0%}" if found.before else "-")
            numbers = [found.before, *(found.steps.get(step) for step in steps), found.after]
            shown = ["-" if found.note or number is None else f"{number:.2e}" for number in numbers]
            rows.append([found.layer or "(model)", *shown, share])
        return rows
