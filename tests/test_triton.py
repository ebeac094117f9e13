"""The kernels for GPUs, in triton's interpreter: bit for bit the reference. And what is true of them without a GPU.

The interpreter is chosen when triton is imported, for the whole process, in which torch.compile needs the other triton.
So the tests in `interpreted/` run in processes of their own, whatever runs beside them.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
INTERPRETED = sorted(path.name for path in (TESTS / "interpreted").glob("test_*.py"))
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed; it is for Linux")


def run_interpreted(*options, env=None):
    variables = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", **(env or {})}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *options]
    return subprocess.run(
        command, cwd=TESTS / "interpreted", env=variables, capture_output=True, text=True, check=False
    )


@needs_triton
@pytest.mark.parametrize("name", INTERPRETED)
def test_equals_the_reference(name):
    found = run_interpreted("-m", "not exhaustive", name)
    assert found.returncode == 0, found.stdout[-5000:] + found.stderr[-2000:]
    assert " passed" in found.stdout


@needs_triton
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", INTERPRETED)
def test_equals_the_reference_in_every_combination(name):
    found = run_interpreted("-m", "exhaustive", name)
    # 5: the file has no exhaustive tests.
    assert found.returncode in (0, 5), found.stdout[-5000:] + found.stderr[-2000:]


@needs_triton
def test_a_failure_in_the_interpreter_is_a_failure():
    """Without the interpreter, its tests refuse to run."""
    found = run_interpreted("test_forward.py", env={"TRITON_INTERPRET": "0"})
    assert found.returncode != 0
    assert "start with TRITON_INTERPRET=1" in found.stdout + found.stderr
