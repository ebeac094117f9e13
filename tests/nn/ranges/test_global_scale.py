"""A fixed scale of the tensor above dynamic scales of blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CheckpointError, ConfigError, ExportError, QParamsError
from fakequant.nn import Quantizer
from fakequant.nn.ranges import params_under

ml_dtypes = pytest.importorskip("ml_dtypes")
SPEC = "float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn@per_tensor"
X = torch.randn(7, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 7)[:, None]


def fixed(global_scale: float) -> Quantizer:
    quantizer = Quantizer(SPEC, dynamic=True)
    quantizer.fix_global_scale(torch.tensor([global_scale]))
    return quantizer


def expected(x: Tensor, global_scale: float) -> Tensor:
    """NumPy's float32 and ml_dtypes: clamped codes of E4M3, whose 0 makes all values of a block 0."""
    blocks = x.numpy().reshape(-1, 16)
    share = np.abs(blocks).max(1, keepdims=True) / np.float32(6) * np.float32(global_scale)
    code = np.minimum(share, np.float32(448)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    scale = np.where(code > 0, code, np.float32(1)) / np.float32(global_scale)
    codes = np.clip(blocks / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    return torch.from_numpy(np.where(code > 0, codes * scale, 0).reshape(x.shape))


@pytest.mark.parametrize("global_scale", [1344.0, 3.7, 1e-3, 2.9e5])
def test_values_are_those_of_the_formula(global_scale: float) -> None:
    y = fixed(global_scale)(X)
    assert torch.equal(y + 0.0, expected(X, global_scale))
    codes = fixed(global_scale).codes(X)
    assert torch.equal(fq.dequantize(codes[0], codes[1], fq.QuantSpec.parse(SPEC)), y)


def test_half_precision_is_float32_rounded_once() -> None:
    x = X.bfloat16()
    assert torch.equal(fixed(3.7)(x), fixed(3.7)(x.float()).bfloat16())


def test_it_is_kept_by_checkpoints_and_conversions(tmp_path: Path) -> None:
    model = fq.prepare(nn.Sequential(nn.Linear(64, 8)), "nvfp4", skip=[])
    plain = model(X)
    model[0].input_quantizer.fix_global_scale(torch.tensor([3.7]))
    assert not torch.equal(model(X), plain)
    assert repr(model[0].input_quantizer).endswith("dynamic under 0.2703)")
    fq.save(model, tmp_path / "one")
    again = fq.load(nn.Sequential(nn.Linear(64, 8)), tmp_path / "one")
    assert torch.equal(again(X), model(X))
    assert again.half()[0].input_quantizer.global_scale.dtype is torch.float32
    again[0].input_quantizer.global_scale = torch.tensor([-1.0])
    fq.save(again, tmp_path / "two")
    with pytest.raises(CheckpointError, match="global_scale must be finite and above 0"):
        fq.load(nn.Sequential(nn.Linear(64, 8)), tmp_path / "two")
    model[0].input_quantizer.reset()
    assert torch.equal(model(X), plain)


def test_what_has_no_such_scale_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not dynamic"):
        Quantizer(SPEC).fix_global_scale(torch.ones(1))
    with pytest.raises(QParamsError, match=r"int8 per_token has no per-tensor scale .* leave global_scale out"):
        Quantizer("int8 per_token", dynamic=True).fix_global_scale(torch.ones(1))
    for wrong in (torch.ones(2), torch.ones(1).double(), torch.zeros(1), torch.full((1,), torch.inf)):
        with pytest.raises(QParamsError, match="global_scale must be"):
            Quantizer(SPEC, dynamic=True).fix_global_scale(wrong)


def test_onnx_refuses_it(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    model = fq.prepare(nn.Sequential(nn.Linear(64, 8)), "nvfp4", skip=[])
    model[0].input_quantizer.fix_global_scale(torch.tensor([3.7]))
    with pytest.raises(ExportError, match="has a fixed global_scale"):
        fq.export_onnx(model, (X,), tmp_path / "model.onnx")


def test_the_whole_tensor_is_no_block() -> None:
    params = params_under(torch.zeros(2, 32), fq.QuantSpec.parse(SPEC), torch.tensor([2.0]))
    assert torch.equal(params.scale, torch.full((2, 2), 0.0625))
