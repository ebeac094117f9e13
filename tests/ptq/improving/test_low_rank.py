"""Thin matrices beside quantized weights."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CalibrationError, CheckpointError, ConfigError
from fakequant.model.weights import disabled
from fakequant.nn.low_rank import LowRank
from fakequant.ptq.improving.low_rank import low_rank
from tests.support.bits import assert_same_bits


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 40), nn.GELU(), nn.Linear(40, 24)).eval()


def batches(count: int = 4) -> list[Tensor]:
    """Inputs with a few directions that matter most, as those of trained models."""
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(48, 48, generator=generator) * torch.logspace(1, -1, 48)
    return [torch.randn(32, 48, generator=generator) @ mixing.T for _ in range(count)]


def prepared(weight: str = "int4 per_block(-1:16,pad)", **fields: Any) -> nn.Sequential:
    model = fq.prepare(net(), fq.Config("test", (fq.Rule(weight=weight, **fields),)))
    fq.calibrate(model, batches(), progress=False)
    return model


@torch.no_grad()
def error(model: nn.Module) -> float:
    x = torch.cat(batches(6)[4:])
    return float((model(x) - net()(x)).square().sum() / net()(x).square().sum())


FORMATS = [
    "int4 per_block(-1:16,pad)",
    "int3 per_channel(0)",
    "nf4 per_block(0:4,-1:8,pad)",
    "float4_e2m1fn per_tensor",
]


@pytest.mark.parametrize("weight", FORMATS)
def test_a_split_loses_less_and_keeps_the_float_function(weight: str) -> None:
    model = prepared(weight, input="int8")
    nearest = error(model)
    found = low_rank(model, batches(), rank=6, progress=False)
    assert [layer.layer for layer in found.layers] == ["0", "2", "4"]
    assert all(layer.after < layer.before for layer in found.layers)
    assert error(model) < 0.8 * nearest
    for layer in (model[0], model[2], model[4]):
        assert_same_bits(layer.weight_quantizer.scale, fq.choose_qparams(layer.weight.detach(), weight).scale)
    with torch.no_grad(), fq.disabled(model):
        torch.testing.assert_close(model(batches()[0]), net()(batches()[0]), rtol=1e-3, atol=1e-3)


def test_more_rank_loses_less_and_steps_go_on_from_it() -> None:
    errors = []
    for rank in (1, 4, 12):
        model = prepared()
        low_rank(model, batches(), rank, progress=False)
        errors.append(error(model))
    assert errors == sorted(errors, reverse=True)
    improved = prepared()
    fq.ptq.improve(improved, batches(), "fast", judge=[], progress=False)
    low_rank(model := prepared(), batches(), 12, progress=False)
    fq.ptq.improve(model, batches(), "fast", judge=[], progress=False)
    assert error(model) < error(improved)
    for layer in (model[0], model[2], model[4]):
        assert_same_bits(layer.weight_quantizer(layer.weight), layer.weight)


def test_a_branch_is_the_best_of_its_rank_for_the_moments() -> None:
    """Against gradient descent from it, which finds nothing better."""
    model = prepared()
    low_rank(model, batches(), 4, progress=False)
    layer: Any = model[0]
    rows = torch.cat(batches()).double()
    error = (layer.weight - layer.quantized_weight() + layer.low_rank.product()).detach().double()
    moments = rows.T @ rows
    moments += 0.01 * moments.diagonal().mean() * torch.eye(48)
    singular = torch.linalg.svdvals(error @ torch.linalg.cholesky(moments))
    assert singular[4:].square().sum() < 0.9 * singular.square().sum()


def test_copies_files_and_the_summary_hold_it(tmp_path: Path) -> None:
    model = prepared(input="int8")
    low_rank(model, batches(), 3, progress=False)
    x = batches()[0]
    y = model(x)
    fq.save(model, tmp_path / "saved")
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), fq.load(net(), tmp_path / "saved")):
        assert_same_bits(again(x), y)
    found = fq.summary(model)
    assert "int4 per_block(-1:16,pad) + rank 3, float16" in str(found)
    codes, scales = 48 * 64 + 64 * 40 + 40 * 24, 64 * 3 + 40 * 4 + 24 * 3
    beside = 16 * 3 * (48 + 64 + 64 + 40 + 40 + 24)
    assert found.bits_per_weight == pytest.approx((4 * codes + 32 * scales + beside) / codes)
    assert found.bytes_quantized == (4 * codes + 32 * scales + beside) // 8 + 4 * (64 + 40 + 24)


def test_a_file_has_two_products_beside_the_quantized_one(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    model = prepared(input="int8")
    plain = copy.deepcopy(model)
    low_rank(model, batches(), 3, progress=False)
    counts = []
    for name, one in (("plain", plain), ("split", model)):
        fq.export_onnx(one, batches()[0], tmp_path / f"{name}.onnx")
        nodes = onnx.load(tmp_path / f"{name}.onnx").graph.node
        counts.append(sum(node.op_type in ("MatMul", "Gemm") for node in nodes))
    assert counts == [3, 9]
    assert fq.verify_onnx(tmp_path / "split.onnx", model, batches()[:1]).exact


def test_it_runs_in_integers_compiled_and_in_training() -> None:
    model = prepared("int8 per_channel(0)", input="int8")
    low_rank(model, batches(), 3, progress=False)
    x = batches()[0]
    y = model(x)
    fq.set_execution(model, "auto")
    torch.testing.assert_close(model(x), y, rtol=1e-4, atol=1e-4)
    fq.set_execution(model, "simulate")
    assert_same_bits(torch.export.export(model, (x,)).module()(x), y)
    model(x).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(48, 48), nn.Linear(48, 48), nn.Linear(48, 2)
        self.conv, self.idle = nn.Conv1d(48, 48, 1), nn.Linear(48, 48)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.conv(self.second(self.first(x))[..., None])[..., 0])


def test_what_stays_is_listed_with_the_reason() -> None:
    model = fq.prepare(Odd(), fq.Config("test", (fq.Rule(weight="int4 per_channel(0)"),)))
    found = low_rank(model, batches(), 4, progress=False)
    assert {layer.layer: layer.note for layer in found.layers} == {
        "first": "layers share its weight",
        "second": "layers share its weight",
        "third": "rank 4 would take as many bits as the weight in float16",
        "conv": "a QuantConv1d is no linear layer",
        "idle": "no batch that chooses weights reaches it",
    }
    model = prepared()
    fq.ptq.improve(model, batches(), "fast", progress=False)
    notes = {layer.note for layer in low_rank(model, batches(), 4, progress=False).layers}
    assert notes == {"its weight is chosen already; call low_rank before improve"}
    low_rank(model := prepared(), batches(), 4, progress=False)
    notes = {layer.note for layer in low_rank(model, batches(), 4, progress=False).layers}
    assert notes == {"it has a product of low rank already"}


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"rank": 0}, ConfigError, "rank must be a whole number of at least 1, got 0"),
        ({"batches": []}, CalibrationError, "low_rank needs batches, and got none"),
        ({"batches": torch.ones(3, 48)}, ConfigError, r"give a list: \[tensor\]"),
        ({"model": net()}, ConfigError, "call fakequant.prepare"),
        ({"batches": [torch.full((3, 48), torch.nan)]}, CalibrationError, "^0, batch 1: an input holds NaN or inf"),
    ],
)
def test_what_is_refused_leaves_the_model_as_it_was(change: Any, kind: type[Exception], message: str) -> None:
    given = {"model": prepared(), "batches": batches(), "rank": 4} | change
    before = copy.deepcopy(given["model"].state_dict())
    with pytest.raises(kind, match=message):
        low_rank(**given, progress=False)
    assert given["model"].state_dict().keys() == before.keys()
    for name, value in given["model"].state_dict().items():
        assert_same_bits(value, before[name], name)


def test_the_float_model_gets_whole_weights_back() -> None:
    model = prepared()
    low_rank(model, batches(), 3, progress=False)
    again = net()
    again.load_state_dict(fq.float_state_dict(model))
    torch.testing.assert_close(again[0].weight, net()[0].weight, rtol=0, atol=1e-3)
    y = model(batches()[0])
    assert_same_bits(fq.bake_weights(model)(batches()[0]), y)


def test_a_damaged_rank_is_refused(tmp_path: Path) -> None:
    model = prepared()
    low_rank(model, batches(), 3, progress=False)
    fq.save(model, tmp_path / "saved")
    manifest = tmp_path / "saved" / "fakequant.json"
    manifest.write_text(manifest.read_text().replace('"low_rank": 3', '"low_rank": 300000'))
    with pytest.raises(CheckpointError, match=r"cannot be quantized: a product of rank 300000 .* does not fit"):
        fq.load(net(), tmp_path / "saved")


def test_other_dtypes_keep_it() -> None:
    model = prepared()
    low_rank(model, batches(), 3, progress=False)
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert half(batches()[0].bfloat16()).dtype == torch.bfloat16
    assert isinstance(model[0].low_rank, LowRank)
    assert model[0].low_rank.down.dtype == torch.float16


def test_batches_that_call_layers_in_other_orders_keep_the_function() -> None:
    """The layers of such a model come up twice, and are split once."""

    class Paths(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one, self.other, self.last = nn.Linear(48, 48), nn.Linear(48, 48), nn.Linear(48, 24)

        def forward(self, x: Tensor) -> Tensor:
            first, second = (self.one, self.other) if x.mean() > 0 else (self.other, self.one)
            return self.last(second(first(x).tanh()))

    model, given = fq.prepare(Paths(), "INT4_WEIGHT_ONLY"), batches(8)
    assert len({bool(x.mean() > 0) for x in given}) == 2
    found = low_rank(model, given, rank=4, progress=False)
    assert sorted(row.layer for row in found.layers) == ["last", "one", "other"]
    with disabled(model), torch.no_grad():
        for x in given:
            assert float((model(x) - Paths()(x)).norm() / Paths()(x).norm()) < 1e-3  # the product is in float16
