"""The search that entropy and mse share: the number of bins to keep that costs least."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Each round of refinement looks at so many neighbours on either side, at a stride this much finer.
_FINER = 8


def used_bins(counts: Tensor) -> Tensor:
    """Bins up to the last one that is not empty, int64 [...], of counts [..., bins]; 0 where all are empty.

    >>> used_bins(torch.tensor([[0, 3, 0, 1, 0], [0, 0, 0, 0, 0]]))
    tensor([4, 0])
    """
    positions = torch.arange(1, counts.shape[-1] + 1)
    return torch.where(counts > 0, positions, 0).amax(-1)


def cheapest(cost: Callable[[Tensor], Tensor], first: int | Tensor, last: Tensor, *, bins: int, coarse: int) -> Tensor:
    """The candidate from `first` to `last` with the smallest cost; of equal ones the largest.

    All candidates are tried where there are at most `coarse`; otherwise every n-th, counted from the last, and then the
    neighbours of the best at ever finer strides. The strides depend on `bins` alone, so that a group's result does not
    depend on the groups beside it.

    Args:
        cost: from candidates, int64 [groups, n], to their costs [groups, n].
        first: the smallest candidate, one for all groups or int64 [groups]; where last is smaller still, that.
        last: the largest candidate, int64 [groups].
        bins: no group's last is larger.
        coarse: how many candidates to try at first.

    Returns:
        int64 [groups].

    >>> cheapest(lambda n: ((n - 700) ** 2).double(), 1, torch.tensor([4096, 512]), bins=4096, coarse=64)
    tensor([700, 512])
    """
    lowest = torch.minimum(last, torch.as_tensor(first, device=last.device))[:, None]
    stride = -(-bins // coarse)
    steps = torch.arange(0, -(-bins // stride) + 1)
    best = last[:, None]
    while True:
        # Descending, because of equal costs argmin takes the first.
        candidates = torch.minimum(torch.maximum(best - steps * stride, lowest), last[:, None])
        best = candidates.gather(1, cost(candidates).argmin(1, keepdim=True))
        if stride == 1:
            return best[:, 0]
        stride = -(-stride // _FINER)
        steps = torch.arange(-_FINER, _FINER + 1)
