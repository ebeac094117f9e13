"""Changes of a model that its state does not hold, and that change what it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

FACTORS = {"module": 1.0}


class Scaled(nn.Module):
    """A model and what a state does not hold: an attribute, a buffer that is not stored, a function, a global value."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.gain, self.names = inner, 1.0, {"factor": 1.0}
        self.function: Callable[[Tensor], Tensor] = torch.sin
        self.register_buffer("shift", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        factor = self.gain * self.names["factor"] * FACTORS["module"]
        return self.inner(self.function(x) * factor + self.shift) * factor


def _other_forward(model: Any) -> None:
    forward = model.forward
    model.forward = lambda x: forward(x).abs()


def _hook(model: Any) -> None:
    model.inner.register_forward_hook(lambda module, args, y: 2 * y)


CHANGES: dict[str, Callable[[Any], object]] = {
    "attribute": lambda model: setattr(model, "gain", 2.0),
    "dict": lambda model: model.names.update(factor=1.0001),
    "buffer": lambda model: model.shift.add_(0.5),
    "function": lambda model: setattr(model, "function", torch.cos),
    "enclosed value": lambda model: setattr(model, "function", (lambda c: lambda x: c * x.sin())(1.5)),
    "forward": _other_forward,
    "hook": _hook,
}
