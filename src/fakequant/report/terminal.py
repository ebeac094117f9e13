"""Print the tables of a report in the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fakequant.report import ReportData, accuracy_cells
from fakequant.text import visible


def print_report(console: Console, data: ReportData) -> None:
    """Print the accuracy, the sizes, the operations left in float and the verification of a report."""
    if data.accuracy:
        print_table(
            console,
            data.metric,
            ("format", "method", "value", "change", ""),
            accuracy_cells(data.accuracy),
            numbers=(2, 3),
        )
    sizes = [
        (size.name, f"{size.bytes:,}", "" if size.float_bytes is None else f"{size.float_bytes:,}")
        for size in data.sizes
    ]
    if sizes:
        print_table(console, "Sizes", ("what", "bytes", "in float32"), sizes, numbers=(1, 2))
    for model, operations in data.unquantized.items():
        console.print(Text(visible(f"{model}, left in float: {'; '.join(operations) or 'nothing'}")))
    checks = [
        (
            check.title,
            check.runtime,
            str(len(check.nodes)),
            f"{sum(node.elements for node in check.nodes):,}",
            f"{sum(node.differing for node in check.nodes):,}",
        )
        for check in data.verifications
    ]
    if checks:
        header = ("model", "run in", "quantizers", "elements compared", "differing")
        print_table(console, "Verification, bit for bit", header, checks, numbers=(2, 3, 4))


def print_table(
    console: Console,
    title: str,
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Sequence[int] = (),
) -> None:
    """Print rows of text as a table; markup and control characters in the text are escaped."""
    table = Table(title=escape(visible(title)), title_justify="left", title_style="bold")
    for index, name in enumerate(header):
        table.add_column(escape(name), justify="right" if index in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(escape(visible(cell)) for cell in row))
    console.print(table)
