"""Scales of weights by the error of the layer's output instead of the largest weight of a group."""

from __future__ import annotations

import torch
from torch import Tensor

from fakequant.numerics.granularity import block_axes, blocked
from fakequant.numerics.qparams import QParams, Range, choose_qparams
from fakequant.numerics.spec import QuantSpec
from fakequant.ops import library

_FACTORS = torch.linspace(1.0, 0.5, 26).tolist()
"""Shares of a group's largest weight that are tried as the end of its range."""


def searched_params(weight: Tensor, spec: QuantSpec, importance: Tensor) -> QParams:
    """The parameters whose rounding has the smallest weighted error, group by group.

    The weights of the error are the diagonal of the sums of x x^T: how much a column of the weight matters.

    Args:
        weight: [out, ...].
        spec: of its quantizer.
        importance: of the weight's elements, broadcasts with it.
    """
    whole = library.measure(weight, spec.granularity)
    best = Range(whole.lo.clone(), whole.hi.clone())
    least = torch.full(whole.lo.shape, torch.inf, dtype=torch.float64, device=weight.device)
    for factor in _FACTORS:
        tried = Range(whole.lo * factor, whole.hi * factor)
        rounded = library.fake_quantize(weight, choose_qparams(tried, spec), spec)
        error = _per_group((rounded.double() - weight.double()).square() * importance, spec).reshape(least.shape)
        better = error < least
        least = torch.where(better, error, least)
        best = Range(*(torch.where(better, new, old) for new, old in zip(tried, best, strict=True)))
    return choose_qparams(best, spec)


def _per_group(values: Tensor, spec: QuantSpec) -> Tensor:
    blocks = spec.granularity.block_shape(values.shape)
    axes = block_axes(values.shape, blocks)
    return blocked(values, blocks).sum(axes) if axes else values
