"""What holds for every test: fixed seeds, and one thread per process (tests of threads ask for more themselves)."""

import gc
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.support.torchlib import spare_exports
from tests.support.vision import import_torchvision

# transformers and peft import it. Where that fails, as beside another torch, `importorskip` skips their tests silently.
if find_spec("torchvision") is not None:
    import_torchvision()

# Without a device, `torch.manual_seed` notes the stack for each kind of device, 2 of 10 ms of a small test.
SEED = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed

# Scripts of users, and scripts to run by hand.
collect_ignore = ["scripts", "hostile"]


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items):
    """What takes minutes first: at the end, one process would work at it while the others wait."""
    items.sort(key=lambda item: item.path.name != "test_triton.py")


def pytest_collection_finish():
    """Keep modules and tests out of garbage collections, which trainers and compilers ask for: 0.5 s each otherwise."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()  # else libraries that count their objects at exit say that these leaked


@pytest.fixture(autouse=True)
def _same_start():
    spare_exports()
    SEED(0)
    torch.set_num_threads(1)


@pytest.fixture
def poisoned_memory():
    """torch.empty gives NaN, or the largest integer, so that an element that no kernel wrote is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def recipe(tmp_path: Path):
    """Writes a recipe file."""

    def write(text: str, name: str = "tiny.py") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write
