"""Whether engines compute on integers what the tables prepare for them: small models of other packages."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CoverageWarning, FusionWarning
from tests.support.bits import assert_same_bits
from tests.support.engines import Computed, by_onnxruntime, by_openvino
from tests.support.functional_models import Calls
from tests.support.placed_models import IDS, IMAGE, MODELS, resnet

SLOW = [pytest.param(name, marks=pytest.mark.exhaustive) for name in ("mobilenet", "densenet", "vit", "bert")]


def prepared(name: str, target: str, config: Any, *, fused: bool = True) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = MODELS[name]().eval(), IDS if name == "bert" else IMAGE
    if fused and name not in ("vit", "bert"):
        with warnings.catch_warnings(action="ignore"):  # densenet has norms that follow no product
            fq.fuse_batch_norm(model, x)
    fq.prepare(model, config, example=x, target=target)
    fq.calibrate(model, [x])
    return model, x


def exported(name: str, target: str, config: Any, folder: Path, dynamic_shapes: Any = None) -> Path:
    model, x = prepared(name, target, config)
    fq.export_onnx(model, x, folder / "model.onnx", dynamic_shapes=dynamic_shapes)
    return folder / "model.onnx"


def on_integers(found: Computed) -> tuple[int, int]:
    assert found.reasons == []
    return found.products


@pytest.mark.parametrize(
    ("name", "products", "others"),
    [
        ("resnet", 13, {"QLinearAdd": 4}),
        pytest.param("mobilenet", 16, {"QLinearMul": 2, "QLinearAdd": 1}, marks=pytest.mark.exhaustive),
        pytest.param("densenet", 11, {"QLinearConcat": 4}, marks=pytest.mark.exhaustive),
        pytest.param("vit", 8, {"QLinearConcat": 1, "QLinearAdd": 0}, marks=pytest.mark.exhaustive),
        ("bert", 9, {"QLinearAdd": 0, "QLinearSoftmax": 1}),
    ],
)
def test_onnxruntime_computes_all_products_on_integers(
    name: str, products: int, others: dict[str, int], tmp_path: Path
) -> None:
    shapes = ({0: "batch"},) if name in ("vit", "bert") else None
    found = by_onnxruntime(exported(name, "onnxruntime", "INT8_AFFINE", tmp_path, shapes))
    assert on_integers(found) == (products, products)
    assert {kind: found.integer[kind] for kind in others} == others


@pytest.mark.parametrize("name", ["resnet", *SLOW])
def test_openvino_computes_all_products_on_integers(name: str, tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="openvino is not installed: see CONTRIBUTING.md")
    integer, products = on_integers(by_openvino(exported(name, "openvino", "INT8", tmp_path)))
    assert integer == products > 5


def test_norms_that_keep_products_in_float_are_told() -> None:
    with pytest.warns(CoverageWarning) as caught:
        prepared("resnet", "onnxruntime", "INT8_AFFINE", fused=False)
    assert [str(warning.message) for warning in caught] == [
        "12 batch normalisations follow products with quantized weights, so that onnxruntime computes both in float; "
        "call fakequant.fuse_batch_norm(model, example) before prepare, or to train them, "
        "fakequant.qat.fold_batch_norm(model, example) after it"
    ]
    with warnings.catch_warnings(action="error", category=CoverageWarning):
        prepared("resnet", "openvino", "INT8", fused=False)  # which folds them


def test_norms_of_a_part_that_is_called_twice_count_once() -> None:
    body = nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3))
    model = Calls(lambda m, x: m.body(x) + m.body(-x), body=body).eval()
    with pytest.warns(CoverageWarning, match="^a batch normalisation follows") as caught:
        fq.prepare(model, "INT8_AFFINE", IMAGE, target="onnxruntime")
    (text,) = [str(one.message) for one in caught if "follows" in str(one.message)]
    assert "called several times stays" in text
    assert "fuse_batch_norm" not in text  # which leaves it


def test_inputs_that_are_nan_in_the_example_are_told() -> None:
    with pytest.warns(CoverageWarning, match=r"the inputs of 0, 2 hold NaN, so that they stay in float; give an exam"):
        model = fq.prepare(
            nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU(), nn.Conv2d(3, 3, 3)),
            "INT8_AFFINE",
            IMAGE * torch.nan,
            target="onnxruntime",
        )
    assert model[0].input_quantizer is None


def test_norms_that_are_trained_folded_leave_all_products_on_integers(tmp_path: Path) -> None:
    """Norms and layers that an owner of sites calls have classes of their own, and are folded as all others."""
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore", category=CoverageWarning):
        model = fq.prepare(resnet().eval(), "INT8_AFFINE", example=IMAGE, target="onnxruntime")
    with warnings.catch_warnings(action="error", category=FusionWarning):  # no norm stays
        fq.qat.fold_batch_norm(model, IMAGE)
    fq.calibrate(model, [IMAGE])
    model.train()(IMAGE).sum().backward()
    before = model.eval()(IMAGE)
    fq.qat.merge_batch_norm(model)
    assert_same_bits(model(IMAGE), before)
    fq.export_onnx(model, IMAGE, tmp_path / "model.onnx")
    integer, products = on_integers(by_onnxruntime(tmp_path / "model.onnx"))
    assert integer == products == 13


class Chunked(nn.Module):
    def __init__(self, cut: Any) -> None:
        super().__init__()
        self.qkv, self.out, self.cut = nn.Linear(8, 24), nn.Linear(8, 8), cut

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.view(2, 5, 2, 4).transpose(1, 2) for part in self.cut(self.qkv(x)))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))


class Resized(nn.Module):
    """Adds a product of another size, as pyramids of features do."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.coarse, self.fine, self.last = nn.Conv2d(3, 8, 2, 2), nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3)
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.interpolate(self.coarse(x), scale_factor=2, mode=self.mode) + self.fine(x))


class Rolled(nn.Module):
    """A convolution that a ReLU, a pooling and a roll follow; then two readers of two views."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.max_pool2d(self.first(x).relu(), 2).roll(1, 2)
        return self.second(y).flatten(2).transpose(1, 2) + self.third(y.flatten(2).transpose(1, 2))


TOKENS = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
BRANCHES: dict[str, Any] = {
    "chunk": (lambda: Chunked(lambda y: y.chunk(3, -1)), TOKENS, 4),
    "slices": (lambda: Chunked(lambda y: (y[..., :8], y[..., 8:16], y[..., 16:])), TOKENS, 4),
    "unbind": (lambda: Chunked(lambda y: y.unflatten(-1, (3, 8)).unbind(2)), TOKENS, 4),
    "permute": (lambda: Chunked(lambda y: y.view(2, 5, 3, 8).permute(2, 0, 1, 3)), TOKENS, 4),
    "nearest": (lambda: Resized("nearest"), IMAGE, 3),
    "bilinear": (lambda: Resized("bilinear"), IMAGE, 3),
    "rolled": (Rolled, IMAGE, 3),
}


@pytest.mark.parametrize(("make", "x", "products"), BRANCHES.values(), ids=BRANCHES)
def test_onnxruntime_computes_products_before_branches_on_integers(
    make: Any, x: Tensor, products: int, tmp_path: Path
) -> None:
    """It moves no quantizer back over Split, Slice, Gather and Resize, and none of several readers."""
    torch.manual_seed(0)
    model = fq.prepare(make().eval(), "INT8_AFFINE", example=x, target="onnxruntime")
    fq.calibrate(model, [x])
    path = fq.export_onnx(model, x, tmp_path / "model.onnx").path
    assert on_integers(by_onnxruntime(path)) == (products, products)
    assert fq.verify_onnx(path, model, [x]).exact


class TwoReaders(nn.Module):
    """Reads one tensor three times, as a residual block and its downsampling do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.main, self.side = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        return x + self.main(x) + self.side(x)


def test_one_pair_of_nodes_for_quantizers_that_are_equal(tmp_path: Path) -> None:
    import onnx

    model = fq.prepare(TwoReaders(), "INT8_AFFINE", example=IMAGE, target="onnxruntime")
    fq.calibrate(model, [IMAGE])
    report = fq.export_onnx(model, IMAGE, tmp_path / "model.onnx")
    read = [node.input[0] for node in onnx.load(tmp_path / "model.onnx").graph.node if node.op_type == "QuantizeLinear"]
    assert len(set(read)) == len(read) == len([q for q in fq.nn.quantizers(model) if "weight" not in q]) - 2
    assert len(report.quantizers) == len(fq.nn.quantizers(model))
    assert fq.verify_onnx(tmp_path / "model.onnx", model, [IMAGE])
