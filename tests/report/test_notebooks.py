"""What notebooks show: results as HTML tables, and pictures."""

from __future__ import annotations

import math
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.errors import ConfigError
from fakequant.export.verdict import OutputRow, Row, VerifyReport
from fakequant.model.sensitivity import Sensitivities, Sensitivity
from fakequant.nn.quantizer import Quantizer
from fakequant.ptq import Compared, Comparison, Improvement, LayerResult

matplotlib.use("agg")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    made = fq.prepare(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)), "int4")
    fq.calibrate(made, batches())
    return made


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 8, generator=generator) for _ in range(2)]


def quantizer_of(model: nn.Module, name: str) -> Quantizer:
    found = model.get_submodule(name)
    assert isinstance(found, Quantizer)
    return found


def test_a_summary_is_a_table(model: nn.Module) -> None:
    found = fq.summary(model, torch.ones(2, 8))
    html = found._repr_html_()
    for text in ("int4 per_channel(0)", "uint4 per_tensor", "bits per weight", "left in float: 0 products"):
        assert text in html
        assert text in str(found)
    assert html.count("<tr>") == 3


def test_a_verification_is_a_table() -> None:
    report = VerifyReport(
        "a<b>.onnx", "given", [Row("0._input_quantizer", "int8", "activation", 1000)], runtime="R", batches=2
    )
    report.outputs = [OutputRow("y", 10)]
    html = report._repr_html_()
    for text in ("0._input_quantizer", "1,000", "a&lt;b&gt;.onnx: exact in R; 2 batches: given", "against torch, y:"):
        assert text in html
    assert "<b>" not in html


def test_an_improvement_is_a_table() -> None:
    found = Improvement([LayerResult("0", 0.02, 0.01, {"gptq": 0.015}), LayerResult("1", note="no <weight>")])
    html = found._repr_html_()
    for text in ("2.00e-02", "1.50e-02", "1.00e-02", "no &lt;weight&gt;", "50% of the error of rounding to nearest is"):
        assert text in html
    assert str(found).splitlines()[0].split() == ["layer", "nearest", "gptq", "chosen", "left"]


def test_sensitivities_print_with_their_unit(model: nn.Module) -> None:
    found = fq.sensitivity(model, batches())
    assert isinstance(found, list)
    assert repr(found).splitlines()[0].split() == ["layer", "dB", "alone"]
    assert [line.split()[0] for line in repr(found).splitlines()[1:]] == [one.layer for one in found]
    assert f"{found[0].value:.1f}" in found._repr_html_()
    by_metric = fq.sensitivity(model, [], lambda net: float(net(batches()[0]).abs().sum()))
    assert repr(by_metric).splitlines()[0].split() == ["layer", "metric", "alone", "change"]
    assert f"{by_metric[0].change:+.3g}" in by_metric._repr_html_()
    assert "exact" in repr(Sensitivities([Sensitivity("a", math.inf, math.inf)]))


@pytest.mark.parametrize("name", ["0._input_quantizer", "2._weight_quantizer"])
def test_a_histogram_counts_every_value(model: nn.Module, name: str) -> None:
    axes = fq.plot.histogram(model, name, batches(), bins=20)
    (stairs,) = [patch for patch in axes.patches if hasattr(patch, "get_data")]
    counts, edges, _ = stairs.get_data()
    expected = torch.cat(batches()) if "input" in name else model.get_parameter("2.weight")
    assert sum(counts) == expected.numel()
    assert len(counts) == 20
    assert (edges[0], edges[-1]) == (expected.min().item(), expected.max().item())
    assert not model.get_submodule(name)._forward_pre_hooks


def test_the_ends_of_the_range_are_drawn(model: nn.Module) -> None:
    quantizer = quantizer_of(model, "0._input_quantizer")
    assert quantizer.scale is not None
    assert quantizer.zero_point is not None
    axes = fq.plot.histogram(model, "0._input_quantizer", batches())
    drawn = [line.get_xdata()[0] for line in axes.lines]
    scale, zero = quantizer.scale.double(), quantizer.zero_point.double()
    assert drawn == [((0 - zero) * scale).item(), ((15 - zero) * scale).item()]


def test_errors_of_layers_are_bars(model: nn.Module) -> None:
    found = fq.sensitivity(model, batches())
    axes = fq.plot.errors(found)
    assert [label.get_text() for label in axes.get_yticklabels()] == [one.layer for one in found]
    assert [bar.get_width() for bar in axes.patches] == [one.value for one in found]
    axes = fq.plot.errors(fq.layer_sqnr(model, batches()))
    assert len(axes.patches) == 4
    improved = Improvement([LayerResult("0", 0.02, 0.01), LayerResult("1", note="left out")])
    assert [bar.get_width() for bar in fq.plot.errors(improved).patches] == [0.02, 0.01]
    by_metric = fq.sensitivity(model, [], lambda net: -200.0)
    assert [bar.get_width() for bar in fq.plot.errors(by_metric).patches] == [-200.0, -200.0]


def test_channels_are_a_band_between_the_ends_of_the_range(model: nn.Module) -> None:
    weight, quantizer = model.get_parameter("0.weight").detach(), quantizer_of(model, "0._weight_quantizer")
    axes = fq.plot.channels(model, "0._weight_quantizer")
    band, *ends = [stairs.get_data() for stairs in axes.patches]
    assert list(band.values) == weight.amax(1).double().tolist()
    assert list(band.baseline) == weight.amin(1).double().tolist()
    assert list(band.edges) == [-0.5, 0.5, 1.5, 2.5, 3.5, 4.5, 5.5]
    assert quantizer.scale is not None
    assert [list(end.values) for end in ends] == [(quantizer.scale.flatten() * code).tolist() for code in (-8, 7)]
    assert axes.get_title() == "0._weight_quantizer: int4 per_channel(0)"


@pytest.mark.parametrize("preset", ["NVFP4_WEIGHT_ONLY", "NF4_WEIGHT_ONLY", "INT4_GROUP32", "FP8_BLOCK"])
def test_the_ends_of_groups_are_those_of_the_widest(preset: str) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(256, 5)
    axes = fq.plot.channels(fq.prepare(nn.Sequential(layer), preset), "0._weight_quantizer")
    lowest, highest = (torch.as_tensor(stairs.get_data().values) for stairs in axes.patches[1:])
    largest = layer.weight.detach().abs().amax(1).double()
    assert bool((highest >= largest * 0.85).all())
    assert bool((highest <= largest.max() * 1.2).all())
    assert bool((lowest <= largest * -0.85).all())


def test_channels_of_convolutions_are_those_of_the_output() -> None:
    net = nn.Sequential(nn.Conv2d(3, 7, 2), nn.ConvTranspose2d(7, 4, 2))
    model = fq.prepare(net, "INT8_WEIGHT_ONLY")
    drawn = [fq.plot.channels(model, f"{layer}._weight_quantizer") for layer in (0, 1)]
    assert [len(axes.patches[0].get_data().values) for axes in drawn] == [7, 4]


@pytest.mark.parametrize("metric", [None, lambda net: 0.5])
def test_a_comparison_is_points_and_a_curve(metric: Any) -> None:
    found = fq.compare(nn.Sequential(nn.Linear(8, 6)), batches(), ["INT8", "INT4_GROUP32"], metric=metric)
    before = matplotlib.get_backend()
    axes = fq.plot.comparison(found, over="milliseconds")
    assert axes.get_xlabel() == "milliseconds of a forward pass"
    assert {text.get_text().split()[0] for text in axes.texts} == {"INT4_GROUP32", "INT8"}
    assert list(axes.lines[0].get_xdata()) == [row.milliseconds for row in found.curve("milliseconds")]
    with pytest.raises(ConfigError, match="over must be one of 'bits', 'milliseconds', got 'bytes'"):
        fq.plot.comparison(found, over="bytes")
    with pytest.raises(ConfigError, match=r"comparison takes the result of fakequant\.compare, got 'rows.jsonl'"):
        fq.plot.comparison("rows.jsonl")  # pyright: ignore[reportArgumentType]
    assert matplotlib.get_backend() == before


def test_a_plot_into_a_file_leaves_the_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matplotlib, "use", lambda *_: pytest.fail("a notebook has chosen its backend"))
    path = Comparison([Compared("INT8", "mse", "", error=0.1, bits=8.0)]).plot(tmp_path / "found.png")
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_names_that_are_not_public_do_not_show() -> None:
    assert dir(fq.plot) == ["channels", "comparison", "errors", "histogram"]
    modules = {"compat", "ir", "plot", "ptq", "__version__"}
    assert set(dir(fq)) == {*fq.__all__, *modules}


def test_what_cannot_be_drawn_is_said(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"no quantizer '0._input_quantiser'; did you mean 0._input_quantizer"):
        fq.plot.histogram(model, "0._input_quantiser", batches())
    with pytest.raises(ConfigError, match=r"no batch reaches 0._input_quantizer, or all values are equal"):
        fq.plot.histogram(model, "0._input_quantizer")
    with pytest.raises(ConfigError, match="give a list"):
        fq.plot.histogram(model, "0._input_quantizer", torch.ones(2, 8))
    with pytest.raises(ConfigError, match=r"no weight has the quantizer '0._input_quantizer'"):
        fq.plot.channels(model, "0._input_quantizer")
    monkeypatch.setattr("fakequant.plot.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"fakequant.plot needs matplotlib, .* pip install 'fakequant\[report\]'"):
        fq.plot.errors({})


def test_plot_is_imported_without_matplotlib() -> None:
    assert isinstance(sys.modules["fakequant.plot"].__spec__, ModuleSpec)
    names = set(vars(sys.modules["fakequant.plot"]))
    assert not names & {"matplotlib", "pyplot"}
