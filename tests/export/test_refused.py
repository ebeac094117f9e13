"""What is refused before a file is written: models that ONNX cannot say, places, and packages that are missing."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import ExportError, OutputError
from fakequant.export import capability, export_onnx, exporter, verify_onnx
from fakequant.model import presets
from fakequant.model.config import Config, Rule, TensorConfig
from fakequant.model.prepare import prepare
from fakequant.nn import Mode, quantizers
from tests.support.export_models import linear

MULTIPLIER = Config(
    "MULTIPLIER",
    (Rule(input=TensorConfig("int8 multiplier"), weight=TensorConfig("int8 per_channel(0) multiplier")),),
)
STOCHASTIC = Config(
    "STOCHASTIC",
    (Rule(input=TensorConfig("int8 stochastic", dynamic=True), weight=TensorConfig("int8 per_channel(0) stochastic")),),
)
REFUSED: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "multiplier": (
        lambda: linear(MULTIPLIER),
        {},
        ["0.0._input_quantizer: int8 per_tensor multiplier", "0.0._weight_quantizer", "Arithmetic.DIVIDE"],
    ),
    "stochastic": (
        lambda: linear(STOCHASTIC),
        {},
        [
            "0.0._input_quantizer: int8 per_tensor stochastic: ",
            "0.0._weight_quantizer",
            "rounding=Rounding.NEAREST_EVEN",
        ],
    ),
    "too_many_bits": (
        lambda: linear("int[-100000,5]"),
        {},
        ["0.0._input_quantizer: the format int[-100000,5] has no element type", "at most 16 bits"],
    ),
    "not_calibrated": (
        lambda: prepare(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4)), presets.INT8),
        {},
        ["2 quantizers are not calibrated: 0._input_quantizer, 1._input_quantizer; call fakequant.calibrate"],
    ),
    "observing": (lambda: _observing(), {}, ["0.0._input_quantizer: is observing"]),
    "bad_scale": (lambda: _with_scale(1e-40), {}, ["0.0._input_quantizer: has the scale", "positive normal"]),
    "zero_scale": (lambda: _with_scale(0.0), {}, ["0.0._input_quantizer: has the scale 0.0"]),
    "old_opset": (lambda: linear("int4"), {"opset": 20}, ["0.0._input_quantizer: opset=20 is too old", "21"]),
    "unknown_opset": (lambda: linear("int8"), {"opset": 99}, ["opset=99: expected 18 to 25"]),
    "unknown_style": (
        lambda: linear("int8"),
        {"style": "trit"},
        ["unknown style 'trit'; did you mean trt?"],
    ),
    "no_quantizers": (lambda: nn.Linear(8, 4), {}, ["nothing in the model quantizes"]),
    "float64": (lambda: linear("int8").double(), {}, ["0.0._input_quantizer: quantizes a float64", "model.float()"]),
}


def _observing() -> nn.Module:
    model = linear("int8")
    quantizers(model)["0.0._input_quantizer"].mode = Mode.OBSERVE
    return model


def _with_scale(scale: float) -> nn.Module:
    model = linear("int8")
    quantizers(model)["0.0._input_quantizer"].set_qparams(fq.QParams(torch.full((1, 1), scale)))
    return model


@pytest.mark.parametrize(("make", "options", "texts"), REFUSED.values(), ids=REFUSED)
def test_what_onnx_cannot_say_is_refused_and_the_old_file_stays(
    make: Any, options: dict[str, Any], texts: list[str], tmp_path: Path
) -> None:
    model = make()
    (tmp_path / "m.onnx").write_bytes(b"old")
    example = torch.ones(2, 8, dtype=next(model.parameters()).dtype)
    with pytest.raises(ExportError) as error:
        export_onnx(model, example, tmp_path / "m.onnx", **options)
    for text in texts:
        assert text in str(error.value)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("m.onnx", b"old")]


@pytest.mark.parametrize("config", [MULTIPLIER, STOCHASTIC], ids=lambda c: c.name)
def test_quantizers_are_refused_before_the_model_runs(config: Config, tmp_path: Path) -> None:
    model = linear(config)
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(ExportError):
        export_onnx(model, torch.ones(2, 8), tmp_path / "m.onnx")


def test_stochastic_rounding_of_a_users_module_is_refused_with_its_name(tmp_path: Path) -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return fq.fake_quantize(x, "int8 per_tensor stochastic", scale=0.1)

    with pytest.raises(ExportError, match=r"\n1: int8 per_tensor stochastic: stochastic rounding draws"):
        export_onnx(nn.Sequential(nn.Linear(8, 8), Noisy()), torch.ones(2, 8), tmp_path / "m.onnx")


def test_a_model_trained_with_stochastic_rounding_is_exported_after_it_is_taken_back(tmp_path: Path) -> None:
    model = linear(STOCHASTIC)
    for quantizer in quantizers(model).values():
        quantizer.spec = quantizer.spec.replace(rounding=fq.Rounding.NEAREST_EVEN)
    export_onnx(model, torch.ones(2, 8), tmp_path / "m.onnx")
    assert verify_onnx(tmp_path / "m.onnx", model, [torch.randn(2, 8)]).exact


def test_control_flow_is_refused(tmp_path: Path) -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, lambda v: fq.fake_quantize(v, "int8", scale=0.1), lambda v: v + 1, (x,))

    with pytest.raises(ExportError, match="lies inside control flow"):
        export_onnx(Branch(), torch.ones(2, 8), tmp_path / "m.onnx")


def test_quantizers_within_vmap_are_refused(tmp_path: Path) -> None:
    class Mapped(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return torch.vmap(self[0])(x)

    model = prepare(Mapped(nn.Linear(8, 8)), presets.INT8)
    fq.calibrate(model, [torch.ones(2, 8)])
    with pytest.raises(ExportError, match=r"0\._input_quantizer: lies inside torch\.vmap, .*; call the layer on"):
        export_onnx(model, torch.ones(2, 8), tmp_path / "m.onnx")


def test_a_file_beyond_two_gigabytes_is_refused_before_tracing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "MAX_BYTES", 1000)
    model = linear(presets.INT8, features=4096)
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(ExportError, match="the file would have about 16,") as error:
        export_onnx(model, torch.ones(2, 4096), tmp_path / "m.onnx")
    assert "at most 1,000" in str(error.value)


def test_a_path_that_cannot_be_written_is_found_before_the_work(tmp_path: Path) -> None:
    model = linear(presets.INT8)
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(OutputError, match="it is a folder"):
        export_onnx(model, torch.ones(2, 8), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write to"):
        export_onnx(model, torch.ones(2, 8), tmp_path / "file" / "m.onnx")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_found_before_the_work(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(OutputError, match="cannot write to"):
        export_onnx(linear(presets.INT8), torch.ones(2, 8), tmp_path / "m.onnx")


def test_a_missing_folder_is_made(tmp_path: Path) -> None:
    export_onnx(linear(presets.INT8), torch.ones(2, 8), tmp_path / "a" / "b" / "m.onnx")
    assert [p.name for p in (tmp_path / "a" / "b").iterdir()] == ["m.onnx"]


INSTALL = r"run pip install 'fakequant\[onnx\]'"


def test_missing_packages_are_all_named() -> None:
    capability.require("torch")
    with pytest.raises(ExportError, match=rf"ONNX needs no_such_a and no_such_b, not installed here; {INSTALL}"):
        capability.require("torch", "no_such_a", "no_such_b")


def test_export_and_verification_ask_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(capability, "find_spec", lambda name: None)
    with pytest.raises(ExportError, match=f"onnx and onnxscript.*{INSTALL}"):
        export_onnx(nn.Linear(2, 2), torch.ones(1, 2), tmp_path / "m.onnx")
    with pytest.raises(ExportError, match=f"onnx and onnxruntime.*{INSTALL}"):
        verify_onnx(tmp_path / "m.onnx")


def test_importing_the_room_imports_none_of_them() -> None:
    code = (
        "import sys, fakequant.export\n"
        "print([m for m in ('onnx', 'onnx_ir', 'onnxruntime', 'onnxscript') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "[]"
