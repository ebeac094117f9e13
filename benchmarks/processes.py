"""The runner: cases timed in several fresh processes, one after the other, and what all of them found together.

Where the memory of a process lies decides how fast it is copied, for as long as the process lives: the same call took
1.6 to 3.5 times the copy from one process to the next. The pairs of all processes count alike.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Effort, Result, Timed, measure
from fakequant.files import write_whole

from .cases import LISTS, chosen
from .limits import missed
from .record import ROOT

QUICK = Effort(0.2)
# Name, direction, specification, elements and dtype of a case.
Key = tuple[str, str, str, int, str]


@dataclass(frozen=True)
class Plan:
    """What to time and for how long.

    Args:
        cases: the name of a list in `cases.LISTS`.
        only: texts, of which a case has one in its name, its direction or what it is timed beside; () for all.
        processes: how many, one after the other.
        effort: for each pair in each process.
        red: the cases that differed from the reference in the first process, and in how many elements.
    """

    cases: str = "everything"
    only: tuple[str, ...] = ()
    processes: int = 3
    effort: Effort = QUICK
    red: tuple[tuple[Key, int], ...] = ()

    def entries(self, process: int) -> list[tuple[Timed, tuple[str, ...]]]:
        """The cases of one process, each with what it is compared with there."""
        every = [(entry.case, entry.of_process(process)) for entry in LISTS[self.cases]()]
        found = [(case, chosen(case, against, self.only)) for case, against in every]
        return [(case, against) for case, against in found if against]


def run(plan: Plan, measure_process: Callable[[Plan, int], list[Result]] | None = None) -> list[Result]:
    """The results of all processes.

    Args:
        plan: what to time.
        measure_process: what one process finds, by its number; by default, a fresh one.

    Raises:
        CalledProcessError: one of the processes failed.
    """
    measured = measure_process or _in_a_process
    first = measured(plan, 0)
    red = {(r.case, r.direction, r.spec, r.elements, r.dtype): r.differing for r in first if r.differing}
    plan = replace(plan, red=tuple(red.items()))
    return together([first, *(measured(plan, number) for number in range(1, plan.processes))])


def together(runs: Iterable[Iterable[Result]]) -> list[Result]:
    """The pairs of several processes as one result each; a case that differed in one of them has no time."""
    found: dict[Result, Result] = {}
    for results in runs:
        for result in results:
            key = replace(result, outcome="", differing=0, pairs=(), facts=None)
            before = found.get(key, replace(result, pairs=()))
            if before.differing or result.differing:
                found[key] = max(before, result, key=lambda one: one.differing)
            else:
                found[key] = replace(before, pairs=before.pairs + result.pairs)
    return list(found.values())


def measured_here(plan: Plan, number: int) -> list[Result]:
    """The results of this process, printed as they come.

    Results are compared with the reference in the first process only, and once where several libraries are timed beside
    the same call: bits do not depend on either.
    """
    torch.manual_seed(0)
    results, red = [], dict(plan.red)
    for case, against in plan.entries(number):
        key = case.name, case.direction, case.text, case.elements, case.dtype_name
        if number == 0 and key not in red:
            red[key] = case.differing()
        differing = red.get(key, 0)
        for result in measure(case, against, plan.effort, lambda _, differing=differing: differing):
            results.append(result)
            print(f"{number + 1}/{plan.processes} {as_text(result)}", flush=True)
    return results


def as_text(result: Result) -> str:
    """A result in one line."""
    what = f"{result.case}, {result.direction}, {result.elements:,} {result.dtype} over {result.against}"
    found = result.ratio
    if found is None:
        return f"{what}: {result.outcome}"
    times = f"{found.p50:.3g} ({found.p20:.3g} to {found.p80:.3g}), {1e3 * found.seconds:.3g} ms"
    return f"{what}: {times} {missed(result)}".rstrip()


def _in_a_process(plan: Plan, number: int) -> list[Result]:
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder, "plan.json"), Path(folder, "results.json")
        given.write_text(json.dumps(asdict(plan) | {"number": number}))
        subprocess.run([sys.executable, "-m", "benchmarks.processes", given, found], cwd=ROOT, check=True)
        return [from_dict(result) for result in json.loads(found.read_text())]


def from_dict(values: dict[str, Any]) -> Result:
    """A result from what `dataclasses.asdict` made of it."""
    return Result(**values | {"pairs": tuple((ours, theirs) for ours, theirs in values["pairs"])})


def main() -> None:
    """Measure what the file named first says, and write the file named second."""
    given, found = (Path(argument) for argument in sys.argv[1:])
    values = json.loads(given.read_text())
    number, effort = values.pop("number"), Effort(**values.pop("effort"))
    red = tuple((tuple(key), differing) for key, differing in values.pop("red"))
    plan = Plan(**values | {"only": tuple(values["only"]), "effort": effort, "red": red})
    results = measured_here(plan, number)
    write_whole(found, json.dumps([asdict(result) for result in results]).encode())


if __name__ == "__main__":
    main()
