"""The list of slow tests."""

import re
from pathlib import Path

from tests.support.slow import slow_functions

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
