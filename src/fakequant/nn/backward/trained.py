"""Modules with products whose backward products may be quantized, and what they know of these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

from torch import Tensor, nn
from torch.compiler import is_compiling

from fakequant.nn.backward.config import GradientConfig
from fakequant.nn.ranges.delayed import DelayedRange
from fakequant.numerics.philox import draw_seed
from fakequant.numerics.spec import QuantSpec, Rounding
from fakequant.ops import library
from fakequant.ops.graph_operators import quantize_as_node

ATTENTION = "scores", "values"
"""The products of attention."""
_RANGES = "_gradient_ranges"


class Backward(NamedTuple):
    """How the backward products of one product of a module are quantized."""

    config: GradientConfig
    ranges: dict[str, DelayedRange]
    """The delayed range of each operand; empty where every tensor has its own range."""

    def quantized(self, operand: str, axis: int, x: Tensor) -> Tensor:
        """The operand "gradient", "input" or "weight" of a sum over its first or second axis; as it is without spec."""
        spec = self.config.operands[operand, axis]
        if spec is None:
            return x
        own = self.ranges.get(operand)
        return _quantized(x, spec, None if own is None else own.scale_for(x, spec, in_backward=True))

    @property
    def rounds_once(self) -> bool:
        """Whether the quantized gradient of the output is the same in both products."""
        first, second = (self.config.operands["gradient", axis] for axis in (0, 1))
        return first == second and self.config.gradient.rounding is not Rounding.STOCHASTIC and not self.config.hadamard


def _quantized(x: Tensor, spec: QuantSpec, scale: Tensor | None) -> Tensor:
    if not is_compiling():
        return library.fake_quantize_dynamic(x, spec) if scale is None else library.quantize_by(x, spec, scale)
    # One node of the graph: as operations of torch 1M elements take twice as long, and the compiler many times.
    return quantize_as_node(x, spec, scale, seed=draw_seed() if spec.rounding is Rounding.STOCHASTIC else None)


class Trained(nn.Module):
    """A module with products whose backward products may be quantized."""

    _gradient: GradientConfig | None = None

    @property
    def gradient(self) -> GradientConfig | None:
        """How the products of the backward pass are quantized; None leaves them in float.

        To set it makes the histories of delayed scales anew.
        """
        return self._gradient

    @gradient.setter
    def gradient(self, config: GradientConfig | None) -> None:
        self._gradient = config
        self._modules.pop(_RANGES, None)
        if config is not None and config.scale:
            made = {name: config.make_ranges() for name in self.trained_products()}
            ranges = nn.ModuleDict({f"{name}_{key}": own for name in made for key, own in made[name].items()})
            self.add_module(_RANGES, ranges.to(next((one.device for one in self.parameters()), None)))

    def trained_products(self) -> Sequence[str]:
        """The names of the products that have ranges of their own."""
        return ("product",)

    def backward_of(self, product: str = "product") -> Backward | None:
        """How the backward products of one of `trained_products` are quantized; None leaves them in float."""
        if (config := self._gradient) is None:
            return None
        found: dict[str, DelayedRange] = {}
        if (held := cast("nn.ModuleDict | None", self._modules.get(_RANGES))) is not None:
            keys = {name: f"{product}_{name}" for name in ("gradient", "input", "weight")}
            found = {name: cast("DelayedRange", held[key]) for name, key in keys.items() if key in held}
        return Backward(config, found)
