"""Write the table of docs/methods.md from the figures in docs/notes/accuracy-measured.md: part of `make docs`."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).with_name("methods.md")
FIGURES = Path(__file__).parent / "notes" / "accuracy-measured.md"
BEGIN, END = "<!-- methods:begin -->", "<!-- methods:end -->"
_COLUMNS = {"nearest": "fakequant nearest", "fast": "fakequant fast", "best": "fakequant best"}
_FLOAT = re.compile(r"^## .*: ([\d.]+) % in float$")
_CELL = re.compile(r"([\d.]+)\**, ([\d.]+) %")


def page() -> str:
    """The page with its table written anew."""
    before, rest = PAGE.read_text().split(BEGIN)
    return f"{before}{BEGIN}\n{table(FIGURES.read_text())}\n{END}{rest.split(END)[1]}"


def table(figures: str) -> str:
    """What each setting loses over the models: the least and the most points, and the error that is left."""
    found = _read(figures)
    lines = [
        "| setting | models | points lost by nearest | by `fast` | error left by `fast` | by `best` |",
        "|---|---|---|---|---|---|",
    ]
    for setting, rows in found.items():
        lost = [_span([points for _, points in rows[column]], 2) for column in ("nearest", "fast")]
        left = [_span([error for error, _ in rows[column]], 3) for column in ("fast", "best")]
        lines.append(f"| {' | '.join([setting, str(len(rows['fast'])), *lost, *left])} |")
    return "\n".join(lines)


def _span(values: list[float], digits: int) -> str:
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _read(figures: str) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """By setting and column: (error, points lost) of each model."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    start, names = 0.0, []
    for line in figures.splitlines():
        if match := _FLOAT.match(line):
            start = float(match[1])
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| |"):
            names = cells
        elif line.startswith("| ") and names:
            rows = found.setdefault(cells[0], {column: [] for column in _COLUMNS})
            for column, title in _COLUMNS.items():
                if match := _CELL.search(cells[names.index(title)]):
                    rows[column].append((float(match[1]), start - float(match[2]) + 0.0))
    return found


if __name__ == "__main__":
    PAGE.write_text(page())
