"""Changes places of the sources that a seed chooses, one at a time, and sees that a quick test finds each change.

    python tests/native/mutants.py map               # which test runs which line, once: 15 minutes
    python tests/native/mutants.py try --seed 7 --count 100
    python tests/native/mutants.py try --seed 7 --only ptq/search.py:71

`mutations.txt` has the changes that a person wrote for the arithmetic. These are for the rooms around it (`ROOMS`): a
comparison, a number, a sign, a condition or a statement of a function becomes another. Only tests that run the changed
line can find the change, and the fastest of them run first. What survives has no test, or makes no difference: a person
decides, and names the second kind in `equal.txt` with its reason.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from mutate import FOLDER, ROOT, SOURCE, TREE, copy_tree

ROOMS = {
    "export": ["export"],
    "delivery": ["delivery"],
    "streaming": ["streaming"],
    "model": ["model"],
    "ptq": ["ptq"],
}
"""The folders of the sources, and the folders of the tests that are about them."""
MAP = FOLDER / "lines.json"
EQUAL = Path(__file__).with_name("equal.txt")
SECONDS = 60
"""Tests of a changed line run for at most this long, the fastest first."""

COMPARED = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
SIGNS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//"}


@dataclass(frozen=True)
class Mutant:
    """A change of one line: text between two columns, and what stands there after the change."""

    file: str
    line: int
    start: int
    end: int
    new: str

    def text(self, source: str) -> str:
        """The source with the change."""
        lines = source.splitlines(keepends=True)
        # Columns of ast count bytes.
        line = lines[self.line - 1].encode()
        lines[self.line - 1] = (line[: self.start] + self.new.encode() + line[self.end :]).decode()
        return "".join(lines)

    def told(self, source: str) -> str:
        """The place, and the line before and after."""
        old, new = (text.splitlines()[self.line - 1].strip() for text in (source, self.text(source)))
        return f"{self.file.removeprefix(SOURCE + '/')}:{self.line}\n  -{old}\n  +{new}"


def mutants_of(path: Path) -> Iterator[Mutant]:
    """All changes of the functions of a file."""
    file, tree = str(path.relative_to(ROOT)), ast.parse(path.read_text())
    lines = path.read_text().splitlines()
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inner = {id(node) for function in functions for node in ast.walk(function) if node is not function}
    for function in functions:
        if id(function) not in inner:
            for statement in function.body:
                for node in ast.walk(statement):
                    yield from _of_node(file, node, lines)


def _of_node(file: str, node: ast.AST, lines: list[str]) -> Iterator[Mutant]:
    if not isinstance(node, ast.expr | ast.stmt) or node.end_lineno != node.lineno:
        return
    line, start, end = node.lineno, node.col_offset, node.end_col_offset or 0

    def between(left: ast.expr, right: ast.expr, new: str) -> Mutant:
        return Mutant(file, line, left.end_col_offset or 0, right.col_offset, f" {new} ")

    text = lines[line - 1].encode()

    def plain(left: ast.expr, right: ast.expr) -> bool:
        """Whether nothing but an operator stands between two operands."""
        return not {*b"()"} & {*text[left.end_col_offset : right.col_offset]}

    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if plain(left, right):
            yield between(left, right, COMPARED[type(op)])
        case ast.BoolOp(op=op, values=[left, right]) if plain(left, right):
            yield between(left, right, "or" if isinstance(op, ast.And) else "and")
        case ast.BinOp(left=left, op=op, right=right) if type(op) in SIGNS and plain(left, right):
            yield between(left, right, SIGNS[type(op)])
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield Mutant(file, line, start, operand.col_offset, "")
        case ast.Constant(value=bool(value)):
            yield Mutant(file, line, start, end, str(not value))
        case ast.Constant(value=int(value)):
            yield Mutant(file, line, start, end, str(value + 1))
        case ast.Raise():
            yield Mutant(file, line, start, end, "pass")
        case ast.Expr(value=ast.Call()):
            yield Mutant(file, line, start, end, "pass")
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield Mutant(file, line, value.col_offset, value.end_col_offset or 0, "None")
        case ast.Continue():
            yield Mutant(file, line, start, end, "pass")
        case ast.IfExp(test=test):
            yield Mutant(file, line, test.col_offset, test.end_col_offset or 0, f"not ({_text(test, text)})")
    if isinstance(node, ast.If | ast.While) and node.test.lineno == node.test.end_lineno:
        yield Mutant(file, line, node.test.col_offset, node.test.end_col_offset or 0, f"not ({_text(node.test, text)})")


def _text(node: ast.expr, line: bytes) -> str:
    return line[node.col_offset : node.end_col_offset].decode()


class Recorder:
    """A plugin of pytest: the lines of the sources that each test runs, and its seconds."""

    def __init__(self) -> None:
        import coverage

        self.coverage = coverage.Coverage(data_file=None, include=[str(ROOT / SOURCE / "*")], config_file=False)
        self.seconds: dict[str, float] = {}
        self.coverage.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration

    def write(self) -> None:
        """Write the map: the seconds of tests, and for each file and line the numbers of the tests that run it."""
        self.coverage.stop()
        data, numbers = self.coverage.get_data(), {name: number for number, name in enumerate(self.seconds)}
        lines = {
            str(Path(file).relative_to(ROOT)): {
                line: [numbers[name] for name in names if name in numbers]
                for line, names in data.contexts_by_lineno(file).items()
            }
            for file in data.measured_files()
        }
        MAP.parent.mkdir(parents=True, exist_ok=True)
        MAP.write_text(json.dumps({"seconds": self.seconds, "lines": lines}))


def make_map() -> int:
    """Run the quick tests of the rooms, and write which test runs which line."""
    import pytest

    recorder = Recorder()
    folders = sorted({f"tests/{folder}" for folders in ROOMS.values() for folder in folders})
    options = ["-q", "-n", "0", "-m", "not exhaustive and not slow", "--rootdir", str(ROOT)]
    code = pytest.main([*options, *folders], plugins=[recorder])
    recorder.write()
    return int(code)


def tests_of(mutant: Mutant, known: dict) -> tuple[list[str], int]:
    """The fastest tests that run a line, as many as `SECONDS` allow, and how many run it."""
    names, tests = list(known["seconds"]), known["lines"].get(mutant.file, {}).get(str(mutant.line), [])
    spent, chosen = 0.0, list[str]()
    for seconds, name in sorted((known["seconds"][names[number]], names[number]) for number in tests):
        spent += seconds
        if chosen and spent > SECONDS:
            break
        chosen.append(name)
    return chosen, len(tests)


def is_found(mutant: Mutant, tests: list[str]) -> bool:
    """Whether one of the tests fails in the copy with the change."""
    file = TREE / mutant.file
    right = file.read_text()
    # A file's tests are collected once.
    by_file = defaultdict[str, list[str]](list)
    for test in tests:
        by_file[test.partition("::")[0]].append(test)
    arguments = FOLDER / "tests.txt"
    arguments.write_text("\n".join(test for names in by_file.values() for test in names))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", f"@{arguments}"]
    paths = {"PYTHONPATH": os.pathsep.join([str(TREE / "src"), str(TREE)])}
    try:
        file.write_text(mutant.text(right))
        run = subprocess.run(command, cwd=TREE, env=os.environ | paths, capture_output=True, text=True, timeout=600)
    except subprocess.TimeoutExpired:
        return True
    finally:
        file.write_text(right)
    return run.returncode != 0


def try_out(seed: int, count: int, only: str | None) -> int:
    """Make the changes of a seed, print what survives, and return how many did."""
    known, equal = json.loads(MAP.read_text()), EQUAL.read_text() if EQUAL.exists() else ""
    choice = random.Random(seed)
    files = [path for room in ROOMS for path in sorted((ROOT / SOURCE / room).rglob("*.py"))]
    chosen = [mutant for path in files for mutant in mutants_of(path)]
    choice.shuffle(chosen)
    if only:
        chosen = [m for m in chosen if f"{m.file}:{m.line}".endswith(only)]
    copy_tree()
    survived = tried = 0
    for mutant in chosen:
        if tried == count:
            break
        source = (TREE / mutant.file).read_text()
        told = mutant.told(source)
        if told.partition("\n")[2] in equal:
            continue
        try:
            compile(mutant.text(source), mutant.file, "exec")
        except SyntaxError:
            continue
        tried += 1
        start = time.monotonic()
        tests, number = tests_of(mutant, known)
        found = bool(tests) and is_found(mutant, tests)
        survived += not found
        state = "found   " if found else "SURVIVED" if tests else "NO TEST "
        print(f"{state} {told}\n  {len(tests)} of {number} tests, {time.monotonic() - start:.0f} s", flush=True)
    print(f"{tried - survived} of {tried} changes are found")
    return survived


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("work", choices=["map", "try"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--only")
    asked = parser.parse_args()
    sys.exit(make_map() if asked.work == "map" else min(1, try_out(asked.seed, asked.count, asked.only)))
