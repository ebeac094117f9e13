"""Hostile inputs of histograms, in every dtype."""

import torch

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def hostile(shape, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    flat = x.view(-1)
    flat[::3] = 0.0
    flat[1::17] = -0.0
    flat[2::5] = (flat[2::5] * 64).round() / 64  # on the edges of bins
    flat[4::101] = torch.tensor(torch.finfo(dtype).smallest_normal).double() / 4
    return x.to(dtype)
