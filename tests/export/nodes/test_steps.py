"""Thresholds found by bisection, and the search among them in ONNX Runtime."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import fakequant as fq
from fakequant.export.nodes.loops import thresholds
from fakequant.numerics.scales import ScaleSpec
from tests.support.bits import assert_same_bits

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper  # noqa: E402

from fakequant.export.inputs import GraphEditor  # noqa: E402
from fakequant.export.nodes.loops import look_up  # noqa: E402
from fakequant.export.nodes.trt import Emitter  # noqa: E402
from fakequant.export.verification.verdict import Session  # noqa: E402

INF, NAN = float("inf"), float("nan")


def test_thresholds_are_the_first_number_of_each_step() -> None:
    points = torch.tensor([-3e38, -1.5, -1e-45, 0.0, 1e-45, 7.25, 3e38])
    found = thresholds(lambda v: torch.bucketize(v, points, right=True), len(points) + 1)
    assert_same_bits(found, points)


def test_a_step_that_is_never_reached_is_nan_and_one_from_the_start_is_the_lowest() -> None:
    found = thresholds(lambda v: (v >= 0).long() + (v > 5).long(), 4, lowest=0.0)
    assert found[0] == 0
    assert found[1] == torch.nextafter(torch.tensor(5.0), torch.tensor(INF))
    assert found[2].isnan()


@pytest.mark.parametrize("rounding", ["floor", "ceil", "even", "even_fp4"])
def test_power_of_two_scales_begin_where_the_definition_says(rounding: str) -> None:
    spec, fmt = ScaleSpec.parse(f"scale=float8_e8m0fnu:{rounding}"), fq.parse_format("float8_e4m3fn")

    def scale(amax: Tensor) -> Tensor:
        return spec.choose(amax, fmt, 1e35)

    found = thresholds(lambda v: torch.frexp(scale(v).double())[1] + 126, 255, lowest=0.0)
    reached = found[~found.isnan()]
    assert len(reached) == 127 + 116  # 2**116 is the largest power of two below 1e35
    assert bool((scale(torch.nextafter(reached, torch.tensor(0.0))) * 2 == scale(reached)).all())
    if rounding == "floor":
        assert_same_bits(reached[:3], torch.tensor([2.0**-118, 2.0**-117, 2.0**-116]))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 255])
def test_search_in_onnx_runtime(count: int) -> None:
    limits, results = torch.arange(1, count).float(), torch.randn(count)
    value = helper.make_tensor_value_info
    graph = helper.make_graph([], "g", [value("x", TensorProto.FLOAT, ["n"])], [value("y", TensorProto.FLOAT, ["n"])])
    to = Emitter(GraphEditor(graph), "search")
    found = look_up(to, "table", "x", limits, results)
    to.editor.finish([*to.nodes, helper.make_node("Identity", [found], ["y"])])
    session = Session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10))
    x = torch.cat(
        [torch.arange(-1, count + 1).float() + d for d in (-1e-4, 0.0, 1e-4)] + [torch.tensor([INF, -INF, NAN])]
    )
    index = torch.bucketize(x, limits, right=True)
    expected = results[torch.where(x.isnan(), 0, index)]
    assert_same_bits(session.run({"x": x})["y"], expected)
    assert math.ceil(math.log2(max(count, 2))) == sum(node.op_type == "Where" for node in to.nodes)
