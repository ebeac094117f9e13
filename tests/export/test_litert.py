"""Files of LiteRT with operators on int8, run by its interpreter; most tests are skipped without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import ConfigError, ExportError
from fakequant.export import litert as module
from fakequant.export.capability import require
from tests.support.mobile import Attention, Block, Cnn, PooledFork, calibrated, rules_of


@pytest.fixture
def engine() -> None:
    pytest.importorskip("litert_torch", reason="needs litert-torch: make engines")


def prepared(net: nn.Module, preset: Any, x: Tensor) -> nn.Module:
    model = fq.prepare(net.eval(), preset, x, target="litert")
    fq.calibrate(model, [x, x / 2], progress=False)
    return model


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("preset", ["INT8", "INT8_AFFINE"])
@pytest.mark.parametrize(
    ("make", "shape"),
    [(Cnn, (2, 3, 16, 16)), (lambda: nn.Sequential(Block(), Block()), (1, 8, 12, 12)), (PooledFork, (1, 3, 16, 16))],
    ids=["cnn", "blocks", "pooled fork"],
)
def test_files_compute_on_int8_and_are_one_step_away(make: Any, shape: Any, preset: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = make(), torch.randn(*shape)
    file = fq.export_litert(prepared(net, preset, x), x, tmp_path / "m.tflite")
    assert file.left == {}
    assert file.outputs[0].steps is not None
    assert file.outputs[0].steps <= 1.001
    assert file.outputs[0].share <= 0.02
    assert file.bytes == (tmp_path / "m.tflite").stat().st_size


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x) + self.b(y), self.b(y)


@pytest.mark.usefixtures("engine")
def test_inputs_and_results_keep_their_order(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(3, 8), 5 * torch.randn(3, 8)
    model = fq.prepare(Two().eval(), "INT8", (x, y), target="litert")
    fq.calibrate(model, [(x, y)], progress=False)
    file = fq.export_litert(model, (x, y), tmp_path / "m.tflite")
    assert [row.steps is not None and row.steps <= 1.001 for row in file.outputs] == [True, True]


@pytest.mark.usefixtures("engine")
def test_operators_on_floats_are_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 64)
    model = prepared(Attention(), "INT8", x)
    with pytest.raises(ExportError, match=r"LiteRT computes .*on floats; .*partial=True"):
        fq.export_litert(model, x, tmp_path / "m.tflite")
    assert not (tmp_path / "m.tflite").exists()
    file = fq.export_litert(model, x, tmp_path / "m.tflite", partial=True)
    assert "SOFTMAX" in file.left
    assert file.outputs[0].sqnr > 50


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            rules_of(weight="int8 per_channel(0)", input="int8_narrow"),
            r"expressed in LiteRT:\n0\._input_quantizer: int8_narrow per_tensor: codes are -127 to 127, .*use int8",
        ),
        (
            rules_of(weight="int8 per_channel(0)", input="int16"),
            r"0\._input_quantizer: int16 per_tensor: codes are -32768 to 32767",
        ),
        (
            rules_of(weight="int4 per_block(-1:32)"),
            r"0\._weight_quantizer: int4 per_block\(-1:32\): weights have scales per tensor or channel",
        ),
        ("W4A8_EXECUTORCH", r"LiteRT has static ranges alone"),
        (rules_of(weight="int4"), r"0\._weight_quantizer: int4 per_tensor: codes are -8 to 7, .*use int8"),
    ],
)
def test_what_it_has_not_is_refused_by_the_export_and_by_prepare(config: Any, words: str, tmp_path: Path) -> None:
    model, x = calibrated("mlp", config)
    with pytest.raises(ExportError, match=words):
        fq.export_litert(model, x, tmp_path / "m.tflite")
    with pytest.raises(ConfigError, match=words):
        calibrated("mlp", config, target="litert")


def test_without_the_packages_an_error_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "require", lambda *names, **options: require("no_such_package", **options))
    model, x = calibrated("mlp", "INT8")
    with pytest.raises(ExportError, match=r"LiteRT needs no_such_package.*pip install litert-torch==0\.10\.0"):
        fq.export_litert(model, x, tmp_path / "m.tflite")
