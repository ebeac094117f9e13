"""What replaces the evaluator's operators is right where the evaluator is wrong, and agrees with it elsewhere."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from fakequant.export.operators import OPERATORS

RANGES = {"INT8": (-128, 127), "UINT8": (0, 255), "INT4": (-8, 7), "UINT4": (0, 15), "INT16": (-32768, 32767)}
E4M3_MAX = 448


def run(nodes: list[Any], feeds: dict[str, np.ndarray], outputs: list[str], *, own: bool = True) -> list[np.ndarray]:
    given = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), None)
        for name, array in feeds.items()
    ]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph(nodes, "g", given, results)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25), helper.make_opsetid("trt", 1)])
    evaluator = ReferenceEvaluator(model, new_ops=list(OPERATORS) if own else [])
    with np.errstate(all="ignore"):
        return evaluator.run(outputs, feeds)  # pyright: ignore[reportReturnType]


def quantize(x: np.ndarray, scale: np.ndarray, *, own: bool = True, **options: Any) -> np.ndarray:
    node = helper.make_node("QuantizeLinear", ["x", "scale"], ["q"], **options)
    return run([node], {"x": x, "scale": scale}, ["q"], own=own)[0]


HUGE = np.array([np.inf, -np.inf, 3e38, -3e38, 2.0**31, -(2.0**33)], np.float32)


@pytest.mark.parametrize("name", RANGES)
def test_integers_saturate_where_the_evaluators_own_do_not(name: str) -> None:
    low, high = RANGES[name]
    kind = TensorProto.DataType.Value(name)
    scale = np.array(0.5, np.float32)
    codes = quantize(HUGE, scale, output_dtype=kind).astype(np.int32)
    assert codes.tolist() == [high, low, high, low, high, low]
    wrong = quantize(HUGE, scale, own=False, output_dtype=kind).astype(np.int32)
    assert wrong.tolist() != codes.tolist(), "onnx is right now: take the replacement away"


@pytest.mark.parametrize("name", RANGES)
def test_integers_are_the_rounded_quotients(name: str) -> None:
    low, high = RANGES[name]
    generator = np.random.default_rng(0)
    x = (generator.integers(-600, 600, 4000) / 4).astype(np.float32)
    x = np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.float32([0.0, -0.0, 1e-45])])
    for scale in (np.float32(0.5), np.float32(0.37)):
        codes = quantize(x, np.array(scale), output_dtype=TensorProto.DataType.Value(name)).astype(np.int32)
        expected = [min(max(round(Fraction(float(v / scale))), low), high) for v in x]
        assert codes.tolist() == expected


def test_zero_points_axes_blocks_and_floats_are_the_evaluators() -> None:
    x = np.random.default_rng(1).normal(size=(4, 6)).astype(np.float32) * 3
    cases: list[tuple[np.ndarray, np.ndarray, dict[str, Any]]] = [
        (np.array(0.1, np.float32), np.array(7, np.uint8), {}),
        (np.array([0.1, 0.2, 0.3, 0.4], np.float32), np.array([1, 0, 2, 3], np.int8), {"axis": 0}),
        (np.full((4, 2), 0.1, np.float32), np.zeros((4, 2), np.int8), {"axis": -1, "block_size": 4}),
    ]
    for scale, zero_point, options in cases:
        node = helper.make_node("QuantizeLinear", ["x", "scale", "zero_point"], ["q"], **options)
        feeds = {"x": x, "scale": scale, "zero_point": zero_point}
        ours, theirs = (run([node], feeds, ["q"], own=own)[0] for own in (True, False))
        assert ours.dtype == theirs.dtype
        assert ours.tolist() == theirs.tolist()
    for kind in (TensorProto.FLOAT4E2M1, TensorProto.FLOAT8E4M3FN):
        ours, theirs = (quantize(x, np.array(0.1, np.float32), own=own, output_dtype=kind) for own in (True, False))
        assert ours.astype(np.float32).tolist() == theirs.astype(np.float32).tolist()


def test_nan_gets_the_lowest_integer() -> None:
    codes = quantize(np.array([np.nan], np.float32), np.array(1, np.float32), output_dtype=TensorProto.INT8)
    assert codes.tolist() == [-128]


def exponent_of(amax: float) -> int:
    """ceil(log2(amax / 448)), by fractions of the quotient in float32."""
    quotient = Fraction(float(np.float32(amax) / np.float32(E4M3_MAX)))
    exponent = -127
    while Fraction(2) ** exponent < quotient:
        exponent += 1
    return exponent


def test_mxfp8_takes_the_exponent_that_holds_every_block() -> None:
    generator = np.random.default_rng(2)
    x = generator.normal(size=(6, 64)).astype(np.float32) * np.float32(2.0) ** generator.integers(-100, 60, (6, 1))
    x[0, :32] = 0.0
    x[1, 0], x[1, 1] = np.inf, np.nan
    for row, power in ((2, 448.0), (3, np.nextafter(np.float32(448.0), np.float32(np.inf))), (4, 2.0**-140)):
        x[row, 32:] = np.float32(power) * np.float32(0.5)
        x[row, 40] = power
    node = helper.make_node("TRT_MXFP8DynamicQuantize", ["x"], ["q", "e"], domain="trt", axis=-1, block_size=32)
    back = helper.make_node("TRT_MXFP8DequantizeLinear", ["q", "e"], ["y"], domain="trt", axis=-1, block_size=32)
    codes, exponents, y = run([node, back], {"x": x.astype(np.float32)}, ["q", "e", "y"])
    assert exponents.dtype == np.uint8
    finite = np.where(np.isfinite(x), np.abs(x), 0).reshape(6, 2, 32).max(-1)
    expected = [[exponent_of(amax) for amax in row] for row in finite.astype(np.float32)]
    assert (exponents.astype(int) - 127).tolist() == expected
    assert exponents[0, 0] == 0
    assert [codes[1, 0].astype(np.float32), np.isnan(codes[1, 1].astype(np.float32))] == [E4M3_MAX, True]
    powers = np.ldexp(1.0, exponents.astype(int) - 127).repeat(32, axis=1)
    assert np.array_equal(y, (codes.astype(np.float64) * powers).astype(np.float32), equal_nan=True)
    inside = np.isfinite(x)
    # Half a spacing of the largest binade, 2**8, of a code: nothing saturates.
    assert (np.abs(y - x)[inside] <= (powers * 16)[inside]).all()


def test_mxfp8_weights_and_half_precision() -> None:
    codes = numpy_helper.saturate_cast(
        np.array([[1.0, -448.0]], np.float32), helper.tensor_dtype_to_np_dtype(TensorProto.FLOAT8E4M3FN)
    )
    options = {"domain": "trt", "axis": 0, "block_size": 32, "output_dtype": TensorProto.FLOAT16}
    node = helper.make_node("TRT_MXFP8DequantizeLinear", ["q", "e"], ["y"], **options)
    (y,) = run([node], {"q": codes, "e": np.array([[127, 124]], np.uint8)}, ["y"])
    assert y.dtype == np.float16
    assert y.tolist() == [[1.0, -56.0]]
