"""What fake quantization costs in training: `python -m benchmarks.training [gradient] [module] [step]`.

* gradient: forward and backward of a tensor over those of `x * 2`, the cheapest differentiable operator.
* module: forward and backward of a calibrated quantizer of 256 elements over those of torch's quantizers.
* step: a training step of a model with INT8 weights and activations over that of the model in float.

Times are taken in turns within one run; exits with 1 if a bar is missed. Bits are compared with the reference first.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import fakequant as fq

from .exactness import differing
from .kernels import Case, Function, Ratio, ratio

SIZES = (1 << 16, 1 << 20, 1 << 22, 1 << 24)
CACHES = 1 << 27  # bytes: buffers of large tensors are together as large, so that each call reads from memory
# The C library's allocator either keeps freed memory or gives it back, by what happened before; then a call pays 1 us
# for every page of 4 KiB that it writes first. Both sides of a ratio are to use memory that is there.
KEPT_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "1000000000", "MALLOC_MMAP_THRESHOLD_": "1000000000"}


@dataclass(frozen=True)
class Row:
    """What was measured, and the most that it may be."""

    name: str
    measured: Ratio
    bar: float


def gradient() -> Iterator[Row]:
    """Forward and backward over those of `x * 2`."""
    for dtype in (torch.float32, torch.bfloat16):
        for granularity in (fq.PerTensor(), fq.PerChannel(0)):
            for elements in SIZES:
                spec = fq.QuantSpec("int8", granularity)
                case = Case("", spec, dtype, (256, elements // 256), backward=True)
                _refuse_wrong(case)
                buffers = 8 if elements < 1 << 20 else max(4, CACHES // (elements * dtype.itemsize))
                inputs = case.inputs(buffers)
                found = ratio(case.run(), _doubled(case), inputs, rounds=max(24, min(400, (1 << 28) // elements)))
                yield Row(f"int8 {granularity}, {elements:,} {str(dtype).removeprefix('torch.')}", found, 1.1)


def _refuse_wrong(case: Case) -> None:
    leaf = case.inputs(1)[0]
    (dx,) = torch.autograd.grad(fq.fake_quantize(leaf, case.spec, scale=case.scale()), leaf, torch.ones_like(leaf))
    scale = case.scale()
    assert scale is not None
    code = torch.round(leaf.detach().float() / scale)
    passes = (code >= case.spec.format.quant_min) & (code <= case.spec.format.quant_max)
    wrong = case.differing() + differing(dx, passes.to(case.dtype))
    assert not wrong, f"{wrong} elements differ from the reference; the time means nothing"


def _doubled(case: Case) -> Function:
    dy = torch.ones(case.shape, dtype=case.dtype)
    return lambda x: torch.autograd.grad(x * 2, x, dy)


def module(elements: int = 256, calls: int = 200) -> Iterator[Row]:
    """A calibrated quantizer over torch's module that observes and quantizes, and over ATen's operator alone."""
    quantizer = fq.nn.Quantizer("int8")
    quantizer.set_range(fq.Range(torch.tensor([-2.0]), torch.tensor([2.0])))
    fused = torch.ao.quantization.FusedMovingAvgObsFakeQuantize(
        observer=torch.ao.quantization.MovingAverageMinMaxObserver,
        quant_min=-128,
        quant_max=127,
        dtype=torch.qint8,
        qscheme=torch.per_tensor_symmetric,
    )
    dy = torch.ones(elements)

    def repeated(function: Callable[[Tensor], Tensor]) -> Function:
        def run(x: Tensor) -> None:
            for _ in range(calls):
                torch.autograd.grad(function(x), x, dy)

        return run

    inputs = [torch.randn(elements).requires_grad_()]
    others: tuple[tuple[str, Callable[[Tensor], Tensor], float], ...] = (
        ("torch.ao's FusedMovingAvgObsFakeQuantize", fused, 1.0),
        ("ATen's operator", lambda x: torch.fake_quantize_per_tensor_affine(x, 0.02, 0, -128, 127), 1.6),
    )
    for name, other, bar in others:
        yield Row(f"quantizer over {name}", ratio(repeated(quantizer), repeated(other), inputs), bar)


class Block(nn.Module):
    """The block of a transformer that has most of its weights, on tokens [512, 384]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(384)
        self.up = nn.Linear(384, 1536)
        self.down = nn.Linear(1536, 384)

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + self.down(nn.functional.gelu(self.up(self.norm(tokens))))


def convolutions() -> nn.Module:
    """Six convolutions for images [3, 32, 32]."""
    layers: list[nn.Module] = []
    for channels, outputs, stride in ((3, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)):
        layers += [nn.Conv2d(channels, outputs, 3, stride, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def step() -> Iterator[Row]:
    """A step of gradient descent with INT8 weights and activations over that in float."""
    models: tuple[tuple[str, Callable[[], nn.Module], tuple[int, ...]], ...] = (
        ("6 convolutions, 32 images", convolutions, (32, 3, 32, 32)),
        ("transformer's block, 512 tokens", Block, (512, 384)),
    )
    for name, make, shape in models:
        torch.manual_seed(0)
        model = make()
        batches = [torch.randn(shape) for _ in range(4)]
        quantized = fq.prepare(copy.deepcopy(model), fq.presets.INT8)
        fq.calibrate(quantized, batches)
        found = ratio(_stepped(quantized), _stepped(model), batches, rounds=100)
        yield Row(f"training step: {name}", found, 1.08)


def _stepped(model: nn.Module) -> Function:
    optimizer = torch.optim.SGD(model.train().parameters(), lr=1e-4)

    def run(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return run


GROUPS: dict[str, Callable[[], Iterator[Row]]] = {"gradient": gradient, "module": module, "step": step}


def main() -> int:
    """Measure the groups that are named, or all; 1 if a bar is missed."""
    if any(os.environ.get(name) is None for name in KEPT_MEMORY):
        os.execve(sys.executable, [sys.executable, "-m", __spec__.name, *sys.argv[1:]], {**os.environ, **KEPT_MEMORY})
    torch.manual_seed(0)
    missed = 0
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"{'case':66} {'ms':>8} {'ratio':>6} {'quartiles':>13} {'bar':>5}")
    for group in sys.argv[1:] or GROUPS:
        for row in GROUPS[group]():
            found = row.measured
            too_slow = found.median > row.bar
            missed += too_slow
            figures = f"{1e3 * found.seconds:8.3f} {found.median:6.2f} {f'{found.low:.2f} - {found.high:.2f}':>13}"
            print(f"{row.name:66} {figures} {row.bar:5g}{' MISSED' if too_slow else ''}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
