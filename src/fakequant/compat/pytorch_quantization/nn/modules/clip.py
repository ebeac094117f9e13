"""Clipping as a module, with bounds that are learned or fixed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fakequant.compat.pytorch_quantization.nn import functional
from fakequant.nn.learned import PreciseModule

__all__ = ["Clip"]


class Clip(PreciseModule):
    """Clips to between two bounds; the learned ones are parameters, the others buffers.

    Args:
        clip_value_min: the lower bound, a number or an array.
        clip_value_max: the upper bound.
        learn_min: whether the lower bound is learned, which needs one number.
        learn_max: whether the upper bound is.

    Raises:
        ValueError: a bound to learn that is not one number.

    >>> Clip(-1.0, 2.0)(torch.tensor([-3.0, 0.5, 3.0]))
    tensor([-1.0000,  0.5000,  2.0000])
    """

    clip_value_min: Tensor
    clip_value_max: Tensor

    def __init__(
        self, clip_value_min: Any, clip_value_max: Any, learn_min: bool = False, learn_max: bool = False
    ) -> None:
        super().__init__()
        bounds = {"clip_value_min": (clip_value_min, learn_min), "clip_value_max": (clip_value_max, learn_max)}
        for name, (value, learned) in bounds.items():
            bound = torch.as_tensor(value, dtype=torch.float32).clone()
            if not learned:
                self.register_buffer(name, bound)
            elif bound.numel() != 1:
                raise ValueError(f"{name} must be scalar to be learned, got shape {list(bound.shape)}; give one number")
            else:
                self.register_parameter(name, nn.Parameter(bound))

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.clip(inputs, self.clip_value_min, self.clip_value_max)
