"""Print the tables of a report in the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from fakequant.report import ReportData, accuracy_cells
from fakequant.report.data import checked_in, verdict_of
from fakequant.text import fitted, listed, table, visible


def print_report(console: Console, data: ReportData) -> None:
    """Print the accuracy, the sizes, the operations left in float and the verification of a report."""
    if data.accuracy:
        header = ("format", "method", "value", "change", "")
        print_table(console, data.metric, header, accuracy_cells(data.accuracy), numbers=(2, 3))
    sizes = [
        (size.name, f"{size.bytes:,}", "" if size.float_bytes is None else f"{size.float_bytes:,}")
        for size in data.sizes
    ]
    if sizes:
        print_table(console, "Sizes", ("what", "bytes", "in float32"), sizes, numbers=(1, 2))
    for model, operations in data.unquantized.items():
        names = listed(operations, 6, "more, see the page", between="; ") or "nothing"
        console.print(Text(visible(f"{model}, left in float: {names}")))
    checks = []
    for check in data.verifications:
        found = checked_in(check)
        elements, differing = sum(row.elements for row in found), sum(row.differing for row in found)
        counts = str(len(found)), f"{elements:,}", f"{differing:,}"
        checks.append((Path(check.path).name, check.runtime, *counts, verdict_of([check])))
    if checks:
        header = ("model", "run in", "quantizers", "elements compared", "differing", "")
        print_table(console, "Verification, bit for bit", header, checks, numbers=(2, 3, 4))
    for fault in (f"{Path(check.path).name}: {fault}" for check in data.verifications for fault in check.faults):
        console.print(Text(fitted(visible(fault))), soft_wrap=True)


def print_table(
    console: Console,
    title: str,
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Sequence[int] = (),
) -> None:
    """Print a title and rows of text as a table; control characters in the text are escaped."""
    console.print(Text(fitted(visible(title)), "bold"), soft_wrap=True)
    console.print(Text(table([header, *rows], numbers=numbers, line=True)), soft_wrap=True)
