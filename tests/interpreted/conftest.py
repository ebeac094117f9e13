"""What holds for every test in triton's interpreter, which has to be chosen before triton is imported."""

import os

import pytest
import torch

assert os.environ.get("TRITON_INTERPRET") == "1", "start with TRITON_INTERPRET=1, or run tests/ops/test_triton.py"


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """torch.empty gives NaN, or the largest integer, so that an element that no kernel wrote is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
