"""The size of the package by room, beside an earlier commit: it informs, and nothing fails by it.

`make size`: lines, lines of code (without docstrings, comments and blank lines), files, the share of imports in the
Python code, private functions that are called once, and the share of tokens in windows of 40 that stand twice (names
count as equal). `BEFORE` names the earlier commit.
"""

from __future__ import annotations

import ast
import io
import keyword
import re
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

BEFORE = "547345f"
_WINDOW = 40
_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_Functions = ast.FunctionDef | ast.AsyncFunctionDef


class Size(NamedTuple):
    """The size of a room; sums of it are sizes, too."""

    files: int = 0
    lines: int = 0
    code: int = 0
    python: int = 0
    imports: int = 0
    once: int = 0
    tokens: int = 0
    repeated: int = 0

    def plus(self, other: Size) -> Size:
        """Both."""
        return Size(*(mine + more for mine, more in zip(self, other, strict=True)))

    def __str__(self) -> str:
        imports, repeated = 100 * self.imports / max(self.python, 1), 100 * self.repeated / max(self.tokens, 1)
        return f"{self.lines:7,} {self.code:7,} {self.files:5} {imports:5.1f} % {self.once:5} {repeated:5.1f} %"


def room_of(path: str) -> str:
    """The room of a file: a folder of the package, "root" for files beside them, "tests" for all tests."""
    parts = path.split("/")
    return "tests" if parts[0] == "tests" else parts[2] if len(parts) > 3 else "root"


def sizes(files: dict[str, str]) -> dict[str, Size]:
    """The size of each room from the text of its files, by path."""
    rooms = defaultdict[str, Size](Size)
    python = {path: text for path, text in files.items() if path.endswith(".py")}
    windows = {path: list(_windows(text)) for path, text in python.items()}
    count = Counter(window for path, found in windows.items() if path.startswith("src/") for window in found)
    for path, text in files.items():
        size = Size(1, text.count("\n"))
        if path in python:
            tree = ast.parse(text)
            code, imports = _code(text, tree)
            length = len(windows[path]) + _WINDOW - 1 if windows[path] else 0
            repeated = set[int]()
            for start, window in enumerate(windows[path]):
                if count[window] > 1:
                    repeated.update(range(start, start + _WINDOW))
            size = Size(1, size.lines, code, code, imports, _called_once(text, tree), length, len(repeated))
        else:
            lines = [line.strip() for line in text.splitlines()]
            size = Size(1, size.lines, sum(bool(line) and not line.startswith("//") for line in lines))
        rooms[room_of(path)] = rooms[room_of(path)].plus(size)
    return rooms


def _code(text: str, tree: ast.Module) -> tuple[int, int]:
    """Lines of code, and of imports among them."""
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    imports = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            imports.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines), len(imports)


def _called_once(text: str, tree: ast.Module) -> int:
    """Private functions and methods whose name stands in their file twice: where it is made, and in one more place."""
    names = [node.name for node in ast.walk(tree) if isinstance(node, _Functions) and re.match(r"_[^_]", node.name)]
    words = Counter(re.findall(r"\w+", text))
    return sum(words[name] == 2 for name in names)


def _windows(text: str) -> Iterator[int]:
    """Every run of tokens, all names and literals equal among each other."""
    tokens = [
        {tokenize.STRING: "text", tokenize.NUMBER: "number"}.get(
            token.type, "name" if token.type == tokenize.NAME and not keyword.iskeyword(token.string) else token.string
        )
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in _LAYOUT
    ]
    for start in range(len(tokens) - _WINDOW + 1):
        yield hash(tuple(tokens[start : start + _WINDOW]))


def files_at(commit: str) -> dict[str, str]:
    """The source files and tests of a commit."""
    archive = subprocess.run(
        ["git", "archive", commit, "src", "tests"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        return {
            member.name: file.read().decode()
            for member in members
            if member.name.endswith((".py", ".cpp", ".h")) and (file := members.extractfile(member)) is not None
        }


def main() -> None:
    """Print the table."""
    now = sizes(files_at("HEAD"))
    try:
        before = sizes(files_at(BEFORE))
    except subprocess.CalledProcessError:
        before = {}
        print(f"{BEFORE} is not in this clone: fetch the whole history to compare", file=sys.stderr)
    for rooms in (now, before):
        rooms["src"] = Size()
        for room in set(rooms) - {"src", "tests"}:
            rooms["src"] = rooms["src"].plus(rooms[room])
    heads = "  lines    code files imports  once repeated"
    print(f"{'room':13} {heads}   | {BEFORE}: {heads.strip()}")
    order = sorted(set(now) - {"src", "tests"}, key=lambda room: -now[room].lines)
    for room in [*order, "src", "tests"]:
        print(f"{room:13} {now[room]}   | {before.get(room, Size())}")


if __name__ == "__main__":
    main()
