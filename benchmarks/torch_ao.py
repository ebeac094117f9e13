"""Models of torch.ao.quantization by `compat.aten` compared with torch's: a quantizer alone, and a training step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.ao import quantization as ao

from benchmarks.harness import CannotRunError, Prepared
from fakequant.compat import aten
from tests.support.exactness import differing

TORCH_AO = "torch.ao"

activation_quantizer = ao.FakeQuantize.with_args(observer=ao.MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
weight_quantizer = ao.FakeQuantize.with_args(
    observer=ao.MovingAveragePerChannelMinMaxObserver,
    quant_min=-128,
    quant_max=127,
    dtype=torch.qint8,
    qscheme=torch.per_channel_symmetric,
)


def separable_convolutions() -> nn.Module:
    """A model that torch.ao has prepared for training, with a FakeQuantize at every weight and activation."""
    layers: list[nn.Module] = [ao.QuantStub(), nn.Conv2d(3, 32, 3, padding=1), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(32, 32, 3, padding=1, groups=32), nn.ReLU(), nn.Conv2d(32, 32, 1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)).train()
    model.qconfig = ao.QConfig(activation_quantizer, weight_quantizer)  # pyright: ignore[reportArgumentType]
    return ao.prepare_qat(model)


def training_step(model: nn.Module) -> Callable[[Tensor], None]:
    """One step of gradient descent on a batch of images."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(images: Tensor) -> None:
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()

    return step


def gradient(quantizer: nn.Module) -> Callable[[Tensor], None]:
    """Forward and backward of a quantizer alone."""
    return lambda x: quantizer(x).sum().backward()


@dataclass(frozen=True)
class Routed:
    """A model with quantizers of torch.ao, a step with it, and the shape of its input."""

    name: str
    direction: str
    model: Callable[[], nn.Module]
    step: Callable[[nn.Module], Callable[[Tensor], None]]
    shape: tuple[int, ...]
    dtype_name: str = "float32"
    text: str = "uint8 and int8 per_channel(0)"

    @property
    def elements(self) -> int:
        return torch.Size(self.shape).numel()

    def batches(self, count: int = 4) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(self.shape, generator=generator).requires_grad_() for _ in range(count)]

    def differing(self) -> int:
        batches = self.batches(2)
        tensors = zip(*(trained(self, by_us=by_us, batches=batches) for by_us in (True, False)), strict=True)
        return sum(differing(mine, theirs) for mine, theirs in tensors)

    def prepare(self, against: str) -> Prepared:
        if against != TORCH_AO:
            raise CannotRunError(f"{against} has no such model")
        torch.manual_seed(0)
        model = self.model()
        ours, theirs = aten.routed()(self.step(model)), self.step(copy.deepcopy(model))
        return Prepared(ours, theirs, self.batches())


_BOTH, _STEP = "forward and backward", "training step"
ROUTED = (
    Routed("torch.ao's FakeQuantize", _BOTH, activation_quantizer, gradient, (1 << 22,)),
    Routed("separable convolutions of torch.ao", _STEP, separable_convolutions, training_step, (16, 3, 64, 64)),
)


def trained(row: Routed, *, by_us: bool, batches: list[Tensor]) -> list[Tensor]:
    """All tensors of the model after some steps, and the gradients of its inputs."""
    torch.manual_seed(0)
    model = row.model()
    step = row.step(model)
    leaves = [x.detach().clone().requires_grad_() for x in batches]
    with aten.routed() if by_us else nullcontext():
        for leaf in leaves:
            step(leaf)
    return [*model.state_dict().values(), *(leaf.grad + 0.0 for leaf in leaves if leaf.grad is not None)]
