"""The cases whose scales are taken from the input: all formats of scales, and numbers hostile to each group's range."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

import fakequant as fq
from fakequant.numerics import qparams
from fakequant.numerics.scales import OffsetSpec, ScaleRounding, ScaleSpec
from tests.support.cases import GRANULARITIES, GranularityCase, neighbour

WHOLE = fq.PerTensor()
SCALES = {
    "float32": ScaleSpec(),
    "e8m0 floor": ScaleSpec("float8_e8m0fnu", ScaleRounding.FLOOR),
    "e8m0 ceil": ScaleSpec("float8_e8m0fnu", ScaleRounding.CEIL),
    "e8m0 even": ScaleSpec("float8_e8m0fnu", ScaleRounding.EVEN),
    "e8m0 even_fp4": ScaleSpec("float8_e8m0fnu", ScaleRounding.EVEN_FP4),
    "e4m3 under float32": ScaleSpec("float8_e4m3fn", granularity=WHOLE),
    "fnuz under float32": ScaleSpec("float8_e4m3fnuz", granularity=WHOLE),
    "uint8 under float32": ScaleSpec("uint8", granularity=WHOLE),
}
EXACT = ("float16", "float16:signed", "float8_e4m3fn", "uint6@per_tensor/float16", "int6@per_tensor/float16")
OFFSETS = ("float32", "float16", "uint6@per_tensor/float16")
FORMATS = [
    *("int8", "int4", "int1", "int8_narrow", "uint8", "uint4", "int[-100,37]", "int16", "uint16"),
    *("float8_e4m3fn", "float8_e5m2", "float6_e2m3fn", "float4_e2m1fn", "nf4"),
]
RUNS = {
    **GRANULARITIES,
    "block_16": GranularityCase(fq.PerBlock({-1: 16}), (3, 5, 112), (1, 1, 16)),
    "many_blocks_32": GranularityCase(fq.PerBlock({-1: 32}), (67, 96), (1, 32)),
    "many_tokens": GranularityCase(fq.PerToken(), (1031, 7), (1, 7)),
    "long_token": GranularityCase(fq.PerToken(), (3, 5003), (1, 5003)),
}


def specs(name: str, granularity: fq.Granularity) -> Iterator[fq.QuantSpec]:
    """Every specification of a format: symmetric and not, all arithmetics, all scale formats."""
    for arithmetic in (fq.Arithmetic.DIVIDE, fq.Arithmetic.RECIPROCAL, fq.Arithmetic.MULTIPLIER):
        yield fq.QuantSpec(name, granularity, symmetric=True, arithmetic=arithmetic)
        if fq.formats().get(name, fq.parse_format(name)).has_zero_point and arithmetic.is_linear:
            yield fq.QuantSpec(name, granularity, symmetric=False, arithmetic=arithmetic)
    for scale in list(SCALES.values())[1:]:
        yield fq.QuantSpec(name, granularity, scale=scale, symmetric=True)
    yield fq.QuantSpec(
        name, granularity, scale=SCALES["e8m0 ceil"], symmetric=True, arithmetic=fq.Arithmetic.RECIPROCAL
    )


def on_lattices(name: str, granularity: fq.Granularity) -> Iterator[fq.QuantSpec]:
    """Every specification of a format with exact scales, and with offsets."""
    for scale in EXACT:
        yield fq.QuantSpec(name, granularity, scale=ScaleSpec.parse(f"scale={scale}"), symmetric=True)
    fmt = fq.parse_format(name)
    for scale in OFFSETS if fmt.has_zero_point and not fmt.signed else ():
        for offset in OFFSETS:
            given = {"scale": ScaleSpec.parse(f"scale={scale}"), "offset": OffsetSpec.parse(f"offset={offset}")}
            yield fq.QuantSpec(name, granularity, **given)


def hostile(where: GranularityCase, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Groups of every magnitude: of zeros, subnormals, the largest numbers, powers of two and their neighbours."""
    random = np.random.default_rng(seed)
    info = torch.finfo(dtype)
    least = info.tiny * info.eps
    tops = [0.0, least, 3 * least, info.tiny, info.max, info.max / 3, *2.0 ** np.arange(-14.0, 15.0, 2), 1.0, 6.0, 7.0]
    top = torch.tensor(random.choice(tops, where.groups), dtype=torch.float64)
    top = neighbour(top.to(dtype), torch.from_numpy(np.asarray(random.integers(-1, 2, where.groups))))
    spread = top.double()
    for axis, block in enumerate(where.blocks):
        spread = spread.repeat_interleave(block, axis)
    fraction = torch.from_numpy(np.asarray(random.choice([-1.0, 1.0, 0.5, 0.75, -0.3, 0.0, -0.0, 1 / 3], where.shape)))
    x = (spread * fraction).to(dtype)
    poison = torch.tensor([float("inf"), -float("inf"), float("nan"), -0.0], dtype=dtype)
    pick = torch.from_numpy(np.asarray(random.integers(0, 60, where.shape)))
    return torch.where(pick < len(poison), poison[pick.clamp(max=len(poison) - 1)], x)


def composed(x, spec):
    """The parameters that the definition gives."""
    return qparams.choose_qparams(qparams.measure(x, spec.granularity), spec, largest=torch.finfo(x.dtype).max)
