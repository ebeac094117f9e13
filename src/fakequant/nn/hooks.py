"""What looks at the calls of a module, or takes part in them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class Watched:
    """Shows functions what a module computes inside of a call, where hooks of torch do not look."""

    _watching: Mapping[int, Callable[..., None]] = MappingProxyType({})

    def watch(self, see: Callable[..., None]) -> RemovableHandle:
        """Have a function called with what the class shows; the handle ends it, as for hooks of torch."""
        watching: dict[int, Any] = vars(self).setdefault("_watching", OrderedDict())
        handle = RemovableHandle(watching)
        watching[handle.id] = see
        return handle

    @property
    def is_watched(self) -> bool:
        """Whether a function watches."""
        return len(self._watching) > 0  # Dynamo takes an empty mapping proxy for true

    def show(self, *values: Any) -> None:
        """Show values to all functions that watch."""
        for see in tuple(self._watching.values()):  # a lane of `improve` may stop in one, while others come
            see(*values)


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
