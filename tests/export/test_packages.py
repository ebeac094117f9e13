"""Without onnx the error says what to install; importing the room needs none of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fakequant.errors import ExportError
from fakequant.export import export_onnx, packages, verify_onnx

INSTALL = r"run pip install 'fakequant\[onnx\]'"


def test_missing_packages_are_all_named() -> None:
    packages.require("torch")
    with pytest.raises(ExportError, match=rf"ONNX needs no_such_a and no_such_b, not installed here; {INSTALL}"):
        packages.require("torch", "no_such_a", "no_such_b")


def test_export_and_verification_ask_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
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
