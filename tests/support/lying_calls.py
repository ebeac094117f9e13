"""Calls of the C++ kernels whose arguments contradict each other: each must raise, and touch no memory of others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

# Tiles g0, b0, g1, b1, then the fields of chunks.h: int8 by division.
PLAIN, SHIFTED = (0.0, 0.0, 0.0), (0.0, 1.0, 0.0)
INT8 = (-128.0, 127.0, -1.0, 0.0, 0.0, 0.0, *PLAIN)
TILES = (1.0, 40.0, 1.0, 1.0)
CHANNELS = (4.0, 10.0, 1.0, 1.0)
INFINITE, NAN = math.inf, math.nan
LYING_TILES = [
    (2000.0, 2000.0, 2000.0, 2000.0),
    (2.0**31, 2.0**31, 2.0**31, 2.0**31),  # whose product is 0 in int64
    (2.0**62, 4.0, 1.0, 1.0),
    (1.0, 41.0, 1.0, 1.0),
    (1.0, 39.0, 1.0, 1.0),
    (-1.0, -40.0, 1.0, 1.0),
    (0.0, 40.0, 1.0, 1.0),
    (INFINITE, 1.0, 1.0, 1.0),
    (NAN, 40.0, 1.0, 1.0),
    (0.5, 80.0, 1.0, 1.0),
]
LYING_GRIDS = [
    (-128.0, 127.0, 53.0, 0.0, 0.0, 0.0, *PLAIN),
    (-128.0, 127.0, 3.0, 1e9, 0.0, 0.0, *PLAIN),
    (-128.0, 127.0, NAN, 0.0, 0.0, 0.0, *PLAIN),
    (NAN, 127.0, -1.0, 0.0, 0.0, 0.0, *PLAIN),
    (-128.0, 127.0, -1.0, 0.0, 0.0, 3.0, *PLAIN),
    (-128.0, 127.0, -1.0, 0.0, 0.0, -1.0, *PLAIN),
]


def form(tiles: tuple[float, ...] = TILES, fields: tuple[float, ...] = INT8, table: tuple[float, ...] = ()) -> Tensor:
    """What `call_of` in chunks.h reads."""
    return torch.tensor((*tiles, *fields, *table), dtype=torch.float64)


def lying_forms() -> Iterator[tuple[str, Tensor]]:
    for tiles in LYING_TILES:
        yield f"tiles {tiles}", form(tiles)
    for fields in LYING_GRIDS:
        yield f"grid {fields}", form(fields=fields)
    yield "an even table", form(table=(0.0, 1.0))
    yield "a table of 257 values", form(table=(0.0,) * 513)
    yield "too short", form()[:12]
    yield "empty", form()[:0]
    yield "float32", form().float()
    yield "with gaps", form().repeat_interleave(2)[::2]


def lying_parameters(x: Tensor) -> Iterator[tuple[str, Tensor, Tensor | None, Tensor]]:
    """Scale, zero point and form for 40 elements."""
    one, four = x.new_ones(1), x.new_ones(4)
    yield "one scale for four groups", one, None, form(CHANNELS)
    yield "four scales for one group", four, None, form()
    yield "a zero point for four groups", four, one, form(CHANNELS)
    yield "an int32 zero point for four groups", four, one.int(), form(CHANNELS)
    yield "a scale in half", one.half(), None, form()
    yield "a scale with gaps", x.new_ones(8)[::2], None, form(CHANNELS)
    yield "a zero point in int64", one, one.long(), form()
    yield "no scale", one[:0], None, form()


Call = tuple[str, Callable[[], Any]]


def lying_calls() -> Iterator[Call]:
    yield from _of_elements()
    yield from _of_gradients()
    yield from _of_ranges()
    yield from _of_histograms()
    yield from _of_products()
    yield from lying_sweeps()


def _of_elements() -> Iterator[Call]:
    ops = torch.ops.fakequant_cpu
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(4, 10, dtype=dtype)
        one, codes = x.new_ones(1), torch.zeros(4, 10, dtype=torch.int8)
        forms = [(name, one, None, lie) for name, lie in lying_forms()]
        for name, scale, zero_point, lie in [*forms, *lying_parameters(x)]:
            given = scale, zero_point, lie
            yield f"checked: {name}", partial(ops.checked, x, *given)
            yield f"checked_with_mask: {name}", partial(ops.checked_with_mask, x, *given)
            yield f"checked_over: {name}", partial(ops.checked_over, x.clone(), *given)
            yield f"checked_codes: {name}", partial(ops.checked_codes, x, *given, codes)
            yield f"dequantize: {name}", partial(ops.dequantize, codes, *given, x)
            full = scale, zero_point, None, None, lie
            if zero_point is None or zero_point.dtype != torch.int32:
                yield f"fake_quantize: {name}", partial(ops.fake_quantize, x, *full, 1)
                yield f"quantize: {name}", partial(ops.quantize, x, *full, codes)
        plain = one, None, form()
        for name, other in (
            ("expanded", x[:1].expand(4, 10)),
            ("with gaps", x.repeat_interleave(2, 1)[:, ::2]),
            ("of integers", x.int()),
        ):
            yield f"checked: x {name}", partial(ops.checked, other, *plain)
            yield f"checked_over: x {name}", partial(ops.checked_over, other, *plain)
        gaps = codes.repeat_interleave(2, 1)[:, ::2]
        for name, other in (("gapped", gaps), ("few", codes[:1]), ("float", codes.float()), ("int64", codes.long())):
            yield f"checked_codes: {name} codes", partial(ops.checked_codes, x, *plain, other)
        floats = form(fields=(-448.0, 448.0, 3.0, -6.0, 1.0, 0.0, *PLAIN))
        yield "codes of a float", partial(ops.checked_codes, x, one, None, floats, codes)
        for mask in (2, 3, 5, -1):
            given = one, None, None, None, form(), mask
            yield f"mask {mask} without a range", partial(ops.fake_quantize, x, *given)
        given = one, None, one[:0], one[:0], form(), 2
        yield "an empty range", partial(ops.fake_quantize, x, *given)
        for random in (torch.zeros(39, dtype=torch.int32), torch.zeros(2, dtype=torch.int64), torch.zeros(40)):
            given = one, None, None, None, form(), 0, random
            name = f"random {random.dtype} {random.numel()}"
            yield name, partial(ops.fake_quantize, x, *given)
    yield "draw_words: int64", partial(ops.draw_words, torch.tensor(1), torch.zeros(8, dtype=torch.int64))
    yield "draw_words: seed", partial(ops.draw_words, torch.zeros(0), torch.zeros(8, dtype=torch.int32))


def _of_gradients() -> Iterator[Call]:
    ops = torch.ops.fakequant_cpu
    x = torch.randn(4, 10)
    one, sums = torch.ones(1), torch.zeros(1, dtype=torch.float64)
    short = torch.zeros(4, dtype=torch.uint8)
    yield "mask_gradient: a short mask", partial(ops.mask_gradient, x, short)
    yield "mask_gradient: a float mask", partial(ops.mask_gradient, x, torch.zeros(5))
    yield "mask_gradient: an expanded gradient", partial(ops.mask_gradient, x[:1].expand(4, 10), torch.zeros(5).byte())
    yield "mask_gradient_over: a short mask", partial(ops.mask_gradient_over, x.clone(), short)
    forms = [(name, one, None, lie) for name, lie in lying_forms()]
    for name, scale, zero_point, lie in [*forms, *lying_parameters(x)]:
        given = scale, zero_point, lie
        if zero_point is None or zero_point.dtype == torch.float32:
            full = scale, zero_point, None, None, lie, sums, None, 0
            yield f"grad_params: {name}", partial(ops.grad_params, x, x, *full)
            yield f"learned_gradients: {name}", partial(ops.learned_gradients, x, x, None, *given, True, True)
    plain = one, None, None, None
    yield "grad_params: few sums", partial(ops.grad_params, x, x, *plain, form(), sums[:0], None, 0)
    yield "grad_params: float sums", partial(ops.grad_params, x, x, *plain, form(), sums.float(), None, 0)
    yield "grad_params: a clip without a range", partial(ops.grad_params, x, x, *plain, form(), sums, None, 3)
    yield "grad_params: another gradient", partial(ops.grad_params, x[:1], x, *plain, form(), sums, None, 0)
    yield (
        "grad_params: an expanded gradient",
        partial(ops.grad_params, x[:1].expand(4, 10), x, *plain, form(), sums, None, 0),
    )
    nothing, empty = x[:0], form((1.0, 0.0, 1.0, 1.0))
    yield "grad_params: no elements", partial(ops.grad_params, nothing, nothing, *plain, empty, sums, None, 0)
    yield (
        "learned_gradients: no elements",
        partial(ops.learned_gradients, nothing, nothing, None, one, None, empty, True, False),
    )


def _of_ranges() -> Iterator[Call]:
    ops = torch.ops.fakequant_cpu
    x, ends = torch.randn(4, 10), torch.zeros(4)
    rule = torch.zeros(26, dtype=torch.float64)
    for name, lie in lying_forms():
        yield f"fake_quantize_dynamic: {name}", partial(ops.fake_quantize_dynamic, x, rule, lie, 1)
    for name, lie in (("short", rule[:25]), ("float", rule.float()), ("NaN", rule + NAN), ("huge", rule + 1e30)):
        yield f"fake_quantize_dynamic: a rule that is {name}", partial(ops.fake_quantize_dynamic, x, lie, form(), 1)
    for together in (3.0, -1.0, 8.0):
        lie = rule.clone()
        lie[18] = together
        yield f"fake_quantize_dynamic: {together} scales", partial(ops.fake_quantize_dynamic, x, lie, form(CHANNELS), 1)
        double, shifted = torch.cat([rule, lie]), form(CHANNELS, (*INT8[:6], *SHIFTED))
        yield f"fake_quantize_dynamic: {together} offsets", partial(ops.fake_quantize_dynamic, x, double, shifted, 1)
    yield (
        "fake_quantize_dynamic: no offsets",
        partial(ops.fake_quantize_dynamic, x, rule, form(fields=(*INT8[:6], *SHIFTED)), 1),
    )
    yield "fake_quantize_dynamic: expanded", partial(ops.fake_quantize_dynamic, x[:1].expand(4, 10), rule, form(), 1)
    for tiles in ((2000,) * 4, (2**31,) * 4, (4, 11, 1, 1), (-4, -10, 1, 1), (2**62, 4, 1, 1)):
        yield f"measure: {tiles}", partial(ops.measure, x, ends.clone(), ends.clone(), *tiles)
    yield "measure: few ends", partial(ops.measure, x, ends[:3].clone(), ends.clone(), 4, 10, 1, 1)
    yield "measure: ends in float64", partial(ops.measure, x, ends.double(), ends.double(), 4, 10, 1, 1)
    yield "measure: no elements", partial(ops.measure, x[:0], ends[:0], ends[:0], 0, 10, 1, 1)


def _of_histograms() -> Iterator[Call]:
    ops = torch.ops.fakequant_cpu
    x, double = torch.randn(4, 10), torch.float64
    ends, inverse = torch.zeros(2, 4), torch.ones(4, dtype=double)
    counts = torch.zeros(4, 2, 16, dtype=torch.int64)
    for name, of, into in (
        ("a negative inverse", -inverse, counts),
        ("an inverse that is NaN", inverse * NAN, counts),
        ("no bins", inverse, counts[:, :, :0]),
        ("few counts", inverse, counts[:3]),
        ("float counts", inverse, counts.double()),
        ("inverse in float32", inverse.float(), counts),
        ("many groups", torch.ones(7, dtype=double), counts),
    ):
        yield f"observe: {name}", partial(ops.observe, x, of, ends.clone(), into)
        yield f"take_in: {name}", partial(ops.take_in, x, of, ends[0].clone(), ends[1].clone(), into)
    yield "observe: few ends", partial(ops.observe, x, inverse, ends[:1].clone(), None)
    yield "take_in: few ends", partial(ops.take_in, x, inverse, ends[0, :3].clone(), ends[1].clone(), None)


def _of_products() -> Iterator[Call]:
    ops = torch.ops.fakequant_cpu
    sums, y, scale, one = torch.zeros(6, 8, dtype=torch.int32), torch.zeros(6, 8), torch.ones(8), torch.ones(1)
    for name, given in (
        ("no columns", (one, scale[:0], None, y, 1, False)),
        ("no outer axis", (one, scale, None, y, 0, False)),
        ("a negative outer axis", (one, scale, None, y, -1, False)),
        ("few rows", (torch.ones(5), scale, None, y, 1, False)),
        ("a short bias", (one, scale, scale[:7], y, 1, False)),
        ("a short result", (one, scale, None, y[:5], 1, False)),
        ("a scale with gaps", (one, torch.ones(16)[::2], None, y, 1, False)),
        ("a result in float64", (one, scale, None, y.double(), 1, False)),
        ("rows with scales, transposed", (torch.ones(6), scale, None, y, 1, True)),
    ):
        yield f"scale_sums: {name}", partial(ops.scale_sums, sums, *given)
    steps, codes = torch.ones(3, 8, dtype=torch.float64), torch.zeros(6, 8, dtype=torch.uint8)
    for name, given in (
        ("no steps", (sums, steps[:, :0], 0, 255, 1, codes)),
        ("steps in float32", (sums, steps.float(), 0, 255, 1, codes)),
        ("many steps", (sums, torch.ones(3, 7, dtype=torch.float64), 0, 255, 1, codes)),
        ("no inner axis", (sums, steps, 0, 255, 0, codes)),
        ("a negative inner axis", (sums, steps, 0, 255, -1, codes)),
        ("a large inner axis", (sums, steps, 0, 255, 2**62, codes)),
        ("few codes", (sums, steps, 0, 255, 1, codes[:5])),
        ("codes with gaps", (sums, steps, 0, 255, 1, torch.zeros(6, 16, dtype=torch.uint8)[:, ::2])),
        ("codes of 16 bits", (sums, steps, 0, 255, 1, codes.short())),
        ("sums of 64 bits", (sums.long(), steps, 0, 255, 1, codes)),
        ("a range beyond the codes", (sums, steps, 0, 256, 1, codes)),
        ("a range of signed codes", (sums, steps, -1, 255, 1, codes)),
        ("a range upside down", (sums, steps, 9, 8, 1, codes)),
    ):
        yield f"fixed_point: {name}", partial(ops.fixed_point, *given)
    yield from _of_channels()
    if ops.convolves():
        yield from _of_convolutions()


def _of_channels() -> Iterator[Call]:
    ops = torch.ops.fakequant_cpu
    right: dict[str, Any] = {
        "codes": torch.zeros(2, 4, 6, 6, dtype=torch.int8),
        "zero_point": 0,
        "weight": torch.zeros(8 * 9, dtype=torch.int8),
        "windows": torch.tensor([[3, 3], [1, 1], [1, 1], [1, 1]]),
        "sums": torch.zeros(2, 8, 6, 6, dtype=torch.int32),
    }
    ops.convolve_channels(*right.values())  # the lies are what is wrong
    windows = right["windows"]
    for name, value in (
        ("codes", right["codes"].short()),
        ("codes", right["codes"][:, :3]),
        ("codes", right["codes"][:, :0]),
        ("codes", right["codes"][:, :, :5]),
        ("codes", right["codes"].transpose(2, 3)[:, :, ::2]),
        ("weight", right["weight"][:-1]),
        ("weight", right["weight"].short()),
        ("windows", windows[:3]),
        ("windows", windows.int()),
        ("windows", windows * 0),
        ("windows", windows * 2**40),
        ("windows", torch.tensor([[3, 3], [2, 2], [1, 1], [1, 1]])),
        ("windows", torch.tensor([[3, 3], [1, 1], [-1, 1], [1, 1]])),
        ("windows", torch.tensor([[3, 3], [1, 1], [1, 1], [2**60, 1]])),
        ("sums", right["sums"][:, :, :5]),
        ("sums", torch.zeros(3, 8, 6, 6, dtype=torch.int32)),
        ("sums", torch.zeros(2, 6, 6, 6, dtype=torch.int32)),
        ("sums", torch.zeros(2, 8, 36, dtype=torch.int32)),
        ("sums", right["sums"].float()),
    ):
        given = (right | {name: value}).values()
        yield f"convolve_channels: {name} {list(value.shape)} {value.dtype}", partial(ops.convolve_channels, *given)


def _of_convolutions() -> Iterator[Call]:
    ops = torch.ops.fakequant_cpu
    right: dict[str, Any] = {
        "codes": torch.zeros(2, 4, 6, 6, dtype=torch.int8),
        "zero_point": 0,
        "weight": torch.zeros(8 * 4 * 9, dtype=torch.int8),
        "weight_sums": torch.zeros(8, dtype=torch.int32),
        "windows": torch.tensor([[3, 3], [1, 1], [1, 1], [1, 1]]),
        "x_scale": torch.ones(1),
        "scale": torch.ones(8),
        "bias": torch.zeros(8),
        "y": torch.zeros(2, 8, 6, 6),
    }
    ops.convolve(*right.values())  # the lies are what is wrong
    windows = right["windows"]
    for name, value in (
        ("codes", right["codes"].short()),
        ("codes", right["codes"][:, :, :5]),
        ("codes", right["codes"].transpose(2, 3)[:, :, ::2]),
        ("weight", right["weight"][:-1]),
        ("weight", right["weight"].short()),
        ("weight_sums", right["weight_sums"][:7]),
        ("windows", windows[:3]),
        ("windows", windows.int()),
        ("windows", windows * 0),
        ("windows", windows * 2**40),
        ("windows", torch.tensor([[3, 3], [2, 2], [1, 1], [1, 1]])),
        ("windows", torch.tensor([[3, 3], [1, 1], [-1, 1], [1, 1]])),
        ("windows", torch.tensor([[3, 3], [1, 1], [1, 1], [2**60, 1]])),
        ("x_scale", torch.ones(0)),
        ("scale", right["scale"][:7]),
        ("bias", right["bias"][:7]),
        ("bias", right["bias"].double()),
        ("y", right["y"][:, :, :5]),
        ("y", torch.zeros(3, 8, 6, 6)),
        ("y", torch.zeros(2, 8, 36)),
        ("y", right["y"].double()),
        ("y", right["y"].int()),
        ("x_scale", None),
        ("scale", None),
    ):
        given = (right | {name: value}).values()
        form = None if value is None else f"{list(value.shape)} {value.dtype}"
        yield f"convolve: {name} {form}", partial(ops.convolve, *tuple(given))
    without = right | {"x_scale": None, "scale": None}
    yield "convolve: a bias alone", partial(ops.convolve, *(without | {"y": right["y"].int()}).values())
    yield "convolve: float without scales", partial(ops.convolve, *(without | {"bias": None}).values())


def lying_sweeps() -> Iterator[Call]:
    """Of three columns of four rows, which have two runs of scales."""
    right: dict[str, Tensor | None] = {
        **{name: torch.zeros(3, 4) for name in ("wanted", "left")},
        "shares": torch.zeros(3, 3),
        **{name: torch.zeros(3, 4) for name in ("errors", "missed")},
        "form": form((4.0, 1.0, 1.0, 1.0)),
        "runs": torch.tensor([0, 0, 1]),
        "scale": torch.ones(2, 4),
        "zero_point": torch.zeros(2, 4),
        "offset": torch.zeros(2, 4),
        "sign": torch.ones(2, 4),
        "zero": torch.zeros(2, 4, dtype=torch.bool),
        "zeros": torch.zeros(3, 4, dtype=torch.bool),
    }
    torch.ops.fakequant_cpu.sweep(*right.values())  # the lies are what is wrong
    for name, value in right.items():
        assert value is not None
        if name != "form":
            yield (
                f"sweep: a short {name}",
                partial(torch.ops.fakequant_cpu.sweep, *(right | {name: value[:-1]}).values()),
            )
        other = value.double() if value.dtype in (torch.float32, torch.bool) else value.float()
        yield f"sweep: {name} {other.dtype}", partial(torch.ops.fakequant_cpu.sweep, *(right | {name: other}).values())
    for runs in ([0, 0, 2], [0, -1, 1], [0, 0, 2**62], [0, 0, 2**63 - 1]):
        yield (
            f"sweep: runs {runs}",
            partial(torch.ops.fakequant_cpu.sweep, *(right | {"runs": torch.tensor(runs)}).values()),
        )
    for name, lie in lying_forms():
        yield f"sweep: {name}", partial(torch.ops.fakequant_cpu.sweep, *(right | {"form": lie}).values())
