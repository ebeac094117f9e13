"""The cases that every backend is compared on: formats, granularities, memory layouts, and hostile numbers for each."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fakequant as fq
from fakequant.numerics.formats import FloatFormat, Specials
from fakequant.numerics.formats.floats import TableFormat
from fakequant.ops.cpu.backend import load_kernels
from fakequant.ops.dispatch import backends
from tests.support import oracle
from tests.support.backends import Calls

# Those that serve tensors of the CPU, the reference among them.
ON_CPU = [Calls(backend) for backend in backends() if backend.device_type in (None, "cpu")]
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True)
class FormatCase:
    """A format with and without a zero point, and the same format as the oracle knows it."""

    format: str | fq.Format
    oracle: oracle.OracleFormat
    symmetric: bool = True

    def spec(self, granularity: fq.Granularity, arithmetic: fq.Arithmetic, **options: Any) -> fq.QuantSpec:
        return fq.QuantSpec(self.format, granularity, symmetric=self.symmetric, arithmetic=arithmetic, **options)

    def arithmetics(self) -> list[fq.Arithmetic]:
        """Those that the oracle knows; `tests/numerics/test_two_scales.py` has its own for the others."""
        return [a for a in fq.Arithmetic if not a.has_two_scales and (self.symmetric or a.is_linear)]


_SQUARES = tuple(float(v * abs(v)) for v in range(-100, 156))

FORMATS = {
    "int8": FormatCase("int8", oracle.Integers(-128, 127)),
    "int8_affine": FormatCase("int8", oracle.Integers(-128, 127), symmetric=False),
    "uint8_affine": FormatCase("uint8", oracle.Integers(0, 255), symmetric=False),
    "uint4": FormatCase("uint4", oracle.Integers(0, 15)),
    "int8_narrow": FormatCase("int8_narrow", oracle.Integers(-127, 127)),
    "int4": FormatCase("int4", oracle.Integers(-8, 7)),
    "int1": FormatCase("int1", oracle.Integers(-1, 0)),
    "uint1_affine": FormatCase("uint1", oracle.Integers(0, 1), symmetric=False),
    "odd_range_affine": FormatCase("int[-100,37]", oracle.Integers(-100, 37), symmetric=False),
    "uint16_affine": FormatCase("uint16", oracle.Integers(0, 65535), symmetric=False),
    "int16": FormatCase("int16", oracle.Integers(-32768, 32767)),
    **{name: FormatCase(name, found) for name in fq.formats() if (found := oracle.small_float(name)) is not None},
    "nf4": FormatCase("nf4", oracle.NF4),
    # Not registered: formats are values, and the kernels know only their fields.
    "three_values": FormatCase(TableFormat("three", (-1.0, 0.0, 0.75)), oracle.Values((-1.0, 0.0, 0.75))),
    "positive_values": FormatCase(TableFormat("positive", (0.0, 1.0, 5.0)), oracle.Values((0.0, 1.0, 5.0))),
    # The most that a table holds: beyond 16 values the kernels search them in another way.
    "256_values": FormatCase(TableFormat("squares", _SQUARES), oracle.Values(_SQUARES)),
    "half": FormatCase(FloatFormat("e5m10", 5, 10, Specials.IEEE), oracle.FLOAT16),
}
_LARGEST_SMALL = 8


def small_formats() -> list[str]:
    return [name for name, fmt in fq.formats().items() if fmt.bits <= _LARGEST_SMALL and fmt.has_zero]


def _known_to_the_oracle(names: list[str]) -> dict[str, FormatCase]:
    found = {}
    for name in names:
        if match := re.fullmatch(r"(u?)int(\d)", name):
            codes = 2 ** int(match[2])
            low = 0 if match[1] else -codes // 2
            found[name] = FormatCase(name, oracle.Integers(low, low + codes - 1), symmetric=True)
        elif name in FORMATS:
            found[name] = FORMATS[name]
    return found


SMALL_FORMATS = _known_to_the_oracle(small_formats())


@dataclass(frozen=True)
class GranularityCase:
    """A granularity on a shape, and the block sizes that it must mean there."""

    granularity: fq.Granularity
    shape: tuple[int, ...]
    blocks: tuple[int, ...]

    @property
    def groups(self) -> tuple[int, ...]:
        return tuple(n // b for n, b in zip(self.shape, self.blocks, strict=True))


# Runs of one scale from 1 element to many, shorter and longer than a vector register; sizes that no 8 divides.
GRANULARITIES = {
    "tensor": GranularityCase(fq.PerTensor(), (5, 7, 9), (5, 7, 9)),
    "channel_0": GranularityCase(fq.PerChannel(0), (6, 5, 7), (1, 5, 7)),
    "channel_1": GranularityCase(fq.PerChannel(1), (2, 5, 3, 6), (2, 1, 3, 6)),
    "channel_1_short_runs": GranularityCase(fq.PerChannel(1), (9, 5, 3), (9, 1, 3)),
    "channel_last": GranularityCase(fq.PerChannel(-1), (4, 3, 37), (4, 3, 1)),
    "channels_0_2": GranularityCase(fq.PerChannel(0, 2), (5, 6, 7), (1, 6, 1)),
    "channels_alternating": GranularityCase(fq.PerChannel(1, -1), (2, 3, 4, 5), (2, 1, 4, 1)),
    "token": GranularityCase(fq.PerToken(), (3, 5, 19), (1, 1, 19)),
    "token_short": GranularityCase(fq.PerToken(), (35, 5), (1, 5)),
    "block_32": GranularityCase(fq.PerBlock({-1: 32}), (5, 64), (1, 32)),
    "block_short": GranularityCase(fq.PerBlock({-1: 4}), (11, 3, 8), (1, 1, 4)),
    "block_first_axis": GranularityCase(fq.PerBlock({0: 3}), (6, 13), (3, 1)),
    "block_middle_axis": GranularityCase(fq.PerBlock({1: 2}), (3, 4, 11), (1, 2, 1)),
    "tiles": GranularityCase(fq.PerBlock({0: 4, 1: 8}), (8, 24), (4, 8)),
    "tiles_alternating": GranularityCase(fq.PerBlock({0: 2, 1: 2, 2: 3}), (4, 4, 6), (2, 2, 3)),
    "every_element": GranularityCase(fq.PerBlock({0: 1}), (7, 11), (1, 1)),
    "no_axes": GranularityCase(fq.PerTensor(), (), ()),
}


def _channels_last(x: Tensor) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if x.dim() > 2 else x


def _sliced(x: Tensor) -> Tensor:
    """Every second element of each row of a larger tensor; what lies between is poison."""
    if not x.dim():
        return x
    larger = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"))
    larger[..., ::2] = x
    return larger[..., ::2]


def _offset(x: Tensor) -> Tensor:
    """Contiguous, but one element into its storage, so that no vector load is aligned."""
    return torch.cat([x.new_full((1,), float("nan")), x.reshape(-1)])[1:].view(x.shape)


# Each returns the values of x in another layout; only `expanded` changes values: it repeats the first row.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() > 1 else x,
    "channels_last": _channels_last,
    "sliced": _sliced,
    "expanded": lambda x: x[:1].expand_as(x) if x.dim() else x,
    "offset": _offset,
}


def neighbour(x: Tensor, steps: Tensor) -> Tensor:
    """The number `steps` representable values further from zero; x where it is zero or not finite."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    moved = (x.view(integer) + steps.to(integer)).view(x.dtype)
    return torch.where((x != 0) & x.isfinite(), moved, x)


@cache
def _special_numbers(dtype: torch.dtype) -> Tensor:
    """Numbers on which arithmetic goes wrong: zeros, subnormals, non-finite ones, extremes, around powers of two."""
    info = torch.finfo(dtype)
    subnormal = neighbour(torch.tensor(info.tiny, dtype=dtype), torch.tensor(-1))
    smallest = torch.tensor(1).to({2: torch.int16, 4: torch.int32, 8: torch.int64}[subnormal.element_size()])
    numbers = [0.0, float("inf"), float("nan"), info.max, info.tiny, subnormal.item(), smallest.view(dtype).item(), 1e4]
    powers = 2.0 ** torch.arange(-14, 15, dtype=torch.float64).to(dtype)
    around = torch.cat([neighbour(powers, torch.full((), step)) for step in (-1, 0, 1)])
    positive = torch.cat([torch.tensor(numbers, dtype=dtype), around])
    return torch.cat([positive, -positive])


@dataclass(frozen=True)
class Numbers:
    """An input with its parameters, [groups per axis]."""

    x: Tensor
    params: fq.QParams


def _random_scales(shape: tuple[int, ...], dtype: torch.dtype, random: np.random.Generator) -> Tensor:
    """Half of them powers of two, so that exact ties occur in every dtype; some extreme."""
    exact = 2.0 ** random.integers(-6, 7, shape)
    rough = np.exp(random.normal(-2, 2, shape))
    scale = torch.from_numpy(np.where(random.random(shape) < 0.5, exact, rough)).reshape(shape).to(dtype)
    extremes = torch.tensor([torch.finfo(dtype).tiny, 1e-30, 1e30], dtype=dtype)
    pick = torch.from_numpy(random.integers(0, 40, shape)).reshape(shape)
    return torch.where(pick < 3, extremes[pick.clamp(max=2)], scale)


def _ties(case: FormatCase, zero_point: np.ndarray | float, shape: tuple[int, ...], random: np.random.Generator):
    """In units of codes: middles between neighbouring values, more often those at the bounds of the format."""
    if isinstance(case.oracle, oracle.Integers):
        low, high = case.oracle.low - 2, case.oracle.high + 2
        near = np.where(random.random(shape) < 0.5, low, high - 4) + random.integers(0, 5, shape)
        code = np.where(random.random(shape) < 0.3, near, random.integers(low, high + 1, shape))
        return code + 0.5 * random.integers(0, 2, shape) - zero_point
    middles = oracle.table(case.oracle).middles
    if isinstance(case.oracle, oracle.Values):
        points = np.concatenate([middles, case.oracle.numbers, [1.5 * case.oracle.numbers[-1], -7.0]])
        return random.choice(points, shape)
    middles = middles[1:]
    index = random.integers(0, len(middles), shape)
    index = np.where(random.random(shape) < 0.2, len(middles) - 1 - index % 2, index)
    return middles[index] * random.choice([-1.0, 1.0], shape)


def hostile(
    case: FormatCase, where: GranularityCase, arithmetic: fq.Arithmetic, dtype: torch.dtype, seed: int = 0
) -> Numbers:
    """Numbers at ties of the scale in use and their nearest neighbours, mixed with special ones."""
    random = np.random.default_rng(seed)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    scale = _random_scales(where.groups, compute, random)
    zero_point = None
    offset: np.ndarray | float = 0.0
    if not case.symmetric:
        assert isinstance(case.oracle, oracle.Integers)
        codes = random.integers(case.oracle.low, case.oracle.high + 1, where.groups)
        zero_point = torch.from_numpy(np.asarray(codes, np.int32)).reshape(where.groups)
        offset = oracle.spread(np.asarray(codes), where.blocks)
    ties = torch.from_numpy(np.asarray(_ties(case, offset, where.shape, random))).to(compute)
    unit = torch.from_numpy(oracle.spread(scale.numpy(), where.blocks))
    x = (ties / unit if arithmetic is fq.Arithmetic.MULTIPLIER else ties * unit).to(dtype)
    x = neighbour(x, torch.from_numpy(np.asarray(random.integers(-1, 2, where.shape))))
    special = _special_numbers(dtype)
    pick = torch.from_numpy(np.asarray(random.integers(0, 4 * len(special), where.shape)))
    x = torch.where(pick < len(special), special[pick.clamp(max=len(special) - 1)], x)
    return Numbers(x, fq.QParams(scale, zero_point))


def hostile_gradient(x: Tensor) -> Tensor:
    """A gradient of every magnitude; NaN and inf only in its last quarter, so that most groups have finite sums."""
    dy = torch.randn(x.shape) * 2.0 ** torch.randint(-14, 15, x.shape)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
    pick = torch.randint(0, 40, (x.numel(),))
    late = (torch.arange(x.numel()) > 0.75 * x.numel()) & (pick < len(special))
    return torch.where(late.view(x.shape), special[pick.clamp(max=len(special) - 1)].view(x.shape), dy).to(x.dtype)


def each_way():
    """The ways through the C++ kernels, each while it serves: registers that the processor has, and portable loops.

    Registers also for results past the caches, as large ones go; portable loops never stream.
    """
    if load_kernels() or os.environ.get("TRITON_INTERPRET") == "1":
        yield "no C++ kernels"
        return
    try:
        for lanes in (16, 8):
            if torch.ops.fakequant_cpu.limit_lanes(lanes) != lanes:
                continue
            yield f"registers of {lanes}"
            before = torch.ops.fakequant_cpu.stream_from(0)
            try:
                yield f"registers of {lanes}, streamed"
            finally:
                torch.ops.fakequant_cpu.stream_from(before)
        torch.ops.fakequant_cpu.limit_lanes(0)
        yield "portable"
    finally:
        torch.ops.fakequant_cpu.limit_lanes(16)
