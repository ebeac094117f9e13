"""Whether anything but its class takes part in the calls of a module."""

from __future__ import annotations

from torch import nn


def is_as_made(module: nn.Module) -> bool:
    """Whether a call of a module is one of its class's `forward`, and no hook looks at it."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or module._compiled_call_impl is not None
        or "forward" in module.__dict__
    )
