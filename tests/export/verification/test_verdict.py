"""The verdict on a file: bits that differ, outputs, and how ONNX Runtime runs it by default."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import fakequant as fq
from fakequant.cli.commands import app
from fakequant.export import exporter
from fakequant.export.verdict import OutputRow, Row, VerifyReport, differing_bits
from fakequant.nn import quantizers
from tests.support.processor import why_sums_saturate


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_bits(dtype: torch.dtype) -> None:
    nan, inf = math.nan, math.inf
    a = torch.tensor([1.0, 0.0, nan, inf, -inf, nan, 1.0], dtype=dtype)
    b = torch.tensor([1.0, -0.0, -nan, inf, inf, 1.0, 1.0], dtype=dtype)
    assert differing_bits(a, b) == 3
    assert differing_bits(a[::2], a[::2]) == 0
    assert differing_bits(a[:0], a[:0]) == 0


def test_output_counts_over_batches() -> None:
    row = OutputRow("y", step=0.5)
    row.add(torch.tensor([[1.0, 2.0], [3.0, 1.0]]), torch.tensor([[1.0, 2.0], [1.0, 3.0]]))
    row.add(torch.tensor([[-0.0, 5.0]]), torch.tensor([[0.0, 6.5]]))
    assert (row.elements, row.differing, row.max_abs, row.steps) == (6, 3, 2.0, 4.0)
    assert (row.rows, row.same_argmax) == (3, 2)
    assert row.share == 0.5
    assert row.argmax_agreement == pytest.approx(2 / 3)
    assert str(row) == "y: 3 of 6 differ, at most by 2, 4 steps, 7.5 dB, arg-max equal in 66.67%"


def test_signal_to_noise_ratio() -> None:
    row = OutputRow("y")
    assert row.sqnr == math.inf
    row.add(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0]))
    assert row.sqnr == math.inf
    row.add(torch.tensor([10.0, math.inf]), torch.tensor([9.5, math.inf]))
    assert row.sqnr == pytest.approx(10 * math.log10((9 + 16 + 9.5**2) / 0.25))
    assert f"{row.sqnr:.1f} dB" in str(row)
    row.add(torch.tensor([math.nan]), torch.tensor([1.0]))
    assert row.sqnr == -math.inf
    empty = OutputRow("y")
    empty.add(torch.tensor([1]), torch.tensor([0]))
    assert empty.sqnr == -math.inf


def test_output_of_another_rank_has_no_argmax_and_nan_equals_nan() -> None:
    row = OutputRow("y")
    row.add(torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0]))
    assert (row.differing, row.max_abs, row.steps, row.argmax_agreement) == (0, 0.0, None, None)
    row.add(torch.tensor([math.nan]), torch.tensor([1.0]))
    assert (row.differing, row.max_abs) == (1, math.inf)


def test_empty_output() -> None:
    row = OutputRow("y")
    row.add(torch.zeros(0, 3), torch.zeros(0, 3))
    assert (row.elements, row.share, row.argmax_agreement) == (0, 0.0, None)


def test_report_is_exact_only_if_every_row_is() -> None:
    good, bad, changed = Row("a", "int8", "weight", 4), Row("b", "int8", "weight", 4, 1), Row("c", "int8", "weight")
    changed.intact = False
    assert VerifyReport("f", "given", [good]).exact
    assert not VerifyReport("f", "given", [good, bad]).exact
    assert not VerifyReport("f", "given", [good, changed]).exact
    assert VerifyReport("f", "given", [good, bad]).differing == 1


def test_nothing_compared_is_not_exact() -> None:
    report = VerifyReport("f", "given", [])
    assert not report.exact
    assert "The file names no quantizer" in str(report)


def test_nodes_that_nothing_compares_are_said() -> None:
    report = VerifyReport("f", "given", [Row("a", "int8", "weight", 4)], uncovered=[f"n{i}" for i in range(7)])
    assert not report.exact
    assert "7 nodes quantize but belong to no quantizer of the file" in str(report)
    assert "n0, n1, n2, n3, n4, ..." in str(report)


X = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0))
IMAGE = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))
BITS = 'SessionOptions.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")'
SUMS = 'SessionOptions.add_session_config_entry("session.x64quantprecision", "1")'
BIAS = 'InferenceSession(..., disabled_optimizers=["WeightBiasQuantization"])'

Made = tuple[nn.Module, Tensor]


def calibrated(net: nn.Module, preset: str, x: Tensor) -> nn.Module:
    model = fq.prepare(net, preset, example=x, target=None)
    fq.calibrate(model, [x])
    return model.eval()


def linears(preset: str) -> Made:
    torch.manual_seed(0)
    return calibrated(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), preset, X), X


def rounded_linears(preset: str) -> Made:
    """A model whose weights are codes times scales, as `improve` leaves them: without quantizers it is the same."""
    model, x = linears(preset)
    found = quantizers(model)
    with torch.no_grad():
        for path in ("0", "2"):
            weight = model.get_parameter(f"{path}.weight")
            weight.copy_(found[f"{path}._weight_quantizer"](weight))
    return model, x


def tiny_scale(layer: Callable[..., nn.Module], x: Tensor) -> Made:
    """A channel of zeros with a bias, which ONNX Runtime divides by the product of both scales."""
    torch.manual_seed(0)
    model = calibrated(nn.Sequential(layer(3, 8, 3), nn.ReLU(), layer(8, 4, 3)), "INT8", x)
    scale = quantizers(model)["0._weight_quantizer"].scale
    assert scale is not None
    with torch.no_grad():
        model.get_parameter("0.weight")[5] = 0
        model.get_parameter("0.bias")[5] = 0.5
        scale[5] = 2.0**-100
    return model, x


def head_alone_is_lost() -> Made:
    """Two outputs, of which the smaller one alone loses."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.small = nn.Linear(64, 8), nn.Linear(64, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return 1000 * x, self.small(x)

    torch.manual_seed(0)
    return calibrated(Heads(), "INT8_WEIGHT_ONLY", X), X


def large_codes() -> Made:
    """The largest codes of inputs and weights, whose products saturate where pairs are added in int16."""
    model, x = nn.Sequential(nn.Linear(64, 8, bias=False)), X.abs().clamp(max=0.5)
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([1.0, -1.0]).repeat(4)[:, None])
    return calibrated(model, "INT8_AFFINE", x), x


LOST = {
    "bits_of_linears": (lambda: linears("INT8_WEIGHT_ONLY"), BITS),
    "rounded": (lambda: rounded_linears("INT8_WEIGHT_ONLY"), BITS),
    "one_of_two_outputs": (head_alone_is_lost, BITS),
    "tiny_scale": (lambda: tiny_scale(nn.Conv2d, IMAGE), BIAS),
    "tiny_scale_1d": (lambda: tiny_scale(nn.Conv1d, IMAGE[:, :, 0]), BIAS),
}
KEPT = {
    "fewer_bits": (lambda: linears("INT4_WEIGHT_ONLY"), BITS),
    "fewer_rounded_bits": (lambda: rounded_linears("INT4_WEIGHT_ONLY"), BITS),
    "activations": (lambda: linears("INT8"), None),
    "dynamic_activations": (lambda: linears("INT8_PER_TOKEN"), BITS),
    "blocks_of_floats": (lambda: linears("MXFP4"), None),
}
(LOST if why_sums_saturate() else KEPT)["large_codes"] = (large_codes, SUMS if why_sums_saturate() else None)
CASES = {name: (*case, False) for name, case in LOST.items()} | {name: (*case, True) for name, case in KEPT.items()}


@pytest.mark.parametrize(("make", "restored_by", "as_deployed"), CASES.values(), ids=CASES)
def test_what_the_default_session_loses_beside_quantization(
    make: Callable[[], Made],
    restored_by: str | None,
    as_deployed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = make()
    if restored_by == BIAS:  # a file of before the export raised scales under which the int32 bias overflows
        monkeypatch.setattr(exporter, "raise_scales", lambda _: [])
    path = fq.export_onnx(model, x, tmp_path / "model.onnx").path
    for given in (fq.verify_onnx(path, model, [x]), fq.verify_onnx(path, model), fq.verify_onnx(path)):
        assert given.exact
        assert given.as_deployed is as_deployed
        assert given.passed is as_deployed
        assert given.to_dict()["as_deployed"] is as_deployed
        assert given.restored_by == restored_by
        assert ("NOT as deployed" in str(given)) is not as_deployed
        assert ("To repair it, run ONNX Runtime with " in str(given)) == (restored_by is not None and not as_deployed)
        assert ("Only if you need the results without" in str(given)) == (restored_by is not None and as_deployed)
    assert CliRunner().invoke(app, ["verify", str(path)]).exit_code == (0 if as_deployed else 1)


def test_other_styles_are_for_other_engines(tmp_path: Path) -> None:
    model, x = linears("INT8_WEIGHT_ONLY")
    report = fq.verify_onnx(fq.export_onnx(model, x, tmp_path / "model.onnx", style="trt").path, model, [x])
    assert report.exact
    assert report.as_deployed is None
    assert report.passed
    assert report.optimised[0].sqnr < 50


def test_a_file_that_does_not_load_by_default_is_not_deployed() -> None:
    report = fq.export.VerifyReport("f", "given", [fq.export.Row("q", "int8 per_tensor", "weight", 1)])
    report.optimised_error = "ONNX Runtime cannot load it"
    assert (report.exact, report.as_deployed, report.passed) == (True, False, False)
