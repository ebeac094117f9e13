"""Which quantizations TensorRT has a form for."""

from __future__ import annotations

from typing import Any

import pytest

import fakequant as fq
from fakequant.errors import ExportError
from fakequant.export.capability import ScaleLayout
from fakequant.export.trt import check, place

MXFP8 = "float8_e4m3fn per_block(-1:32) scale=float8_e8m0fnu"
NVFP4 = "float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn@per_tensor"

WEIGHTS = [
    ("int8 per_channel(0)", (8, 3)),
    ("int8_narrow per_tensor", (8, 3)),
    ("int8 per_channel(0) reciprocal", (8, 3)),
    ("float8_e4m3fn per_channel(1)", (8, 3)),
    ("int4 per_block(-1:64)", (8, 64)),
    ("int4 per_block(0:128)", (256, 8)),
    (f"{MXFP8}:floor", (2, 3, 64)),
    (NVFP4, (4, 16)),
]
ACTIVATIONS = [
    ("int8", False, ("n", 3)),
    ("float8_e4m3fn", False, (2, 3, 4, 5)),
    (f"{MXFP8}:ceil", True, ("n", 64)),
    ("float8_e4m3fn per_block(1:32) scale=float8_e8m0fnu:ceil", True, (2, 32, 7)),
]


@pytest.mark.parametrize(("text", "shape"), WEIGHTS)
def test_weights(text: str, shape: tuple[int, ...]) -> None:
    for known in (shape, None):
        check(fq.QuantSpec.parse(text), known, constant=True, dynamic=False)


@pytest.mark.parametrize(("text", "dynamic", "shape"), ACTIVATIONS)
def test_activations(text: str, dynamic: bool, shape: tuple[Any, ...]) -> None:
    for known in (shape, None):
        check(fq.QuantSpec.parse(text), known, constant=False, dynamic=dynamic)


STATIC, DYNAMIC, WEIGHT = (
    {"constant": False, "dynamic": False},
    {"constant": False, "dynamic": True},
    {"constant": True, "dynamic": False},
)
REFUSED: dict[str, tuple[str, tuple[Any, ...] | None, dict[str, bool], str]] = {
    "zero_point": ("uint8", None, STATIC, "TensorRT has no zero points; use a symmetric specification such as int8"),
    "unsigned": ("uint8 symmetric", None, WEIGHT, "TensorRT has no such weights; use int8"),
    "reciprocal": ("int8 reciprocal", None, STATIC, r"takes the scale itself; use Arithmetic\.DIVIDE"),
    "e5m2": ("float8_e5m2", None, STATIC, "TensorRT has no such activations; use int8"),
    "table": ("nf4 per_block(-1:64)", None, WEIGHT, "TensorRT has no such weights; use int8"),
    "mxfp4": ("float4_e2m1fn per_block(-1:32) scale=float8_e8m0fnu", None, WEIGHT, "TensorRT has no such weights"),
    "int4_activations": ("int4 per_block(-1:64)", None, STATIC, "TensorRT has no such activations"),
    "int4_per_channel": ("int4 per_channel(0)", None, WEIGHT, "only in blocks of 64 or 128 along one axis; use such"),
    "int4_small_blocks": (
        "int4 per_block(-1:32)",
        None,
        WEIGHT,
        "only in blocks of 64 or 128 along one axis; use such",
    ),
    "tiles": ("int4 per_block(0:2,1:64)", None, WEIGHT, "only in blocks of 64 or 128 along one axis; use such blocks"),
    "several_channels": (
        "int8 per_channel(0,1)",
        None,
        WEIGHT,
        "has int8 only per tensor or along one channel axis; use",
    ),
    "channels_of_activations": (
        "int8 per_channel(1)",
        None,
        STATIC,
        "TensorRT has int8 only per tensor; use such a gran",
    ),
    "dynamic": ("int8", None, DYNAMIC, "TensorRT's scales are constants; calibrate the quantizer"),
    "floor": (f"{MXFP8}:floor", None, DYNAMIC, "rounds the exponents of MXFP8 up; use scale=float8_e8m0fnu:ceil"),
    "static_mxfp8": (f"{MXFP8}:ceil", None, STATIC, "supports blocks of activations only in dynamic MXFP8"),
    "nvfp4": (NVFP4, None, DYNAMIC, "in NVFP4 with a constant scale of the tensor, which no QuantSpec describes"),
    "ragged": (NVFP4.replace("16", "16,pad"), (4, 20), WEIGHT, "axis -1 has 20 elements, .* multiple of 16; pad the"),
    "symbolic": (f"{MXFP8}:ceil", (4, "n"), DYNAMIC, "axis -1 has n elements, but TensorRT wants a constant multiple"),
    "outer_axis": (NVFP4.replace("-1", "0"), (16, 2, 2), WEIGHT, "along one of the last two axes, got axis 0 of 3"),
    "four_axes": (f"{MXFP8}:ceil", (2, 2, 2, 32), DYNAMIC, "tensors of 2 or 3 axes in blocks, got 4"),
}


@pytest.mark.parametrize(("text", "shape", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals_say_what_came_and_what_to_do(
    text: str, shape: tuple[Any, ...] | None, options: dict[str, bool], message: str
) -> None:
    spec = fq.QuantSpec.parse(text)
    with pytest.raises(ExportError, match=message) as error:
        check(spec, shape, **options)
    assert str(error.value).startswith(f"{spec}: ")
    assert str(error.value).endswith('; or use style="standard" or "portable"')


def test_a_block_as_long_as_its_axis_is_still_a_block() -> None:
    assert place(fq.QuantSpec.parse("int4 per_block(-1:128)"), 2) == ScaleLayout(1, 128, (1, 1))
    assert place(fq.QuantSpec.parse("int8 per_channel(0)"), 2) is None
