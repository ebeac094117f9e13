"""The search that entropy and mse share: the number of bins to keep that costs least."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fakequant.numerics.formats.format import Format

# Each round of refinement tries this many neighbours on either side, at a stride finer by this factor.
_FINER = 8


def used_bins(counts: Tensor) -> Tensor:
    """Bins up to the last one that is not empty, int64 [...], of counts [..., bins]; 0 where all are empty.

    >>> used_bins(torch.tensor([[0, 3, 0, 1, 0], [0, 0, 0, 0, 0]]))
    tensor([4, 0])
    """
    positions = torch.arange(1, counts.shape[-1] + 1, device=counts.device)
    return torch.where(counts > 0, positions, 0).amax(-1)


def cheapest(cost: Callable[[Tensor], Tensor], first: int | Tensor, last: Tensor, *, bins: int, coarse: int) -> Tensor:
    """The candidate from `first` to `last` with the smallest cost; the largest one if several are equal.

    All candidates are tried where there are at most `coarse`; otherwise every n-th, counted from the last, and then the
    neighbours of the best at ever finer strides. The strides depend on `bins` alone, so that a group's result does not
    depend on the other groups.

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
    steps = torch.arange(0, -(-bins // stride) + 1, device=last.device)
    best = last[:, None]
    while True:
        # Descending, because argmin takes the first of equal costs.
        candidates = torch.minimum(torch.maximum(best - steps * stride, lowest), last[:, None])
        best = candidates.gather(1, cost(candidates).argmin(1, keepdim=True))
        if stride == 1:
            return best[:, 0]
        stride = -(-stride // _FINER)
        steps = torch.arange(-_FINER, _FINER + 1, device=last.device)


def magnitudes(fmt: Format, span: float, *, at_most: int) -> Tensor | None:
    """The codes of a format from 0 to span, float64; None if they are more than `at_most`.

    >>> magnitudes(FLOAT4_E2M1FN, 6.0, at_most=16)
    tensor([0.0000, 0.5000, 1.0000, 1.5000, 2.0000, 3.0000, 4.0000, 6.0000],
           dtype=torch.float64)
    """
    grid = fmt.grid
    if grid.mantissa_bits is None:
        return torch.arange(span + 1, dtype=torch.float64, device="cpu") if span < at_most else None
    octave = torch.arange(1 << grid.mantissa_bits, dtype=torch.float64, device="cpu")
    spacing = 2.0 ** (grid.min_exponent - grid.mantissa_bits)
    # Subnormals have the spacing of the lowest octave.
    codes = [octave * spacing]
    while octave.numel() * spacing <= span and sum(map(len, codes)) <= at_most:
        codes.append((octave + octave.numel()) * spacing)
        spacing *= 2.0
    values = torch.cat(codes)
    values = values[values <= span]
    return values if values.numel() <= at_most else None
