"""Packages of Core ML: their weights, element by element; most tests are skipped without coremltools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.errors import ConfigError, ExportError
from fakequant.export import coreml as module
from fakequant.export.capability import require
from tests.support.mobile import calibrated


@pytest.fixture
def engine() -> None:
    pytest.importorskip("coremltools", reason="needs coremltools: make engines")


CASES = [("cnn", "INT8", 8), ("cnn", "INT8_AFFINE", 8), ("cnn", "INT4_WEIGHT_ONLY", 8), ("mlp", "INT4_GROUP32", 2)]


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(("name", "preset", "count"), [*CASES, ("attention", "INT8_WEIGHT_ONLY", 4)])
def test_weights_have_the_values_of_the_simulation(name: str, preset: str, count: int, tmp_path: Path) -> None:
    model, x = calibrated(name, preset)
    file = fq.export_coreml(model, x, tmp_path / "m.mlpackage")
    assert f"every element of {count} weights has the value of the simulation" in str(file)
    assert file.bytes > 1000
    import coremltools  # pyright: ignore[reportMissingImports]

    spec = coremltools.models.MLModel(str(file.path), skip_model_load=True).get_spec()
    blocks = next(iter(spec.mlProgram.functions["main"].block_specializations.values()))
    kinds = [one.type for one in blocks.operations]
    assert kinds.count("constexpr_blockwise_shift_scale") == count
    assert ("quantize" in kinds) == (preset in ("INT8", "INT8_AFFINE"))


@pytest.mark.usefixtures("engine")
def test_another_weight_is_an_error_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from coremltools.converters.mil.mil.ops.defs.iOS18 import (  # pyright: ignore[reportMissingImports]
        constexpr_blockwise_shift_scale as weight,
    )

    values = weight.materialized_val_inference

    def other(self: Any) -> Any:
        found = values(self).copy()
        found[0, 0] += 1e-3
        return found

    monkeypatch.setattr(weight, "materialized_val_inference", other)
    model, x = calibrated("mlp", "INT8_WEIGHT_ONLY")
    with pytest.raises(ExportError, match=r"1 elements of the weight dequantize_per_channel.* nothing was written"):
        fq.export_coreml(model, x, tmp_path / "m.mlpackage")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("engine")
def test_paths_and_ranges_of_every_token_are_refused(tmp_path: Path) -> None:
    model, x = calibrated("mlp", "INT8_WEIGHT_ONLY")
    with pytest.raises(ExportError, match=r"end in \.mlpackage"):
        fq.export_coreml(model, x, tmp_path / "m.tflite")
    (tmp_path / "m.mlpackage").mkdir()
    with pytest.raises(ExportError, match="give a new path, or remove it"):
        fq.export_coreml(model, x, tmp_path / "m.mlpackage")
    tokens, _ = calibrated("mlp", "W4A8_EXECUTORCH")
    with pytest.raises(ExportError, match=r"0\._input_quantizer: .*ranges of every token"):
        fq.export_coreml(tokens, x, tmp_path / "n.mlpackage")
    with pytest.raises(ConfigError, match=r"coreml cannot load.*\n0\._input_quantizer: .*ranges of every token"):
        calibrated("mlp", "W4A8_EXECUTORCH", target="coreml")


def test_without_coremltools_an_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "require", lambda *names, **options: require("no_such_package", **options))
    model: nn.Module = nn.Linear(2, 2)
    with pytest.raises(ExportError, match=r"Core ML needs no_such_package.*pip install coremltools==9\.0"):
        fq.export_coreml(model, torch.ones(1, 2), tmp_path / "m.mlpackage")
