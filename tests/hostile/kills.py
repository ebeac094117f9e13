"""Kill processes that write files, at random moments; run by hand.

    python tests/hostile/kills.py [--kills 200] [--kind checkpoint onnx run quantize] [--seed 0]

After every SIGKILL what is there must be one whole generation of files, old or new; a run may also say that it is not
whole. Prints one line, and what went wrong; exits 1 if anything did.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.generations import WRITERS, Writer


def write_for_ever(writer: Writer, folder: Path) -> None:
    """What the process does that will be killed; it never returns."""
    try:
        number = 1
        while True:
            writer.write(folder, float(number % 7))
            number += 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def run(kind: str, kills: int, seed: int) -> list[str]:
    """Kill a number of processes; returns what went wrong."""
    writer, wrong, draw = WRITERS[kind], list[str](), random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = time.monotonic()
        writer.write(folder, 0.0)
        took = time.monotonic() - start
        for number in range(kills):
            child = os.fork()
            if not child:
                write_for_ever(writer, folder)
            time.sleep(draw.uniform(0.0, 2.0 * took))
            os.kill(child, signal.SIGKILL)
            if os.WTERMSIG(os.waitpid(child, 0)[1]) != signal.SIGKILL:
                wrong.append(f"{kind} {number}: the process ended before it was killed")
            try:
                values = writer.read(folder)
            except Exception:
                wrong.append(f"{kind} {number} (seed {seed}): {traceback.format_exc(limit=-2)}")
            else:
                wrong += [] if len(values) == 1 else [f"{kind} {number} (seed {seed}): a mix of {values}"]
        writer.write(folder, 0.5)
        if left := sorted(path.name for path in folder.rglob(".fakequant*")):
            wrong.append(f"{kind}: left behind {', '.join(left)}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="of each kind")
    parser.add_argument("--kind", nargs="+", choices=list(WRITERS), default=list(WRITERS))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # threads do not survive a fork
    wrong = [fault for kind in options.kind for fault in run(kind, options.kills, options.seed)]
    print(f"{options.kills} kills of each of {', '.join(options.kind)}: {len(wrong)} wrong")
    print(*wrong[:10], sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
