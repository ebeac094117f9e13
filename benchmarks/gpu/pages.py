"""The table of docs/notes/gpu.md, and the same as plain text, from lines of results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.pages import size, table
from benchmarks.record import ROOT, Line, put_between

from .limits import bar_of, verdict

PAGE = ROOT / "docs" / "notes" / "gpu.md"
BEGIN, END = "<!-- gpu:begin -->", "<!-- gpu:end -->"
HEADER = ("case", "", "elements", "beside", "ms", "time over it", "share of a copy", "bar", "")


def write(lines: Sequence[Line], page: Path = PAGE) -> None:
    """Write the table.

    Raises:
        ValueError: the page lacks its markers.
    """
    put_between(page, BEGIN, END, f"{table(HEADER, [row(line) for line in lines])}\n\n{source(lines)}")


def row(line: Line) -> list[str]:
    """The cells of a line."""
    bar = bar_of(line)
    what = [line["case"], line["direction"], f"{size(line['elements'])} {line['dtype']}", line["against"]]
    if line["p50"] is None:
        return [*what, "", line["outcome"], "", "", ""]
    ratio = f"{line['p50']:.3g} ({line['p20']:.3g} to {line['p80']:.3g})"
    found = "" if line["share"] is None else f"{line['share']:.0%}"
    return [*what, f"{1e3 * line['seconds']:.3g}", ratio, found, bar.text if bar else "", verdict(line)]


def text(lines: Sequence[Line]) -> str:
    """The table for a terminal."""
    rows = [HEADER, *(row(line) for line in lines)]
    widths = [max(len(cells[column]) for cells in rows) for column in range(len(HEADER))]
    return "\n".join("  ".join(map(str.ljust, cells, widths)).rstrip() for cells in rows)


def source(lines: Sequence[Line]) -> str:
    """Where figures come from."""
    places = dict.fromkeys((line["machine"], line["torch"], line["commit"]) for line in lines)
    where = "; ".join(f"{machine}, torch {torch}, at {commit}" for machine, torch, commit in places)
    return f"Written by `make bench-gpu` from {len(lines)} lines of `benchmarks/results/gpu.jsonl`: {where}."
