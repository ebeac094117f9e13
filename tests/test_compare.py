"""Ways to quantize a model, side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.errors import CalibrationError, ConfigError
from fakequant.ptq import Ways, compare

WAYS = Ways(["INT8", "w4a16_g32", "NVFP4"], ["max", "mse"], [None, "fast"])


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))


def batches() -> list[torch.Tensor]:
    return [torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


def test_every_way_is_a_row_the_best_first() -> None:
    found = compare(net(), batches(), WAYS)
    assert len(found.rows) == 2 * 2 + 2 + 2  # one method where no input is static
    errors = [row.error for row in found.rows]
    assert errors == sorted(errors)
    by_way = {row.way: row for row in found.rows}
    assert by_way["INT4_GROUP32", "max", "fast"].error < 0.5 * by_way["INT4_GROUP32", "max", ""].error
    assert by_way["INT4_GROUP32", "max", ""].bits == 5.0
    assert by_way["INT4_GROUP32", "max", ""].bytes == 5 * (64 * 64 + 64 * 8) / 8
    model = fq.prepare(net(), "INT4_GROUP32")
    with torch.no_grad():
        pairs = [(model(x), net()(x)) for x in batches()]
    lost = sum(float((y - wanted).double().square().sum()) for y, wanted in pairs)
    assert by_way["INT4_GROUP32", "max", ""].error == lost / sum(float(w.double().square().sum()) for _, w in pairs)
    header = "preset method steps metric error bits MB seconds"
    assert str(found).splitlines()[0].split() == header.split()
    assert "INT4_GROUP32" in found._repr_html_()


def test_a_metric_decides_the_order() -> None:
    def fewest_bits(model: Any) -> float:
        quantizer = getattr(model[0], "weight_quantizer", None)
        return 0.0 if quantizer is None else -float(quantizer.spec.format.bits)

    found = compare(net(), batches(), ["INT8", "MXFP4"], metric=fewest_bits)
    assert [row.preset for row in found.rows] == ["MXFP4", "MXFP4", "INT8", "INT8"]
    assert found.float_metric == 0.0
    assert "-4 (-4)" in str(found)


def test_rows_of_a_file_are_not_run_again(tmp_path: Path) -> None:
    path, calls = tmp_path / "rows.jsonl", []

    def metric(model: Any) -> float:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return 1.0

    ways = Ways(["INT8", "FP8"], steps=[None])
    with pytest.raises(KeyboardInterrupt):
        compare(net(), batches(), ways, metric=metric, path=path)
    assert len(path.read_text().splitlines()) == 2
    with path.open("a") as file:
        file.write('{"preset": "FP')  # a kill in the middle of a line
    found = compare(net(), batches(), ways, metric=metric, path=path)
    assert len(calls) == 5  # the float model twice, INT8 once, FP8 twice
    assert len(found.rows) == 2
    assert [json.loads(line).get("preset") for line in path.read_text().splitlines()] == [None, "INT8", "FP8"]


def test_what_fails_is_a_row() -> None:
    model = nn.Sequential(nn.Linear(64, 8))
    found = compare(model, [*batches(), torch.full((1, 64), torch.nan)], Ways(["INT8", "INT4_GROUP32"], steps=[None]))
    failed = found.rows[-1]
    assert failed.preset == "INT8"
    assert failed.failed.startswith("CalibrationError: 0._input_quantizer")
    assert failed.failed in str(found)


def test_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = compare(net(), batches(), Ways(["INT8", "FP8"], steps=[None]))
    assert found.plot(tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"


def test_what_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    compare(net(), batches(), Ways(["INT8"], steps=[None]), path=path)
    with pytest.raises(ConfigError, match="no comparison of this model and these batches"):
        compare(net(), batches()[:2], Ways(["INT8"], steps=[None]), path=path)
    path.write_text(path.read_text().splitlines()[0] + '\n{"preset": 1}\n')
    with pytest.raises(ConfigError, match="is damaged"):
        compare(net(), batches(), Ways(["INT8"], steps=[None]), path=path)
    with pytest.raises(ConfigError, match="unknown preset 'INT9'"):
        compare(net(), batches(), ["INT9"])
    with pytest.raises(CalibrationError, match="compare needs batches"):
        compare(net(), [])
