"""What holds for every test: fixed seeds, and one thread per process (tests of threads ask for more themselves)."""

import os
from collections import defaultdict
from pathlib import Path

import pytest
import torch

# Scripts of users, scripts to run by hand, and the tests in triton's interpreter, which tests start as programs.
collect_ignore = ["scripts", "hostile"]
if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore.append("interpreted")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items):
    """What takes minutes first: at the end, one process would work at it while the others wait."""
    items.sort(key=lambda item: item.path.name != "test_triton.py")
    met = defaultdict(dict)  # the values of each parameter of a test, by their identity, and the place of each
    for item in items:
        if marker := item.get_closest_marker("one_in"):
            places = []
            for name, value in item.callspec.params.items():
                values = met[item.path, item.originalname, name]
                places.append(values.setdefault(id(value), len(values)))
            if not runs_always(places, *marker.args):
                item.add_marker(pytest.mark.exhaustive)


def runs_always(places, every):
    """Whether a case of a test marked `one_in(every)` is in every test run; the others are exhaustive.

    By its places in the lists of parameters, so that every two values of three lists meet if the third is as long as
    `every`. Added and subtracted in turn: sums of places choose what the tests themselves take in turn.
    """
    return (sum(places[::2]) - sum(places[1::2])) % every == 0


@pytest.fixture(autouse=True)
def _same_start():
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture
def recipe(tmp_path: Path):
    """Writes a recipe file."""

    def write(text: str, name: str = "tiny.py") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write
