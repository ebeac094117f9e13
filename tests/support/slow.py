"""The slow tests: `make test` runs the first cases, `make test-all` all, and CI as many as its time allows.

`tests/slow.txt` has a line for each slow test function: how many of its first cases `make test` runs, and its name.
"""

import time
from collections import Counter
from hashlib import sha256
from pathlib import Path

import pytest

LIST = Path(__file__).parents[1] / "slow.txt"


def slow_functions() -> dict[str, int]:
    lines = (line.split(maxsplit=1) for line in LIST.read_text().splitlines() if line and not line.startswith("#"))
    return {name: int(count) for count, name in lines}


def mark_slow(items: list[pytest.Item], root: Path) -> None:
    """Mark the cases of slow functions that come after the first ones."""
    kept, seen = slow_functions(), Counter[str]()
    for item in items:
        name = f"{item.path.relative_to(root)}::{item.nodeid.partition('::')[2].partition('[')[0]}"
        if name in kept:
            seen[name] += 1
            if seen[name] > kept[name]:
                item.add_marker(pytest.mark.slow)


class TimeLimit:
    """Runs files in an order that changes with a word, and skips what has not started after a number of seconds."""

    def __init__(self, seconds: float, word: str) -> None:
        self.seconds, self.word, self.end = seconds, word, time.monotonic() + seconds

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: sha256(f"{self.word}{item.path}".encode()).hexdigest())

    def pytest_runtest_setup(self) -> None:
        if time.monotonic() > self.end:
            pytest.skip(f"the {self.seconds:.0f} seconds for slow tests are over; `make test-all` runs all of them")
