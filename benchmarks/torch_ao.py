"""Time of torch.ao's quantizers by `compat.aten` over that by torch: `python -m benchmarks.torch_ao`.

A row for a quantizer alone and one for the training of a model, compared bit for bit first. Exits with 1 if a result
differs, or if a step is not faster than torch's.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.ao import quantization as ao

from fakequant.compat import aten

from .exactness import differing
from .kernels import ratio

ROUNDS = 16

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
class TorchAo:
    """A model with quantizers of torch.ao, a step with it, and the shape of its input."""

    name: str
    model: Callable[[], nn.Module]
    step: Callable[[nn.Module], Callable[[Tensor], None]]
    shape: tuple[int, ...]


TORCH_AO = (
    TorchAo("torch.ao's FakeQuantize, forward and backward", activation_quantizer, gradient, (1 << 22,)),
    TorchAo("training step of separable convolutions", separable_convolutions, training_step, (16, 3, 64, 64)),
)


def trained(row: TorchAo, *, by_us: bool, batches: list[Tensor]) -> list[Tensor]:
    """All tensors of the model after some steps, and the gradients of its inputs."""
    torch.manual_seed(0)
    model = row.model()
    step = row.step(model)
    leaves = [x.clone().requires_grad_() for x in batches]
    with aten.routed() if by_us else nullcontext():
        for leaf in leaves:
            step(leaf)
    return [*model.state_dict().values(), *(leaf.grad + 0.0 for leaf in leaves if leaf.grad is not None)]


def torch_ao() -> bool:
    """Whether models of torch.ao train to the same bits by `compat.aten`, and faster; prints a row for each."""
    good = True
    for row in TORCH_AO:
        batches = [torch.randn(row.shape).requires_grad_() for _ in range(4)]
        tensors = zip(*(trained(row, by_us=by_us, batches=batches) for by_us in (True, False)), strict=True)
        wrong = sum(differing(mine, theirs) for mine, theirs in tensors)
        model = row.model()
        found = ratio(aten.routed()(row.step(model)), row.step(copy.deepcopy(model)), batches, rounds=ROUNDS)
        good &= not wrong and found.median < 1
        print(
            f"{row.name}: torch {found.other_seconds * 1e3:.1f} ms, ours {found.seconds * 1e3:.1f} ms, ratio "
            f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f}), {wrong} differing elements"
        )
    return good


def main() -> int:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return int(not torch_ao())


if __name__ == "__main__":
    sys.exit(main())
