"""Clipping as a module, with bounds that are learned or fixed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fakequant.compat.pytorch_quantization.nn import functional
from fakequant.errors import shown
from fakequant.nn.learned import PreciseModule

__all__ = ["Clip"]


class Clip(PreciseModule):
    """Clips to between two bounds; the learned ones are parameters, the others buffers.

    A bound that is a parameter stays that parameter.

    Args:
        clip_value_min: the lower bound, a number, a tensor, a parameter or an array.
        clip_value_max: the upper bound.
        learn_min: whether the lower bound is learned, which needs one number, not a tensor.
        learn_max: whether the upper bound is.

    Raises:
        ValueError: a bound to learn that is not one number.
        TypeError: a bound that is neither a number nor a tensor or an array of numbers.

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
            bound = _numbers(name, value)
            if not learned and isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
            elif not learned:
                self.register_buffer(name, bound)
            elif bound.numel() != 1 or isinstance(value, Tensor):
                # Scripts match this text, "initilizing" included.
                expected = "clip_value_min/clip_value_max must be scalar for initilizing learnable range."
                raise ValueError(f"{expected} {name} is {shown(value)} of shape {list(bound.shape)}; give one number")
            else:
                self.register_parameter(name, nn.Parameter(bound))

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.clip(inputs, self.clip_value_min, self.clip_value_max)


def _numbers(name: str, value: Any) -> Tensor:
    """A copy of the bound in float32."""
    try:
        if isinstance(value, Tensor) and value.is_complex():
            raise TypeError(f"{value.dtype} has no order")
        return torch.as_tensor(value, dtype=torch.float32).clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be a number, or a tensor or an array of numbers, got {value!r}") from error
