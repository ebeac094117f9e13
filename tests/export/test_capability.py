"""What ONNX can say of formats, granularities and operator sets, and the record in a file's metadata."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch

import fakequant as fq
from fakequant.errors import ExportError, VerificationError
from fakequant.export.capability import (
    block_sizes,
    check_opset,
    check_scale,
    check_spec,
    digest,
    encoding,
    layout,
    read,
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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("int8 per_tensor q8_k", "made by another scale than they are decoded by"),
        ("int8 per_tensor multiplier", r"prepare the model with Arithmetic\.DIVIDE"),
        ("int8 per_tensor stochastic", r"set quantizer\.spec = .*rounding=Rounding\.NEAREST_EVEN\) and export again"),
    ],
)
def test_what_no_node_computes_is_refused(text: str, said: str) -> None:
    with pytest.raises(ExportError, match=f"{text}: .*{said}"):
        check_spec(fq.QuantSpec.parse(text))
    assert check_spec(fq.QuantSpec("int8", arithmetic=fq.Arithmetic.RECIPROCAL)).element.name == "INT8"


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


DAMAGED = [
    *("[]", "{", '{"layout": 1}', "null"),
    '{"layout": 1, "version": "", "style": "trt", "sites": [{}]}',
    '{"layout": 1, "version": "", "style": "no style", "sites": [], "inputs": []}',
]


@pytest.mark.parametrize("text", DAMAGED)
def test_damaged_record(text: str) -> None:
    model = onnx.ModelProto()
    model.metadata_props.add(key="fakequant", value=text)
    with pytest.raises(VerificationError, match="its record of quantizers is damaged"):
        read(model)


def test_digest_sees_contents_shape_and_type() -> None:
    arrays = [np.zeros(4, np.int8), np.zeros((2, 2), np.int8), np.zeros(4, np.uint8), np.ones(4, np.int8)]
    found = {digest([onnx.numpy_helper.from_array(array)]) for array in arrays}
    assert len(found) == 4
    assert digest([onnx.numpy_helper.from_array(np.zeros(4, np.int8), "another name")]) in found
