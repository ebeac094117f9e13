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
from fakequant.ptq.advising.engines import rivals


@dataclass(frozen=True)
class MadeBy:
    """The preset of all quantized layers of a model, and the layers in float that it would quantize."""

    preset: Config
    skip: tuple[str, ...] = ()

    @property
    def relatives(self) -> list[Config]:
        """The presets of as many bits: those with the same weights and other inputs, and then their rivals."""
        own = self.preset.layer_rules[0]
        rules = {one: rule for one in presets().values() if _bits(rule := one.layer_rules[0]) == _bits(own)}
        same = [one for one, rule in rules.items() if rule.weight == own.weight and rule.input != own.input]
        names = rivals(one.name for one in (self.preset, *same))
        return [*same, *(one for one, rule in rules.items() if rule.weight != own.weight and one.name in names)]

    def code(self, preset: Config | None = None, skip: tuple[str, ...] = (), model: str = "float_model") -> str:
        """The call of `prepare` for a model, by this preset or another, with more layers in float."""
        name, left = (preset or self.preset).name.lower(), [*self.skip, *skip]
        return f'model = fq.prepare({model}, "{name}"{f", skip={left}" if left else ""})'


def made_by(model: nn.Module) -> MadeBy | None:
    """The preset that quantized every layer of a model; None if there is no such preset, or functions are quantized.

    >>> found = made_by(prepare(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "int8", skip=["1"]))
    >>> found.preset.name, found.skip, [preset.name for preset in found.relatives]
    ('INT8', ('1',), ['INT8_AFFINE', 'INT8_PER_TOKEN', 'W8A8_DYNAMIC', 'W8A8_TRANSFORMERS', 'FP8'])
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


def _bits(rule: Rule) -> list[int]:
    """The bits of a weight and of an input, 0 for one in float."""
    return [0 if one is None else one.spec.format.bits for one in (rule.weight, rule.input)]


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
