"""Sequential in which a quantizer computes the ReLU before it."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fakequant.nn.layers import QuantizedLayer
from fakequant.nn.quantizer import is_hooked
from fakequant.numerics.qparams import runs_eagerly


class QuantSequential(nn.Sequential):
    """Sequential that computes a ReLU and the input quantizer of the next layer in one pass over memory each way.

    Results and gradients have the same bits, and nothing is saved for the gradient of the ReLU alone. Where a ReLU is
    looked at it is a module like others: where it or the layer has hooks, or another `forward` than its class, and
    where a compiler, an exporter or a function transform watches.

    >>> from fakequant import prepare
    >>> model = prepare(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), "INT8")
    >>> type(model).__name__, isinstance(model, nn.Sequential)
    ('QuantSequential', True)
    """

    def forward(self, input: Any, *, relu: bool = False) -> Any:
        """What the modules compute of input one after the other, or of torch.relu(input)."""
        if not runs_eagerly():
            return super().forward(torch.relu(input) if relu else input)
        x, waiting, before = input, None, None
        for module in self._modules.values():
            assert module is not None
            if relu or (waiting is not None and takes_relu(module)):
                x, relu, waiting = cast("QuantSequential", module).forward(x, relu=True), False, None
            else:
                x = x if waiting is None else waiting(x)
                waiting = module if _can_wait(module, before) and isinstance(x, Tensor) else None
                x = module(x) if waiting is None else x
            before = module
        return x if waiting is None else waiting(x)


def join_relus(model: nn.Module) -> None:
    """Have every Sequential with quantized layers compute ReLUs as `QuantSequential` does, in place.

    Subclasses of Sequential, which may compute anything, stay as they are.
    """
    for module in model.modules():
        if type(module) is nn.Sequential and any(isinstance(child, QuantizedLayer) for child in module.modules()):
            module.__class__ = QuantSequential


def takes_relu(module: nn.Module) -> bool:
    """Whether `module.forward(x, relu=True)` can stand for `module(torch.relu(x))`: nobody sees the difference."""
    if is_hooked(module) or "forward" in module.__dict__ or _has_any_global_hook():
        return False
    if isinstance(module, QuantSequential):
        first = next(iter(module._modules.values()), None)
        return first is not None and takes_relu(first)
    return isinstance(module, QuantizedLayer) and _has_relu(type(module))


@lru_cache(maxsize=256)
def _has_relu(layer: type[QuantizedLayer]) -> bool:
    return "relu" in inspect.signature(layer.forward).parameters


def _can_wait(module: nn.Module, before: nn.Module | None) -> bool:
    """Whether a module is a ReLU that need not run on its own.

    One in place changes its input, which is to be seen but where a layer just made it for nobody else.
    """
    if type(module) is not nn.ReLU or is_hooked(module) or "forward" in module.__dict__:
        return False
    made = (QuantizedLayer, nn.modules.batchnorm._BatchNorm)
    return not module.inplace or (isinstance(before, made) and not is_hooked(before))
