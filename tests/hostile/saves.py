"""Save to one folder by two processes at once while a third loads from it; run by hand.

    python tests/hostile/saves.py [--saves 200] [--pairs 10]

Every load must give one of the models that were saved. Then pairs of processes begin at once to save, deliver, improve
a folder or advise in one folder: it has what one of them wrote, and the other may be refused. Prints two lines, and
what went wrong; exits 1 if anything did.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from fakequant.errors import FakeQuantError
from tests.support.generations import WRITERS, Writer


def save_often(writer: Writer, folder: Path, numbers: range) -> None:
    """What each of the writing processes does."""
    for number in numbers:
        writer.write(folder, float(number % 7))


def forked(act: Callable[[], None]) -> int:
    """Run something in another process; its id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        act()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def run(saves: int) -> tuple[int, list[str]]:
    """How often a folder was read while two processes wrote to it, and what went wrong."""
    writer, wrong, reads = WRITERS["checkpoint"], list[str](), 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        writer.write(folder, 0.0)
        alive = [
            forked(lambda start=start: save_often(writer, folder, range(start, start + saves))) for start in (0, 3)
        ]
        while alive:
            for child in list(alive):
                found, status = os.waitpid(child, os.WNOHANG)
                if found:
                    alive.remove(child)
                    wrong += ["a process that saves failed"] if status else []
            reads += 1
            try:
                values = writer.read(folder)
            except Exception:
                wrong.append(traceback.format_exc(limit=-2))
            else:
                wrong += [] if len(values) == 1 else [f"a mix of {sorted(values, key=str)}"]
        if left := sorted(path.name for path in folder.iterdir() if path.name.startswith(".fakequant")):
            wrong.append(f"left behind {', '.join(left)}")
    return reads, wrong


def pairs(count: int) -> tuple[int, list[str]]:
    """How often one of two was refused, and what went wrong."""
    refused, wrong = 0, list[str]()

    def once(writer: Writer, folder: Path, value: float) -> None:
        try:
            (writer.once or writer.write)(folder, value)
        except FakeQuantError:
            os._exit(7)

    for kind in ("checkpoint", "deliver", "improve_folder", "advise"):
        for number in range(count):
            with tempfile.TemporaryDirectory() as name:
                folder, writer = Path(name), WRITERS[kind]
                if number % 2:
                    writer.write(folder, 3.0)
                act = partial(once, writer, folder)
                both = [forked(partial(act, value)) for value in (1.0, 2.0)]
                codes = [os.WEXITSTATUS(os.waitpid(child, 0)[1]) for child in both]
                refused += codes.count(7)
                wrong += [f"{kind} {number}: ended with {codes}"] if {*codes} - {0, 7} else []
                try:
                    values = writer.read(folder)
                except Exception:
                    wrong.append(f"{kind} {number}: {traceback.format_exc(limit=-2)}")
                else:
                    wrong += [] if len(values) == 1 else [f"{kind} {number}: a mix of {values}"]
    return refused, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--saves", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=10, help="of each kind")
    options = parser.parse_args()
    torch.set_num_threads(1)  # threads do not survive a fork
    reads, wrong = run(options.saves)
    print(f"2 processes x {options.saves} saves, {reads} loads beside them: {len(wrong)} wrong")
    refused, faults = pairs(options.pairs)
    print(f"{4 * options.pairs} pairs of processes, {refused} of them refused: {len(faults)} wrong")
    wrong += faults
    print(*wrong[:10], sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
