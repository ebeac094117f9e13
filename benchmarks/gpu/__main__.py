"""Time everything on a GPU: `python -m benchmarks.gpu [TEXT ...]`, or `make bench-gpu`. What is timed: `cases.py`.

All cases are compared with the reference on the CPU first; if a bit differs, that is printed, and no time is. Results
are written to benchmarks/results/gpu.jsonl, whole or not at all, and the table into docs/notes/gpu.md. With a TEXT
only the cases that have it in "name, direction, dtype, elements, other" are timed, and nothing is written unless
`--add` puts these results among the others. `--pages` times nothing and writes the table from the file. Without a GPU
it says so in one line and exits with 0; with 1 if a bit differs or a bar of `limits.py` is missed.
"""

from __future__ import annotations

import argparse
import os

from .machine import unavailable


def arguments() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser("python -m benchmarks.gpu")
    parser.add_argument("only", nargs="*", metavar="TEXT", help="time only the cases with one of these texts")
    parser.add_argument("--add", action="store_true", help="put the results of some cases among the others")
    parser.add_argument("--pages", action="store_true", help="time nothing, write the table from the file")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each pair")
    parser.add_argument("--device", default="cuda", help="where; cpu tries the program itself")
    parser.add_argument("--largest", type=int, help="elements of the large tensors, for a small GPU")
    parser.add_argument("--commit", help="what is measured, where there is no git")
    return parser


def main(given: list[str] | None = None) -> int:
    """Compare, measure, print and write; 1 if a bit differs or a bar is missed."""
    asked = arguments().parse_args(given)
    if not asked.pages and asked.device != "cpu" and (reason := unavailable()):
        print(reason)
        return 0
    # Before torch meets CUDA: cuBLAS gives the same bits again only with a workspace of its own.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Not before torch is known to be there.
    from . import runner

    return runner.run(asked)


if __name__ == "__main__":
    raise SystemExit(main())
