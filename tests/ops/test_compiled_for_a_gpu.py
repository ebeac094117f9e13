"""What Inductor makes of a quantizer for a GPU, which needs no GPU: fused with its neighbours, with the eager bits."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed; it is for Linux")

SPECS = [
    *("int8", "int8 per_channel(0)", "uint8 per_token asymmetric", "int8 per_channel(1) reciprocal"),
    *("int8 per_tensor input_range", "int8 per_tensor clip", "uint8 per_tensor identity"),
    *("int4 per_block(-1:16) multiplier", "int8 per_tensor multiplier input_range"),
    *("float8_e4m3fn", "float8_e5m2 per_channel(0)", "float8_e4m3fnuz", "float4_e2m1fn per_block(-1:16)"),
]
which = pytest.mark.parametrize("specs", [SPECS[:1], pytest.param(SPECS[1:], marks=pytest.mark.slow)])


def told(specs, interpret):
    variables = {**os.environ, "TRITON_INTERPRET": interpret, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.gpu_code", *specs]
    root = Path(__file__).parents[2]
    found = subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-1000:] + found.stderr[-3000:]
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    assert {line["spec"] for line in lines} == set(specs)
    return lines


@which
def test_a_quantizer_is_part_of_one_exact_kernel_forward_and_one_backward(specs):
    for line in told(specs, interpret="0"):
        masks = ["torch.bool"] * (1 if "identity" in line["spec"] else 2)  # of the ReLU before it, and its own
        assert (line["kernels"], line["saved"], line["inexact"]) == ([1, 1], masks, []), line
        assert line["no_cuda_graph"] == [None, None], line  # torch's own reasons


@which
def test_the_kernels_have_the_bits_of_the_reference(specs):
    for line in told(specs, interpret="1"):
        assert (line["y"], line["dx"]) == (0, 0), line
