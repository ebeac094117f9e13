"""The tutorials: their blocks run in order, and print what the pages show."""

from pathlib import Path

import pytest
import torch

from tests.support import pages
from tests.support.vision import import_torchvision

DOCS = Path(__file__).parents[1] / "docs"
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
NEEDS = {
    "cnn": ("sklearn", "onnxruntime"),
    "delivery": ("gguf", "compressed_tensors", "transformers"),
    "encoder": ("transformers", "onnxruntime"),
    "trainer": ("transformers",),
}


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_prints_what_it_shows(page, tmp_path, monkeypatch):
    for package in NEEDS.get(page.stem, ()):
        pytest.importorskip(package)
    if "transformers" in NEEDS.get(page.stem, ()):
        import_torchvision()
    monkeypatch.chdir(tmp_path)
    names = pages.started()
    for block in pages.blocks(page.read_text()):
        found = pages.printed(block.code, names, page, block.line)
        assert pages.alike(found, block.expected), f"{page.name}:{block.line} prints\n{found}"


def test_there_are_six_and_each_shows_figures():
    assert len(TUTORIALS) == 6
    for page in TUTORIALS:
        assert sum(bool(block.expected) for block in pages.blocks(page.read_text())) >= 3, page.name


@pytest.mark.parametrize(
    ("found", "same"),
    [("a 1.00 b 3", True), ("a 1.09 b 3", True), ("a 1.12 b 3", False), ("a 1.0 b 4", False), ("c 1.0 b 3", False)],
)
def test_figures_are_compared_with_a_margin_and_all_else_exactly(found, same):
    assert pages.alike(found, "a 1.00 b 3") is same
