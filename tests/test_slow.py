"""The list of slow tests."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.slow import TimeLimit, mark_slow, slow_functions

ROOT = Path(__file__).parents[1]


def test_the_list_names_tests_that_exist() -> None:
    gone = []
    for name in slow_functions():
        path, _, test = name.partition("::")
        text = (ROOT / path).read_text() if (ROOT / path).exists() else ""
        is_text = not test.startswith(("test", "Test")) and bool(text)  # examples in docs and docstrings
        if not is_text and not re.search(rf"def {test.rpartition('::')[2]}\(", text):
            gone.append(name)
    assert gone == []


class Item(SimpleNamespace):
    """A collected test, as far as it is asked for here."""

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.name)


def items(name: str, count: int) -> list[Any]:
    path, _, test = name.partition("::")
    return [Item(path=ROOT / path, nodeid=f"{path}::{test}[{number}]", marks=[]) for number in range(count)]


def test_the_first_cases_of_a_slow_function_always_run() -> None:
    name, kept = next((name, kept) for name, kept in slow_functions().items() if kept)
    slow, quick = items(name, kept + 2), items("tests/test_slow.py::test_of_no_list", 2)
    mark_slow([*slow, *quick], ROOT)
    assert [item.marks for item in slow] == [[]] * kept + [["slow"]] * 2
    assert [item.marks for item in quick] == [[], []]


def test_files_come_in_an_order_of_the_word_and_stop_with_the_time() -> None:
    found = [item for number in range(8) for item in items(f"tests/test_{number}.py::test", 2)]
    orders = []
    for word in ("one", "other", "one"):
        listed = [*found]
        TimeLimit(9.0, word).pytest_collection_modifyitems(listed)
        orders.append([item.nodeid for item in listed])
    assert orders[0] == orders[2] != orders[1]
    assert {*orders[0]} == {*orders[1]}
    TimeLimit(9.0, "").pytest_runtest_setup()
    with pytest.raises(pytest.skip.Exception, match="the -0 seconds for slow tests are over"):
        TimeLimit(-0.1, "").pytest_runtest_setup()
