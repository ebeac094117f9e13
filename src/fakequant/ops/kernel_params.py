"""What kernels know of a specification as numbers: grids, tables and formulas of scales; and what they do not serve."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fakequant.numerics.floats import ExponentFormat
from fakequant.numerics.format import Format, Grid
from fakequant.numerics.qparams import compute_dtype
from fakequant.numerics.scales import ScaleRounding, ScaleSpec
from fakequant.numerics.spec import Arithmetic, Gradient, QuantSpec

# Rounding adds 2**(e + 23 - mantissa_bits), which must stay a float32.
LARGEST = 2.0**64
# A step is built by its exponent field, which subnormal numbers have not.
_SMALLEST_STEP = 2.0**-126
_NO_MANTISSA = -1
# The numbers by which scales.h knows the kinds of scales.
FLOAT, MULTIPLIER, ASYMMETRIC, POWER_OF_TWO, UNDER_A_SCALE = range(5)
_NEVER = 2.0  # mantissas end below 1


def grid_fields(grid: Grid) -> tuple[float, float, int, int, bool]:
    """What the kernels know of a format without a table, in their order."""
    mantissa_bits = _NO_MANTISSA if grid.mantissa_bits is None else grid.mantissa_bits
    return grid.quant_min, grid.quant_max, mantissa_bits, grid.min_exponent, grid.negative_zero


@lru_cache
def table_fields(fmt: Format, dtype: torch.dtype) -> tuple[float, ...]:
    """The values of a table format, then from which number of a dtype on each but the first is reached."""
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
    """Why the kernels do not round to a format in a dtype, or None."""
    if fmt.grid.mantissa_bits is not None and fmt.quant_max > LARGEST and dtype != torch.float64:
        return f"the kernels round floats up to 2**64, {fmt} reaches {fmt.quant_max:g}"
    return None


def cannot_hold(spec: QuantSpec) -> str | None:
    """Why the kernels do not compute with the parameters of a specification, or None."""
    if spec.arithmetic.has_two_scales:
        return f"the kernels encode and decode by one scale, and {spec} by two"
    if spec.offset is not None:
        return f"the kernels shift codes by zero points, and {spec} shifts x by offsets"
    if spec.scale.is_exact:
        return f"the kernels know positive scales, and those of {spec} may be 0 or negative"
    return None


def cannot_choose(spec: QuantSpec, dtype: torch.dtype, groups: tuple[int, ...]) -> str | None:
    """Why the kernels do not find the scales of a specification, or None."""
    if spec.gradient is Gradient.CLIP:
        return "its gradient ends at the values of codes, and the dynamic kernels know those of the range"
    scale = spec.scale
    if reason := cannot_hold(spec):
        return reason
    if scale.needs_values:
        return f"its scales follow from all values of a group by {scale.rounding.value}, and the kernels know its range"
    if scale.format is None or scale.granularity is None:
        return None
    if scale.granularity.block_shape(groups) != groups:
        return f"its scales share scales {scale.granularity}, and the kernels know those of the whole tensor only"
    if scale.format.quant_max > LARGEST and dtype != torch.float64:
        return f"the kernels round scales up to 2**64, {scale.format} reaches {scale.format.quant_max:g}"
    return None


def cannot_draw(fmt: Format, dtype: torch.dtype) -> str | None:
    """Why the kernels do not round to a format stochastically, or None."""
    grid = fmt.grid
    if grid.mantissa_bits is None or dtype == torch.float64:
        return None
    if (step := 2.0 ** (grid.min_exponent - grid.mantissa_bits)) < _SMALLEST_STEP:
        return f"the kernels round stochastically to steps from 2**-126 on, {fmt} has one of {step:g}"
    return None


class ScaleRule(NamedTuple):
    """The fields of ScaleRule in scales.h, in the order of RuleField in dynamic.cpp; its comments say what they are."""

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


@lru_cache
def scale_rule(spec: QuantSpec, dtype: torch.dtype) -> Tensor:
    """The ScaleRule for tensors of a dtype [15]."""
    return torch.tensor(rule_of(spec, dtype), dtype=torch.float64, device="cpu")


def rule_of(spec: QuantSpec, dtype: torch.dtype) -> ScaleRule:
    """The rule by which tensors of a dtype get their scales; see numerics/qparams.py for the formulas."""
    fmt, info = spec.format, torch.finfo(compute_dtype(dtype))
    largest = torch.finfo(dtype).max * (1.0 - info.eps)
    if not spec.symmetric:
        return ScaleRule(ASYMMETRIC, fmt.quant_max - fmt.quant_min, largest)
    limit = largest / max(-fmt.quant_min, fmt.quant_max)
    if spec.arithmetic is Arithmetic.MULTIPLIER:
        return ScaleRule(MULTIPLIER, fmt.bound, limit)
    if isinstance(spec.scale.format, ExponentFormat):
        return _power_of_two(spec, spec.scale.format.exponent_bias, limit)
    if spec.scale.format is None:
        return ScaleRule(FLOAT, spec.scale.bound(fmt), limit)
    return _under_a_scale(spec.scale.bound(fmt), spec.scale, limit)


def _power_of_two(spec: QuantSpec, lowest: int, limit: float) -> ScaleRule:
    rounding, bound = spec.scale.rounding, spec.format.bound
    rule = ScaleRule(
        POWER_OF_TWO,
        bound,
        limit,
        divisor=1.0,
        offset=-math.frexp(bound)[1],
        lowest=-lowest,
        highest=min(lowest, math.frexp(limit)[1] - 1),
    )
    if rounding is ScaleRounding.CEIL:
        return rule._replace(divisor=bound, offset=0, down_at=0.5)
    if rounding is ScaleRounding.EVEN:
        return rule._replace(up_from=1 - 2.0 ** -(spec.format.fraction_bits + 2))
    return rule


def _under_a_scale(bound: float, scale: ScaleSpec, limit: float) -> ScaleRule:
    fmt = scale.format
    assert fmt is not None, "only scales with a format have a scale of their own"
    rule = ScaleRule(UNDER_A_SCALE, bound, limit, divisor=fmt.quant_max * bound, smallest=fmt.smallest)
    return ScaleRule(*rule[:10], *grid_fields(fmt.grid))
