"""The costs of thresholds in searches of histograms, by kernels: they sum in another order, and are much faster."""

from __future__ import annotations

import torch
from torch import Tensor

from fakequant.numerics.qparams import QParams, is_concrete
from fakequant.numerics.spec import QuantSpec

from .cpu.backend import load_kernels
from .dispatch import choose


def cumulative_moments(centers: Tensor, counts: Tensor) -> Tensor:
    """The sums that `squared_errors` needs, for counts int64 [groups, bins] in bins with these middles."""
    if load_kernels() is None and is_concrete(centers, counts):
        return torch.ops.fakequant_cpu.cumulative_moments.default(centers, counts.contiguous())
    x = centers.double()
    weighted = counts[:, None].double() * torch.stack([torch.ones_like(x), x, x * x])
    return torch.nn.functional.pad(weighted.cumsum(-1), (1, 0))


def squared_errors(centers: Tensor, sums: Tensor, middles: Tensor, params: QParams, spec: QuantSpec) -> Tensor | None:
    """The sum of w (x - y)**2 for every threshold, where y is x quantized; None where no kernel finds it.

    A threshold costs as much as there are codes, not as many bins as there are.

    Args:
        centers: the middles x of bins in rising order, at nearly equal distances, float32 [bins].
        sums: of the weights w, of w x and of w x**2 over the first bins, float64 [groups, 3, bins + 1].
        middles: the middles between neighbouring codes, before the zero point is added, in rising order, float64.
        params: of every group and threshold [groups * thresholds, 1], in float32.
        spec: how to quantize; its granularity does not matter.

    Returns:
        float64 [groups, thresholds].
    """
    if not is_concrete(centers, sums, params.scale):
        return None
    return choose(centers, spec).squared_errors(centers, sums, middles, params, spec)


def nearly_least(centers: Tensor, counts: Tensor, amax: Tensor, scale: Tensor, spec: QuantSpec) -> Tensor | None:
    """Which thresholds may have the least mean of w (x - y)**2 when float32 sums it; None where no kernel finds them.

    Args:
        centers: the middles x >= 0 of bins in rising order, at nearly equal distances, float32 [bins].
        counts: the weights, int64 [bins].
        amax: thresholds in rising order, float32 [n].
        scale: of each of them [n].
        spec: how to quantize, symmetrically to integers.

    Returns:
        Their indices in rising order, int64.
    """
    if not is_concrete(centers, counts, amax) or counts.dtype != torch.int64:
        return None
    return choose(centers, spec).nearly_least(centers, counts.contiguous(), amax, scale, spec)


def cross_entropies(
    mass: Tensor, filled: Tensor, middles: Tensor, span: float, width: Tensor, ends: Tensor, clipped: Tensor
) -> Tensor | None:
    """The sum of P log Q for every threshold, see `calibration.entropy`; None where no kernel finds it.

    Args:
        mass: counts in the first bins, float64 [groups, sides, bins + 1].
        filled: how many of them are not empty, of the same shape.
        middles: the middles between neighbouring magnitudes of codes, in rising order, float64.
        span: the largest magnitude, `width` bins away from 0.0.
        width: float64, broadcasts to [groups, sides, thresholds].
        ends: bins kept on a side, int64 [groups, sides, thresholds].
        clipped: counts beyond them, float64 of the same shape.

    Returns:
        float64 [groups, sides, thresholds].
    """
    if load_kernels() is not None or not is_concrete(mass, ends):
        return None
    lines = [values.flatten(0, 1).contiguous() for values in (mass, filled.double(), width.expand_as(clipped))]
    found = torch.ops.fakequant_cpu.cross_entropies.default(
        *lines[:2], middles, span, lines[2], ends.flatten(0, 1).contiguous(), clipped.flatten(0, 1).contiguous()
    )
    return found.view(ends.shape)
