"""The quantized parts of a model, why a format cannot hold one, and the nearest preset that it can."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from fakequant.delivery.format import DeliveryFormat, Part
from fakequant.delivery.places import paired
from fakequant.errors import ExportError
from fakequant.model.config import Rule
from fakequant.model.presets import presets
from fakequant.model.sites.planned import site_path
from fakequant.model.sizes import spec_bits
from fakequant.model.state.plan import LayerEntry, QuantizerEntry
from fakequant.model.state.snapshots import QuantizedState
from fakequant.model.tensor_config import TensorConfig
from fakequant.nn.operands import Operand, Role
from fakequant.nn.paths import join, module_at
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.quantizer import Mode
from fakequant.text import listed

_IN_FLOAT = 32
"""Bits of a tensor that is not quantized, for distances."""
_KIND = 8
"""Bits by which a dynamic range is farther than a fixed one."""
_AXES = 0.01
"""Bits by which other groups of the same number are farther."""


def parts_of(model: nn.Module, state: QuantizedState) -> list[Part]:
    """What is quantized in a model: each layer once for each of its weights, and each call of a function."""
    found: list[Part] = []
    for path, entry in state.layers.items():
        layer = module_at(model, path)
        assert isinstance(layer, QuantizedLayer)
        found += _of_layer(path, layer, entry)
    for path, owner in state.sites.owners.items():
        for key, site in owner.sites.items():
            held = {name: one.tensor for name, one in site.quantizers.items() if _is_on(one)}
            if held:
                paths = {name: f"{site_path(path, key)}.{name}" for name in held}
                found.append(Part(path, key.rpartition("_")[0], module_at(model, path), held, paths, call=key))
    return found


def _is_on(entry: QuantizerEntry | None) -> bool:
    return entry is not None and entry.mode is Mode.QUANTIZE


def _of_layer(path: str, layer: QuantizedLayer, entry: LayerEntry) -> Iterator[Part]:
    held = {name: one.tensor for name, one in entry.quantizers.items() if _is_on(one)}
    operands = layer.operands(layer)
    pairs = paired(operands)
    for attribute, source in pairs.items():
        inputs = [source] if source else [name for name, one in operands.items() if one.role is Role.INPUT]
        own = {"input" if source else _shown(name): name for name in inputs}
        own |= {"weight": attribute, "output": "_output_quantizer"}
        tensors = {name: held[key] for name, key in own.items() if key in held}
        if tensors:
            places = {name: operands[key] for name, key in own.items() if key in operands}
            yield Part(path, entry.type, layer, tensors, {name: join(path, own[name]) for name in tensors}, places)
    if not pairs and held:
        tensors = {_shown(name): one for name, one in held.items()}
        yield Part(path, entry.type, layer, tensors, {_shown(name): join(path, name) for name in held})


def _shown(attribute: str) -> str:
    return attribute.strip("_").removesuffix("_quantizer")


def refuse(
    format: DeliveryFormat, model: nn.Module, parts: Sequence[Part], state: QuantizedState, *, with_ranges: bool = True
) -> None:
    """Raise if a format cannot hold all that is quantized, before any work.

    Args:
        with_ranges: whether static inputs must have theirs.

    Raises:
        ExportError: all parts that it cannot hold, each with the reason, and the nearest preset that it can hold.
    """
    if reason := format.refuses(model):
        raise ExportError(f"{format.name} cannot hold this model, however it is quantized: {reason}")
    found: dict[str, str] = {}
    for part in parts:
        if reason := _own_reason(part, state, with_ranges=with_ranges):
            found[part.name] = reason
        elif reason := format.why_not(part):
            found[part.name] = f"{reason}{_nearest(format, part)}"
    if not found:
        found |= format.conflicts(model, parts)
    weights = {state.shared.get(part.weight, part.weight): part.name for part in parts if "weight" in part.operands}
    for weight in weights.keys() & state.in_float.keys():
        found.setdefault(weights[weight], state.in_float[weight])
    if found:
        alike: dict[str, list[str]] = {}
        for name, reason in found.items():
            alike.setdefault(reason, []).append(name)
        lines = "".join(f"\n  {_named(names)}: {reason}" for reason, names in alike.items())
        raise ExportError(f"{format.name} cannot hold {len(found)} parts of the model as they are quantized:{lines}")


def _named(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} parts ({listed(names, 3)})"


def _own_reason(part: Part, state: QuantizedState, *, with_ranges: bool) -> str | None:
    """What no file of another program holds."""
    entry = None if part.call else state.layers[part.path]
    if entry is not None and entry.transform is not None:
        kind = entry.transform.kind
        return (
            f"its input goes through a {kind} before its quantizer; leave that step out of improve, or, where a file "
            "has it, read the values by read(path, dequantize=True) and quantize them for this format"
        )
    if entry is not None and entry.low_rank:
        return f"a product of rank {entry.low_rank} is added to its output; leave that step out of improve"
    held = entry.quantizers if entry is not None else state.sites.owners[part.path].sites[part.call].quantizers
    if chosen := [one.by_value for one in held.values() if one.by_value is not None]:
        return f"its ranges follow {chosen[0].by}, and files have one; calibrate without by="
    if any(one.learned is not None for one in held.values()):
        return "its range is learned; fakequant.qat.set_scales(model, fakequant.qat.Scales.FIXED) fixes it"
    scales = {name: state.tensors.get(f"{path}.scale") for name, path in part.paths.items()}
    left = [name for name, scale in scales.items() if scale is None and _is_fixed(part, name)]
    if left and with_ranges:
        return f"its {left[0]} has no range yet; call fakequant.calibrate(model, batches) before"
    dtypes = [scale.dtype for scale in scales.values() if scale is not None]
    if part.weight:
        dtypes.append(part.module.get_parameter(part.places["weight"].weight).dtype)
    if torch.float64 in dtypes:
        return "it is in float64, whose scales files round to float32; convert it by model.float() before prepare"
    return None


def _is_fixed(part: Part, name: str) -> bool:
    """Whether a quantizer needs data before it can work: weights have scales of their own."""
    place = part.places.get(name)
    return not part.operands[name].dynamic and (place is None or place.role is not Role.WEIGHT)


def _nearest(format: DeliveryFormat, part: Part) -> str:
    """The preset nearest to how a layer is quantized that a format can hold, as the end of a message."""
    if not part.weight:
        return "; leave it in float by Rule(pattern)"
    held: dict[str, tuple[float, float]] = {}
    for name, preset in presets().items():
        rules = [rule for rule in preset.layer_rules if rule.pattern == "*" and not rule.layers]
        placed = {key: _placed(rule, own) for rule in rules[:1] for key, own in part.places.items()}
        tensors = {key: one for key, one in placed.items() if one is not None}
        if "weight" in tensors and format.why_not(replace(part, operands=tensors)) is None:
            held[name] = _distance(part, tensors)
    if not held:
        return "; leave it in float by Rule(pattern), or give the model to fakequant.export_onnx"
    return f"; the nearest preset that it holds is {min(held, key=held.__getitem__)}"


def _placed(rule: Rule, place: Operand) -> TensorConfig | None:
    """How a rule quantizes an operand."""
    config = rule.tensor(place.role, place.axes(), place.kernel)
    return config.for_each() if place.is_stack and config is not None else config


def _distance(part: Part, other: Mapping[str, TensorConfig]) -> tuple[float, float]:
    """How far two ways to quantize a layer are apart: the formats of the weight, which come first, and bits of all."""
    ours, theirs, total = part.operands.get("weight"), other["weight"].spec.format, 0.0
    codes = _IN_FLOAT if ours is None else abs(theirs.bits - ours.spec.format.bits) + (theirs != ours.spec.format)
    for name in ("weight", "input"):
        one, two = part.operands.get(name), other.get(name)
        bits = [_bits(tensor, part.shape if name == "weight" else ()) for tensor in (one, two)]
        total += abs(bits[0] - bits[1])
        if one is not None and two is not None:
            total += _KIND * (one.dynamic != two.dynamic) + (one.spec.format != two.spec.format)
            total += _AXES * (one.spec.granularity != two.spec.granularity)
    return codes, total


def _bits(tensor: TensorConfig | None, shape: tuple[int, ...]) -> float:
    if tensor is None:
        return _IN_FLOAT
    return spec_bits(tensor.spec, shape).per_weight if shape else tensor.spec.format.bits
