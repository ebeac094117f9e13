"""The kernels compare what they are told with what they get: arguments that lie raise an error and crash nothing."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fakequant.ops.cpu.backend import load_kernels
from tests.support.lying_calls import CHANNELS, form, lying_calls

pytestmark = pytest.mark.skipif(load_kernels() is not None, reason="the kernels are not built here")

# Each lie by itself, so that the one that crashes is known; in another process, which it may take with it.
SCRIPT = """
from tests.support.lying_calls import lying_calls
from fakequant.ops.cpu.backend import load_kernels

assert load_kernels() is None
for name, call in lying_calls():
    print(name, flush=True)
    try:
        call()
    except (RuntimeError, IndexError, NotImplementedError):
        continue
    print("TAKEN", flush=True)
print("END")
"""


def test_lying_arguments_raise():
    paths = [str(Path(__file__).parents[2]), *sys.path]
    code = f"import sys; sys.path[:0] = {paths!r}\n{SCRIPT}"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    lines = found.stdout.splitlines()
    assert found.returncode == 0, f"crashed at {lines[-1:]}: {found.returncode} {found.stderr[-500:]}"
    taken = [lines[i - 1] for i, line in enumerate(lines) if line == "TAKEN"]
    assert not taken
    assert lines[-1] == "END"
    assert len(lines) > 500


def test_the_message_names_the_tiles():
    x = torch.randn(4)
    with pytest.raises(RuntimeError, match=r"tiles \[2000, 2000, 2000, 2000\] do not fill a tensor of 4 elements"):
        torch.ops.fakequant_cpu.checked(x, torch.ones(1), None, form((2000.0,) * 4))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_tensors_without_gaps_are_taken_in_any_order_of_axes(order):
    x = torch.randn(2, 4, 5).permute(order)
    y = torch.ops.fakequant_cpu.checked(x, torch.ones(1), None, form())
    assert torch.equal(y, x.round())
    assert y.stride() == x.stride()


def test_right_forms_are_taken():
    x = torch.randn(4, 10)
    y = torch.ops.fakequant_cpu.checked(x, torch.full((4,), 0.5), torch.zeros(4, dtype=torch.int32), form(CHANNELS))
    assert torch.equal(y, (x / 0.5).round() * 0.5)
    empty = torch.ops.fakequant_cpu.checked(x[:0], torch.ones(1), None, form((1.0, 0.0, 1.0, 1.0)))
    assert empty.shape == (0, 10)


def test_the_calls_cover_every_kernel():
    named = {name.split(":")[0] for name, _ in lying_calls()}
    kernels = {
        name.removeprefix("fakequant_cpu::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("fakequant_cpu::")
    }
    skipped = set() if torch.ops.fakequant_cpu.convolves() else {"convolve"}  # refuses such a processor before it reads
    # These take only numbers, and any will do; or are faults on purpose, of `make sanitize`.
    assert kernels - named <= {"limit_lanes", "stream_from", "convolves", "fault_address", "fault_undefined"} | skipped
