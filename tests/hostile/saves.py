"""Save to one folder by two processes at once while a third loads from it; run by hand.

    python tests/hostile/saves.py [--saves 200]

Of checkpoints and of graphs. Every load must give one of the models that were saved. Prints one line, and what went
wrong; exits 1 if anything did.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--saves", type=int, default=200)
    saves = parser.parse_args().saves
    torch.set_num_threads(1)  # threads do not survive a fork
    reads, wrong = run(saves)
    print(f"2 processes x {saves} saves, {reads} loads beside them: {len(wrong)} wrong")
    print(*wrong[:10], sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
