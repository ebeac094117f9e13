"""Clipping whose bounds can be learned, as a function and as a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fakequant.errors import shown
from fakequant.nn.ranges import PreciseModule, straight_through
from fakequant.numerics.formats.floats import IntegerFormat
from fakequant.numerics.granularity import PerTensor
from fakequant.numerics.qparams import QParams
from fakequant.numerics.spec import Gradient, QuantSpec
from fakequant.ops import library

__all__ = ["Clip", "ClipFunction", "clip"]


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
        shapes = f"{list(low.shape)} and {list(high.shape)}"

        def refuse(_: Tensor) -> None:
            raise ValueError(f"bounds that are learned can only be scalar, got shapes {shapes}; learn one per tensor")

        output.register_hook(refuse)
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


class Clip(PreciseModule):
    """Clips to between two bounds; the learned ones are parameters, the others buffers.

    A bound that is a parameter stays that parameter.

    Args:
        clip_value_min: the lower bound, a number, a tensor, a parameter or an array.
        clip_value_max: the upper bound.
        learn_min: whether the lower bound is learned, which needs one number, not a tensor.
        learn_max: whether the upper bound is.

    Raises:
        ValueError: a bound to learn that is not one number.
        TypeError: a bound that is neither a number nor a tensor or an array of numbers.

    >>> Clip(-1.0, 2.0)(torch.tensor([-3.0, 0.5, 3.0]))
    tensor([-1.0000,  0.5000,  2.0000])
    """

    clip_value_min: Tensor
    clip_value_max: Tensor

    def __init__(
        self, clip_value_min: Any, clip_value_max: Any, learn_min: bool = False, learn_max: bool = False
    ) -> None:
        super().__init__()
        bounds = {"clip_value_min": (clip_value_min, learn_min), "clip_value_max": (clip_value_max, learn_max)}
        for name, (value, learned) in bounds.items():
            bound = _numbers(name, value)
            if not learned and isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
            elif not learned:
                self.register_buffer(name, bound)
            elif bound.numel() != 1 or isinstance(value, Tensor):
                # Scripts match this text, "initilizing" included.
                expected = "clip_value_min/clip_value_max must be scalar for initilizing learnable range."
                raise ValueError(f"{expected} {name} is {shown(value)} of shape {list(bound.shape)}; give one number")
            else:
                self.register_parameter(name, nn.Parameter(bound))

    def forward(self, inputs: Tensor) -> Tensor:
        return clip(inputs, self.clip_value_min, self.clip_value_max)


def _numbers(name: str, value: Any) -> Tensor:
    """A copy of the bound in float32."""
    try:
        if isinstance(value, Tensor) and value.is_complex():
            raise TypeError(f"{value.dtype} has no order")
        return torch.as_tensor(value, dtype=torch.float32).clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be a number, or a tensor or an array of numbers, got {value!r}") from error
