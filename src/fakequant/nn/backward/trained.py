"""Modules with products whose backward products may be quantized, and what they know of these."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn
from torch.compiler import is_compiling

from fakequant.nn.backward.config import GradientConfig
from fakequant.numerics.philox import draw_seed
from fakequant.numerics.spec import Rounding
from fakequant.ops import library
from fakequant.ops.graph_operators import quantize_as_node


class Backward(NamedTuple):
    """How the backward products of a product are quantized."""

    config: GradientConfig

    def quantized(self, operand: str, axis: int, x: Tensor) -> Tensor:
        """The operand "gradient", "input" or "weight" of a sum over its first or second axis; as it is without spec."""
        spec = self.config.operands[operand, axis]
        if spec is None:
            return x
        if not is_compiling():
            return library.fake_quantize_dynamic(x, spec)
        # One node of the graph: as operations of torch 1M elements take twice as long, and the compiler many times.
        return quantize_as_node(x, spec, seed=draw_seed() if spec.rounding is Rounding.STOCHASTIC else None)

    @property
    def rounds_once(self) -> bool:
        """Whether the quantized gradient of the output is the same in both products."""
        first, second = (self.config.operands["gradient", axis] for axis in (0, 1))
        return first == second and self.config.gradient.rounding is not Rounding.STOCHASTIC and not self.config.hadamard


class Trained(nn.Module):
    """A module with products whose backward products may be quantized."""

    gradient: GradientConfig | None = None
    """How the products of the backward pass are quantized; None leaves them in float."""

    def backward_of(self) -> Backward | None:
        """How the backward products are quantized; None leaves them in float."""
        return None if self.gradient is None else Backward(self.gradient)
