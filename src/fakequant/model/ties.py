"""Weights that several layers share: one set of codes, or a line that says why not."""

from __future__ import annotations

from torch import nn

from fakequant.model.weights import quantized_weights, weights_of
from fakequant.nn.paths import layer_of
from fakequant.nn.products.product import Product
from fakequant.text import module_name


def tied_weights(model: nn.Module) -> list[dict[str, Product]]:
    """The quantized parameters that several layers share, each by the paths of its quantizers.

    >>> model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4, bias=False))
    >>> model[1].weight = model[0].weight
    >>> [list(weights) for weights in tied_weights(prepare(model, "int8"))]
    [['0._weight_quantizer', '1._weight_quantizer']]
    """
    groups: dict[nn.Parameter, dict[str, Product]] = {}
    for path, weight in quantized_weights(model).items():
        if (parameter := weight.parameter) is not None:
            groups.setdefault(parameter, {})[path] = weight
    return [weights for weights in groups.values() if len(weights) > 1]


def share_learned(model: nn.Module) -> None:
    """Have the quantizers of a shared weight learn one range, so that its codes stay the same in all layers."""
    for weights in tied_weights(model):
        first = next(iter(weights.values())).quantizer
        for weight in weights.values():
            own = weight.quantizer
            if first.learned is not None and own.learned is not None and own.trained_spec == first.trained_spec:
                own.add_module(first.learned.method, first.learned)


def untied(model: nn.Module, purposely: set[nn.Module]) -> str | None:
    """What is said of weights that layers share and quantize in different ways; None if there are none.

    Args:
        model: a prepared model.
        purposely: modules that a rule leaves in float.
    """
    said = []
    for weights in tied_weights(model):
        specs = {(weight.quantizer.spec, weight.quantizer.dynamic) for weight in weights.values()}
        if len(specs) > 1:
            named = " and ".join(f"{layer_of(path)} as {weight.quantizer.spec}" for path, weight in weights.items())
            said.append(f"{named} (give both layers one rule)")
    quantized = {weight.parameter: layer_of(path) for path, weight in quantized_weights(model).items()}
    layers = {weight.owner for weight in quantized_weights(model).values()}
    for path, module in model.named_modules():
        if module not in layers and module not in purposely:
            said += [
                f"{quantized[parameter]}, and {module_name(path)} ({type(module).__name__}) uses it in float"
                for parameter in weights_of(module)
                if parameter in quantized
            ]
    if not said:
        return None
    return f"layers share a weight and do not have the same codes of it: {'; '.join(said)}"
