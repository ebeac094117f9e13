"""The compile-time constants of the kernels; imports no triton.

A kernel is compiled for every different value of `KernelCall`, `Tiling` and `Sweep`. So these classes hold only
constants that kernels read, and no number that changes with every shape.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from fakequant.numerics.formats.floats import FloatFormat, Format, Specials
from fakequant.numerics.granularity import Tiles
from fakequant.numerics.qparams import compute_dtype
from fakequant.numerics.spec import Arithmetic, Gradient, QuantSpec, Rounding
from fakequant.ops.kernel_params import UNDER_A_SCALE, grid_fields, rule_of, table_fields

# Adding and subtracting 1.5 * 2**23 rounds to an integer while |v| < 2**22; beyond that v stays about itself, which
# saturates all the same where codes and zero points stay below 2**21.
_PLAIN_BITS = 20
LARGEST_INT32 = 2**31 - 1
# The most elements of a run that a program holds at once: 32 elements for each thread of 8 warps.
LONGEST_RUN = 8192
# Runs shorter than this are reduced with those of other rows of memory, which lie side by side in it.
_SHORT = 16
# The kinds of scales, indexed by the constants in ops/kernel_params.py.
_KINDS = ("float", "multiplier", "asymmetric", "power_of_two", "under_a_scale")
_MASKS = {Gradient.CODE_RANGE: "code", Gradient.INPUT_RANGE: "input", Gradient.CLIP: "clip"}


@dataclass(frozen=True)
class ScaleChoice:
    """`ops.kernel_params.ScaleRule`, the rule from ranges to scales, with its numbers rounded to the compute dtype."""

    kind: str
    bound: float
    limit: float
    least_multiplier: float
    largest_multiplier: float
    largest_number: float
    divisor: float
    offset: int
    up_from: float
    down_at: float
    lowest: int
    highest: int
    smallest: float
    scales: KernelCall | None  # how scales are rounded to their format, where they have one that is rounded to


@dataclass(frozen=True)
class KernelCall:
    """The steps from an element to its code and value; triton compiles a kernel for each different `KernelCall`."""

    arithmetic: str
    has_zero_point: bool
    family: str  # "integer", "float" or "table"
    plain: bool  # integers so small that two additions round them, and no sign of zero to keep
    has_offset: bool  # whether codes are integers, which have no negative zero
    quant_min: float
    quant_max: float
    bound: float
    symmetric: bool
    mantissa_bits: int
    min_exponent: int
    negative_zero: bool
    smallest_normal: float  # of a float format: where its subnormals end
    step: float  # of a float format: the spacing just above 1
    steps_in_one: float  # of a float format: 1 over the spacing of its subnormals; 0 where float32 has no such number
    table_size: int
    code_bits: int
    nan_pattern: int  # of a float format: the stored code of NaN
    infinity_pattern: int  # the stored code of infinity, or -1
    stochastic: bool
    mask: str  # where gradients pass: "none", "code", "input" or "clip"
    emit: str  # "value" or "code"
    rule: ScaleChoice | None  # by which scales are found, where they are not given


@dataclass(frozen=True)
class Tiling:
    """How the kernel finds the group of each element in a block.

    Attributes:
        kind: "single": there is one group. "whole": a block lies in one run of memory under one scale. "long": a block
            lies in at most two runs. "eights": every eight elements lie in one run. "any": each element may be in
            another run.
        run: the length of runs if it is a power of two and the kind is "eights", else 0.
        columns: the number of groups side by side, if that is a power of two and each is one element wide; else 0.
        one_row: whether run i lies in group i.
        one_plane: if not `one_row`, whether a row contains all groups. Both are False if the kernel does not use them.
        wide: whether positions need 64 bits.
    """

    kind: str
    run: int
    columns: int
    one_row: bool
    one_plane: bool
    wide: bool


@dataclass(frozen=True)
class TilePlace:
    """Tiles as runs of memory, each under one scale, and how blocks of elements cover the runs.

    Attributes:
        run: the number of elements of a run.
        columns: the number of groups in a row of memory, with one run each.
        period: the number of runs after which other groups begin.
    """

    elements: int
    groups: int
    run: int
    columns: int
    period: int
    block: int
    tiling: Tiling

    @staticmethod
    def of(tiles: Tiles, block: int) -> TilePlace:
        """The `TilePlace` for tiles and a block size, a power of two of at least 8."""
        g0, b0, g1, b1 = tiles
        # Groups that are runs of memory are one row of columns.
        run, columns, period = (b0, g0, g0) if g1 == 1 and b1 == 1 else (b1, g1, b0 * g1)
        place = TilePlace(tiles.elements, tiles.groups, run, columns, period, block, _NO_TILING)
        one_row, one_plane = place.numbering
        kind, equal_runs, narrow = "any", 0, 0
        if place.groups <= 1:
            kind = "single"
        elif run >= block:
            kind = "long" if run % block else "whole"
        elif run % 8 == 0:
            kind, equal_runs = "eights", run if is_power_of_two(run) else 0
        elif run == 1 and place.is_one_plane and is_power_of_two(columns):
            narrow = columns
        if kind == "single" or narrow:
            one_row = one_plane = False
        wide = is_wide(place.elements + block)
        return replace(place, tiling=Tiling(kind, equal_runs, narrow, one_row, one_plane, wide))

    @property
    def is_one_plane(self) -> bool:
        """Whether a row contains all groups."""
        return self.period * self.run >= self.elements

    @property
    def numbering(self) -> tuple[bool, bool]:
        """The values of `Tiling.one_row` and `Tiling.one_plane`."""
        one_row = self.columns == self.period
        return one_row, not one_row and self.is_one_plane

    def is_in_one_pass(self, rule: ScaleChoice) -> bool:
        """Whether a program can also compute scales, because it has whole groups and whole bytes of the mask."""
        runs_are_groups = self.columns == self.period and self.groups * self.run == self.elements
        return runs_are_groups and self.run % 8 == 0 and self.run <= LONGEST_RUN and rule.kind != "under_a_scale"


_NO_TILING = Tiling("single", 0, 0, False, False, False)


def is_wide(elements: int) -> bool:
    """Whether the positions of `elements` elements need 64 bits."""
    return elements > LARGEST_INT32


def is_power_of_two(n: int) -> bool:
    """Whether a positive number is a power of two."""
    return n & (n - 1) == 0


def call_of(
    spec: QuantSpec,
    dtype: torch.dtype,
    *,
    zero_point: bool = False,
    mask: bool = False,
    emit: str = "value",
) -> KernelCall:
    """The `KernelCall` for a dtype and scales from the caller; `mask`: whether the mask is written."""
    fmt = spec.format
    stochastic = spec.rounding is Rounding.STOCHASTIC
    keeps_sign = spec.arithmetic is Arithmetic.MULTIPLIER or stochastic
    return KernelCall(
        arithmetic=spec.arithmetic.value,
        has_zero_point=zero_point,
        plain=_family(fmt) == "integer" and fmt.bits <= _PLAIN_BITS and not keeps_sign,
        symmetric=spec.symmetric,
        stochastic=stochastic,
        mask=_MASKS.get(spec.gradient, "none") if mask else "none",
        emit=emit,
        rule=None,
        **_fields(fmt, dtype),
    )


def dynamic_call_of(spec: QuantSpec, dtype: torch.dtype, *, mask: bool) -> KernelCall:
    """The `KernelCall` for a dtype that computes each scale from the range of its group."""
    rule, computed = rule_of(spec, dtype), compute_dtype(dtype)
    number, info = (np.float64 if computed == torch.float64 else np.float32), torch.finfo(computed)
    scales = None
    if rule.kind == UNDER_A_SCALE:
        assert spec.scale.format is not None
        scales = replace(call_of(QuantSpec("int8"), dtype), plain=False, **_fields(spec.scale.format, dtype))
    choice = ScaleChoice(
        kind=_KINDS[rule.kind],
        bound=float(number(rule.bound)),
        limit=float(number(rule.limit)),
        least_multiplier=float(number(1.0 / rule.limit)),
        largest_multiplier=float(number(1.0 / info.tiny)),
        largest_number=float(info.max),
        divisor=float(number(rule.divisor)),
        offset=rule.offset,
        up_from=float(number(rule.up_from)),
        down_at=float(number(rule.down_at)),
        lowest=rule.lowest,
        highest=rule.highest,
        smallest=float(number(rule.smallest)),
        scales=scales,
    )
    call = call_of(spec, dtype, zero_point=not spec.symmetric, mask=mask)
    # Dividing by a power of two is multiplying by its reciprocal, bit for bit, where that exists: from 2**-127 on.
    exact = choice.kind == "power_of_two" and choice.lowest >= -127 and spec.arithmetic is Arithmetic.DIVIDE
    return replace(call, rule=choice, arithmetic=Arithmetic.RECIPROCAL.value if exact else call.arithmetic)


def _family(fmt: Format) -> str:
    if fmt.grid.table is not None:
        return "table"
    return "integer" if fmt.grid.mantissa_bits is None else "float"


def _fields(fmt: Format, dtype: torch.dtype) -> dict[str, Any]:
    """The fields of `KernelCall` that a format determines."""
    quant_min, quant_max, mantissa_bits, min_exponent, negative_zero = grid_fields(fmt.grid)
    infinity_pattern = -1
    if isinstance(fmt, FloatFormat) and fmt.specials is Specials.IEEE:  # all bits of the exponent
        infinity_pattern = ((1 << fmt.exponent_bits) - 1) << fmt.mantissa_bits
    return {
        "family": _family(fmt),
        "has_offset": fmt.has_zero_point,
        "quant_min": float(quant_min),
        "quant_max": float(quant_max),
        "bound": float(fmt.bound),
        "mantissa_bits": mantissa_bits,
        "min_exponent": min_exponent,
        "negative_zero": negative_zero,
        "smallest_normal": 2.0**min_exponent,
        "step": 2.0**-mantissa_bits,
        "steps_in_one": 2.0 ** (mantissa_bits - min_exponent) if mantissa_bits - min_exponent < 128 else 0.0,
        "code_bits": fmt.bits,
        "nan_pattern": fmt.nan_pattern if isinstance(fmt, FloatFormat) else 0,
        "infinity_pattern": infinity_pattern,
        "table_size": (len(table_fields(fmt, compute_dtype(dtype))) + 1) // 2,
    }


@dataclass(frozen=True)
class Sweep:
    """The order in which a program reduces the elements of groups.

    Attributes:
        across: whether a row of memory has one or a few elements of every group, so that rows are reduced with each
            other; else a row is a run, which is reduced to one value.
        rows: the number of rows of a block.
        width: the number of elements of a row in a block; a power of two.
        one_row, one_plane, wide: as in `Tiling`; the first two only if rows are runs.
    """

    across: bool
    rows: int
    width: int
    one_row: bool
    one_plane: bool
    wide: bool

    @property
    def reduced(self) -> int:
        """The axis of a block [rows, width] that is reduced."""
        return 0 if self.across else 1


class Reduction(NamedTuple):
    """A `Sweep` over all groups, and the programs that run it.

    Attributes:
        steps: how many blocks a program reduces, along a run or over rows.
        programs: the number of programs.
    """

    sweep: Sweep
    steps: int
    programs: int

    @staticmethod
    def of(place: TilePlace, most_steps: int = 8) -> Reduction:
        """The `Reduction` for a `TilePlace`, in blocks of its size."""
        across = place.run < _SHORT and place.period > place.columns
        if across:
            row = place.columns * place.run
            rows, planes = place.period // place.columns, place.groups // place.columns
            width = min(next_power_of_two(row), max(place.block // 16, 8))
            height = place.block // width
            steps = min(most_steps, ceiling(rows, height))
            programs = planes * ceiling(rows, height * steps) * ceiling(row, width)
            one_row = one_plane = False
        else:
            width = min(next_power_of_two(place.run), place.block)
            height, steps = place.block // width, min(most_steps, ceiling(place.run, width))
            programs = ceiling(place.elements // place.run, height) * ceiling(place.run, width * steps)
            one_row, one_plane = place.numbering
        wide = is_wide(place.elements + place.block * most_steps)
        return Reduction(Sweep(across, height, width, one_row, one_plane, wide), steps, programs)


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is not below a positive number n."""
    return 1 << (n - 1).bit_length()


def ceiling(n: int, by: int) -> int:
    """n / by, rounded up."""
    return -(-n // by)
