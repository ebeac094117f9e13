"""Compare a GPU with the CPU: `python -m tests.gpu`, with src and . on PYTHONPATH, or `make test-gpu`.

Without a GPU it says so in one line and exits with 0; with 1 if a bit differs or a check fails.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from benchmarks.gpu.machine import build_kernels, title, unavailable

_BYTES_OF_A_PROCESS = 5 << 30
# The definition takes about fifty times as long as the kernels.
_ELEMENTS, _ELEMENTS_BY_THE_REFERENCE = 10_000_000, 500_000


def arguments() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser("python -m tests.gpu")
    parser.add_argument("only", nargs="*", metavar="TEXT", help="only what has one of these texts in its line")
    parser.add_argument("--device", default="cuda", help="what is compared with the CPU; cpu tries the program itself")
    parser.add_argument("--elements", type=int, help=f"of the large tensors, by default {_ELEMENTS:,}")
    parser.add_argument("--seconds", type=float, help="start no comparison after this time")
    parser.add_argument(
        "--record", type=Path, help="lines of lists that were equal: those in it come last, new ones join"
    )
    parser.add_argument("--processes", type=int, help="at a time; 0: this one alone; by default as many as fit")
    return parser


def main(given: list[str] | None = None) -> int:
    """Compare, check, print; 1 if anything is wrong."""
    asked = arguments().parse_args(given)
    if asked.device != "cpu" and (reason := unavailable()):
        print(reason)
        return 0
    start = time.monotonic()
    # Before torch meets CUDA: cuBLAS gives the same bits again only with a workspace of its own.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    side = build_kernels()
    print(title(asked.device))
    print(f"small tensors beside the reference, large ones beside {side}", flush=True)
    elements = asked.elements or (_ELEMENTS if side == "the C++ kernels" else _ELEMENTS_BY_THE_REFERENCE)
    wrong = _parity(asked, elements) + _checks(asked)
    print(f"{len(wrong)} wrong, {time.monotonic() - start:.0f} seconds")
    print("\n".join(wrong))
    return int(bool(wrong))


def _chosen(names: Iterable[str], only: list[str]) -> set[str]:
    return {name for name in names if not only or any(text in name for text in only)}


def _parity(asked: argparse.Namespace, elements: int) -> list[str]:
    """Make all comparisons, a line for each task; what is wrong."""
    from tests.gpu import parity

    every = parity.tasks(asked.device, elements)
    chosen = _chosen(map(str, every), asked.only)
    known = set(asked.record.read_text().splitlines()) if asked.record and asked.record.exists() else set[str]()
    every.sort(key=lambda task: str(task) in known)  # what no card has run comes first
    compared, values, wrong = 0, 0, []
    served: Counter[str] = Counter()
    reasons: set[str] = set()
    for task, found in _run([task for task in every if str(task) in chosen], asked):
        compared, values = compared + found.compared, values + found.values
        served, reasons = served + found.served, reasons | found.reasons
        outcome = f"RED  {task}: {len(found.wrong)} of" if found.wrong else f"ok   {task}:"
        print(f"{outcome} {found.compared:,} results, {found.values:,} values, {found.seconds:.1f} s", flush=True)
        print("".join(f"       {line}\n" for line in found.wrong[: parity.TOLD]), end="")
        wrong += [f"RED  {task}: {line}" for line in found.wrong[: parity.TOLD]]
        if asked.record and not found.wrong and str(task) not in known:
            with asked.record.open("a") as file:
                file.write(f"{task}\n")
    by = ", ".join(f"{name} {count:,}" for name, count in served.items())
    print(f"parity: {compared:,} results, {values:,} values; specifications served: {by or 'none'}")
    print("".join(f"       {reason}\n" for reason in sorted(reasons)), end="")
    return wrong


def _run(tasks: list, asked: argparse.Namespace) -> Iterator[tuple]:
    """Tasks with what came of them, in the order in which they are done."""
    import torch

    from tests.gpu import parity

    processes, end = _processes(asked), time.monotonic() + (asked.seconds or float("inf"))
    if not processes or not tasks:
        yield from ((task, parity.run(task)) for task in tasks if time.monotonic() < end)
        return
    threads = max(1, (os.cpu_count() or 1) // processes)
    # Spawned: CUDA does not survive a fork.
    with ProcessPoolExecutor(processes, get_context("spawn"), torch.set_num_threads, (threads,)) as pool:
        running = {pool.submit(parity.run, task): task for task in tasks}
        for done in as_completed(running):
            if not done.cancelled():
                yield running[done], done.result()
            if time.monotonic() > end:
                pool.shutdown(wait=False, cancel_futures=True)


def _processes(asked: argparse.Namespace) -> int:
    if asked.processes is not None:
        return asked.processes
    import torch

    fit = (os.cpu_count() or 1) if asked.device == "cpu" else torch.cuda.mem_get_info()[0] // _BYTES_OF_A_PROCESS
    return max(1, min(os.cpu_count() or 1, int(fit)))


def _checks(asked: argparse.Namespace) -> list[str]:
    """Make all checks, a line for each; what is wrong."""
    from tests.gpu import execution

    wrong = []
    for name in [name for name in execution.CHECKS if name in _chosen(execution.CHECKS, asked.only)]:
        start = time.monotonic()
        outcome, what = execution.tried(name, asked.device)
        line = f"{outcome:<4} {name}: {what}"
        print(f"{line}, {time.monotonic() - start:.1f} s", flush=True)
        if outcome == "RED":
            wrong.append(line)
    return wrong


if __name__ == "__main__":
    raise SystemExit(main())
