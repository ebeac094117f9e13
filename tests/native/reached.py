"""A plugin of pytest for mutants.py: the marks of the sources that each test reaches, and the seconds of the test.

Marks that imports reach before the first test stand beside the name `IMPORTED`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

reached = set[str]()
add = reached.add
IMPORTED = ""
tests: dict[str, tuple[float, list[str]]] = {}


def pytest_runtest_logstart() -> None:
    tests.setdefault(IMPORTED, (0.0, sorted(reached)))
    reached.clear()


def pytest_runtest_logreport(report) -> None:
    seconds, places = tests.get(report.nodeid, (0.0, []))
    tests[report.nodeid] = seconds + report.duration, sorted(reached.union(places))


def pytest_sessionfinish() -> None:
    # The controller of pytest-xdist hears of all tests, and runs none.
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        (Path(os.environ["REACHED"]) / f"reached-{worker}.json").write_text(json.dumps(tests))
