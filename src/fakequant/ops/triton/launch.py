"""Launches the kernels on torch's current stream of the tensor's device."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

from fakequant.ops.triton.kernels.elements import (
    dequantize_kernel,
    measure_kernel,
    quantize_kernel,
    quantize_runs_kernel,
)
from fakequant.ops.triton.kernels.rounding import mask_kernel

from .call import KernelCall, Reduction, TilePlace, ceiling, is_wide, next_power_of_two
from .kernels.gradients import digits_kernel, largest_kernel, total_kernel
from .kernels.histogram import ends_kernel, observe_kernel
from .kernels.sweep import sweep_kernel

Given = tuple[Tensor | int | None, ...]
_WARPS = 4
# Elements of rows that take twice the warps.
_WIDE_ROW = 4096
# Blocks of values that a program observes.
_STEPS = 8
# Rows of a matrix that a program sweeps: with 128 columns 32 numbers in the registers of each thread.
_SWEPT = 32
# The groups whose totals one program finds.
_GROUPS = 256
_SAME_SIZE_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _start(kernel: Any, programs: int, x: Tensor, *rest: Tensor | int | None, warps: int = _WARPS, **fixed: Any) -> Any:
    """Launch a kernel on the device of its first tensor; triton itself would take the current device.

    Returns the compiled kernel, or None in triton's interpreter.
    """
    current = not x.is_cuda or x.device.index == torch.cuda.current_device()
    with contextlib.nullcontext() if current else torch.cuda.device(x.device):
        # A product and a sum must not become one operation with one rounding.
        return kernel[(programs,)](x, *rest, **fixed, enable_fp_fusion=False, num_warps=warps)


class _Again:
    """Launches one kernel with the constants of a plan; the first launch compiles, later launches skip triton's lookup.

    The lookup by all arguments takes 11 us, this takes 2. Numbers and dtypes of a plan stay the same; for pointers that
    are not multiples of 16, triton compiles another kernel.
    """

    def __init__(self, programs: int, *numbers: int, **fixed: Any) -> None:
        self.programs, self.numbers, self.fixed = programs, numbers, fixed
        self.arguments = *numbers, *fixed.values()
        self.compiled: Any = None

    def first(self, kernel: Any, *tensors: Any) -> None:
        """Launch by triton, and keep the compiled kernel."""
        compiled = _start(kernel, self.programs, *tensors, *self.numbers, **self.fixed)
        if isinstance(compiled, CompiledKernel) and _divided(tensors) and not kernel.pre_run_hooks:
            active: Any = driver.active
            self.device, self.stream_of = active.get_current_device, active.get_current_stream
            self.index = tensors[0].device.index or 0
            self.run: Any = compiled.run
            self.function, self.metadata = compiled.function, compiled.packed_metadata
            self.compiled = compiled  # which owns the function

    def start(self, *tensors: Tensor | None) -> bool:
        """Launch the compiled kernel; False if these tensors need another kernel, or a profiler must see launches."""
        if self.compiled is None or not _divided(tensors) or self.device() != self.index:
            return False
        hook = knobs.runtime.launch_enter_hook
        if hook is not None and bool(getattr(hook, "calls", True)):  # a profiler has asked triton to tell it of starts
            return False
        stream = self.stream_of(self.index)
        self.run(self.programs, 1, 1, stream, self.function, self.metadata, None, None, None, *tensors, *self.arguments)
        return True


def _divided(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether all pointers are multiples of 16."""
    pointers = 0
    for tensor in tensors:
        if tensor is not None:
            pointers |= tensor.data_ptr()
    return not pointers & 15


class Quantizing:
    """`quantize` with fixed scales, for all calls of a plan, see `_Again`."""

    def __init__(self, table: Tensor | None, place: TilePlace, call: KernelCall) -> None:
        self.others = None, None, table, None, None
        fixed = {"CALL": call, "TILING": place.tiling, "BLOCK": place.block}
        self.again = _Again(ceiling(place.elements, place.block), 0, *_shape(place), **fixed)

    def __call__(self, x: Tensor, y: Tensor, bits: Tensor | None, scale: Tensor, zero_point: Tensor | None) -> None:
        tensors = x, y, bits, None, scale, zero_point, *self.others
        if not self.again.start(*tensors):
            self.again.first(quantize_kernel, *tensors)


class Masking:
    """`mask_gradient`, for all calls of a plan, see `_Again`."""

    def __init__(self, n: int, block: int) -> None:
        self.again = _Again(ceiling(n, block), n, WIDE=is_wide(n + block), BLOCK=block)

    def __call__(self, dy: Tensor, bits: Tensor, dx: Tensor) -> None:
        if not self.again.start(dy, bits, dx):
            integer = _SAME_SIZE_INTEGER[dy.element_size()]
            self.again.first(mask_kernel, dy.view(integer), bits, dx.view(integer))


def _shape(place: TilePlace) -> tuple[int, int, int, int]:
    one_row, _ = place.numbering
    # With one row no kernel reads the columns, and triton would compile another kernel if 16 divides them.
    return place.elements, place.run, 1 if one_row else place.columns, place.period


def quantize(x: Tensor, outputs: Given, given: Given, place: TilePlace, call: KernelCall) -> None:
    """Launch `quantize_kernel`. Its arguments: `outputs` are y, bits, odd; `given` are scale_or_whole to seed_value."""
    if place.elements:
        fixed = {"CALL": call, "TILING": place.tiling, "BLOCK": place.block}
        _start(quantize_kernel, ceiling(place.elements, place.block), x, *outputs, *given, *_shape(place), **fixed)


def dequantize(codes: Tensor, y: Tensor, given: Given, place: TilePlace, call: KernelCall) -> None:
    """Launch `dequantize_kernel` over all codes; `given` are its arguments from scale to table."""
    if place.elements:
        fixed = {"CALL": call, "TILING": place.tiling, "BLOCK": place.block}
        _start(dequantize_kernel, ceiling(place.elements, place.block), codes, y, *given, *_shape(place), **fixed)


def quantize_runs(x: Tensor, outputs: Given, given: Given, place: TilePlace, call: KernelCall) -> None:
    """Launch `quantize_runs_kernel`. Its arguments: `outputs` are y and bits, `given` are table to seed_value."""
    width = max(next_power_of_two(place.run), 8)
    rows = max(place.block // width, 1)
    wide = is_wide(place.elements + rows * width)
    fixed = {"CALL": call, "WIDE": wide, "ROWS": rows, "WIDTH": width}
    warps = 2 * _WARPS if width >= _WIDE_ROW else _WARPS
    programs = ceiling(place.groups, rows)
    _start(quantize_runs_kernel, programs, x, *outputs, *given, place.groups, place.run, warps=warps, **fixed)


def measure(x: Tensor, patterns: Given, place: TilePlace) -> None:
    """Launch `measure_kernel` over x; `patterns` are its arguments low, high and whole."""
    if place.elements:
        sweep, steps, programs = Reduction.of(place)
        _start(measure_kernel, programs, x, *patterns, *_shape(place), steps, SWEEP=sweep)


def observe(values: Tensor, found: Given, inverse: Tensor | None, block: int) -> None:
    """Launch `observe_kernel` over values [groups, elements]; `found` are its arguments low, high and counts."""
    (groups, elements), counts = values.shape, found[-1]
    width = min(next_power_of_two(elements), block)
    rows, steps = block // width, min(_STEPS, ceiling(elements, width))
    bins = counts.shape[-1] if isinstance(counts, Tensor) else 0
    fixed = {"BINS": bins, "WIDE": is_wide(values.numel() + block), "ROWS": rows, "WIDTH": width, "STEPS": steps}
    programs = ceiling(groups, rows) * ceiling(elements, width * steps)
    _start(observe_kernel, programs, values, *found, inverse, groups, elements, **fixed)


def ends_of_keys(keys: Tensor, ends: Tensor) -> None:
    """Launch `ends_kernel`: it writes the ranges `ends` [2, groups] from `keys` [2, groups]."""
    groups = ends.shape[-1]
    block = min(_GROUPS, next_power_of_two(groups))
    _start(ends_kernel, ceiling(groups, block), *keys, *ends, groups, BLOCK=block)


def mask_gradient(dy: Tensor, bits: Tensor, dx: Tensor, block: int) -> None:
    """Launch `mask_kernel` over dy."""
    n, integer = dy.numel(), _SAME_SIZE_INTEGER[dy.element_size()]
    if n:
        wide = is_wide(n + block)
        _start(mask_kernel, ceiling(n, block), dy.view(integer), bits, dx.view(integer), n, WIDE=wide, BLOCK=block)


def sum_gradients(dy: Tensor, x: Tensor, sums: Given, given: Given, place: TilePlace, call: KernelCall) -> None:
    """Launch both passes that add to sums [6, groups]; `given` are the kernels' arguments scale to seed_value."""
    sweep, steps, programs = Reduction.of(place, most_steps=16)
    numbers = place.groups, *_shape(place), steps
    for kernel in (largest_kernel, digits_kernel):
        _start(kernel, programs, dy, x, *sums, *given, *numbers, CALL=call, SWEEP=sweep)


def sweep(block: tuple[Tensor, ...], grid: Given, call: KernelCall) -> None:
    """Launch `sweep_kernel` over all rows; `block` are its arguments wanted to missed, `grid` runs to table."""
    columns, rows = block[0].shape
    fixed = {"CALL": call, "COLUMNS": next_power_of_two(columns), "ROWS": _SWEPT}
    if block[0].numel():
        _start(sweep_kernel, ceiling(rows, _SWEPT), *block, *grid, rows, columns, block[2].shape[1], **fixed)


def total(sums: Tensor, result: Tensor) -> None:
    """Launch `total_kernel` over all groups."""
    _start(total_kernel, ceiling(result.numel(), _GROUPS), sums, result, result.numel(), BLOCK=_GROUPS)
