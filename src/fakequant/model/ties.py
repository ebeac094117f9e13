"""Weights that several layers share, which have one set of codes, and scales that several weights share."""

from __future__ import annotations

from collections.abc import Container, Iterable

import torch
from torch import nn

from fakequant.distributed import is_sharded
from fakequant.functional import choose_qparams
from fakequant.model.weights import note_weight, quantized_weights, weights_of
from fakequant.nn.paths import join, layer_of
from fakequant.nn.products.product import Product
from fakequant.numerics.qparams import QParams
from fakequant.text import module_name

MERGED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("w1", "w3"),
)
"""Layers of a module that vLLM 0.32 and SGLang merge into a matrix, by their names."""


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


def merged_layers(paths: Iterable[str]) -> list[list[str]]:
    """The layers that engines merge, of some layers by their paths.

    >>> merged_layers(["0.q_proj", "0.k_proj", "0.v_proj", "0.o_proj", "1.q_proj"])
    [['0.q_proj', '0.k_proj', '0.v_proj']]
    """
    known = set(paths)
    parents = dict.fromkeys(path.rpartition(".")[0] for path in paths)
    groups = ([join(parent, name) for name in names] for parent in parents for names in MERGED)
    found = ([path for path in group if path in known] for group in groups)
    return [group for group in found if len(group) > 1]


def tie_scales(model: nn.Module, names: Container[str]) -> None:
    """Give weights that engines merge the same scale of the tensor, where their scales are under it.

    A merged matrix has one such scale. It follows from the largest magnitude of all. Weights with fixed codes stay.

    Args:
        model: prepared.
        names: the paths of the quantizers that get scales.
    """
    weights = {
        layer_of(path): weight
        for path, weight in quantized_weights(model).items()
        if path in names and weight.quantizer.spec.scale.is_under_a_tensor and not weight.has_fixed_codes
    }
    for group in merged_layers(weights):
        tied = [weights[path] for path in group]
        spec, tensors = tied[0].quantizer.spec, [weight.tensor.detach() for weight in tied]
        if any(weight.quantizer.spec != spec or weight.quantizer.learned for weight in tied):
            continue
        if any(is_sharded(x) or spec.granularity.block_shape(x.shape)[0] != 1 or not bool(x.any()) for x in tensors):
            continue
        scales = choose_qparams(torch.cat(tensors), spec).scale.split([len(x) for x in tensors])
        for weight, scale in zip(tied, scales, strict=True):
            weight.quantizer.set_qparams(QParams(scale))
            note_weight(weight)


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
