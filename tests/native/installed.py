"""What `versions.py` runs with an installed wheel: the kernels serve, with the right bits, and a model makes its round.

Needs torch, numpy, safetensors and the package alone.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.numerics import reference
from fakequant.ops.cpu.backend import load_kernels

# The digest of all results below, with any Python, torch and processor. If a number changes, it changes, on purpose.
DIGEST = "9b890a167564bfa1"
SPECS = [
    "int8",
    "int4 per_channel(0)",
    "uint8 per_channel(-1) asymmetric",
    "int8 per_token multiplier",
    "int16 per_tensor reciprocal",
    "float8_e4m3fn per_channel(0)",
    "float8_e5m2",
    "float4_e2m1fn per_block(-1:32) scale=float8_e8m0fnu:floor",
    "float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn@per_tensor",
    "float6_e2m3fn per_block(-1:32)",
    "nf4 per_block(-1:64)",
]
PRESETS = ["INT8", "INT8_AFFINE", "FP8", "MXFP4", "NVFP4", "INT4_WEIGHT_ONLY"]


def numbers(rows: int, columns: int, start: int = 0) -> Tensor:
    """Fixed numbers of many magnitudes, by arithmetic of integers and powers of two alone [rows, columns]."""
    n = torch.arange(start, start + rows * columns).reshape(rows, columns)
    fractions = (n * 2654435761 % 2**24 - 2**23).float() / 2**21
    return torch.ldexp(fractions, n % 7 - 3)


def bits(x: Tensor) -> bytes:
    """The bytes of a tensor."""
    return x.detach().contiguous().view(torch.uint8).numpy().tobytes()


def results(spec: str, dtype: torch.dtype) -> list[Tensor]:
    """The scale, values, codes and gradient of one specification; the reference's are compared with them."""
    x = numbers(48, 128).to(dtype).requires_grad_()
    params = fq.choose_qparams(x.detach(), spec)
    y = fq.fake_quantize(x, spec)
    dy = numbers(48, 128, start=7).to(dtype)
    y.backward(dy)
    assert x.grad is not None
    plain, value = x.detach(), fq.QuantSpec.parse(spec)
    codes, _ = fq.quantize(plain, spec)
    right = [
        reference.fake_quantize(plain, params, value),
        reference.grad_input(dy, reference.passes(plain, params, value)),
    ]
    for ours, by_reference in zip((y, x.grad), right, strict=True):
        assert bits(ours) == bits(by_reference), f"{spec} {dtype}: other bits than the reference's"
    return [params.scale, y, x.grad, codes]


def round_trip(preset: str) -> None:
    """Prepares, calibrates, saves and loads a network; the loaded one has the same bits."""

    def network() -> nn.Module:
        net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64))
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.copy_(numbers(1, parameter.numel()).view_as(parameter) / 8)
        return net

    model = fq.prepare(network(), getattr(fq.presets, preset))
    fq.calibrate(model, [numbers(16, 64, start=16 * 64 * i) for i in range(3)])
    with tempfile.TemporaryDirectory() as folder:
        fq.save(model, Path(folder) / "saved")
        loaded = fq.load(network(), Path(folder) / "saved")
    x = numbers(16, 64, start=5)
    assert bits(model(x)) == bits(loaded(x)), f"{preset}: the loaded model differs"


def main() -> int:
    reason = load_kernels()
    assert reason is None, reason
    digest = hashlib.sha256()
    for spec in SPECS:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for tensor in results(spec, dtype):
                digest.update(bits(tensor))
    for preset in PRESETS:
        round_trip(preset)
    found = digest.hexdigest()[:16]
    assert found == DIGEST, f"the digest of all results is {found}, not {DIGEST}"
    return 0


if __name__ == "__main__":
    sys.exit(main())
