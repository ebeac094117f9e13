"""Changes places of the sources that a seed chooses, one at a time, and sees that a quick test finds each change.

    python tests/native/mutants.py --seed 7 --count 100
    python tests/native/mutants.py --seed 7 --only ptq/search.py:71

`mutations.txt` has the changes that a person wrote for the arithmetic. These are for the rooms around it (`ROOMS`): a
comparison, a number, a sign, a condition or a statement of a function becomes another. Only tests that run the changed
statement can find the change, and the fastest of them run first. A first run of the quick tests says which these are:
in a copy of the tree, each statement to change begins with a mark, which costs nothing beside coverage of all lines.
For a statement that an import runs, they are the tests in the nearest folder of the same name.
What survives has no test, or makes no difference: a person decides, and names the second kind in `equal.txt` with its
reason.
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
from reached import IMPORTED

ROOMS = ("export", "delivery", "streaming", "model", "ptq")
PATHS = {"PYTHONPATH": os.pathsep.join([str(TREE / "src"), str(TREE)])}
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

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"

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


MARK = "__import__('tests.native.reached').native.reached.add({!r})"


def marked(file: str, source: str, lines: set[int]) -> str | None:
    """A source whose statements at some lines note `Mutant.place` when they run; None if a line has no room for it."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    text, marks = [line.encode() for line in source.splitlines(keepends=True)], []
    for place in lines:
        inside = [node for node in nodes if node.lineno <= place <= (node.end_lineno or 0)]
        node = max(inside, key=lambda node: (node.lineno, node.col_offset))
        mark = MARK.format(f"{file}:{place}")
        if header := {ast.If: "test", ast.While: "test", ast.For: "iter", ast.Match: "subject"}.get(type(node)):
            part = getattr(node, header)
            marks += [(part.lineno, part.col_offset, f"({mark} or ("), (part.end_lineno, part.end_col_offset, "))")]
        elif hasattr(node, "body"):
            return None
        else:
            marks.append((node.lineno, node.col_offset, f"{mark}; "))
    # From the end, so that columns stay right.
    for line, column, mark in sorted(marks, reverse=True):
        text[line - 1] = text[line - 1][:column] + mark.encode() + text[line - 1][column:]
    return b"".join(text).decode()


def reaching(chosen: list[Mutant]) -> tuple[dict[str, float], dict[str, list[str]]]:
    """The seconds of the quick tests of the rooms, and for each place of a change the tests that run its statement."""
    copy_tree()
    for file in {mutant.file for mutant in chosen}:
        lines = {mutant.line for mutant in chosen if mutant.file == file}
        (TREE / file).write_text(marked(file, (ROOT / file).read_text(), lines) or "")
    folders = [f"{place}/{room}" for place in ("tests", SOURCE) for room in ROOMS]
    folders += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("test_*.py"))
    options = ["-q", "-n", "2", "--dist", "loadfile", "-m", "not exhaustive and not slow", "-p", "tests.native.reached"]
    command = [sys.executable, "-m", "pytest", *options, *folders]
    subprocess.run(command, cwd=TREE, env=os.environ | PATHS | {"REACHED": str(FOLDER)}, stdout=subprocess.DEVNULL)
    copy_tree()
    seconds, tests, imported = dict[str, float](), defaultdict[str, list[str]](list), set[str]()
    for part in FOLDER.glob("reached-*.json"):
        for test, (spent, places) in json.loads(part.read_text()).items():
            if test == IMPORTED:
                imported.update(places)
                continue
            seconds[test] = spent
            for place in places:
                tests[place].append(test)
        part.unlink()
    for place in imported:
        folder = Path(place.removeprefix(f"{SOURCE}/")).parent
        while not any(test.startswith(f"tests/{folder}/") for test in seconds) and folder.name:
            folder = folder.parent
        tests[place] += [test for test in seconds if test.startswith(f"tests/{folder}/") and test not in tests[place]]
    return seconds, tests


def fastest(tests: list[str], seconds: dict[str, float]) -> list[str]:
    """The fastest tests, as many as `SECONDS` allow."""
    spent, chosen = 0.0, list[str]()
    for test in sorted(tests, key=seconds.__getitem__):
        spent += seconds[test]
        if chosen and spent > SECONDS:
            break
        chosen.append(test)
    return chosen


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
    try:
        file.write_text(mutant.text(right))
        run = subprocess.run(command, cwd=TREE, env=os.environ | PATHS, capture_output=True, text=True, timeout=600)
    except subprocess.TimeoutExpired:
        return True
    finally:
        file.write_text(right)
    return run.returncode != 0


def draw(seed: int, count: int, only: str | None) -> list[Mutant]:
    """Changes of a seed that compile, have a place for a mark, and are not named in `equal.txt`."""
    equal = EQUAL.read_text() if EQUAL.exists() else ""
    files = [path for room in ROOMS for path in sorted((ROOT / SOURCE / room).rglob("*.py"))]
    drawn = [mutant for path in files for mutant in mutants_of(path)]
    random.Random(seed).shuffle(drawn)
    chosen = list[Mutant]()
    for mutant in drawn:
        source = (ROOT / mutant.file).read_text()
        if only and not mutant.place.endswith(only):
            continue
        if mutant.told(source).partition("\n")[2] in equal or not marked(mutant.file, source, {mutant.line}):
            continue
        try:
            compile(mutant.text(source), mutant.file, "exec")
        except SyntaxError:
            continue
        chosen.append(mutant)
        if len(chosen) == count:
            break
    return chosen


def try_out(chosen: list[Mutant]) -> int:
    """Make the changes, print what survives, and return how many did."""
    seconds, tests_of = reaching(chosen)
    survived = 0
    for mutant in chosen:
        start, tests = time.monotonic(), fastest(tests_of[mutant.place], seconds)
        found = bool(tests) and is_found(mutant, tests)
        survived += not found
        state = "found   " if found else "SURVIVED" if tests else "NO TEST "
        told = mutant.told((TREE / mutant.file).read_text())
        spent = time.monotonic() - start
        print(f"{state} {told}\n  {len(tests)} of {len(tests_of[mutant.place])} tests, {spent:.0f} s", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} changes are found")
    return survived


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--only", help="the end of a file's name and a line, file.py:71")
    asked = parser.parse_args()
    sys.exit(min(1, try_out(draw(asked.seed, asked.count, asked.only))))
