"""Inputs and specifications for files that measure their ranges themselves."""

from __future__ import annotations

import torch
from torch import Tensor

import fakequant as fq

FORMATS = ("float4_e2m1fn", "float8_e4m3fn", "int8", "int4", "nf4")


SCALES = (
    "float8_e8m0fnu:floor",
    "float8_e8m0fnu:ceil",
    "float8_e8m0fnu:even",
    "float8_e8m0fnu:even_fp4",
    "float8_e4m3fn@per_tensor",
    "uint8@per_tensor",
)


# Blocks along the last axis, ragged, along a middle axis, tiles, longer than the axis; whole axes.
PLACES = {
    "per_block(-1:16)": (3, 2, 32),
    "per_block(-1:16,pad)": (3, 2, 40),
    "per_block(1:2,pad)": (3, 5, 4, 2),
    "per_block(1:3,2:8,pad)": (3, 7, 20),
    "per_block(-1:32,pad)": (3, 20),
    "per_token": (3, 4, 16),
    "per_channel(1)": (3, 4, 5),
    "per_tensor": (3, 9),
}


# Every format with every scale in ragged blocks, and every place with both kinds of scales.
CASES = sorted(
    {(f, "per_block(-1:16,pad)", s) for f in FORMATS for s in SCALES}
    | {("float4_e2m1fn", place, s) for place in PLACES for s in (SCALES[0], SCALES[4])}
    | {("float6_e2m3fn", "per_token", SCALES[1]), ("float8_e5m2", "per_block(-1:16)", SCALES[1])}
    | {("int8", place, SCALES[0]) for place in ("per_block(1:3,2:8,pad)", "per_channel(1)", "per_tensor")}
    | {("float4_e2m1fn", "per_block(-1:16)", "float8_e4m3fn@per_channel(0,2)")}
)


def hostile(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Groups of very different magnitude, most with a largest value at or next to a power of two or a tie."""
    generator = torch.Generator().manual_seed(seed)

    def random(*size: int) -> Tensor:
        return torch.rand(size, generator=generator)

    count = torch.Size(shape).numel()
    grid = torch.randint(-28, 29, (count,), generator=generator) * 0.25
    x = torch.where(random(count) < 0.5, grid, torch.randn(count, generator=generator))
    x = x.view(shape) * 2.0 ** torch.randint(-12, 12, (*shape[:-1], 1), generator=generator)
    bound = torch.tensor([1.0, 6.0, 7.5, 448.0, 127.0, 7.0])[torch.randint(0, 6, shape, generator=generator)]
    powers = bound * 2.0 ** torch.randint(-120, 120, shape, generator=generator)
    beside = torch.nextafter(powers, torch.where(random(*shape) < 0.5, torch.inf, 0.0))
    x = torch.where(random(*shape) < 0.02, torch.where(random(*shape) < 0.5, powers, beside), x)
    x.view(-1)[:6] = torch.tensor([0.0, -0.0, 1e-40, torch.inf, -torch.inf, torch.nan])
    x.select(0, 1).zero_()
    return x.to(dtype)


def numbers(text: str, shape: tuple[int, ...], seed: int) -> Tensor:
    x = hostile(shape, seed)
    # Integers have no code for NaN.
    return x.nan_to_num(0.0, torch.inf, -torch.inf) if fq.QuantSpec.parse(text).format.has_zero_point else x


TEXTS = {f"{f} {place} scale={s}": PLACES[place] for f, place, s in CASES}
