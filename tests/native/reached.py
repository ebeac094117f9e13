"""A plugin of pytest for mutants.py: the marks of the sources that each test reaches, and the seconds of the test."""

from __future__ import annotations

import json
import os
from pathlib import Path

reached = set[str]()
add = reached.add
tests: dict[str, tuple[float, list[str]]] = {}


def pytest_runtest_logstart() -> None:
    reached.clear()


def pytest_runtest_logreport(report) -> None:
    seconds, places = tests.get(report.nodeid, (0.0, []))
    tests[report.nodeid] = seconds + report.duration, sorted(reached.union(places))


def pytest_sessionfinish() -> None:
    # The controller of pytest-xdist hears of all tests, and runs none.
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        (Path(os.environ["REACHED"]) / f"reached-{worker}.json").write_text(json.dumps(tests))
