"""Find parameters by name, to group them for an optimizer, to freeze them, or to quantize weights in place."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fakequant.compat.pytorch_quantization.nn import QuantRNNBase, QuantRNNCellBase
from fakequant.compat.pytorch_quantization.utils import logger
from fakequant.text import module_name

__all__ = ["freeze_parameters", "group_parameters", "match_parameters", "quant_weight_inplace"]


def match_parameters(model: nn.Module, patterns: Sequence[str]) -> Iterator[nn.Parameter]:
    """Yield each parameter whose name contains one of the regular expressions, once for each that it contains.

    >>> [p.shape for p in match_parameters(nn.Linear(3, 2), ["bias"])]
    [torch.Size([2])]
    """
    for name, parameter in model.named_parameters():
        for pattern in patterns:
            if re.search(pattern, name):
                yield parameter


def group_parameters(
    model: nn.Module,
    patterns_list: Sequence[Sequence[str]],
    lrs: Sequence[float] | None = None,
    momentums: Sequence[float] | None = None,
    weight_decays: Sequence[float] | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups for torch's optimizers, by names of parameters.

    Args:
        model: any module.
        patterns_list: the regular expressions of every group.
        lrs: the learning rate of every group; likewise momentums and weight_decays.

    Raises:
        TypeError: patterns that are not lists of lists, or options of another length.
    """
    if not isinstance(patterns_list, list) or not all(isinstance(patterns, list | tuple) for patterns in patterns_list):
        example = "give for example [['conv'], ['bias']]"
        raise TypeError(f"patterns_list must be list of list of patterns, got {patterns_list!r}; {example}")
    options = {"lr": lrs, "momentum": momentums, "weight_decay": weight_decays}
    given = {name: values for name, values in options.items() if values is not None}
    for name, values in given.items():
        if not isinstance(values, list | tuple) or len(values) != len(patterns_list):
            expected = f"give a list with one number for each group ({len(patterns_list)})"
            raise TypeError(f"{name}s must match patterns_list, got {values!r}; {expected}")
    return [
        {"params": list(match_parameters(model, patterns)), **{name: values[at] for name, values in given.items()}}
        for at, patterns in enumerate(patterns_list)
    ]


def freeze_parameters(model: nn.Module, patterns: Sequence[str]) -> None:
    """Turn off the gradients of the parameters that `match_parameters` yields."""
    for parameter in match_parameters(model, patterns):
        parameter.requires_grad = False


@torch.no_grad()
def quant_weight_inplace(model: nn.Module) -> None:
    """Replace the weights of every quantized layer, also of recurrent layers, by their fake-quantized values."""
    for name, module in model.named_modules():
        if isinstance(module, QuantRNNBase | QuantRNNCellBase):
            for weights, quantizers in module.gates():
                if _replaces(quantizers.weight, name):
                    quantized = quantizers.weights(weights)
                    weights.input.copy_(quantized.input)
                    weights.hidden.copy_(quantized.hidden)
            continue
        quantizer, weight = getattr(module, "_weight_quantizer", None), getattr(module, "weight", None)
        if quantizer is not None and weight is not None and _replaces(quantizer, name):
            weight.copy_(quantizer(weight))


def _replaces(quantizer: Any, name: str) -> bool:
    if not quantizer.fake_quant:
        logger.warning("the weight of %s is not replaced: its quantizer gives codes", module_name(name))
    return quantizer.fake_quant
