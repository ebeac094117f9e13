"""Clipping whose bounds can be learned."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ClipFunction", "clip"]


def clip(input: Tensor, clip_value_min: Tensor, clip_value_max: Tensor) -> Tensor:
    """Input between two bounds, whose gradients are those of the values that reach them (PACT).

    A value on a bound counts as clipped: its gradient goes to the bound.

    Raises:
        ValueError: in the backward pass, if a bound has more than one element.

    Source: Choi et al., PACT, arXiv 1805.06085, equation 2.

    >>> bound = torch.tensor(1.0, requires_grad=True)
    >>> clip(torch.tensor([0.5, 1.0, 3.0]), -bound.detach(), bound).sum().backward()
    >>> bound.grad
    tensor(2.)
    """
    low, high = clip_value_min, clip_value_max
    output = torch.where(input >= high, high.to(input.dtype), input)
    output = torch.where(input <= low, low.to(input.dtype), output)
    if low.numel() != 1 or high.numel() != 1:
        shapes = f"{list(low.shape)} and {list(high.shape)}"

        def refuse(_: Tensor) -> None:
            raise ValueError(f"bounds that are learned can only be scalar, got shapes {shapes}; learn one per tensor")

        if output.requires_grad:
            output.register_hook(refuse)
    return output


class ClipFunction:
    """`clip` as the static method of a class, as scripts call it."""

    apply = staticmethod(clip)
