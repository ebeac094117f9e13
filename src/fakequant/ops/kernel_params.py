"""Specifications as numbers for kernels (formats, tables, rules of scales), and reasons why kernels cannot compute."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fakequant.numerics.formats.floats import ExponentFormat, Format, Grid
from fakequant.numerics.qparams import compute_dtype
from fakequant.numerics.scales import ScaleRounding, ScaleSpec
from fakequant.numerics.spec import Arithmetic, Gradient, QuantSpec

# Rounding adds 2**(e + 23 - mantissa_bits), which must stay a float32.
LARGEST = 2.0**64
# A step is built by its exponent field, which subnormal numbers have not.
_SMALLEST_STEP = 2.0**-126
_NO_MANTISSA = -1
# The numbers by which scales.h knows the kinds of scales.
FLOAT, MULTIPLIER, ASYMMETRIC, POWER_OF_TWO, UNDER_A_SCALE, EXACT = range(6)
_NEVER = 2.0  # mantissas end below 1


def grid_fields(grid: Grid) -> tuple[float, float, int, int, bool]:
    """The fields of a format without a table, in the order in which kernels read them."""
    mantissa_bits = _NO_MANTISSA if grid.mantissa_bits is None else grid.mantissa_bits
    return grid.quant_min, grid.quant_max, mantissa_bits, grid.min_exponent, grid.negative_zero


@lru_cache
def table_fields(fmt: Format, dtype: torch.dtype) -> tuple[float, ...]:
    """The values of a table format, then the smallest number that rounds to each value but the first."""
    table = fmt.grid.table
    if table is None:
        return ()
    kind = np.float64 if dtype == torch.float64 else np.float32
    reached_from = []
    for code, middle in enumerate(table.middles, start=1):
        number = kind(middle)
        # From a middle the even code is reached; an odd one only from the next number on.
        while float(number) < middle or (float(number) == middle and code % 2):
            number = np.nextafter(number, kind(np.inf))
        reached_from.append(float(number))
    return *table.values, *reached_from


def cannot_round(fmt: Format, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot round to a format in a dtype; None if they can."""
    if fmt.grid.mantissa_bits is not None and fmt.quant_max > LARGEST and dtype != torch.float64:
        return f"the kernels round floats up to 2**64, {fmt} reaches {fmt.quant_max:g}"
    return None


def cannot_hold(spec: QuantSpec) -> str | None:
    """Why the kernels cannot compute with the parameters of a specification; None if they can."""
    if spec.arithmetic.has_two_scales:
        return f"the kernels encode and decode by one scale, and {spec} by two"
    return None


def is_lattice(spec: QuantSpec) -> bool:
    """Whether a specification has offsets in units of x, or scales that may be 0 or negative."""
    return spec.offset is not None or spec.scale.is_exact


def cannot_choose(
    spec: QuantSpec, dtype: torch.dtype, groups: tuple[int, ...], order: tuple[int, ...] | None = None
) -> str | None:
    """Why the kernels cannot compute the scales of a specification from ranges; None if they can.

    `groups` is the shape of the scales, `order` their axes from slowest to fastest in the kernel (default: in order).
    """
    if spec.gradient is Gradient.CLIP:
        return "its gradient ends at the values of codes, and kernels that compute scales know only the range"
    scale = spec.scale
    if scale.needs_values:
        return f"{scale.rounding.value} computes scales from all values of a group, and the kernels from its range"
    if not spec.symmetric and spec.offset is None and scale.format is not None:
        return f"the kernels choose zero points by float32 scales only, not by those in {scale.format}"
    if spec.offset is not None and scale.format is not None and not scale.is_exact:
        return f"the kernels choose offsets by exact or float32 scales only, not by {scale}"
    if spec.needs_values:
        return "its offsets may be negative, and the kernels support only ranges that contain 0"
    for stored in (scale, spec.offset):
        if stored is not None and stored.format is not None and (reason := _cannot_store(stored, dtype, groups, order)):
            return reason
    return None


def _cannot_store(
    stored: ScaleSpec, dtype: torch.dtype, groups: tuple[int, ...], order: tuple[int, ...] | None
) -> str | None:
    fmt, within, what = stored.format, stored.granularity, stored.word
    assert fmt is not None, "float32 scales are not rounded"
    if isinstance(fmt, ExponentFormat):
        return None
    for each in (fmt, stored.shared):
        if each is not None and each.quant_max > LARGEST and dtype != torch.float64:
            return f"the kernels round {what}s up to 2**64, {each} reaches {each.quant_max:g}"
    if within is None:
        return None
    if not stored.is_exact:
        whole = within.block_shape(groups) == groups
        return None if whole else f"its {what}s share scales {within}, and the kernels support one for the tensor only"
    if not fmt.has_zero_point:
        return f"the kernels support integer codes of {what}s under a shared scale, not {fmt}"
    if in_turn(stored, groups, order) is None:
        return f"{what}s that share one {within} do not follow each other in memory"
    return None


def in_turn(stored: ScaleSpec | None, groups: tuple[int, ...], order: tuple[int, ...] | None = None) -> int | None:
    """How many neighbouring scales share an exact scale; 0 without shared scales, None if they are not neighbours."""
    if stored is None or stored.granularity is None or not stored.is_exact:
        return 0
    blocks, count, whole = stored.granularity.block_shape(groups), 1, True
    for axis in reversed(order or range(len(groups))):
        block = blocks[axis]
        if (block > 1 and not whole) or groups[axis] % max(block, 1):
            return None
        count *= block
        whole = whole and block == groups[axis]
    return count


def cannot_draw(fmt: Format, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot round stochastically to a format; None if they can."""
    grid = fmt.grid
    if grid.mantissa_bits is None or dtype == torch.float64:
        return None
    if (step := 2.0 ** (grid.min_exponent - grid.mantissa_bits)) < _SMALLEST_STEP:
        return f"the kernels round stochastically to steps from 2**-126 on, {fmt} has one of {step:g}"
    return None


class ScaleRule(NamedTuple):
    """The fields of ScaleRule in scales.h, where they are explained, in the order of RuleField in dynamic.cpp."""

    kind: int
    bound: float
    limit: float
    divisor: float = 0.0
    offset: int = 0
    up_from: float = _NEVER
    down_at: float = _NEVER
    lowest: int = 0
    highest: int = 0
    smallest: float = 0.0
    quant_min: float = 0.0
    quant_max: float = 0.0
    mantissa_bits: int = 0
    min_exponent: int = 0
    negative_zero: bool = False
    most: float = 0.0
    keeps_small: bool = True
    is_signed: bool = False
    together: int = 0
    shared_smallest: float = 0.0
    shared_most: float = 0.0
    shared_quant_min: float = 0.0
    shared_quant_max: float = 0.0
    shared_mantissa_bits: int = 0
    shared_min_exponent: int = 0
    shared_negative_zero: bool = False


@lru_cache
def scale_rule(spec: QuantSpec, dtype: torch.dtype, scales: int | None, offsets: int | None) -> Tensor:
    """The ScaleRule for a dtype as float64 [26], or [52] with a rule of offsets; the counts are those of `in_turn`."""
    rules = rule_of(spec, dtype)._replace(together=scales or 0)
    if spec.offset is not None:
        largest = torch.finfo(dtype).max * (1.0 - torch.finfo(compute_dtype(dtype)).eps)
        offset = _exact(1.0, spec.offset, largest, dtype)._replace(keeps_small=False, together=offsets or 0)
        rules = (*rules, *offset)
    return torch.tensor(rules, dtype=torch.float64, device="cpu")


def rule_of(spec: QuantSpec, dtype: torch.dtype) -> ScaleRule:
    """The rule that computes scales for tensors of a dtype; numerics/qparams.py has the formulas."""
    fmt, info = spec.format, torch.finfo(compute_dtype(dtype))
    largest = torch.finfo(dtype).max * (1.0 - info.eps)
    if spec.offset is not None:
        return _exact(fmt.quant_max, spec.scale, largest / fmt.quant_max, dtype)
    if not spec.symmetric:
        return ScaleRule(ASYMMETRIC, fmt.quant_max - fmt.quant_min, largest)
    limit = largest / max(-fmt.quant_min, fmt.quant_max)
    if spec.arithmetic is Arithmetic.MULTIPLIER:
        return ScaleRule(MULTIPLIER, fmt.bound, limit)
    if isinstance(spec.scale.format, ExponentFormat):
        lowest = spec.scale.format.exponent_bias
        highest = min(lowest, math.frexp(limit)[1] - 1)
        rule = ScaleRule(POWER_OF_TWO, fmt.bound, limit, lowest=-lowest, highest=highest)
        if spec.scale.rounding is ScaleRounding.CEIL:
            return rule._replace(divisor=fmt.bound, down_at=0.5)
        return rule._replace(divisor=1.0, offset=-math.frexp(fmt.bound)[1], up_from=spec.scale.up_from(fmt))
    if spec.scale.format is None:
        return ScaleRule(FLOAT, spec.scale.bound(fmt), limit)
    if spec.scale.is_exact:
        return _exact(spec.scale.bound(fmt), spec.scale, limit, dtype)
    of_scales, bound = spec.scale.format, spec.scale.bound(fmt)
    rule = ScaleRule(UNDER_A_SCALE, bound, limit, divisor=of_scales.quant_max * bound, smallest=of_scales.smallest)
    return rule._replace(**_named_fields(of_scales))


def _exact(bound: float, stored: ScaleSpec, limit: float, dtype: torch.dtype) -> ScaleRule:
    """The rule for scales or offsets that are exact numbers of a format, or float32 if they have no format."""
    fmt, shared, computed = stored.format, stored.shared, compute_dtype(dtype)
    if fmt is None:
        return ScaleRule(FLOAT, bound, limit)

    def most(of: Format, limit: float) -> float:
        return of.neighbours(torch.tensor(limit, dtype=computed, device="cpu")).near.item()

    tiny = torch.finfo(computed).tiny
    rule = ScaleRule(
        EXACT,
        bound,
        limit,
        divisor=fmt.farthest * bound,
        smallest=max(fmt.smallest, tiny),
        most=most(fmt, limit),
        is_signed=stored.rounding is ScaleRounding.SIGNED and bound < 0,
    )
    rule = rule._replace(**_named_fields(fmt))
    if shared is None:
        return rule
    rule = rule._replace(shared_smallest=max(shared.smallest, tiny), shared_most=most(shared, limit / fmt.smallest))
    return rule._replace(**_named_fields(shared, "shared_"))


def _named_fields(fmt: Format, prefix: str = "") -> dict[str, Any]:
    names = ("quant_min", "quant_max", "mantissa_bits", "min_exponent", "negative_zero")
    return {prefix + name: field for name, field in zip(names, grid_fields(fmt.grid), strict=True)}
