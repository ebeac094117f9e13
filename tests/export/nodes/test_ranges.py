"""Scales in a format of their own, computed in the graph or stored, have the bits of torch in every style."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import ExportError
from fakequant.export import export_onnx, verify_onnx
from fakequant.export.inputs import GraphEditor
from fakequant.export.trt import Emitter, factor, powers_of_two
from fakequant.export.verify import Evaluator
from fakequant.nn import Quantizer
from tests.support.bits import assert_same_bits
from tests.support.export_models import Casting, Quantizers, Weights, quantizer, run
from tests.support.range_cases import FORMATS, SCALES, TEXTS, hostile, numbers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("export")


@pytest.fixture(scope="module")
def file(folder: Path) -> Path:
    model = Quantizers([Quantizer(text, dynamic=True) for text in TEXTS])
    xs = tuple(numbers(text, shape, 0) for text, shape in TEXTS.items())
    export_onnx(model, xs, folder / "m.onnx", dynamic_shapes=(tuple({0: "batch"} for _ in TEXTS),))
    return folder / "m.onnx"


@pytest.mark.parametrize("batch", [2, 17])
def test_dynamic_scale_has_the_bits_of_torch_at_every_batch_size(file: Path, batch: int) -> None:
    xs = [numbers(text, (batch, *shape[1:]), batch) for text, shape in TEXTS.items()]
    for text, x, y in zip(TEXTS, xs, run(file, xs), strict=True):
        assert_same_bits(y, fq.fake_quantize(x, text), text)


def test_verification_covers_them(file: Path) -> None:
    xs = [numbers(text, (4, *shape[1:]), 5) for text, shape in TEXTS.items()]
    model = Quantizers([Quantizer(text, dynamic=True) for text in TEXTS])
    for found in (verify_onnx(file, model, [tuple(xs)]), verify_onnx(file, None, [tuple(xs)])):
        assert found.exact, str(found)
        assert [row.spec for row in found.rows] == list(TEXTS)
        assert all(row.elements for row in found.rows)


def test_a_changed_threshold_is_found(folder: Path) -> None:
    model = Quantizers([Quantizer("int8 per_token scale=float8_e8m0fnu:floor", dynamic=True)])
    x = torch.full((2, 4), 1.5)
    export_onnx(model, x, folder / "changed.onnx")
    file = onnx.load(folder / "changed.onnx")
    (limits,) = (tensor for tensor in file.graph.initializer if tensor.name.endswith("scale_limits"))
    values = onnx.numpy_helper.to_array(limits) * 2
    limits.CopyFrom(onnx.numpy_helper.from_array(values, limits.name))
    onnx.save(file, folder / "changed.onnx")
    (row,) = verify_onnx(folder / "changed.onnx", model, [x * 1.01]).rows
    assert not row.intact
    assert row.differing == 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype: torch.dtype, folder: Path) -> None:
    texts = [f"float4_e2m1fn per_block(-1:16,pad) scale={s}" for s in SCALES] + ["nf4 per_token"]
    model = Casting([Quantizer(text, dynamic=True) for text in texts])
    model.dtypes = [dtype] * len(texts)
    xs = tuple(hostile((3, 40), seed, dtype).float() for seed in range(len(texts)))
    export_onnx(model, xs, folder / "half.onnx")
    for text, x, y in zip(texts, xs, run(folder / "half.onnx", xs), strict=True):
        assert_same_bits(y.to(dtype), fq.fake_quantize(x.to(dtype), text), text)


def test_the_largest_numbers_stay_finite(folder: Path) -> None:
    texts = ["float4_e2m1fn per_tensor", "int8 per_token", *(f"int4 per_token scale={s}" for s in SCALES)]
    most = torch.finfo(torch.float32).max
    x = torch.tensor([[most, 1.0, -most / 3, 0.0], [most / 2, -most, 1e30, -1.0]])
    model = Quantizers([Quantizer(text, dynamic=True) for text in texts])
    export_onnx(model, (x,) * len(texts), folder / "largest.onnx")
    for text, y in zip(texts, run(folder / "largest.onnx", [x] * len(texts)), strict=True):
        assert_same_bits(y, fq.fake_quantize(x, text), text)
        assert bool(y.isfinite().all())


@pytest.mark.parametrize("scale", SCALES)
def test_static_scales_of_a_format_are_constants(scale: str, folder: Path) -> None:
    specs = [fq.QuantSpec.parse(f"{f} per_block(-1:16,pad) scale={scale}") for f in FORMATS]
    xs = tuple(numbers(str(spec), (3, 40), 7) for spec in specs)
    model = Quantizers([quantizer(spec, fq.choose_qparams(x, spec)) for spec, x in zip(specs, xs, strict=True)])
    export_onnx(model, xs, folder / "static.onnx")
    for spec, module, x, y in zip(specs, model.quantizers, xs, run(folder / "static.onnx", xs), strict=True):
        assert_same_bits(y, module(x), spec)


class Bare(nn.Module):
    """Calls of the function in a model's own forward, one per input."""

    def __init__(self, texts: Sequence[str]) -> None:
        super().__init__()
        self.texts = texts

    def forward(self, *xs: Tensor) -> list[Tensor]:
        return [fq.fake_quantize(x, text) for x, text in zip(xs, self.texts, strict=True)]


def test_calls_of_the_function_export_like_quantizers(folder: Path) -> None:
    texts = [f"{f} per_block(-1:16,pad) scale={s}" for f in ("float4_e2m1fn", "int8") for s in SCALES]
    texts += ["int8 per_token", "uint8 per_token", "nf4 per_tensor"]
    model = Bare(texts)
    xs = tuple(numbers(text, (3, 40), seed) for seed, text in enumerate(texts))
    report = export_onnx(model, xs, folder / "bare.onnx", dynamic_shapes=(tuple({0: "batch"} for _ in texts),))
    assert [(q.quantizer, q.spec) for q in report.quantizers] == [("", text) for text in texts]
    xs = tuple(numbers(text, (5, 40), 9 + seed) for seed, text in enumerate(texts))
    for text, x, y in zip(texts, xs, run(folder / "bare.onnx", xs), strict=True):
        assert_same_bits(y, fq.fake_quantize(x, text), text)
    assert verify_onnx(folder / "bare.onnx", model, [xs]).exact


def test_scales_that_the_model_computes_by_bits_are_refused(folder: Path) -> None:
    spec = "int8 per_token scale=float8_e8m0fnu:floor"

    class Given(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return fq.fake_quantize(x, spec, amax=x.abs().amax(1, keepdim=True))

    with pytest.raises(ExportError, match=r"the model: int8 per_token .*: the model computes scales"):
        export_onnx(Given(), torch.ones(2, 8), folder / "given.onnx")


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
