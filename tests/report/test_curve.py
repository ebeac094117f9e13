"""The curve of a comparison in a report."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fakequant as fq
from fakequant.cli.commands import app
from fakequant.data.arguments import NamedMetric
from fakequant.errors import ConfigError
from fakequant.model import presets
from fakequant.nn.quantizer import quantizers
from fakequant.ptq import Ways, compare
from fakequant.ptq.comparison import Comparison
from fakequant.ptq.trial import Compared
from fakequant.report import ReportData, comparison_of, from_json, render
from fakequant.report.data import DECIBELS
from tests.support.parsed_page import Page

ROWS = [
    Compared("INT8", "mse", "fast", 0.001, 98.5, 8.25),
    Compared("INT4", "mse", "", 0.1, 97.0, 4.5),
    Compared("NVFP4", "mse", "", failed="ConfigError: a reason"),
]


def calibrated(*layers: nn.Module, shape: tuple[int, ...] = (4, 8)) -> nn.Module:
    torch.manual_seed(0)
    model = fq.prepare(nn.Sequential(*layers), presets.INT8)
    fq.calibrate(model, [torch.randn(shape)])
    return model


def written(path: Path) -> Path:
    lines = [json.dumps({"fingerprint": "0"}), *(json.dumps(asdict(row)) for row in ROWS)]
    path.write_text("\n".join(lines) + "\n" + '{"preset": "cut o')
    return path


def test_rows_are_read_from_a_file(tmp_path: Path) -> None:
    assert comparison_of(written(tmp_path / "rows.jsonl")).rows == ROWS


@pytest.mark.parametrize("from_file", [False, True])
def test_a_perplexity_is_drawn_without_the_sign_by_which_it_is_compared(tmp_path: Path, from_file: bool) -> None:
    torch.manual_seed(0)
    model, batches, path = nn.Sequential(nn.Linear(8, 8)), [torch.randn(4, 8)], tmp_path / "rows.jsonl"
    metric = NamedMetric(lambda model: -9.5 - float(bool(quantizers(model))), "perplexity", negated=True)
    found = compare(model, batches, Ways(["INT8", "INT4"], steps=[None]), metric=metric, path=path)
    assert compare(model, batches, Ways(["INT8"], steps=[None]), metric=metric, path=path).best.metric == -10.5
    page = fq.report(
        calibrated(nn.Linear(8, 8)), batches, tmp_path / "r.html", comparison=path if from_file else found
    ).read_text()
    curve = page[page.index('id="curve"') :]
    assert "-10.5" not in curve
    assert curve.count("10.5") >= 3, "the end of the axis, and both rows of the table"


def test_without_a_metric_points_are_the_error_in_decibels() -> None:
    rows = [Compared("INT8", "mse", "", 0.001, None, 8.0), Compared("INT4", "mse", "", 0.1, None, 4.0), ROWS[2]]
    words = Page(render(ReportData("x", curve=Comparison(rows)))).words
    assert f"form bits per weight {DECIBELS} INT8 mse 8.00 30 best for its bits" in words
    assert "INT4 mse 4.00 10 best for its bits" in words


@pytest.mark.parametrize("content", [None, "", "{}\n", "1\n", '{"fingerprint": "0"}\n'])
def test_a_file_without_rows_is_refused_before_the_work(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=r"rows.jsonl (cannot be read|holds no rows)"):
        fq.report(nn.Linear(2, 2), [], tmp_path / "r.html", comparison=tmp_path / "rows.jsonl")


def test_a_report_shows_the_curve_of_a_comparison(tmp_path: Path) -> None:
    model = calibrated(nn.Linear(8, 8))
    page = fq.report(model, [torch.ones(4, 8)], tmp_path / "r.html", comparison=Comparison(ROWS, 99.0)).read_text()
    assert 'id="curve"' in page
    assert page.count("<circle") == 2, "what failed has no place"
    assert "ConfigError: a reason" in page
    found = from_json((tmp_path / "r.json").read_text())
    assert found.curve == Comparison(ROWS, 99.0)


def test_the_command_adds_a_curve_to_a_page(tmp_path: Path) -> None:
    fq.report(calibrated(nn.Linear(8, 8)), [torch.ones(4, 8)], tmp_path / "r.html")
    rows, out = str(written(tmp_path / "rows.jsonl")), tmp_path / "with.html"
    assert 'id="curve"' not in (tmp_path / "r.html").read_text()
    ran = CliRunner().invoke(app, ["report", str(tmp_path / "r.html"), "--compare", rows, "--out", str(out)])
    assert ran.exit_code == 0, ran.output
    assert out.read_text().count("<circle") == 2
    twice = [str(tmp_path / "r.html")] * 2
    assert CliRunner().invoke(app, ["report", *twice, "--compare", rows, "--out", str(out)]).exit_code == 2
