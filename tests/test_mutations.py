"""The list of mutations: a change of the sources that makes an entry stale fails here, not a day later by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENTRIES = (ROOT / "tests" / "native" / "mutations.txt").read_text().strip().split("\n\n")[1:]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.splitlines()[0])
def test_the_text_of_a_mutation_stands_once_and_its_tests_exist(entry: str) -> None:
    _, file, old, _, tests = entry.splitlines()
    assert (ROOT / "src" / "fakequant" / file).read_text().count(old[1:]) == 1
    assert all((ROOT / name.partition("::")[0]).is_file() for name in tests.split())
