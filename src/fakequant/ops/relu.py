"""Whether kernels may compute a ReLU in the pass of the quantizer after it, with the bits of one after the other."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_CHANNELS_LAST = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}


def relu_later(x: Tensor) -> Tensor:
    """x for a quantizer that computes the ReLU after a reshape or a maximum; torch.relu(x) if its strides differ."""
    return x if keeps_strides(x) else torch.relu(x)


@cache
def keeps_negative_zero(dtype: torch.dtype) -> bool:
    """Whether torch.relu gives -0.0 for -0.0 here, as the kernels do; torch leaves it to the processor's maximum."""
    return bool(torch.relu(torch.full((67,), -0.0, dtype=dtype, device="cpu")).signbit().all())


def keeps_strides(x: Tensor) -> bool:
    """Whether the result of torch.relu is known to lie as its input: how the next product sums may depend on it."""
    for format in (torch.contiguous_format, *_CHANNELS_LAST.get(x.dim(), ())):
        if x.is_contiguous(memory_format=format):
            # An axis of one element may have any stride; torch gives it that of the format.
            return torch.empty(x.shape, device="meta", memory_format=format).stride() == x.stride()
    return False
