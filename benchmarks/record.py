"""Where figures come from and where they go: the machine, files written whole, tables between the markers of a page."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import fakequant as fq
from benchmarks import harness
from fakequant.files import write_whole

ROOT = Path(__file__).parent.parent
LINES = ROOT / "benchmarks" / "results" / "bench.jsonl"
Line = dict[str, Any]
"""One result as the file of results has it, see `lines_of`."""
_IDENTITY = ("case", "direction", "spec", "elements", "dtype", "against")


@cache
def machine() -> dict[str, str]:
    """Where the figures come from."""
    return {**harness.machine(), "fakequant": fq.__version__, "commit": commit()}


def commit(*paths: str) -> str:
    """The commit, with "+changes" where files differ from it: those under some paths, or any."""
    changed = _git("status", "--porcelain", "--", *paths)
    return (_git("rev-parse", "--short", "HEAD") or "unknown") + ("+changes" if changed else "")


def _git(*command: str) -> str:
    """What git says; nothing where there is no git, or no repository."""
    if shutil.which("git") is None:
        return ""
    return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Replace a file of results in one step: an interrupted run leaves the old one."""
    write_whole(path, (json.dumps(results, indent=2) + "\n").encode())


def lines_of(results: Iterable[harness.Result], where: dict[str, str] | None = None) -> list[Line]:
    """Results as lines: where they come from, what was compared with what, and percentiles of the ratio.

    Args:
        results: of one run.
        where: by default `machine()`.
    """
    where = where or machine()
    lines = []
    for result in results:
        found = result.ratio
        lines.append(
            {
                "commit": where["commit"],
                "machine": where["processor"],
                "torch": where["torch"],
                "threads": int(where["threads"]),
                "load": where["load"],
                **{name: getattr(result, name) for name in _IDENTITY},
                "outcome": result.outcome,
                "differing": result.differing,
                "p20": found and found.p20,
                "p50": found and found.p50,
                "p80": found and found.p80,
                "seconds": found and found.seconds,
                "other_seconds": found and found.other_seconds,
                "pairs": found.pairs if found else 0,
                **(result.facts or {}),
            }
        )
    return lines


def read_lines(path: Path) -> list[Line]:
    """The lines of a file of results; none if there is no such file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_lines(path: Path, lines: Iterable[Line]) -> None:
    """Write a file of results, one line of JSON each, in one step: an interrupted run leaves the old one."""
    write_whole(path, "".join(json.dumps(line) + "\n" for line in lines).encode())


def updated(old: Iterable[Line], new: Iterable[Line]) -> list[Line]:
    """Old lines in their order, those that were measured anew replaced; then what is new."""
    found = {tuple(line[name] for name in _IDENTITY): line for line in old}
    found.update({tuple(line[name] for name in _IDENTITY): line for line in new})
    return list(found.values())


def put_between(page: Path, begin: str, end: str, content: str) -> None:
    """Replace what stands between two markers of a page.

    Raises:
        ValueError: a marker is missing.
    """
    text = page.read_text()
    if begin not in text or end not in text:
        raise ValueError(f"{page} lacks the markers {begin} and {end}; put them where the table belongs")
    before, rest = text.split(begin, 1)
    after = rest.split(end, 1)[1]
    write_whole(page, f"{before}{begin}\n{content}\n{end}{after}".encode())
