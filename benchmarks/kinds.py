"""Kinds of cases: the name that stands in every table, the specification, and where the scales come from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import fakequant as fq
from benchmarks.harness import Case, square


@dataclass(frozen=True)
class Kind:
    """Fake quantization by one specification, of any size, dtype and direction.

    Args:
        name: in tables and results.
        spec: as text.
        dynamic: whether scales are taken from the input; else they are given.
        learned: whether scales get a gradient too.
    """

    name: str
    spec: str
    dynamic: bool = False
    learned: bool = False

    @property
    def directions(self) -> tuple[bool, ...]:
        """Whether the gradient is computed too, each way that is timed; without it, a learned scale is a given one."""
        return (True,) if self.learned else (False, True)

    def case(self, elements: int, dtype: torch.dtype = torch.float32, *, backward: bool = False) -> Case:
        """The case of one size."""
        spec = fq.QuantSpec.parse(self.spec)
        return Case(self.name, spec, square(elements), dtype, backward, self.dynamic, self.learned)


def mx(format: str, rounding: str) -> str:
    """The specification of an MX format, by its rule for the exponent of a block."""
    return f"{format} per_block(-1:32) scale=float8_e8m0fnu:{rounding}"


def _given(format: str, where: str, granularity: str) -> Kind:
    return Kind(f"{format} {where}", f"{format} {granularity}")


INT8_TENSOR = _given("int8", "per tensor", "per_tensor")
INT8_CHANNEL = _given("int8", "per channel", "per_channel(0)")
INT8_CHANNEL_TAKEN = Kind("int8 per channel, from the input", "int8 per_channel(0)", dynamic=True)
INT8_TOKEN = Kind("int8 per token", "int8 per_token", dynamic=True)
INT8_GROUPS = Kind("int8 in groups of 32", "int8 per_block(-1:32)", dynamic=True)
INT4_GROUPS = Kind("int4 in groups of 32", "int4 per_block(-1:32)", dynamic=True)
INT4_LARGE_GROUPS = Kind("int4 in groups of 128", "int4 per_block(-1:128)", dynamic=True)
FP8_TENSOR = _given("float8_e4m3fn", "per tensor", "per_tensor")
FP8_TENSOR_TAKEN = Kind("float8_e4m3fn per tensor, from the input", "float8_e4m3fn per_tensor", dynamic=True)
MXFP4 = Kind("MXFP4", mx("float4_e2m1fn", "floor"), dynamic=True)
MXFP8 = Kind("MXFP8", mx("float8_e4m3fn", "floor"), dynamic=True)
MXINT8 = Kind("MXINT8", mx("int8_narrow", "floor"), dynamic=True)
NVFP4 = Kind("NVFP4", "float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn@per_tensor", dynamic=True)
_K = "uint6@per_block(-1:8)/float16"
Q4_K = Kind("Q4_K", f"uint4 per_block(-1:32) scale={_K} offset={_K}", dynamic=True)
_K = "uint4@per_block(-1:16)/float16"
Q2_K = Kind("Q2_K", f"uint2 per_block(-1:16) scale={_K} offset={_K}", dynamic=True)
Q6_K = Kind("Q6_K", "int6 per_block(-1:16) scale=int8@per_block(-1:16)/float16", dynamic=True)
LSQ = Kind("LSQ, int8 per tensor", "int8 per_tensor", learned=True)

# Shown from the smallest to the largest size, in float32, forward and with the gradient.
GROWTH = (INT8_TENSOR, FP8_TENSOR, MXFP4, NVFP4)
OTHERS = (INT8_CHANNEL, INT8_TOKEN, INT8_GROUPS, INT4_GROUPS)
SHOWN = (*GROWTH, *OTHERS, LSQ)
"""The rows of the tables, in which no other library may be faster."""

SMALL_FLOATS = tuple(
    _given(format, where, granularity)
    for format in ("float8_e4m3fn", "float8_e5m2", "float6_e3m2fn", "float6_e2m3fn", "float4_e2m1fn")
    for where, granularity in (("per tensor", "per_tensor"), ("in blocks of 32", "per_block(-1:32)"))
)
"""With given scales."""
FROM_THE_INPUT = (MXFP8, MXFP4, NVFP4, INT4_GROUPS, INT4_LARGE_GROUPS)
"""Formats of blocks whose scales are taken from the input."""
K_QUANTS = (Q4_K, Q2_K, Q6_K)
"""Types of GGUF whose scales share scales."""
INTEGER_GRANULARITIES = (
    INT8_TENSOR,
    INT8_CHANNEL,
    Kind("int8 per channel 1", "int8 per_channel(1)"),
    Kind("int8 in tiles of 128x128", "int8 per_block(0:128,1:128)"),
)
"""With given scales."""
