"""What holds for every test in triton's interpreter, which has to be chosen before triton is imported."""

import os

import pytest

assert os.environ.get("TRITON_INTERPRET") == "1", "start with TRITON_INTERPRET=1, or run tests/ops/test_triton.py"


@pytest.fixture(autouse=True)
def _poisoned(poisoned_memory):
    """For every test here."""
