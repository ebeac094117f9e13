"""The state of torch's compilers while they trace."""

from __future__ import annotations

import torch
from torch import Tensor

# Types of devices for which compilers compute other bits; `ops.dispatch` adds those of its backends. Compilers read
# sets of strings, and no backends.
approximate_devices: frozenset[str] = frozenset()

FUSED_DEVICES: frozenset[str] = frozenset({"cpu"} if torch.version.hip else {"cpu", "cuda"})
"""Types of devices for which `numerics.division` tells Inductor how to compute the right bits."""


def is_exporting() -> bool:
    """Whether torch.export traces.

    Before torch 2.13 Dynamo answers True for `torch.compiler.is_exporting()` within every torch.compile.
    """
    return torch.compiler._is_exporting_flag


def is_watched() -> bool:
    """Whether a compiler or tracer sees the operations: some leave a conversion and the one back out."""
    return torch.compiler.is_compiling() or torch._C._is_tracing()


def is_approximate(x: Tensor) -> bool:
    """Whether a compiler would divide numbers like x approximately.

    Not for exporters, which are shown the plain division. Nor for function transforms: within a compiled graph they
    differentiate what an autograd function does in place of it, which gives other bits.
    """
    return (
        torch.compiler.is_compiling()
        and x.device.type in approximate_devices
        and not is_exporting()
        and not torch._C._are_functorch_transforms_active()
    )
