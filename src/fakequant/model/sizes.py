"""How many bits the quantized weights of a model take: their codes, their scales and their zero points."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

from torch import nn

from fakequant.model.weights import quantized_weights
from fakequant.nn.paths import layer_of
from fakequant.nn.products import Product
from fakequant.nn.quantizer import Kind, Quantizer
from fakequant.numerics.spec import QuantSpec
from fakequant.text import listed, module_name

_NAMED = 3
_MORE = 1.05
"""Bits per weight beyond the narrowest codes that are worth a word: groups of 32 with a float32 scale take 1."""


class WeightBits(NamedTuple):
    """The bits of one quantized weight, or of several together."""

    elements: int
    codes: int
    scales: int
    """The bits of scales, of the scales of scales, and of zero points."""

    @property
    def per_weight(self) -> float:
        """Bits per weight with scales; 0.0 without weights."""
        return (self.codes + self.scales) / self.elements if self.elements else 0.0

    def plus(self, other: WeightBits) -> WeightBits:
        """Both together."""
        return WeightBits(self.elements + other.elements, self.codes + other.codes, self.scales + other.scales)


def bits_of_all(sizes: Iterable[WeightBits]) -> WeightBits:
    """The bits of several weights."""
    total = WeightBits(0, 0, 0)
    for own in sizes:
        total = total.plus(own)
    return total


def spec_bits(spec: QuantSpec, shape: tuple[int, ...]) -> WeightBits:
    """The bits of a tensor of a shape by a specification.

    >>> spec_bits(QuantSpec.parse("int4 per_block(-1:32)"), (64, 256)).per_weight  # a float32 scale for every 32 codes
    5.0
    """
    elements, groups = prod(shape), spec.granularity.group_shape(shape)
    scales = spec.scale.bits(groups)
    if spec.offset is not None:
        scales += spec.offset.bits(groups)
    elif not spec.symmetric:
        scales += prod(groups) * spec.format.bits
    return WeightBits(elements, elements * spec.format.bits, scales)


def exceeds_float(spec: QuantSpec, shape: tuple[int, ...], bits: int = 32) -> bool:
    """Whether codes and scales of a tensor take more room than its floats.

    >>> exceeds_float(QuantSpec.parse("int4 per_channel(0)"), (64, 1))
    True
    """
    found = spec_bits(spec, shape)
    return found.codes + found.scales > found.elements * bits


def scales_text(weights: Mapping[str, WeightBits]) -> str | None:
    """A text that says which scales take more than one bit for each weight; None if all together do not.

    Args:
        weights: the sizes of quantized weights, by the path of the layer.

    >>> print(scales_text({"head": WeightBits(100, 400, 50), "stem": WeightBits(100, 400, 300)}))
    5.75 bits per weight with scales, where the codes have 4.00; the scales of stem (7.00 bits) take most of them
    """
    total = bits_of_all(weights.values())
    if total.scales <= total.elements:
        return None
    large = {path: own for path, own in weights.items() if own.scales > own.elements}
    named = sorted(large, key=lambda path: large[path].elements - large[path].scales)
    shown = listed([f"{module_name(path)} ({large[path].per_weight:.2f} bits)" for path in named], _NAMED)
    return (
        f"{total.per_weight:.2f} bits per weight with scales, where the codes have "
        f"{total.codes / total.elements:.2f}; the scales of {shown} take most of them"
    )


def wide_text(weights: Mapping[str, WeightBits]) -> str | None:
    """A text that names layers of more bits than the narrowest, where all take over one bit more than these; else None.

    Args:
        weights: the sizes of quantized weights, by the path of the layer.

    >>> print(wide_text({"head": WeightBits(100, 400, 50), "table": WeightBits(300, 2400, 24)}))
    7.18 bits per weight with scales, because table (8.08 bits) has more than 4-bit codes
    """
    total = bits_of_all(weights.values())
    narrowest = min((own.codes / own.elements for own in weights.values()), default=0.0)
    wide = {path: own for path, own in weights.items() if own.codes > narrowest * own.elements}
    if not wide or total.per_weight <= narrowest + _MORE:
        return None
    named = sorted(wide, key=lambda path: -wide[path].codes)
    shown = listed([f"{module_name(path)} ({wide[path].per_weight:.2f} bits)" for path in named], _NAMED)
    verb = "has" if len(wide) == 1 else "have"
    said = f"{shown} {verb} more than {narrowest:g}-bit codes"
    return f"{total.per_weight:.2f} bits per weight with scales, because {said}"


def note_on_scales(model: nn.Module, too_small: Sequence[str], *, by_name: bool) -> list[str]:
    """Lines on a prepared model whose weights take many more bits than one expects, where inputs are in float.

    Args:
        model: prepared.
        too_small: layers whose weights stay in float because of their scales.
        by_name: whether a preset by its name chose all layers.
    """
    found: dict[nn.Parameter, tuple[str, WeightBits]] = {}
    for path, weight in quantized_weights(model).items():
        alone = all(own.kind is Kind.WEIGHT for own in weight.layer.children() if isinstance(own, Quantizer))
        if alone and weight.parameter is not None and (bits := weight_bits(weight)) is not None:
            found[weight.parameter] = layer_of(path), bits
    notes = []
    if too_small:
        shown = listed([module_name(path) for path in too_small], _NAMED)
        notes.append(
            f"weights stay in float where their scales would take more room than floats: {shown}; one scale for "
            "all of a layer's weights takes less: Rule(name, weight='int8')"
        )
    if by_name and (text := wide_text(dict(found.values()))) is not None:
        notes.append(f"{text}; rules={{name: preset}} gives them another preset")
    if (text := scales_text(dict(found.values()))) is not None:
        notes.append(f"{text}. skip=[...] leaves such layers in float, rules={{name: 'int8_weight_only'}} is finer")
    return notes


def weight_bits(weight: Product) -> WeightBits | None:
    """The bits of a weight that has a quantizer; None where it is computed, or has none."""
    if weight.quantizer is None or weight.parameter is None:
        return None
    return spec_bits(weight.quantizer.spec, tuple(weight.parameter.shape))
