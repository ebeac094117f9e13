"""Where the elements of a block lie, and in which groups."""

import triton
import triton.language as tl

from .elements import load_params


@triton.jit
def first_element(BLOCK: tl.constexpr, TILING: tl.constexpr):
    """The position of the program's block."""
    program = tl.program_id(0)
    if TILING.wide:
        program = program.to(tl.int64)
    return program * BLOCK


@triton.jit
def lanes(BLOCK: tl.constexpr):
    """Positions within a block [BLOCK // 8, 8]: a row has one byte of the mask."""
    return tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def group_of_run(run_index, columns, period, TILING: tl.constexpr):
    """The group of a run of memory; of a sweep as of a tiling."""
    if TILING.one_row:
        return run_index
    elif TILING.one_plane:
        return run_index % columns
    else:
        return run_index // period * columns + run_index % columns


@triton.jit
def group_of_element(position, run, columns, period, TILING: tl.constexpr):
    if TILING.columns:
        return position % TILING.columns
    else:
        return group_of_run(position // run, columns, period, TILING)


@triton.jit
def params_of_block(
    scale_or_whole, zero_point, low, high, start, n, run, columns, period, CALL: tl.constexpr, TILING: tl.constexpr,
    BLOCK: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """The parameters of the elements of a block: scalars, one per row [BLOCK // 8, 1], or one per element."""
    if TILING.kind == "single":
        return load_params(scale_or_whole, zero_point, low, high, 0, start < n, COMPUTE, CALL)
    elif TILING.kind == "whole":
        group = group_of_run(start // run, columns, period, TILING)
        return load_params(scale_or_whole, zero_point, low, high, group, start < n, COMPUTE, CALL)
    elif TILING.kind == "long":
        number = start // run
        group = group_of_run(number, columns, period, TILING)
        s, inverse, z, lo, hi = load_params(scale_or_whole, zero_point, low, high, group, start < n, COMPUTE, CALL)
        after = (number + 1) * run
        group = group_of_run(number + 1, columns, period, TILING)
        s1, inverse1, z1, lo1, hi1 = load_params(scale_or_whole, zero_point, low, high, group, after < n, COMPUTE, CALL)
        before = lanes(BLOCK) < tl.minimum(after - start, BLOCK).to(tl.int32)
        s, inverse, z = tl.where(before, s, s1), tl.where(before, inverse, inverse1), tl.where(before, z, z1)
        return s, inverse, z, tl.where(before, lo, lo1), tl.where(before, hi, hi1)
    elif TILING.kind == "eights":
        position = start + tl.arange(0, BLOCK // 8) * 8
        number = position // (TILING.run if TILING.run else run)
        group = group_of_run(number, columns, period, TILING)
        # Loaded as a line: of a column, triton takes another layout, and computes each element in both.
        s, inverse, z, lo, hi = load_params(scale_or_whole, zero_point, low, high, group, position < n, COMPUTE, CALL)
        return s[:, None], inverse[:, None], z[:, None], lo[:, None], hi[:, None]
    else:
        position = start + lanes(BLOCK)
        group = group_of_element(position, run, columns, period, TILING)
        return load_params(scale_or_whole, zero_point, low, high, group, position < n, COMPUTE, CALL)
