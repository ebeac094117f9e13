"""What small calls cost: they stay on the thread that makes them. The kernels divide at 32 chunks of 1024 elements."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import fakequant as fq
from tests.support.lattices import LATTICES
from tests.support.plan_cases import needs_kernels

TASKS, SPENT = Path("/proc/self/task"), Path("/proc/self/schedstat")
GRAIN = 32 * 1024
NVFP4 = "float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn@per_tensor"
# Specification, dtype, and the gradients that are computed.
CALLS = [
    ("int8", torch.float32, ""),
    ("int8", torch.bfloat16, ""),
    ("int8", torch.float32, "x"),
    ("int8", torch.float32, "x, scale"),
    ("int8 per_channel(0)", torch.float32, "x"),
    ("int8 per_channel(0)", torch.float32, "x, scale"),
    ("float8_e4m3fn", torch.float16, "x"),
]
# The same with scales from the input.
DYNAMIC = [
    ("int8", torch.float32, "x"),
    ("int8 per_token", torch.float32, "x"),
    ("int8 per_channel(1)", torch.float32, "x"),
    ("int4 per_block(-1:32)", torch.bfloat16, "x"),
    ("float4_e2m1fn per_block(-1:32) scale=float8_e8m0fnu:floor", torch.float32, "x"),
    (NVFP4, torch.float32, "x"),
    (LATTICES["Q4_K"], torch.float32, "x"),
]


def times():
    """Nanoseconds that each other thread of this process has run, as soon as none of them runs any more."""
    found: dict[str, int] = {}
    for _ in range(500):
        before = found
        found = {task.name: int((task / SPENT.name).read_text().split()[0]) for task in TASKS.iterdir()}
        del found[str(_own())]
        if found == before:
            return found
        time.sleep(0.02)
    raise RuntimeError(f"threads run without an end: {found}")


def _own():
    return Path("/proc/thread-self").resolve().name


def prepared(text, dtype, gradients, elements, dynamic):
    """The call, and what it needs made beforehand: torch too divides what it fills."""
    spec, shape = fq.QuantSpec.parse(text), (elements // 1024, 1024)
    x, dy = torch.randn(shape).to(dtype), torch.ones(shape, dtype=dtype)
    scale = None if dynamic else torch.full(spec.granularity.group_shape(shape), 0.02)
    leaves = [leaf for name, leaf in (("x", x), ("scale", scale)) if name in gradients.split(", ") and leaf is not None]
    for leaf in leaves:
        leaf.requires_grad_()

    def call():
        y = fq.fake_quantize(x, spec, scale=scale)
        if leaves:
            torch.autograd.grad(y, leaves, dy)

    return call


def other_threads(call):
    before = times()
    call()
    return sum(spent != before.get(name) for name, spent in times().items())


def report():
    """For every call: other threads at the largest size that is not divided, and at four times as much."""
    torch.set_num_threads(2)
    found = []
    for dynamic, calls in ((False, CALLS), (True, DYNAMIC)):
        for text, dtype, gradients in calls:
            sizes = (GRAIN, 4 * GRAIN)
            busy = [other_threads(prepared(text, dtype, gradients, size, dynamic)) for size in sizes]
            found.append([f"{text} {dtype} {gradients} {dynamic}", *busy])
    one_more = prepared("int8", torch.float32, "", GRAIN + 1024, dynamic=False)
    return [*found, ["one chunk more", 0, other_threads(one_more)]]


@needs_kernels
@pytest.mark.skipif(not SPENT.exists(), reason=f"no {SPENT}, by which each thread says for how long it has run")
def test_what_fits_in_the_grain_stays_on_one_thread_and_more_does_not():
    # In a process of its own, whose other threads are those of torch's pool alone.
    done = subprocess.run([sys.executable, "-m", __name__], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == len(CALLS) + len(DYNAMIC) + 1
    assert [row for row in found if row[1:] != [0, 1]] == []


if __name__ == "__main__":
    print(json.dumps(report()))
