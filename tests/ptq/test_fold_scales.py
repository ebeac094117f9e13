"""Channel scales in the normalisations before them: which ones, that the function stays, and what a file needs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from benchmarks.zoo.case import Case
from fakequant.errors import ConfigError
from fakequant.model.weights import disabled
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.transforms import make_transform
from fakequant.ptq import fold_scales
from fakequant.ptq.channel_scales import FoldedScale
from fakequant.ptq.weights import shared_parameters
from tests.support.architectures import case_of, each_architecture
from tests.support.bits import assert_same_bits, unchanged
from tests.support.functional_models import Calls
from tests.support.interruption import InterruptedForward

OUTLIERS = [3, 9]


class Root(nn.Module):
    """A normalisation of another library: the root of the mean square, times a weight or 1 + weight."""

    def __init__(self, width: int, offset: float) -> None:
        super().__init__()
        self.weight, self.offset = nn.Parameter(torch.full((width,), 1 - offset)), offset

    def forward(self, x: Tensor) -> Tensor:
        return x * x.square().mean(-1, keepdim=True).rsqrt() * (self.offset + self.weight)


class Block(nn.Module):
    """A feed-forward block whose normalisation makes outlier channels."""

    def __init__(self, norm: nn.Module, residual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.residual = norm, residual
        self.up, self.gate, self.down = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        with torch.no_grad():
            weight = self.norm.get_parameter("weight")
            offset = getattr(norm, "offset", 0)
            weight[OUTLIERS] = (weight[OUTLIERS] + offset) * 100 - offset
            for layer in (self.up, self.gate):
                layer.weight[:, OUTLIERS] /= 100

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        y = self.down(nn.functional.gelu(self.gate(x)) * self.up(x))
        return x + y if self.residual else y


def batches() -> list[Tensor]:
    return [torch.randn(64, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


def smoothed(model: nn.Module) -> Any:
    """A model whose first two layers have one scale, as `improve` chooses it."""
    fq.prepare(model, "int8")
    fq.calibrate(model, batches(), progress=False)
    fq.ptq.improve(model, batches(), ["smooth"], progress=False)
    return model


def norms() -> dict[str, Callable[[], nn.Module]]:
    return {
        "LayerNorm": lambda: nn.LayerNorm(16),
        "without bias": lambda: nn.LayerNorm(16, bias=False),
        "RMSNorm": lambda: nn.RMSNorm(16),
        "BatchNorm": lambda: nn.BatchNorm1d(16),
        "weight": lambda: Root(16, 0.0),
        "1 + weight": lambda: Root(16, 1.0),
    }


@pytest.mark.parametrize("name", norms())
def test_scales_go_into_every_normalisation(name: str, tmp_path: Path) -> None:
    model, x = smoothed(Block(norms()[name]()).eval()), batches()[0]
    assert model.up.input_transform is not None
    with disabled(model), torch.no_grad():
        before = model(x)
    quantized = model(x)
    found = fold_scales(model, x)
    assert [(of.layer, of.into) for of in found.layers if not of.note] == [("up", "norm"), ("gate", "norm")]
    assert model.up.input_transform is model.gate.input_transform is None
    with disabled(model), torch.no_grad():
        assert float((model(x) - before).norm() / before.norm()) < 1e-6
    # A value halfway between two codes may fall on the other side, for the product is rounded elsewhere.
    assert float((model(x) - quantized).norm() / quantized.norm()) < 1e-2
    y = model(x)
    loaded = fq.load(Block(norms()[name]()).eval(), fq.save(model, tmp_path / "saved"))
    assert_same_bits(loaded(x), y)
    assert fold_scales(model, x).layers == [of for of in found.layers if of.note]


def test_a_file_has_no_operation_for_it(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model, x = fq.prepare(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 4)), "int8"), batches()[0]
    scaled(model[1], 0.5)
    fq.calibrate(model, [x], progress=False)
    fold_scales(model, x)
    fq.export_onnx(model, x, tmp_path / "model.onnx")
    assert fq.verify_onnx(tmp_path / "model.onnx", model, [x]).exact
    assert "Mul" not in {node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node}


def scaled(layer: Any, factor: float) -> None:
    scale = make_transform("channel_scale", layer)
    scale.scale[::2] = factor
    with torch.no_grad():
        layer.weight.copy_(scale.into_weight(layer, layer.weight))
    layer.input_transform = scale


class Wrong(nn.LayerNorm):
    """Its weight is not what its output is multiplied by."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.square() + self.bias


def stays() -> dict[str, tuple[nn.Module, dict[str, float], str]]:
    tied = Block(nn.LayerNorm(16))
    tied.other = nn.LayerNorm(16)
    tied.other.weight = tied.norm.get_parameter("weight")
    hooked = Block(nn.LayerNorm(16))
    hooked.norm.register_forward_hook(lambda *_: None)
    both, elsewhere = {"up": 0.5, "gate": 0.5}, "norm: something else reads its output too"
    return {
        "residual": (Block(nn.LayerNorm(16), residual=True), both, elsewhere),
        "one reader": (Block(nn.LayerNorm(16)), {"up": 0.5}, elsewhere),
        "different": (Block(nn.LayerNorm(16)), {"up": 0.5, "gate": 0.25}, "norm: its readers have different scales"),
        "shared": (tied, both, "norm: modules share its weight"),
        "hook": (hooked, both, "norm: it has hooks or a forward of its own"),
        "other function": (Block(Wrong(16)), both, "norm: its output is not a multiple of its weight"),
        "no norm": (Block(nn.LayerNorm(16)), {"down": 0.5}, "no normalisation makes its input"),
    }


@pytest.mark.parametrize("name", stays())
def test_what_cannot_be_folded_stays_and_says_why(name: str) -> None:
    model, factors, why = stays()[name]
    fq.prepare(model, "int8")
    for layer, factor in factors.items():
        scaled(model.get_submodule(layer), factor)
    fq.calibrate(model, batches(), progress=False)
    with unchanged(model):
        found = fold_scales(model, batches()[0])
    assert [(of.layer, of.into, of.note[: len(why)]) for of in found.layers] == [(name, "", why) for name in factors]
    assert f"stays: {why}" in str(found)


@pytest.mark.parametrize("kind", ["block_hadamard", "scaled_hadamard", "permutation"])
def test_every_other_transform_stays_by_its_name(kind: str) -> None:
    model: Any = fq.prepare(nn.Sequential(Block(nn.LayerNorm(16)), Block(nn.LayerNorm(16))), "int8")
    options = {"block": 4} if "hadamard" in kind else {}
    model[0].up.input_transform = transform = make_transform(kind, model[0].up, **options)
    row = FoldedScale("0.up", note=f"a normalisation cannot hold a {type(transform).__name__}")
    assert fold_scales(model, batches()[0]).layers == [row]
    for layer in (model[1].up, model[1].gate):
        scaled(layer, 0.5)
    found = fold_scales(model, batches()[0]).layers
    assert found == [FoldedScale("1.up", "1.norm"), FoldedScale("1.gate", "1.norm"), row]
    assert model[0].up.input_transform is transform


@pytest.mark.parametrize("in_float", [[], ["gate"]])
def test_a_scale_stays_where_the_batch_does_not_reach_another_reader(in_float: list[str]) -> None:
    torch.manual_seed(0)
    layers = {"norm": nn.LayerNorm(16), "up": nn.Linear(16, 4), "gate": nn.Linear(16, 4)}
    branches = Calls(lambda m, x: (m.up if x[0, 0] > 0 else m.gate)(m.norm(x)), **layers)
    model: Any = fq.prepare(branches, "int8", skip=in_float)
    for name in {"up", "gate"} - {*in_float}:
        scaled(model.get_submodule(name), 0.5)
    x = batches()[0]
    x[0, 0] = 1.0
    with disabled(model), torch.no_grad():
        before = [model(x), model(-x)]
        found = fold_scales(model, x)
        assert [model(x), model(-x)] == [pytest.approx(y) for y in before]
    notes = {of.layer: of.note for of in found.layers}
    assert "this batch does not reach gate.weight, which may read the same values" in notes["up"]
    assert notes.get("gate", "this batch does not reach it") == "this batch does not reach it"


@pytest.mark.parametrize("name", ["weight", "1 + weight"])
def test_what_a_normalisation_multiplies_by_is_seen_at_its_own_output(name: str) -> None:
    """A branch may be 1e-6 of the output, as at the start of training with LayerScale."""
    torch.manual_seed(0)
    small = Calls(lambda m, x: x + 1e-6 * m.up(m.norm(x)), norm=norms()[name](), up=nn.Linear(16, 16))
    model: Any = fq.prepare(small, "int8")
    scaled(model.up, 0.5)
    x = batches()[0]
    with disabled(model), torch.no_grad():
        before = model.up(model.norm(x))
        assert [of.into for of in fold_scales(model, x).layers] == ["norm"]
        assert float((model.up(model.norm(x)) - before).norm() / before.norm()) < 1e-6


def test_a_wrong_one_does_not_keep_others_from_it() -> None:
    model = nn.Sequential(Block(nn.LayerNorm(16)), Block(Wrong(16)))
    fq.prepare(model, "int8")
    for block in model:
        for layer in (block.get_submodule("up"), block.get_submodule("gate")):
            scaled(layer, 0.5)
    found = fold_scales(model, batches()[0])
    assert [of.into for of in found.layers] == ["0.norm", "0.norm", "", ""]


def test_errors() -> None:
    with pytest.raises(ConfigError, match="no quantizers; call fakequant"):
        fold_scales(nn.Linear(2, 2), torch.ones(1, 2))
    model = smoothed(Block(nn.LayerNorm(16)))
    with unchanged(model), pytest.raises(KeyboardInterrupt):
        fold_scales(model, batches()[0], forward=InterruptedForward(4))


SMOOTHED = [
    *("hf bert", "hf opt", "hf bloom", "hf t5", "hf bart", "hf whisper", "hf vit", "hf dinov2", "hf clip"),
    *("hf siglip", "hf swin", "hf llama", "hf mistral", "hf qwen2", "hf qwen3", "hf phi3", "hf gemma3", "hf gpt_neox"),
    *("hf modernbert", "hf segformer", "tv vit_b_16", "tv swin_t", "timm test_vit"),
]


def called(model: nn.Module, case: Case) -> list[Any]:
    """The quantized linear layers of a model that are called, and share no weight."""
    shared, seen = shared_parameters(model), dict[nn.Module, None]()
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and isinstance(m, QuantizedLayer)]
    handles = [m.register_forward_pre_hook(lambda module, _: seen.update({module: None})) for m in layers]
    case.outputs(model)
    for handle in handles:
        handle.remove()
    return [layer for layer in seen if shared.isdisjoint(layer.parameters(recurse=False))]


@each_architecture(["timm test_vit"], SMOOTHED)
def test_architectures_keep_their_float_function(name: str) -> None:
    case = case_of(name)
    wanted = case.outputs(case.float())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = fq.prepare(case.float(), "int8")
        fq.calibrate(model, case.batches, progress=False, unseen="float")
        for layer in called(model, case):  # what `improve` would choose depends on the random weights
            scaled(layer, 0.5)
        found = fold_scales(model, case.batches[0])
    with disabled(model):
        outputs = case.outputs(model)
    assert all(float((y - x).norm()) <= 1e-5 * float(x.norm()) for x, y in zip(wanted, outputs, strict=True))
    # Where the sum with the residual comes before the normalisation, the next sum reads what that makes.
    assert any(of.into for of in found.layers) or name in ("hf bert", "hf bart")
