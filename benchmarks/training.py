"""What fake quantization costs in training: a quantizer module against torch's, a step against the float one."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fakequant as fq
from benchmarks.harness import ATEN, CannotRunError, Function, Prepared
from fakequant.ops import products
from tests.support.exactness import by_int64, by_the_reference, differing

FUSED = "torch.ao FusedMovingAvgObsFakeQuantize"
FLOAT = "the float model"
_STEPS_COMPARED = 2


@dataclass(frozen=True)
class Module:
    """Forward and backward of a calibrated quantizer module, of a tensor so small that Python is what takes time."""

    elements: int = 256
    name: str = "quantizer module, int8 per tensor"
    direction: str = "forward and backward"
    dtype_name: str = "float32"
    text: str = "int8 per_tensor"

    def quantizer(self) -> fq.nn.Quantizer:
        quantizer = fq.nn.Quantizer(self.text)
        quantizer.set_range(fq.Range(torch.tensor([-2.0]), torch.tensor([2.0])))
        return quantizer

    def input(self) -> Tensor:
        return torch.randn(self.elements, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def differing(self) -> int:
        dy, x, quantizer = torch.ones(self.elements), self.input(), self.quantizer()
        y = quantizer(x)
        with by_the_reference():
            expected = quantizer(x)
        (dx,), (right,) = torch.autograd.grad(y, x, dy), torch.autograd.grad(expected, x, dy)
        return differing(y, expected) + differing(dx, right)

    def prepare(self, against: str) -> Prepared:
        others: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
            FUSED: self._fused,
            ATEN: lambda: lambda x: torch.fake_quantize_per_tensor_affine(x, 0.02, 0, -128, 127),
        }
        if against not in others:
            raise CannotRunError(f"{against} has no such module")
        dy = torch.ones(self.elements)

        def with_gradient(function: Callable[[Tensor], Tensor]) -> Function:
            return lambda x: torch.autograd.grad(function(x), x, dy)

        return Prepared(with_gradient(self.quantizer()), with_gradient(others[against]()), [self.input()])

    def _fused(self) -> nn.Module:
        return torch.ao.quantization.FusedMovingAvgObsFakeQuantize(
            observer=torch.ao.quantization.MovingAverageMinMaxObserver,
            quant_min=-128,
            quant_max=127,
            dtype=torch.qint8,
            qscheme=torch.per_tensor_symmetric,
        )


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


@dataclass(frozen=True)
class Step:
    """A step of gradient descent with INT8 weights and activations.

    Args:
        name: of the model.
        make: the float model.
        shape: of a batch.
        compiled: whether both models run under torch.compile.
        execution: of the quantized model, see `fakequant.set_execution`.
        device: where the models are.
    """

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    compiled: bool = False
    execution: str = "simulate"
    device: str = "cpu"
    dtype_name: str = "float32"
    text: str = "INT8"

    @property
    def direction(self) -> str:
        by = "" if self.execution == "simulate" else ", codes multiplied"
        return f"compiled training step{by}" if self.compiled else f"training step{by}"

    @property
    def elements(self) -> int:
        return torch.Size(self.shape).numel()

    def batches(self, count: int = 4) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(self.shape, generator=generator).to(self.device) for _ in range(count)]

    def models(self) -> tuple[nn.Module, nn.Module]:
        """Quantized and calibrated, and in float."""
        torch.manual_seed(0)
        model = self.make().to(self.device)
        quantized = fq.prepare(copy.deepcopy(model), fq.presets.INT8)
        fq.calibrate(quantized, self.batches(), progress=False)
        return fq.set_execution(quantized, self.execution), model

    def differing(self) -> int:
        """Elements of the parameters after some eager steps that differ from those after steps by the reference.

        Both on the same device: in which order it sums products, its libraries decide.
        """
        ours, _ = self.models()
        rights = copy.deepcopy(ours)
        step, right = descent(ours), descent(rights)
        with torch.backends.cudnn.flags(deterministic=True):
            for batch in self.batches(_STEPS_COMPARED):
                step(batch)
                with by_the_reference(), by_int64():
                    right(batch)
        pairs = zip(ours.parameters(), rights.parameters(), strict=True)
        return sum(differing(mine.detach(), other.detach()) for mine, other in pairs)

    def prepare(self, against: str) -> Prepared:
        if against != FLOAT:
            raise CannotRunError(f"{against} has no such step")
        if self.execution != "simulate" and (reason := products.linear_unavailable(torch.device(self.device).type)):
            raise CannotRunError(reason)
        torch.compiler.reset()
        quantized, plain = (descent(model, compiled=self.compiled) for model in self.models())
        batches = self.batches()
        for step in (quantized, plain):
            step(batches[0])  # where it compiles, which is not what is timed
        return Prepared(quantized, plain, batches)


@dataclass(frozen=True)
class Evaluation(Step):
    """A forward pass without gradients."""

    @property
    def direction(self) -> str:
        return "evaluation" if self.execution == "simulate" else "evaluation, codes multiplied"

    def differing(self) -> int:
        """Elements of the outputs that differ from those of the reference."""
        ours, _ = self.models()
        rights, total = copy.deepcopy(ours), 0
        with torch.no_grad():
            for batch in self.batches():
                y = ours(batch)
                with by_the_reference(), by_int64():
                    total += differing(y, rights(batch))
        return total

    def prepare(self, against: str) -> Prepared:
        if against != FLOAT:
            raise CannotRunError(f"{against} has no such layers")
        quantized, plain = (evaluation(model) for model in self.models())
        return Prepared(quantized, plain, self.batches())


def evaluation(model: nn.Module) -> Function:
    """A forward pass of a batch without gradients, one of many: weights are quantized with the first."""
    model.eval()
    held = contextlib.ExitStack()  # for as long as the function is
    held.enter_context(fq.nn.cached_weights(model))

    def run(x: Tensor, held: contextlib.ExitStack = held) -> Tensor:
        with torch.no_grad():
            return model(x)

    return run


def descent(model: nn.Module, *, compiled: bool = False) -> Function:
    """One step of gradient descent on a batch."""
    optimizer = torch.optim.SGD(model.train().parameters(), lr=1e-4)
    forward: Any = torch.compile(model) if compiled else model

    def run(x: Tensor) -> None:
        optimizer.zero_grad()
        forward(x).square().mean().backward()
        optimizer.step()

    return run


MODULE = Module()
CNN = Step("CNN of 6 convolutions, 32 images", convolutions, (32, 3, 32, 32))
BLOCK = Step("transformer's block, 512 tokens", Block, (512, 384))
_CODES = "auto"
LINEAR_BY_CODES = Evaluation("Linear 384 to 1536, 512 rows", lambda: nn.Linear(384, 1536), (512, 384), execution=_CODES)
CONVOLUTION_BY_CODES = Evaluation(
    "3x3 convolution, 64 to 64 channels, 32 images 16x16",
    lambda: nn.Conv2d(64, 64, 3, padding=1),
    (32, 64, 16, 16),
    execution=_CODES,
)
EVALUATIONS_BY_CODES = tuple(Evaluation(step.name, step.make, step.shape, execution=_CODES) for step in (CNN, BLOCK))
