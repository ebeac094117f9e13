"""Folders of quantized models as other programs write them, for a model of two linear layers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fakequant as fq

ROWS, COLUMNS = 64, 96
E4M3 = torch.float8_e4m3fn
X = torch.linspace(-3, 3, 3 * COLUMNS).reshape(3, COLUMNS)


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(COLUMNS, ROWS), nn.Linear(ROWS, 8)).to(dtype)


def write(folder: Path, tensors: Mapping[str, Tensor], quantization: Mapping[str, Any]) -> Path:
    """A folder whose first layer has these tensors, by the ends of their names."""
    folder.mkdir(exist_ok=True)
    floats = {name: value for name, value in net().state_dict().items() if name != "0.weight"}
    own = {f"0.{end}": tensor.clone(memory_format=torch.contiguous_format) for end, tensor in tensors.items()}
    save_file({**floats, **own}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": dict(quantization)}))
    return folder


def read(folder: Path, model: nn.Module | None = None) -> Any:
    return fq.read(folder, net() if model is None else model)


def words(numbers: np.ndarray, bits: int, axis: int) -> Tensor:
    """Numbers below 2**bits as a stream of bits along an axis, low bits first, in int32."""
    lines = np.moveaxis(numbers, axis, -1).astype(np.uint8)
    stream = np.unpackbits(lines[..., None], axis=-1, bitorder="little")[..., :bits].reshape(*lines.shape[:-1], -1)
    packed = np.packbits(stream, axis=-1, bitorder="little")
    packed = np.pad(packed, [(0, 0)] * (packed.ndim - 1) + [(0, -packed.shape[-1] % 4)])
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(packed.view(np.int32), -1, axis)))


def random_codes(bits: int, groups: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [out, in], zero points [out, groups] with their extremes, and scales in float16."""
    made = np.random.default_rng(seed)
    codes = made.integers(0, 1 << bits, (ROWS, COLUMNS))
    points = made.integers(0, 1 << bits, (ROWS, groups))
    points[0, 0], points[0, 1] = 0, (1 << bits) - 1
    return codes, points, made.uniform(1e-4, 0.1, (ROWS, groups)).astype(np.float16)


SIZE = 32
GROUPS = COLUMNS // SIZE
Files = tuple[dict[str, Tensor], dict[str, Any], Tensor]
ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""The outputs of a word, from its lowest bits on."""


def gptq(bits: int = 4, version: int = 2, index: np.ndarray | None = None, **config: Any) -> Files:
    """The tensors and the configuration of a layer, and its weight."""
    codes, points, scales = random_codes(bits, GROUPS)
    if config.get("sym"):
        points[:] = 1 << bits - 1
    own = np.arange(COLUMNS) // SIZE if index is None else index
    found = {
        "qweight": words(codes, bits, 1).T,
        "qzeros": words((points - 2 + version) % (1 << bits), bits, 0).T,
        "scales": torch.from_numpy(scales.T.copy()),
        "g_idx": torch.from_numpy(own.astype(np.int32)),
    }
    values = scales.astype(np.float32)[:, own] * (codes - points[:, own]).astype(np.float32)
    layout = "gptq_v2" if version == 2 else "gptq"
    given = {"quant_method": "gptq", "bits": bits, "group_size": SIZE, "sym": False, "checkpoint_format": layout}
    return found, {**given, **config}, torch.from_numpy(values)


def awq(**config: Any) -> tuple[dict[str, Tensor], dict[str, Any], Tensor]:
    """The tensors and the configuration of a layer, and its weight."""
    codes, points, scales = random_codes(4, GROUPS)
    order = np.arange(ROWS).reshape(-1, 8)[:, ORDER].reshape(-1)
    found = {
        "qweight": words(codes[order].T, 4, 1),
        "qzeros": words(points[order].T, 4, 1),
        "scales": torch.from_numpy(scales.T.copy()),
    }
    wide = [np.repeat(one, SIZE, 1).astype(np.float32) for one in (scales, points)]
    given = {"quant_method": "awq", "bits": 4, "group_size": SIZE, "zero_point": True, "version": "gemm"}
    return found, {**given, **config}, torch.from_numpy(wide[0] * (codes.astype(np.float32) - wide[1]))


def random_fp8(*shape: int) -> Tensor:
    patterns = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    patterns[(patterns & 127) == 127] = 0
    return patterns.view(E4M3)


def scales(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 0.01 + 1e-3).to(dtype)
