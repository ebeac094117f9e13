"""Find the preset of a quantized model by its quantizers, and exchange it for another."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fakequant.model.config import Config, Rule
from fakequant.model.prepare import configs_of, quantizers_of
from fakequant.model.presets import presets
from fakequant.model.tensor_config import TensorConfig
from fakequant.nn.quantized.forms import quantized_class
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.sites.sites import SITES


@dataclass(frozen=True)
class MadeBy:
    """The preset of all quantized layers of a model, and the layers in float that it would quantize."""

    preset: Config
    skip: tuple[str, ...] = ()

    @property
    def relatives(self) -> list[Config]:
        """The presets with the same weights, and with inputs of as many bits that are quantized in another way."""
        own = self.preset.layer_rules[0]
        if own.input is None:
            return []
        found, bits = [], own.input.spec.format.bits
        for preset in presets().values():
            rule = preset.layer_rules[0]
            if rule.input is None or rule.weight != own.weight or rule.input == own.input:
                continue
            if rule.input.spec.format.bits == bits:
                found.append(preset)
        return found

    def code(self, preset: Config | None = None, skip: tuple[str, ...] = (), model: str = "float_model") -> str:
        """The call of `prepare` for a model, by this preset or another, with more layers in float."""
        name, left = (preset or self.preset).name.lower(), [*self.skip, *skip]
        return f'model = fq.prepare({model}, "{name}"{f", skip={left}" if left else ""})'


def made_by(model: nn.Module) -> MadeBy | None:
    """The preset that quantized every layer of a model; None if there is no such preset, or functions are quantized.

    >>> found = made_by(prepare(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "int8", skip=["1"]))
    >>> found.preset.name, found.skip, [preset.name for preset in found.relatives]
    ('INT8', ('1',), ['INT8_AFFINE', 'INT8_PER_TOKEN', 'W8A8_DYNAMIC'])
    """
    if has_sites(model):
        return None
    held = {layer: _held(layer) for layer in quantized_layers(model).values()}
    floats = {path: layer for path, layer in model.named_modules() if quantized_class(layer) is not None}
    for preset in presets().values():
        if all(configs_of(type(layer), layer, rule_of(preset, layer)) == own for layer, own in held.items()):
            return MadeBy(preset, tuple(p for p, layer in floats.items() if not rule_of(preset, layer).leaves_in_float))
    return None


def has_sites(model: nn.Module) -> bool:
    """Whether the model has quantized functions; `prepare` finds these with an example."""
    return any(name.rpartition(".")[2] == SITES for name, _ in model.named_modules())


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLayer]:
    """The quantized layers of a model by path."""
    return {path: layer for path, layer in model.named_modules() if isinstance(layer, QuantizedLayer)}


def rule_of(preset: Config, layer: nn.Module) -> Rule:
    """The rule of a preset for a float or quantized layer."""
    classes = {base.__name__ for base in getattr(type(layer), "float_class", type(layer)).__mro__}
    rules = [rule for rule in preset.layer_rules if not rule.layers or not classes.isdisjoint(rule.layers)]
    return rules[-1]


def _held(layer: QuantizedLayer) -> dict[str, TensorConfig]:
    held = {attribute: getattr(layer, attribute) for attribute in layer.operands(layer)}
    return {name: TensorConfig(q.spec, q.dynamic) for name, q in held.items() if q is not None}


def requantize(model: nn.Module, preset: Config) -> None:
    """Give all quantized layers of a model the quantizers of a preset, without ranges, in place."""
    for path, layer in quantized_layers(model).items():
        requantize_layer(layer, rule_of(preset, layer), path)


def requantize_layer(layer: QuantizedLayer, rule: Rule, path: str) -> None:
    """Give a quantized layer the quantizers of a rule, without ranges, in place."""
    configs = configs_of(type(layer), layer, rule)
    for attribute, quantizer in quantizers_of(type(layer), layer, configs, path).items():
        setattr(layer, attribute, quantizer)
