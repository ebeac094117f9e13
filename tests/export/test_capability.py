"""What ONNX can say of formats, granularities and operator sets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fakequant as fq
from fakequant.errors import ExportError
from fakequant.export.capability import (
    ScaleLayout,
    block_sizes,
    check_opset,
    check_scale,
    check_spec,
    encoding,
    layout,
    overflows,
)
from fakequant.numerics.formats import FloatFormat, Specials
from fakequant.numerics.granularity import parse_granularity

BOUNDS = {
    "INT4": (-8, 7),
    "UINT4": (0, 15),
    "INT8": (-128, 127),
    "UINT8": (0, 255),
    "INT16": (-32768, 32767),
    "UINT16": (0, 65535),
}


@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
@pytest.mark.parametrize("bits", range(1, 17))
def test_integers_go_into_the_smallest_type_that_holds_them(bits: int, signed: bool) -> None:
    fmt = fq.IntegerFormat.of(bits, signed=signed)
    found = encoding(fmt)
    low, high = BOUNDS[found.element.name]
    assert low <= fmt.low <= fmt.high <= high
    assert (low < 0) == signed
    assert found.element.bits == next(size for size in (4, 8, 16) if size >= bits)
    assert found.clips == (bits not in (4, 8, 16))
    assert found.element.opset == (13 if 4 < bits <= 8 else 21)


RANGES = {
    "narrow": ("int8_narrow", "INT8", True),
    "odd": ("int[-100,37]", "INT8", True),
    "odd_unsigned": ("int[0,100]", "UINT8", True),
    "one_too_many": ("int[-1,128]", "INT16", True),
    "e4m3": ("float8_e4m3fn", "FLOAT8E4M3FN", False),
    "e5m2": ("float8_e5m2", "FLOAT8E5M2", False),
}


@pytest.mark.parametrize(("name", "element", "clips"), RANGES.values(), ids=RANGES)
def test_other_ranges_and_floats(name: str, element: str, clips: bool) -> None:
    found = encoding(fq.parse_format(name))
    assert (found.element.name, found.clips) == (element, clips)


@pytest.mark.parametrize(
    "fmt",
    [fq.IntegerFormat(-32769, 0), fq.IntegerFormat(0, 65536), FloatFormat("e5m10", 5, 10, Specials.IEEE)],
    ids=str,
)
def test_larger_formats_are_refused(fmt: fq.Format) -> None:
    with pytest.raises(ExportError, match="has no element type in ONNX that QuantizeLinear writes; use integers of at"):
        encoding(fmt)


@pytest.mark.parametrize("name", [name for name in fq.formats() if name not in ("float16", "bfloat16")])
def test_every_format_has_an_encoding(name: str) -> None:
    fmt = fq.parse_format(name)
    found = encoding(fmt)
    assert found.element.bits >= fmt.bits
    assert found.portable == (not isinstance(fmt, fq.IntegerFormat) and not found.element.name.startswith("FLOAT8"))
    assert found.opset(constant=False) == (18 if found.portable else found.element.opset)


def test_two_scales_are_refused() -> None:
    with pytest.raises(ExportError, match=r"int8 per_tensor q8_k: it encodes and decodes by different scales"):
        check_spec(fq.QuantSpec("int8", arithmetic=fq.Arithmetic.Q8_K))


def test_multiplier_is_refused_and_reciprocal_is_not() -> None:
    with pytest.raises(ExportError, match=r"int8 per_tensor multiplier: .* prepare the model with Arithmetic\.DIVIDE"):
        check_spec(fq.QuantSpec("int8", arithmetic=fq.Arithmetic.MULTIPLIER))
    assert check_spec(fq.QuantSpec("int8", arithmetic=fq.Arithmetic.RECIPROCAL)).element.name == "INT8"


def test_stochastic_rounding_is_refused() -> None:
    message = (
        r"int8 per_tensor stochastic: .* set quantizer\.spec = .*rounding=Rounding\.NEAREST_EVEN\) and export again"
    )
    with pytest.raises(ExportError, match=message):
        check_spec(fq.QuantSpec("int8", rounding=fq.Rounding.STOCHASTIC))


LAYOUTS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...], ScaleLayout]] = {
    "no_axes": ((), (), ScaleLayout()),
    "tensor": ((8, 3), (1, 1), ScaleLayout()),
    "tensor_symbolic": (("n", 3), (1, 1), ScaleLayout()),
    "channel": ((8, 3, 5), (1, 3, 1), ScaleLayout(1)),
    "channel_of_symbolic": (("n", 3, 5), (1, 3, 1), ScaleLayout(1)),
    "symbolic_channel": (("n", 3), ("n", 1), ScaleLayout(0, symbolic=True)),
    "single_channel": ((8, 1, 5), (1, 1, 1), ScaleLayout()),
    "tokens": ((2, 7, 64), (2, 7, 1), ScaleLayout(2, 64, (1, 1, 1))),
    "symbolic_tokens": (("n", "t", 64), ("n", "t", 1), ScaleLayout(2, 64, (1, 1, 1), symbolic=True)),
    "blocks": ((8, 64), (8, 2), ScaleLayout(1, 32, (1, 1))),
    "blocks_first": ((64, 8), (2, 8), ScaleLayout(0, 32, (1, 1))),
    "tiles": ((8, 64), (2, 2), ScaleLayout(1, 32, (4, 1))),
    "two_channels": ((4, 3, 5, 2), (4, 3, 1, 1), ScaleLayout(2, 5, (1, 1, 1, 2))),
    "every_element": ((4, 3), (4, 3), ScaleLayout(1, 1, (1, 1))),
}


@pytest.mark.parametrize(("shape", "groups", "expected"), LAYOUTS.values(), ids=LAYOUTS)
def test_layout(shape: tuple[Any, ...], groups: tuple[Any, ...], expected: ScaleLayout) -> None:
    found = layout(shape, groups)
    assert found == expected
    assert found.opset == (21 if expected.block_size or expected.symbolic else 18)


@pytest.mark.parametrize(
    ("shape", "groups", "text"),
    [
        (("n", 3, 5, 2), (1, 3, 1, 2), r"scales of shape \[1, 3, 1, 2\] on .*: ONNX has .*make the other axes static"),
        (("n", 64), (4, 1), "an axis of symbolic length n is divided into 4 groups"),
    ],
)
def test_layouts_that_onnx_lacks(shape: tuple[Any, ...], groups: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ExportError, match=text):
        layout(shape, groups)


BLOCKS: dict[str, tuple[str, tuple[Any, ...], list[Any]]] = {
    "tensor": ("per_tensor", ("n", 3), ["n", 3]),
    "channel": ("per_channel(-1)", ("n", 3), ["n", 1]),
    "token": ("per_token", ("n", "t", 8), [1, 1, 8]),
    "full": ("per_block(-1:32)", ("n", 64), [1, 32]),
    "ragged": ("per_block(0:4,1:32,pad)", (6, 40), [4, 32]),
    "longer_than_the_axis": ("per_block(1:32,pad)", ("n", 20), [1, 20]),
}


@pytest.mark.parametrize(("granularity", "shape", "expected"), BLOCKS.values(), ids=BLOCKS)
def test_block_sizes(granularity: str, shape: tuple[Any, ...], expected: list[Any]) -> None:
    assert block_sizes(parse_granularity(granularity), shape) == expected


def test_blocks_of_an_axis_of_symbolic_length_are_refused() -> None:
    with pytest.raises(ExportError, match="an axis of symbolic length n is divided into blocks of 4; export it with"):
        block_sizes(parse_granularity("per_block(0:4,pad)"), ("n", 8))


def test_blocks_of_any_granularity_along_an_axis_of_symbolic_length_are_refused() -> None:
    class PairsOfRows(fq.Granularity):
        def block_shape(self, shape: Any) -> tuple[int, ...]:
            return (2, *shape[1:])

        @classmethod
        def parse(cls, arguments: str) -> PairsOfRows:
            return cls()

    assert block_sizes(PairsOfRows(), (4, "n")) == [2, "n"]
    with pytest.raises(ExportError, match="an axis of symbolic length n is divided into blocks of 2"):
        block_sizes(PairsOfRows(), ("n", 8))


def test_a_last_block_that_is_not_full_keeps_the_size_of_the_others() -> None:
    assert layout((3, 40), (3, 2), [1, 32]) == ScaleLayout(1, 32, (1, 1))


def test_where_onnx_runtime_overflows() -> None:
    int4, int8, fp8 = (encoding(fq.parse_format(name)).element for name in ("int4", "int8", "float8_e4m3fn"))
    assert overflows(int4, ScaleLayout(), 2)
    assert not overflows(int8, ScaleLayout(0), 2)
    assert not overflows(int8, ScaleLayout(1, 32), 2)
    assert overflows(int8, ScaleLayout(0, 32), 2)
    assert not overflows(fp8, ScaleLayout(0, 32), 2)


@pytest.mark.parametrize("bad", [0.0, -1.0, 1e-40, float("inf"), float("nan")])
def test_scales_must_be_positive_and_normal(bad: float) -> None:
    spec, powers = fq.QuantSpec("int8"), fq.QuantSpec.parse("int8 per_tensor scale=float8_e8m0fnu:floor")
    check_scale(torch.tensor([1.0, 2.0**-126]), spec)
    check_scale(torch.tensor([1.0, 2.0**-127]), powers)
    for each in (spec, powers):
        with pytest.raises(ExportError, match=r"has the scale .*, expected positive normal"):
            check_scale(torch.tensor([[1.0], [bad]]), each)
    with pytest.raises(ExportError, match=r"has the scale .*, expected positive normal"):
        check_scale(torch.tensor([2.0**-127]), spec)


def test_operator_set_is_the_smallest_that_suffices() -> None:
    assert check_opset(None, 13, "x") == 20
    assert check_opset(None, 21, "x") == 21
    assert check_opset(18, 13, "x") == 18
    with pytest.raises(ExportError, match="opset=20 is too old: conv needs 21 or newer; leave opset=None"):
        check_opset(20, 21, "conv")
    for opset in (17, 26):
        with pytest.raises(ExportError, match=f"opset={opset}: expected 18 to 25"):
            check_opset(opset, 13, "x")
