"""What quantizers cost in compiled models and in small calls on a GPU, without one: `python -m benchmarks.compiled`.

All times are process time of one thread, the least of several rounds. Compiled code of GPUs is that of
`tests/support/gpu_code.py`, which needs no GPU; a driver that starts nothing stands in for one in the last rows.
"""

from __future__ import annotations

import copy
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fakequant as fq
from benchmarks.training import Block as Mlp
from benchmarks.training import convolutions, descent
from examples.demo.text import Block
from fakequant.numerics import division

_ROUNDS, _SECONDS = 15, 0.2


def least(*functions: Callable[[], object]) -> list[float]:
    """The seconds of one call of each, timed in turn."""
    counts = []
    for function in functions:
        function()  # compiles
        started = time.process_time()
        for _ in range(5):
            function()
        counts.append(max(1, round(5 * _SECONDS / max(time.process_time() - started, 1e-6))))
    found = [float("inf")] * len(functions)
    for _ in range(_ROUNDS):
        for place, (function, count) in enumerate(zip(functions, counts, strict=True)):
            started = time.process_time()
            for _ in range(count):
                function()
            found[place] = min(found[place], (time.process_time() - started) / count)
    return found


def models(make: Callable[[], nn.Module], x: Tensor) -> tuple[nn.Module, nn.Module]:
    """With INT8 weights and activations, calibrated, and in float."""
    torch.manual_seed(0)
    model = make()
    quantized = fq.prepare(copy.deepcopy(model), "INT8")
    fq.calibrate(quantized, [x], progress=False)
    return quantized, model


def gradient_of(function: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> Callable[[], object]:
    """Forward and backward, without an optimizer."""
    parameters = list(model.parameters())
    return lambda: torch.autograd.grad(function(x).sum(), parameters)


def small_block() -> None:
    """A block of a transformer with 12 quantizers, so small that launches and Python are what takes time."""
    x = torch.randn(1, 8, 32)
    quantized, plain = models(lambda: Block(32, 4), x)
    compiled: Any = torch.compile(quantized)
    before, division.approximate_devices = division.approximate_devices, frozenset({"cpu"})
    try:
        as_on_gpus = gradient_of(compiled, quantized, x)
        as_on_gpus()  # compiles
        steps = [gradient_of(one, of, x) for one, of in ((quantized, quantized), (plain, plain))]
        times = least(as_on_gpus, gradient_of(torch.compile(plain), plain, x), *steps)
    finally:
        division.approximate_devices = before
    ours, floats, eager, eager_float = (one * 1e3 for one in times)
    print(f"block of 12 quantizers, compiled as for a GPU: {ours:.3f} ms, float {floats:.3f}: {ours / floats:.2f}")
    print(f"the same in eager mode: {eager:.3f} ms, float {eager_float:.3f}: {eager / eager_float:.2f}")


def network() -> None:
    """Six convolutions on the CPU, as in `benchmarks/limits.py`."""
    x = torch.randn(32, 3, 32, 32)
    steps = [descent(model, compiled=True) for model in models(convolutions, x)]
    ours, floats = (one * 1e3 for one in least(*(lambda step=step: step(x) for step in steps)))
    print(f"training step of 6 convolutions, compiled: {ours:.1f} ms, float {floats:.1f}: {ours / floats:.2f}")


def code_of_gpus() -> None:
    """How many kernels the compiled graphs of a GPU start, and what they hold that a CUDA graph cannot."""
    from tests.support import gpu_code

    gpu_code._pretend()
    for name, make, shape in (("block", Mlp, (64, 384)), ("6 convolutions", convolutions, (2, 3, 32, 32))):
        x = torch.randn(shape)
        counts = []
        for model in models(make, x):
            parts = gpu_code.compiled(model, x)  # fullgraph=True: a graph break is an error
            code = "\n".join(part.code for part in parts)
            starts = [len(re.findall(r"\.run\(.*stream=", part.code)) for part in parts]
            held = len(re.findall(r"empty_strided_cpu\(|device='cpu'", code))
            counts.append((starts, len(re.findall(r"= torch\.ops\.fakequant\.", code)), held))
        (ours, nodes, held), (floats, *_) = counts
        print(
            f"{name} on a GPU: Triton kernels forward and backward {ours}, float {floats}; {nodes} nodes of fakequant"
        )
        print(f"{name} on a GPU: {held} tensors on the CPU")


def starts() -> None:
    """Calls of a quantizer of 4 numbers by Triton's kernels, which are compiled and not started."""
    from triton.runtime import driver

    from fakequant.ops import Backend, dispatch, register_backend
    from fakequant.ops.triton.backend import TritonBackend
    from tests.support.gpu_driver import Gpu

    stand_in: Any = Gpu()
    driver.set_active(stand_in)
    backend: Backend = type("Stubbed", (TritonBackend,), {"name": "stubbed", "unavailable": lambda _: None})("cpu")
    register_backend(backend, before="cpu")
    quantizer = fq.nn.Quantizer("int8")
    quantizer.set_range(fq.Range(torch.tensor([-2.0]), torch.tensor([2.0])))
    x, leaf, dy, scale = torch.randn(4), torch.randn(4, requires_grad=True), torch.ones(4), quantizer.scale
    plan = dispatch.find_plan(x, quantizer.spec, scale)
    assert plan is not None

    class Copy(torch.autograd.Function):
        """What Python's part of autograd takes for a function that computes nothing."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *dy: Tensor) -> Tensor:
            return dy[0].clone() if ctx.saved_tensors else dy[0]

    def aten(x: Tensor) -> Tensor:
        return torch.fake_quantize_per_tensor_affine(x, 0.02, 0, -128, 127)

    times = least(
        lambda: plan.values(x, scale, None, None),
        lambda: quantizer(x),
        lambda: torch.autograd.grad(quantizer(leaf), leaf, dy),
        lambda: aten(x),
        lambda: torch.autograd.grad(aten(leaf), leaf, dy),
        lambda: torch.autograd.grad(Copy.apply(leaf), leaf, dy),
    )
    start, forward, both, *others = (one * 1e6 for one in times)
    print(f"start of a kernel: {start:.1f} us; Quantizer: {forward:.1f}, with backward {both:.1f}")
    print(f"ATen's operator on the CPU: {others[0]:.1f} us, with backward {others[1]:.1f}")
    print(f"a Python function of autograd that copies, with backward: {others[2]:.1f} us")


_PARTS = {one.__name__: one for one in (small_block, network, code_of_gpus, starts)}


def main() -> None:
    """Each part in a process of its own: some put a device in torch's place."""
    torch.set_num_threads(1)
    if sys.argv[1:]:
        _PARTS[sys.argv[1]]()
        return
    for name in _PARTS:
        subprocess.run([sys.executable, "-W", "ignore", "-m", "benchmarks.compiled", name], check=True)


if __name__ == "__main__":
    main()
