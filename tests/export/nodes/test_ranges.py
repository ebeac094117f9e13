"""Scales in a format of their own, computed in the graph: ONNX Runtime must give the bits of torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import ExportError
from fakequant.nn import Quantizer
from tests.support.bits import assert_same_bits

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from fakequant.export import export_onnx, verify_onnx  # noqa: E402
from tests.support.export_models import Casting, Quantizers, quantizer, run  # noqa: E402
from tests.support.range_cases import FORMATS, SCALES, TEXTS, hostile, numbers  # noqa: E402


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
