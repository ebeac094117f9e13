"""Clipping whose bounds can be learned."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fakequant.nn.learned import straight_through
from fakequant.numerics.formats.floats import IntegerFormat
from fakequant.numerics.granularity import PerTensor
from fakequant.numerics.qparams import QParams
from fakequant.numerics.spec import Gradient, QuantSpec
from fakequant.ops import library

__all__ = ["ClipFunction", "clip"]

# Codes 0 and 1 under a scale of 1: every 1 saturates, and gives the scale its gradient.
_REACHED = QuantSpec(IntegerFormat.of(1, signed=False), PerTensor(), symmetric=True, gradient=Gradient.CLIP)


def clip(input: Tensor, clip_value_min: Tensor, clip_value_max: Tensor) -> Tensor:
    """Input between two bounds, whose gradients are those of the values that reach them (PACT).

    A value on a bound counts as clipped: its gradient goes to the bound. The sum is that of `Gradient.CLIP`, the same
    in any order.

    Raises:
        ValueError: in the backward pass, if a bound has more than one element.

    Source: Choi et al., PACT, arXiv 1805.06085, equation 2.

    >>> bound = torch.tensor(1.0, requires_grad=True)
    >>> clip(torch.tensor([0.5, 1.0, 3.0]), -bound.detach(), bound).sum().backward()
    >>> bound.grad
    tensor(2.)
    """
    scalar = clip_value_min.numel() == clip_value_max.numel() == 1
    low, high = (bound.detach() if scalar else bound for bound in (clip_value_min, clip_value_max))
    ends = torch.maximum(torch.minimum(input.detach(), high.to(input.dtype)), low.to(input.dtype))
    output = torch.where((input > low) & (input < high), input, ends)
    if scalar:
        return _to_bound(_to_bound(output, input <= low, clip_value_min), input >= high, clip_value_max)
    if output.requires_grad:
        output.register_hook(_refusal(low, high))
    return output


class ClipFunction:
    """`clip` as the static method of a class, as scripts call it."""

    apply = staticmethod(clip)


def _to_bound(output: Tensor, reached: Tensor, bound: Tensor) -> Tensor:
    """Output, the gradient of which goes to a bound of one element too, from where it is reached."""
    if not (bound.requires_grad and torch.is_grad_enabled()):
        return output
    flags = reached.to(torch.promote_types(output.dtype, bound.dtype))
    # A bound that is not finite would make the scale NaN, and nothing would be learned from it.
    finite = bound.nan_to_num(0.0, 0.0, 0.0).reshape((1,) * output.dim())
    scale = straight_through(torch.ones_like(finite), finite)
    # Subtracting +0.0 changes no value, not even -0.0.
    return output - (flags - library.fake_quantize(flags, QParams(scale), _REACHED)).to(output.dtype)


def _refusal(low: Tensor, high: Tensor) -> Callable[[Tensor], None]:
    shapes = f"{list(low.shape)} and {list(high.shape)}"

    def refuse(_: Tensor) -> None:
        raise ValueError(f"bounds that are learned can only be scalar, got shapes {shapes}; learn one per tensor")

    return refuse
