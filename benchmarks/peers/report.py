"""All calls of all peers, as a file of results and as the table of docs/peers.md."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT, machine, put_between, write_results

from . import brevitas, modelopt, torchao
from .call import Call
from .measure import MEASURED, NOT_INSTALLED, Row, inputs, measure

RESULTS = ROOT / "benchmarks" / "results" / "peers.json"
PAGE = ROOT / "docs" / "peers.md"
BEGIN, END = "<!-- peers:begin -->", "<!-- peers:end -->"
CALLS: tuple[Call, ...] = modelopt.CALLS + torchao.CALLS + brevitas.CALLS


def results(rows: Sequence[Row]) -> dict[str, Any]:
    """Rows as the file holds them, with where they come from."""
    return {"machine": machine(), "rows": [asdict(row) for row in rows]}


def table(found: dict[str, Any]) -> str:
    """Results as a Markdown table, cases together, with where they come from."""
    lines = [
        "| case | library | ours over a copy | theirs over ours | theirs compiled over ours | elements that differ |",
        "|---|---|---|---|---|---|",
    ]
    order = list(dict.fromkeys(row["case"] for row in found["rows"]))
    lines += [_line(row) for row in sorted(found["rows"], key=lambda row: order.index(row["case"]))]
    where = found["machine"]
    versions = {row["peer"]: row["version"] or NOT_INSTALLED for row in found["rows"]}
    named = ", ".join(f"{peer} {version}" for peer, version in versions.items())
    source = (
        f"{where['processor']}, {where['threads']} threads, load {where['load']}; torch {where['torch']}, {named}; "
        f"fakequant {where['fakequant']} at {where['commit']}."
    )
    return "\n".join([*lines, "", source])


def _line(row: dict[str, Any]) -> str:
    start = f"| {row['case']} | {row['peer']} `{row['way']}`"
    if row["outcome"] != MEASURED:
        return f"{start} | | {row['outcome'].replace('|', '/')} | | |"
    compiled = row["compiled_over_ours"]
    compiled = f"{compiled:.1f}" if isinstance(compiled, float) else f"fails ({compiled.split(':')[0]})"
    times = f"{row['over_copy']['median']:.2f} | {row['over_ours']['median']:.1f} | {compiled}"
    return f"{start} | {times} | {_difference(row)} |"


def _difference(row: dict[str, Any]) -> str:
    words = _count(row["difference"])
    if given := row["difference_with_its_scales"]:
        words += f" (given its scales: {_count(given)})"
    return f"{words}: {row['why']}" if row["why"] else words


def _count(difference: dict[str, int]) -> str:
    bits, values = difference["bits"], difference["values"]
    return f"{bits:,} signs of zeros" if bits and not values else f"{bits:,}"


def main(results_path: Path = RESULTS, page: Path = PAGE) -> int:
    """Measure, print and write everything; 1 if a peer is faster. With `--pages`: only write the page from the file."""
    if "--pages" in sys.argv[1:]:
        put_between(page, BEGIN, END, table(json.loads(results_path.read_text())))
        return 0
    machine()  # before anything is measured: the load is then that of other programs
    buffers, rows = inputs(), []
    for call in CALLS:
        rows.append(measure(call, buffers))
        print(_line(asdict(rows[-1])), flush=True)
    write_results(results_path, results(rows))
    put_between(page, BEGIN, END, table(results(rows)))
    faster = [f"{row.peer} {row.way}" for row in rows if row.over_ours and row.over_ours.median <= 1]
    print(f"faster than ours: {'; '.join(faster)}" if faster else "none that was measured is faster")
    return 1 if faster else 0
