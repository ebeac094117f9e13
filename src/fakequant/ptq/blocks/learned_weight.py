"""The quantized values of one weight as a function of tensors that are learned."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import torch
from torch import Tensor, nn

from fakequant.model.weights import quantized_weights
from fakequant.nn.products.product import Product
from fakequant.numerics.qparams import QParams, Range, choose_qparams
from fakequant.ops import library
from fakequant.ptq.solvers.grid import WeightGrid, of_elements

_LOW, _HIGH = -0.1, 1.1  # the ends of AdaRound's stretched sigmoid
_MOST = torch.finfo(torch.float32).max


def learnable_weights(block: nn.Module, fixed: frozenset[nn.Parameter] = frozenset()) -> dict[str, Product]:
    """The weights whose values can be chosen, by the names of their parameters in a block."""
    names = {parameter: name for name, parameter in block.named_parameters()}
    weights = list(quantized_weights(block).values())
    used = Counter(weight.parameter for weight in weights)
    return {
        names[parameter]: weight
        for weight in weights
        if (parameter := weight.parameter) is not None and weight.tensor is parameter and used[parameter] == 1
        if parameter not in fixed and not _moves(weight)
    }


def _moves(weight: Product) -> bool:
    quantizer = weight.quantizer
    return quantizer.dynamic or quantizer.pinned or quantizer.learned is not None


class LearnedWeight:
    """A weight, its rounding and the factors of its ranges.

    Args:
        weight: of a layer; its quantizer is as calibrated, or follows the weight.
        mode: how rounding is learned; None for nearest.
    """

    def __init__(self, weight: Product, mode: Literal["offset", "relaxed"] | None) -> None:
        parameter = weight.parameter
        assert parameter is not None
        with torch.no_grad():
            self._mode, self._dtype, self.spec = mode, parameter.dtype, weight.quantizer.spec
            self._weight = parameter.detach().float().clone()
            self._params = weight.quantizer.qparams(parameter.detach())
            matrix = self._weight.reshape(len(self._weight), -1)
            sides = WeightGrid(self.spec, self._params, self._weight.shape).neighbours(matrix)
            self._low, high = (side.reshape(self._weight.shape) for side in sides)
            self._gap = high - self._low
            self._range = self._whole_range()
        self.factor = torch.ones_like(self._range.hi, requires_grad=True)
        """What each group's range is multiplied by."""
        self.rounding = torch.zeros_like(self._weight)
        """Offsets in steps, or shares before their sigmoid."""
        if mode == "relaxed":
            share = torch.where(self._gap > 0, (self._weight - self._low) / self._gap, 0.0).clamp(0, 1)
            self.rounding = ((share - _LOW) / (_HIGH - share)).log()
        self.rounding.requires_grad_()

    def _whole_range(self) -> Range:
        """The range of each group, from the largest values that the operator gives."""
        hi = library.measure(
            self._rounded(torch.full_like(self._weight, _MOST), self._params), self.spec.granularity
        ).hi
        lo = library.measure(
            self._rounded(torch.full_like(self._weight, -_MOST), self._params), self.spec.granularity
        ).lo
        if not self.spec.symmetric:
            return Range(lo, hi)
        amax = torch.where(hi > 0, hi, -lo)
        return Range(-amax, amax)

    def _rounded(self, x: Tensor, params: QParams) -> Tensor:
        return library.fake_quantize(x, params, self.spec)

    def params(self) -> QParams:
        """The parameters of the quantizer by the factors; those from before where no factor has moved."""
        factor = self.factor.detach()
        if bool((factor == 1).all()):
            return self._params
        return choose_qparams(Range(self._range.lo * factor, self._range.hi * factor), self.spec)

    def hard(self) -> Tensor:
        """The values that the weight would get, in its dtype."""
        with torch.no_grad():
            if self._mode == "relaxed":
                return torch.where(self.rounding >= 0, self._low + self._gap, self._low).to(self._dtype)
            return self._rounded(self._weight + self.rounding * self._gap, self.params()).to(self._dtype)

    def soft(self) -> Tensor:
        """The values for training: `hard` with straight-through gradients, or between two values of the grid."""
        if self._mode == "relaxed":
            return (self._low + self._share() * self._gap).to(self._dtype)
        x, params = self._weight + self.rounding * self._gap, self.params()
        with torch.no_grad():
            values = self._rounded(x, params)
            ends = [self._rounded(torch.full_like(x, end), params) for end in (-_MOST, _MOST)]
            inside = ((x >= ends[0]) & (x <= ends[1])).float()
            by_factor = values - x * inside
        blocks = self.spec.granularity.block_shape(x.shape)
        factor = of_elements(self.factor, x.shape, blocks).reshape(x.shape)
        # The value itself; its gradient by x is 1 inside, and by a factor f that of a step which grows with f.
        moved = (x - x.detach()) * inside + (factor / factor.detach() - 1) * by_factor
        return (values + moved).to(self._dtype)

    def _share(self) -> Tensor:
        return (self.rounding.sigmoid() * (_HIGH - _LOW) + _LOW).clamp(0, 1)

    def undecided(self, progress: float) -> Tensor:
        """AdaRound's regularizer: how many values are not on the grid, more sharply as the power falls from 20 to 2."""
        if progress < 0.2:
            return self.rounding.new_zeros(())
        power = 2 + 18 * (1 - (progress - 0.2) / 0.8)
        return (1 - (2 * self._share() - 1).abs() ** power).sum()
