"""Rounding by the oldest operators, on every value of every format and every middle between two; folded weights."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto, helper

import fakequant as fq
from fakequant.errors import ExportError
from fakequant.export import export_onnx, verify_onnx
from fakequant.export.capability import encoding
from fakequant.export.inputs import GraphEditor
from fakequant.export.loops import code_values, round_to
from fakequant.export.trt import Emitter
from fakequant.export.verdict import Session
from fakequant.numerics.formats import FloatFormat, Specials
from fakequant.numerics.formats.floats import ExponentFormat, TableFormat
from tests.support.bits import assert_same_bits
from tests.support.export_models import Weights, quantizer

FORMATS = {
    **{name: fmt for name, fmt in fq.formats().items() if fmt.bits <= 8 and fmt.has_zero},
    "one_binade": FloatFormat("e1m2", 1, 2, Specials.NONE),
    "no_mantissa": FloatFormat("e4m0", 4, 0, Specials.NONE),
    "wide": FloatFormat("e5m10", 5, 10, Specials.IEEE),
    "far": FloatFormat("e3m2b90", 3, 2, Specials.NEGATIVE_ZERO_IS_NAN, bias=90),
    "two_values": TableFormat("two", (0.0, 0.3125)),
    "uneven": TableFormat("uneven", (-7.0, -(2.0**-100), 0.0, 2.0**-100, 0.1875, 3.0)),
    "all_codes": TableFormat("all", tuple(float(i) for i in range(-100, 156))),
}
INF = float("inf")


def hostile(fmt: fq.Format) -> torch.Tensor:
    """Every value of a format, every middle, their neighbours in float32, and special numbers."""
    if isinstance(fmt, fq.IntegerFormat):
        values = torch.arange(fmt.low - 2, fmt.high + 3).double() / 2
    elif fmt.bits > 8:
        values = torch.arange(0x7C00, dtype=torch.int32).to(torch.int16).view(torch.float16).double()
    else:
        values = torch.from_numpy(code_values(fmt)).double()
        values = values[values.isfinite()].sort().values
    points = torch.cat([values, (values[1:] + values[:-1]) / 2]).float()
    limit = torch.tensor([fmt.quant_max, fmt.quant_min])
    points = torch.cat([points, -points, limit * 1.0625, limit * 2])
    inf = torch.tensor(INF)
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-38, 3e38, -3e38, INF, -INF, float("nan")])
    return torch.cat([points, torch.nextafter(points, inf), torch.nextafter(points, -inf), special])


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_round_to_every_format(fmt: fq.Format) -> None:
    value = helper.make_tensor_value_info
    graph = helper.make_graph([], "g", [value("x", TensorProto.FLOAT, ["n"])], [value("y", TensorProto.FLOAT, ["n"])])
    to = Emitter(GraphEditor(graph), "round")
    code = round_to(to, "x", fmt)
    to.editor.finish([*to.nodes, helper.make_node("Identity", [code], ["y"])])
    session = Session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10))
    x = hostile(fmt)
    expected = fmt.clamp(fmt.round(x))
    # As `reference` does: integers have no negative zero.
    assert_same_bits(session.run({"x": x})["y"], expected + 0.0 if fmt.has_zero_point else expected, fmt)


def test_a_format_for_scales_only_is_refused() -> None:
    fmt = fq.parse_format("float8_e8m0fnu")
    assert isinstance(fmt, ExponentFormat)
    to = Emitter(GraphEditor(helper.make_graph([], "g", [], [])), "round")
    with pytest.raises(ExportError, match="the format float8_e8m0fnu has no form in ONNX"):
        round_to(to, "x", fmt)


SPECS = [
    *("float4_e2m1fn per_block(-1:4,pad)", "float6_e3m2fn per_channel(0)", "float8_e3m4 per_tensor"),
    *("float8_e4m3b11fnuz per_block(0:2,1:4,pad)", "nf4 per_block(-1:4,pad) scale=float8_e8m0fnu:floor"),
    *("float8_e4m3fnuz per_tensor", "float8_e5m2 per_channel(0)", "int8 per_block(-1:4,pad)", "uint3 per_tensor"),
    *("int4 per_block(0:2,1:4,pad) scale=float8_e4m3fn@per_tensor",),
]


@pytest.fixture(scope="module")
def folded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Weights]:
    specs = [fq.QuantSpec.parse(text) for text in SPECS]
    weights = [torch.randn(5, 10, generator=torch.Generator().manual_seed(i)) for i in range(len(specs))]
    weights[0][:2] = 0.0
    weights[4][:2] = 0.0  # its scale is 2**-127
    model = Weights([quantizer(s, fq.choose_qparams(w, s)) for s, w in zip(specs, weights, strict=True)], weights)
    path = tmp_path_factory.mktemp("export") / "m.onnx"
    export_onnx(model, torch.zeros(1), path)
    return path, model


def test_folded_weights_are_verified_with_the_model_and_without(folded: tuple[Path, Weights]) -> None:
    path, model = folded
    for found in (verify_onnx(path, model, [torch.zeros(1)]), verify_onnx(path, None, [torch.zeros(1)])):
        assert found.exact, str(found)
        assert [row.spec for row in found.rows] == SPECS
        assert {row.elements for row in found.rows} == {50}


def test_weights_are_stored_as_codes_of_few_bits(folded: tuple[Path, Weights]) -> None:
    tensors = {tensor.name: tensor for tensor in onnx.load(folded[0]).graph.initializer}
    for index, text in enumerate(SPECS):
        codes = tensors[f"quantizers.{index}/codes"]
        bits = encoding(fq.QuantSpec.parse(text).format).element.bits
        assert len(codes.raw_data) == 50 * bits // 8


def test_a_changed_value_is_found(folded: tuple[Path, Weights], tmp_path: Path) -> None:
    path, model = folded
    file = onnx.load(path)
    (values,) = (tensor for tensor in file.graph.initializer if tensor.name == "quantizers.0/values")
    values.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(values) * 2, values.name))
    onnx.save(file, tmp_path / "m.onnx")
    first, *others = verify_onnx(tmp_path / "m.onnx", model, [torch.zeros(1)]).rows
    assert not first.intact
    assert first.differing > 0
    assert all(row.exact for row in others)


def test_nan_in_a_weight_is_refused_where_the_format_has_none(tmp_path: Path) -> None:
    weight = torch.tensor([[1.0, float("nan")]])
    params = fq.QParams(torch.ones(1, 1))
    for name in ("float4_e2m1fn", "nf4"):
        with pytest.raises(ExportError, match=f"quantizers.0: the weight holds NaN, which has no code in {name}"):
            export_onnx(Weights([quantizer(fq.QuantSpec(name), params)], [weight]), torch.zeros(1), tmp_path / "m.onnx")
    model = Weights([quantizer(fq.QuantSpec("float8_e3m4"), params)], [weight])
    export_onnx(model, torch.zeros(1), tmp_path / "m.onnx")
    assert verify_onnx(tmp_path / "m.onnx", model, [torch.zeros(1)]).exact
