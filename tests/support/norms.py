"""Batch normalisations as other libraries write them."""

import torch
from torch import Tensor, nn


class NormAct(nn.BatchNorm2d):
    """As timm's `BatchNormAct2d`: a normalisation, a dropout and an activation in one module."""

    def __init__(self, channels: int, act: nn.Module) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), act

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )
        return self.act(self.drop(x))


class FrozenNorm(nn.Module):
    """As in detectors: statistics and affine parameters in buffers."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.eps = 1e-5
        for name in ("weight", "running_var"):
            self.register_buffer(name, torch.rand(channels) + 0.5)
        for name in ("bias", "running_mean"):
            self.register_buffer(name, torch.randn(channels))

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self.weight * (self.running_var + self.eps).rsqrt(), self.running_mean
        return (x - shift.view(1, -1, 1, 1)) * scale.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)


class FrozenNormAct(FrozenNorm):
    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))
