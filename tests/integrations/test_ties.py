"""Tied embeddings: one weight with one set of codes, through calibration, training and files."""

from __future__ import annotations

import pickle
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant import Rule, TensorConfig
from fakequant.errors import CoverageWarning
from tests.support.transformers_models import ARCHITECTURES
from tests.support.vision import import_torchvision

pytest.importorskip("transformers", reason="transformers is not installed")
import_torchvision()  # transformers imports it for its losses

TIED: dict[str, dict[str, Any]] = {"gpt2": {}, "llama": {"tie_word_embeddings": True}}


def tied(name: str) -> nn.Module:
    return ARCHITECTURES[name].make(**TIED[name])


def check(model: Any) -> None:
    """The table and the head have one parameter, and the same quantized values of it."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert table.weight is head.weight
    assert torch.equal(table.quantized_weight(), head.quantized_weight())
    assert not torch.equal(table.quantized_weight(), table.weight)


def learning(name: str) -> tuple[Any, dict[str, Any]]:
    """A calibrated model with learned scales, and its inputs."""
    model, inputs = fq.prepare(tied(name), "int8"), ARCHITECTURES[name].inputs()
    fq.calibrate(model, [inputs])
    fq.qat.set_scales(model, fq.qat.Scales.LEARNED)
    return model, inputs


def trained(model: nn.Module, name: str) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(**ARCHITECTURES[name].inputs())[0].square().mean().backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("name", TIED)
@pytest.mark.parametrize("preset", ["INT8", "FP8_BLOCK", "NVFP4", "INT4_GROUP32"])
def test_tied_layers_have_the_same_codes(name: str, preset: str, tmp_path: Path) -> None:
    inputs = ARCHITECTURES[name].inputs()
    with warnings.catch_warnings(action="error", category=CoverageWarning):
        warnings.filterwarnings("ignore", ".* bits per weight with scales")  # of layers as small as these
        model = fq.prepare(tied(name), preset)
    check(model)
    fq.calibrate(model, [inputs])
    for one in (model, deepcopy(model), pickle.loads(pickle.dumps(model))):
        check(one)
    fq.save(model, tmp_path / "saved")
    again = fq.load(tied(name), tmp_path / "saved")
    check(again)
    with torch.no_grad():
        assert torch.equal(again(**inputs)[0], model(**inputs)[0])


@pytest.mark.parametrize("name", TIED)
def test_tied_layers_learn_one_range(name: str, tmp_path: Path) -> None:
    model, inputs = fq.prepare(tied(name), "int8"), ARCHITECTURES[name].inputs()
    fq.calibrate(model, [inputs])
    count = len(list(model.parameters()))
    fq.qat.set_scales(model, fq.qat.Scales.LEARNED)
    learned = [q for q in fq.nn.quantizers(model).values() if q.learned is not None]
    assert len(list(model.parameters())) == count + len(learned) - 1
    before = model.get_input_embeddings()._weight_quantizer.learned.step.detach().clone()  # type: ignore[operator]
    check(trained(model, name))
    assert not torch.equal(before, model.get_output_embeddings()._weight_quantizer.learned.step)  # type: ignore[operator]
    fq.save(model, tmp_path / "saved")
    again = fq.load(tied(name), tmp_path / "saved")
    check(again)
    assert torch.equal(again(**inputs)[0], model(**inputs)[0])
    check(trained(again, name))
    fq.qat.set_scales(again, fq.qat.Scales.FIXED)
    check(again)


@pytest.mark.parametrize("name", TIED)
def test_tied_layers_learn_one_range_after_load_state_dict(name: str) -> None:
    model, inputs = learning(name)
    trained(model, name)
    again = fq.prepare(tied(name), "int8")
    nn.Sequential(again).load_state_dict({f"0.{key}": value for key, value in model.state_dict().items()})
    assert [key for key, _ in again.named_parameters()] == [key for key, _ in model.named_parameters()]
    assert torch.equal(trained(again, name)(**inputs)[0], trained(model, name)(**inputs)[0])
    check(again)


@pytest.mark.parametrize("name", TIED)
def test_ranges_of_tied_layers_that_differ_come_back_as_they_are(name: str, tmp_path: Path) -> None:
    import transformers

    from fakequant.integrations.transformers import enable_saving

    architecture = ARCHITECTURES[name]
    model, inputs = learning(name)
    head: Any = model.get_output_embeddings()._weight_quantizer  # type: ignore[operator]
    head.lsq = deepcopy(head.lsq)  # as where the layers were tied after `set_scales`
    head.lsq.step.data.mul_(1.5)
    fq.save(model, tmp_path / "saved")
    enable_saving(model).save_pretrained(tmp_path / "folder")  # type: ignore[operator, type-var]
    state_dict = fq.prepare(tied(name), "int8")
    state_dict.load_state_dict(model.state_dict())
    found = [
        fq.load(tied(name), tmp_path / "saved"),
        fq.apply(tied(name), fq.snapshot(model)),
        getattr(transformers, architecture.model).from_pretrained(tmp_path / "folder"),
        state_dict.eval(),
    ]
    assert [torch.equal(again(**inputs)[0], model(**inputs)[0]) for again in found] == [True] * 4


@pytest.mark.parametrize("name", TIED)
def test_tied_layers_are_saved_by_transformers(name: str, tmp_path: Path) -> None:
    import transformers

    from fakequant.integrations.transformers import enable_saving

    architecture = ARCHITECTURES[name]
    model, inputs = learning(name)
    enable_saving(trained(model, name)).save_pretrained(tmp_path)  # type: ignore[operator, type-var]
    again = getattr(transformers, architecture.model).from_pretrained(tmp_path)
    check(again)
    assert torch.equal(again(**inputs)[0], model(**inputs)[0])


def test_layers_without_the_same_codes_are_named() -> None:
    head = Rule("lm_head", weight=TensorConfig("int4 per_channel(0)"))
    with pytest.warns(CoverageWarning, match="share a weight and do not have the same codes") as caught:
        fq.prepare(tied("llama"), fq.presets.INT8.with_rule(head))
    assert str(caught[0].message) == (
        "layers share a weight and do not have the same codes of it: model.embed_tokens as int8 per_channel(0) and "
        "lm_head as int4 per_channel(0) (give both layers one rule)"
    )

    class Lookup(nn.Module):
        def __init__(self, table: nn.Parameter) -> None:
            super().__init__()
            self.table = table

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table[x]

    linear = nn.Linear(8, 4, bias=False)
    with pytest.warns(CoverageWarning) as caught:
        fq.prepare(nn.Sequential(Lookup(linear.weight), linear), "int8")
    assert str(caught[-1].message).endswith("codes of it: 1, and 0 (Lookup) uses it in float")
    linear = nn.Linear(8, 4, bias=False)
    with warnings.catch_warnings(action="error", category=CoverageWarning):
        meant = fq.presets.INT8.with_rule(Rule("*", layers="Lookup"))
        fq.prepare(nn.Sequential(Lookup(linear.weight), linear), meant)


class Positions(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input + 1)


class Shared(nn.Module):
    """As Marian: a table that is never called shares its weight with the table and the head that are."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.table, self.positions = nn.Embedding(16, 32), nn.Embedding(16, 32), Positions(16, 32)
        self.head = nn.Linear(32, 16, bias=False)
        self.table.weight = self.head.weight = self.shared.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids) + self.positions(ids))


def test_a_table_that_is_never_called_is_quantized_as_those_that_share_its_weight() -> None:
    sums = fq.presets.INT8.with_rule(Rule("*", input=TensorConfig("int8"), ops=("add",)))
    ids = torch.arange(8).view(2, 4)
    for config, target in (("int8", None), (sums, None), ("int8_affine", "onnxruntime")):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model = fq.prepare(Shared().eval(), config, ids, target=target)
        assert not [one for one in said if "share a weight" in str(one.message)], said
        fq.calibrate(model, [ids])
        assert torch.equal(model.shared.quantized_weight(), model.head.quantized_weight())  # type: ignore[operator]
