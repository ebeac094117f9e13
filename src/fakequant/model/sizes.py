"""How many bits the quantized weights of a model take: their codes, their scales and their zero points."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from fakequant.nn.operands import LayerWeight
from fakequant.numerics.spec import QuantSpec


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


def spec_bits(spec: QuantSpec, shape: tuple[int, ...]) -> WeightBits:
    """The bits of a tensor of a shape by a specification.

    >>> spec_bits(QuantSpec.parse("int4 per_block(-1:32)"), (64, 256)).per_weight  # a float32 scale for every 32 codes
    5.0
    """
    elements, groups = prod(shape), spec.granularity.group_shape(shape)
    scale_bits = 32 if spec.scale.format is None else spec.scale.format.bits
    scales = prod(groups) * (scale_bits if spec.symmetric else scale_bits + spec.format.bits)
    if spec.scale.granularity is not None:
        scales += 32 * prod(spec.scale.granularity.group_shape(groups))
    return WeightBits(elements, elements * spec.format.bits, scales)


def weight_bits(weight: LayerWeight) -> WeightBits | None:
    """The bits of a weight that has a quantizer; None where it is computed, or has none."""
    if weight.quantizer is None or weight.parameter is None:
        return None
    return spec_bits(weight.quantizer.spec, tuple(weight.parameter.shape))
