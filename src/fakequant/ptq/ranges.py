"""Ranges by the error of the layer's output instead of the largest value of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fakequant.nn.quantizer import Quantizer
from fakequant.numerics.granularity import block_axes, blocked
from fakequant.numerics.qparams import QParams, Range, choose_qparams
from fakequant.numerics.spec import QuantSpec
from fakequant.ops import library
from fakequant.ptq.grid import of_elements
from fakequant.ptq.sums import product_of

_FACTORS = (*torch.linspace(1.0, 0.5, 26).tolist(), 1.25, 1.5)
"""Multiples of a group's largest weight that are tried as the end of its range. With 1.5 that weight becomes the value
4 of float4_e2m1fn in place of 6; the neighbours of 4 are nearer (arXiv 2512.02010)."""
_INPUT_FACTORS = tuple(torch.linspace(1.0, 0.1, 31).tolist())
_SAMPLED = 4
"""Batches by which the range of an input is chosen."""


def searched_params(weight: Tensor, spec: QuantSpec, moments: Tensor) -> QParams:
    """The parameters of a weight whose rounding has the smallest error, group by group.

    The error of a group is that of the layer's output if all other groups had none: d H d^T with the group's part of H.

    Args:
        weight: [out, ...].
        spec: of its quantizer.
        moments: of the layer's inputs, float64 [groups of the convolution, columns, columns].
    """
    whole = library.measure(weight, spec.granularity)
    best = Range(whole.lo.clone(), whole.hi.clone())
    least = torch.full(whole.lo.shape, torch.inf, dtype=torch.float64, device=weight.device)
    inside = _inside_groups(weight, spec, moments.float())
    for factor in _FACTORS:
        tried = Range(whole.lo * factor, whole.hi * factor)
        error = library.fake_quantize(weight, choose_qparams(tried, spec), spec).float() - weight.float()
        rows = error.reshape(len(inside), -1, inside.shape[-1])
        shares = ((rows @ inside) * rows).double().reshape(weight.shape)
        found = _per_group(shares, spec).reshape(least.shape)
        better = found < least
        least = torch.where(better, found, least)
        best = Range(*(torch.where(better, new, old) for new, old in zip(tried, best, strict=True)))
    return choose_qparams(best, spec)


def _inside_groups(weight: Tensor, spec: QuantSpec, moments: Tensor) -> Tensor:
    """The moments, with 0 for two columns that do not share a scale."""
    shape = spec.granularity.group_shape(weight.shape)
    numbers = torch.arange(moments.new_zeros(shape).numel(), device=weight.device).reshape(shape)
    columns = of_elements(numbers, weight.shape, spec.granularity.block_shape(weight.shape))[0]
    return moments * (columns[:, None] == columns[None, :])


def _per_group(values: Tensor, spec: QuantSpec) -> Tensor:
    blocks = spec.granularity.block_shape(values.shape)
    axes = block_axes(values.shape, blocks)
    return blocked(values, blocks).sum(axes) if axes else values


def whole_range(inputs: Sequence[Tensor], quantizer: Quantizer) -> Range:
    """The smallest range that holds all inputs of a quantizer."""
    seen = [library.measure(x, quantizer.spec.granularity) for x in inputs]
    return Range(torch.stack([found.lo for found in seen]).amin(0), torch.stack([found.hi for found in seen]).amax(0))


def searched_input(layers: Sequence[Any], inputs: Sequence[Tensor]) -> tuple[QParams, float, float]:
    """The parameters of an input's quantizer with which the outputs of its layers have the smallest error.

    Args:
        layers: those that get the input, with a weight matrix each; their quantizers are alike.
        inputs: before the quantizer.

    Returns:
        The parameters, the error with those that the first layer's quantizer has, and with those found.
    """
    spec = layers[0].input_quantizer.spec
    lo, hi = whole_range(inputs, layers[0].input_quantizer)
    choices = [layers[0].input_quantizer.qparams(inputs[0])]
    choices += [choose_qparams(Range(lo * factor, hi * factor), spec) for factor in _INPUT_FACTORS]
    sample = inputs[:: max(1, len(inputs) // _SAMPLED)]
    losses = [sum(_output_error(layer, spec, params, sample) for layer in layers) for params in choices]
    best = min(range(len(choices)), key=losses.__getitem__)
    return choices[best], losses[0], losses[best]


def _output_error(layer: Any, spec: QuantSpec, params: QParams, inputs: Sequence[Tensor]) -> float:
    """The sum of squared errors of the output that quantizing the input makes."""
    errors = (library.fake_quantize(x, params, spec) - x for x in inputs)
    return sum(float(product_of(layer, layer.weight, error).double().square().sum()) for error in errors)
