"""Scales in ONNX's own types: products of codes, and powers of two that Cast finds, against `numerics.scales`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import fakequant as fq
from fakequant.errors import ExportError
from fakequant.nn import Quantizer
from tests.support.bits import assert_same_bits

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper  # noqa: E402

from fakequant.export import export_onnx, verify_onnx  # noqa: E402
from fakequant.export.inputs import GraphEditor  # noqa: E402
from fakequant.export.nodes.trt import (  # noqa: E402
    Emitter,
    factor,
    powers_of_two,
)
from fakequant.export.verification.verify import Evaluator  # noqa: E402
from tests.support.export_models import Quantizers, Weights, quantizer  # noqa: E402
from tests.support.range_cases import TEXTS, numbers  # noqa: E402

LIMIT = torch.finfo(torch.float32).max * (1.0 - torch.finfo(torch.float32).eps)


def amaxes(element: fq.Format) -> Tensor:
    """Zero, every power of two, the numbers at which a rule steps, their neighbours, subnormals, the largest."""
    powers = torch.ldexp(torch.ones(277, dtype=torch.float64), torch.arange(-149, 128)).float()
    steps = [1.0, 1.75, element.bound, 2.0 - 2.0 ** -(element.fraction_bits + 1), element.bound / 2]
    points = torch.cat([powers * step for step in steps])
    points = torch.cat([points, points.nextafter(points * 2), points.nextafter(points * 0)])
    points = torch.cat([points, torch.tensor([0.0, 1e-45, torch.finfo(torch.float32).max])])
    return points[points.isfinite()]


@pytest.mark.parametrize("name", ["float4_e2m1fn", "float6_e3m2fn", "float8_e4m3fn", "float8_e5m2", "int8_narrow"])
@pytest.mark.parametrize("rule", ["floor", "ceil", "even", "even_fp4"])
@pytest.mark.parametrize("largest", [1.0, 65504.0 / torch.finfo(torch.float32).max], ids=["float32", "float16"])
def test_powers_of_two_by_cast(rule: str, name: str, largest: float) -> None:
    spec = fq.QuantSpec.parse(f"{name} per_tensor scale=float8_e8m0fnu:{rule}")
    limit = LIMIT * largest / spec.format.quant_max
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("amax", "scale")]
    editor = GraphEditor(helper.make_graph([], "g", values[:1], values[1:]))
    to = Emitter(editor, "range")
    powers_of_two(to, "amax", spec, limit, "scale")
    editor.finish(to.nodes)
    model = helper.make_model(editor.graph, opset_imports=[helper.make_opsetid("", 24)])
    del model.graph.input[0].type.tensor_type.shape.dim[:]
    model.graph.input[0].type.tensor_type.shape.dim.add()
    amax = amaxes(spec.format)
    scale = Evaluator(model).run({"amax": amax})["scale"]
    assert_same_bits(scale, spec.scale.choose(amax, spec.format, limit), (rule, name))


FACTORED = [
    ("float4_e2m1fn per_block(-1:4) scale=float8_e4m3fn@per_tensor", (5, 64)),
    ("int4 per_block(-1:4,pad) scale=uint8@per_tensor", (5, 62)),
    ("nf4 per_block(-1:4) scale=uint8@per_block(-1:8)", (5, 64)),
    ("nf4 per_block(-1:4) scale=float8_e4m3fn@per_block(-1:3,pad)", (5, 64)),
    ("int8 per_channel(0) scale=float8_e5m2@per_tensor", (7, 3)),
    ("float4_e2m1fn per_block(-1:4) scale=float8_e4m3fn@per_channel(0)", (3, 8)),
]


@pytest.mark.parametrize(("text", "shape"), FACTORED)
def test_scales_are_found_to_be_products(text: str, shape: tuple[int, int]) -> None:
    spec = fq.QuantSpec.parse(text)
    fmt = spec.scale.format
    assert fmt is not None
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        size = 2.0 ** torch.randint(-90, 90, (), generator=generator)
        x = torch.randn(shape, generator=generator) * size * 2.0 ** torch.randint(-9, 9, (shape[0], 1)).float()
        scale = fq.choose_qparams(x, spec).scale
        found = factor(scale, spec)
        assert found is not None
        assert bool((found.codes > 0).all())
        assert_same_bits(fmt.from_storage(fmt.to_storage(found.codes), torch.float32), found.codes)
        shared = found.shared
        for axis, (n, m) in enumerate(zip(scale.shape, shared.shape, strict=True)):
            if m not in (1, n):
                assert spec.scale.granularity is not None
                block = spec.scale.granularity.block_shape(scale.shape)[axis]
                shared = shared.repeat_interleave(block, axis).narrow(axis, 0, n)
        assert_same_bits(found.codes * shared, scale, seed)


def test_scales_of_zeros_are_products_and_others_need_not_be() -> None:
    spec = fq.QuantSpec.parse(FACTORED[0][0])
    zeros = factor(fq.choose_qparams(torch.zeros(2, 8), spec).scale, spec)
    assert zeros is not None
    assert zeros.shared.tolist() == [[torch.finfo(torch.float32).tiny]]
    assert factor(torch.tensor([[448.0, 3.3]]), spec) is None
    assert factor(torch.zeros(0, 2), spec) is None


def test_static_scales_that_are_no_products_stay_float32(tmp_path: Path) -> None:
    spec = fq.QuantSpec.parse("float4_e2m1fn per_block(-1:2) scale=float8_e4m3fn@per_tensor")
    model = Weights([quantizer(spec, fq.QParams(torch.tensor([[448.0, 3.3]])))], [torch.tensor([[1e3, 2e3, 9.0, 0.4]])])
    report = export_onnx(model, torch.zeros(1), tmp_path / "m.onnx", style="standard")
    assert report.quantizers[0].expressed.endswith("because they are not products of codes and shared scales")
    for found in (verify_onnx(tmp_path / "m.onnx", model), verify_onnx(tmp_path / "m.onnx")):
        assert found.exact


WEIGHTS = [
    *(text for text, _ in FACTORED if not text.startswith("nf4")),
    *("int4 per_block(-1:4) scale=uint8@per_block(-1:8)", "int4 per_block(0:2,-1:4) scale=float8_e4m3fn@per_tensor"),
    *("float6_e2m3fn per_block(-1:4,pad) scale=float8_e8m0fnu:floor", "int8 per_block(0:2,-1:4) scale=float8_e8m0fnu"),
    *("float4_e2m1fn per_channel(0)", "float4_e2m1fn per_block(-1:8) reciprocal", "float8_e5m2fnuz per_tensor"),
]


def test_weights_are_verified_with_the_model_and_without(tmp_path: Path) -> None:
    specs = [fq.QuantSpec.parse(text) for text in WEIGHTS]
    weights = [torch.randn(6, 64, generator=torch.Generator().manual_seed(i)) for i in range(len(specs))]
    weights[0][:2] = 0.0
    model = Weights([quantizer(s, fq.choose_qparams(w, s)) for s, w in zip(specs, weights, strict=True)], weights)
    export_onnx(model, torch.zeros(1), tmp_path / "m.onnx", style="standard")
    for found in (verify_onnx(tmp_path / "m.onnx", model), verify_onnx(tmp_path / "m.onnx")):
        assert found.exact, str(found)
        assert [row.spec for row in found.rows] == [str(spec) for spec in specs]


STANDARD = {text: shape for text, shape in TEXTS.items() if not text.startswith("nf4")}


def test_dynamic_scales_of_every_kind_in_the_standard_style(tmp_path: Path) -> None:
    model = Quantizers([Quantizer(text, dynamic=True) for text in STANDARD])
    xs = tuple(_finite_codes(text, numbers(text, shape, 0)) for text, shape in STANDARD.items())
    shapes = (tuple({0: "batch"} for _ in xs),)
    export_onnx(model, xs, tmp_path / "m.onnx", dynamic_shapes=shapes, style="standard")
    batches = [
        tuple(_finite_codes(t, numbers(t, (batch, *s[1:]), batch)) for t, s in STANDARD.items()) for batch in (2, 7)
    ]
    found = verify_onnx(tmp_path / "m.onnx", model, batches)
    assert found.exact, str(found)
    assert [row.spec for row in found.rows] == list(STANDARD)


def _finite_codes(text: str, x: Tensor) -> Tensor:
    """Floats of 4 and 6 bits have no code for NaN in ONNX."""
    return x if text.startswith("float8") else x.nan_to_num(0.0, torch.inf, -torch.inf)


def test_a_scale_that_is_no_power_of_two_is_refused(tmp_path: Path) -> None:
    spec = fq.QuantSpec.parse("int8 per_tensor scale=float8_e8m0fnu:floor")
    model = Quantizers([quantizer(spec, fq.QParams(torch.tensor([[0.3]])))])
    with pytest.raises(ExportError, match=r"quantizers\.0: has the scale 0\.3.*, expected powers of two"):
        export_onnx(model, torch.ones(2, 2), tmp_path / "m.onnx", style="standard")
    assert export_onnx(model, torch.ones(2, 2), tmp_path / "m.onnx").opset == 20
