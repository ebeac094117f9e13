"""Sequential in which a quantizer computes the ReLU before it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fakequant.nn.layers import QuantizedLayer
from fakequant.nn.quantizer import Mode, Quantizer, is_as_made
from fakequant.numerics.qparams import runs_eagerly

_NORMALISATIONS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class QuantSequential(nn.Sequential):
    """Sequential that computes a ReLU and the input quantizer of the next layer in one pass over memory each way.

    Results and gradients have the same bits, and nothing is saved for the gradient of the ReLU alone. That is for
    quantizers with fixed parameters; before others, and where somebody looks, a ReLU is a module as any other: where it
    or the layer has hooks or another `forward` than its class, and where a compiler, an exporter or a function
    transform watches.

    >>> from fakequant import prepare
    >>> model = prepare(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), "INT8")
    >>> type(model).__name__, isinstance(model, nn.Sequential)
    ('QuantSequential', True)
    """

    def forward(self, input: Any) -> Any:
        """What the modules compute of input one after the other."""
        return self._run(input, relu=False) if runs_eagerly() else super().forward(input)

    def forward_after_relu(self, input: Tensor) -> Any:
        """What they compute of torch.relu(input), where `takes_relu` says that the first module can."""
        return self._run(input, relu=True)

    def _run(self, x: Any, *, relu: bool) -> Any:
        waiting, before = None, None
        for module in cast("dict[str, nn.Module]", self._modules).values():
            if relu or (waiting is not None and takes_relu(module)):
                x, relu, waiting = cast("QuantSequential", module).forward_after_relu(x), False, None
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
    """Whether `module.forward_after_relu(x)` can stand for `module(torch.relu(x))`: nobody sees the difference."""
    if not is_as_made(module) or _has_any_global_hook():
        return False
    if type(module) is QuantSequential:
        first = next(iter(module._modules.values()), None)
        return first is not None and takes_relu(first)
    if not isinstance(module, QuantizedLayer) or not _defines_both(type(module)):
        return False
    quantizer = module._input_quantizer
    return type(quantizer) is Quantizer and is_as_made(quantizer) and _is_fixed(quantizer)


def _is_fixed(quantizer: Quantizer) -> bool:
    return quantizer.mode is Mode.QUANTIZE and quantizer.scale is not None and not quantizer.dynamic


@lru_cache(maxsize=256)
def _defines_both(layer: type[nn.Module]) -> bool:
    """Whether the class that says what `forward` computes says what it computes after a ReLU."""
    owner = next(cls for cls in layer.__mro__ if "forward" in vars(cls))
    return "forward_after_relu" in vars(owner)


def _can_wait(module: nn.Module, before: nn.Module | None) -> bool:
    """Whether a module is a ReLU that need not run on its own.

    One in place changes its input, which is to be seen but where a layer just made it for nobody else.
    """
    if type(module) is not nn.ReLU or not is_as_made(module):
        return False
    return not module.inplace or (before is not None and _makes_for_one(before))


def _makes_for_one(module: nn.Module) -> bool:
    quantizes = isinstance(module, QuantizedLayer) and _defines_both(type(module))
    return is_as_made(module) and (quantizes or type(module) in _NORMALISATIONS)
