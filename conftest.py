"""Names that each example of a docstring may use; pages import what they use, as they run where they are pasted."""

from importlib.util import find_spec

import pytest
import torch
from _pytest.doctest import DoctestItem

import fakequant
from fakequant.numerics import formats

pytest.register_assert_rewrite("tests.support")  # before the first of them is imported

from tests.support.processor import avoid_broken_amx  # noqa: E402
from tests.support.slow import TimeLimit, mark_slow  # noqa: E402
from tests.support.vision import import_torchvision  # noqa: E402

NAMES = {
    **{name: value for name, value in vars(formats).items() if name.isupper()},
    **{name: getattr(fakequant, name) for name in fakequant.__all__},
    "torch": torch,
    "fq": fakequant,
}

collect_ignore = [
    "docs/site/examples.py",  # a part of mkdocstrings, which `make site` alone installs
    *("src/fakequant/presets.py", "src/fakequant/qat.py"),  # second names of modules, whose examples run there
]
if not find_spec("lightning"):
    collect_ignore.append("src/fakequant/integrations/lightning.py")

LIMITED = avoid_broken_amx()  # before torch's first product, and inherited by the processes that tests start


def pytest_report_header() -> str | None:
    """What a run leaves out of the processor."""
    return LIMITED


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--seconds 300 --order WORD` runs files in an order that changes with the word, and stops after that time."""
    parser.addoption("--seconds", type=float, help="skip tests that have not started after this time")
    parser.addoption("--order", default="", help="a word, such as a commit, that changes the order of files")


def pytest_configure(config: pytest.Config) -> None:
    """Limit the time where it is asked for."""
    if config.getoption("--seconds") is not None:
        config.pluginmanager.register(TimeLimit(config.getoption("--seconds"), config.getoption("--order")))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the slow tests."""
    mark_slow(items, config.rootpath)  # before -m chooses


@pytest.fixture(autouse=True)
def _examples(request: pytest.FixtureRequest) -> None:
    """Run examples in an empty folder; those of docstrings with one seed, torch, fq, public names and named formats.

    What the module itself defines stays the module's.
    """
    if isinstance(request.node, DoctestItem):
        request.getfixturevalue("monkeypatch").chdir(request.getfixturevalue("tmp_path"))
        if {"transformers", "delivery", "engines"} & {request.node.path.stem, *request.node.path.parts}:
            import_torchvision()
        if request.node.path.suffix == ".md":
            torch.seed()  # a page sets the seed that its numbers need
            return
        torch.manual_seed(0)  # else an example's numbers depend on the tests before it
        for name, value in NAMES.items():
            request.node.dtest.globs.setdefault(name, value)
