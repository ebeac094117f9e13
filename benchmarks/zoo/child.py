"""The steps of one architecture in this process: `python -m benchmarks.zoo.child NAME LETTERS`.

Prints one line of JSON for each step. A step that never ends, or that ends the process, costs only itself: the parent
starts another process for the rest.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import warnings
from typing import Any

import torch

from .architectures import ARCHITECTURES
from .case import Case
from .steps import STEPS, NotForThisError

OK, OURS, FLOAT_TOO, NOT_RUN = "+", "X", "f", "."


def run_step(case: Case, letter: str) -> dict[str, Any]:
    """What one step came to: its cell, seconds of processor time, and its note or error."""
    step, begin = STEPS[letter], time.process_time()
    found: dict[str, Any] = {"step": letter}
    note = None
    try:
        note = step.run(case)
    except NotForThisError:
        found["cell"] = NOT_RUN
    except Exception as error:  # whatever a model raises is what is recorded
        case.forget()
        found |= {"cell": OURS if _works_in_float(case, letter) else FLOAT_TOO, "error": first_line(error)}
        note = getattr(error, "note", None)
    else:
        found["cell"] = OK
    if note:
        found["note"] = note
    if step.changes:
        case.forget()
    return found | {"seconds": round(time.process_time() - begin, 1)}


def _works_in_float(case: Case, letter: str) -> bool:
    in_float = STEPS[letter].in_float
    if in_float is None:
        return True
    try:
        in_float(case)
    except Exception:  # as above
        return False
    return True


def first_line(error: BaseException) -> str:
    """The class of an error and the first line of its text, or two where that ends in ":"; at most 300 characters.

    Without colours, and without the folders of temporary files, which are others in every run.
    """
    plain = re.sub(r"\x1b\[[0-9;]*m|\S*/tmp\w+/", "", str(error))
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return f"{type(error).__name__}: {text}"[:300]


def main() -> None:
    """Run the steps that the arguments name."""
    name, letters = sys.argv[1:]
    lines = os.fdopen(os.dup(1), "w")  # what models print goes to the other stream
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    case = Case(ARCHITECTURES[name])
    for letter in letters:
        print(json.dumps(run_step(case, letter)), file=lines, flush=True)


if __name__ == "__main__":
    main()
