"""Pages whose blocks of Python run in order, each with what it prints in the block of text after it.

python -m tests.support.pages docs/tutorials/*.md    # writes what the blocks print into the pages
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

CLOSE = 0.1
"""Trained figures differ between processors and versions of torch: numbers with a point may differ by this share."""
_BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?", re.MULTILINE | re.DOTALL)
_DECIMAL = re.compile(r"-?\d[\d,]*\.\d+")


@dataclass(frozen=True)
class Block:
    """A block of a page: its code, what the page says that it prints, and its first line in the page."""

    code: str
    expected: str
    line: int


def blocks(page: str) -> list[Block]:
    found = _BLOCK.finditer(page)
    return [Block(one["code"], one["output"] or "", page.count("\n", 0, one.start("code")) + 1) for one in found]


def printed(code: str, names: dict[str, Any], page: Path, line: int) -> str:
    """Run one block where the blocks before it left `names`; returns what it prints."""
    into = io.StringIO()
    with contextlib.redirect_stdout(into):
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)
    return "".join(f"{line.rstrip()}\n" for line in into.getvalue().splitlines())


def alike(found: str, expected: str) -> bool:
    """Whether texts are equal, numbers with a decimal point within `CLOSE`."""
    if _DECIMAL.split(found) != _DECIMAL.split(expected):
        return False
    pairs = zip(_numbers(found), _numbers(expected), strict=True)
    return all(abs(a - b) <= CLOSE * max(abs(a), abs(b)) for a, b in pairs)


def _numbers(text: str) -> list[float]:
    return [float(one.replace(",", "")) for one in _DECIMAL.findall(text)]


def started() -> dict[str, Any]:
    """What a block begins with: one thread, so that sums are rounded alike on every run."""
    torch.set_num_threads(1)
    return {"__name__": "__page__"}


def written(page: Path) -> str:
    names = started()
    text = page.read_text()
    outputs = iter([printed(one.code, names, page, one.line) for one in blocks(text)])

    def replaced(found: re.Match[str]) -> str:
        output = next(outputs)
        shown = f"\n```text\n{output}```\n" if output else ""
        return f"```python\n{found['code']}```\n{shown}"

    return _BLOCK.sub(replaced, text)


def main() -> None:
    for name in sys.argv[1:]:
        page = Path(name).resolve()
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            text = written(page)
        page.write_text(text)
        print(f"{name}: written")


if __name__ == "__main__":
    main()
