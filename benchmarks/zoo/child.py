"""The steps of one architecture in a fork.

A step that never ends, or that ends the process, costs only itself: the parent forks again for the rest.
"""

from __future__ import annotations

import logging
import re
import time
import warnings
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.record import ROOT

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
        found |= {"cell": OURS, "error": first_line(error)}
        if (in_float := _error_in_float(case, letter)) is not None:
            found |= {"cell": FLOAT_TOO, "in float": first_line(in_float)}
        note = getattr(error, "note", None)
    else:
        found["cell"] = OK
    if note:
        found["note"] = note
    if step.changes:
        case.forget()
    return found | {"seconds": round(time.process_time() - begin, 1)}


def _error_in_float(case: Case, letter: str) -> Exception | None:
    """What the same step raises with the float model; None where it works, or always works."""
    in_float = STEPS[letter].in_float
    if in_float is not None:
        try:
            in_float(case)
        except Exception as error:  # as above
            return error
    return None


def first_line(error: BaseException) -> str:
    """The class of an error and the first line of its text, or two where that ends in ":"; at most 300 characters.

    Without colours, and without the folders of the checkout and of temporary files, which differ from run to run.
    """
    plain = re.sub(r"\x1b\[[0-9;]*m|\S*/tmp\w+/", "", str(error).replace(f"{ROOT}/", ""))
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return f"{type(error).__name__}: {text}"[:300]


def run_steps(name: str, letters: str, cells: Connection) -> None:
    """Run the steps, and send the cell of each when it is done."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    case = Case(ARCHITECTURES[name])
    for letter in letters:
        cells.send(run_step(case, letter))
