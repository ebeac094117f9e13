"""What a format cannot hold is refused before the work, by layer, with the reason and the nearest preset."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.errors import ExportError

X = torch.linspace(-3, 3, 2 * 3 * 96).reshape(2, 3, 96)
_POWERS = "scale=float8_e8m0fnu:floor"

# Of formats that no file has, and of those that it has at other axes.
UNKNOWN = [
    "nf4",
    "iq4_nl",
    "int1",
    "int9",
    "uint12",
    "int16",
    "int[-3,200]",
    "float8_e5m2",
    "float6_e3m2fn",
    "float8_e4m3",
]
AXES = ["", "per_channel(0)", "per_block(-1:32)"]
WEIGHTS = [
    *(" ".join(filter(None, words)) for words in product(UNKNOWN, AXES)),
    *("int4 per_block(-1:36,pad)", "int8 per_block(0:32,-1:32)", "int4 per_channel(1)", "int8 per_block(0:4,-1:4)"),
    *("int8 multiplier", "int4 per_block(-1:32) multiplier", "float8_e4m3fn per_channel(1) multiplier"),
    *(
        "float4_e2m1fn",
        "float4_e2m1fn per_channel(0)",
        "float4_e2m1fn per_block(-1:32)",
        "float6_e2m3fn per_channel(0)",
    ),
    *(f"float4_e2m1fn per_block(-1:16) {_POWERS}", "float4_e2m1fn per_block(-1:32) scale=float8_e4m3fn@per_tensor"),
    *("float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn@per_channel(0)", f"float6_e2m3fn per_block(-1:48) {_POWERS}"),
    *("uint4 per_block(-1:32) scale=float16 offset=float16", "float8_e4m3fn per_block(-1:36,pad)"),
    *("float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn@per_tensor/float16",),
]
INPUTS = [
    *("int8 per_token dynamic", "int4 per_token dynamic", "int8 dynamic", "int8_narrow per_token dynamic"),
    *("int8 per_channel(-1)", "int8 per_block(-1:32) dynamic", "float8_e5m2", "nf4", "int16", "uint8 reciprocal"),
    *(
        "int8 multiplier",
        "int8 stochastic",
        "float8_e4m3fn per_channel(-1) dynamic",
        "int8 per_block(-2:3,-1:32) dynamic",
    ),
    *(f"float8_e4m3fn per_block(-1:32) {_POWERS} dynamic", f"float4_e2m1fn per_block(-1:32) {_POWERS} dynamic"),
    *(
        "float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn@per_tensor dynamic",
        "float8_e4m3fn per_block(-1:36,pad) dynamic",
    ),
]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 96))


def refused(config: fq.Config, folder: Path) -> str:
    model = fq.prepare(net(), config)
    fq.calibrate(model, [X], progress=False)
    with pytest.raises(ExportError) as raised:
        fq.deliver(model, folder / "new", "compressed-tensors")
    assert not (folder / "new").exists()
    return str(raised.value)


def test_there_are_many() -> None:
    assert len(WEIGHTS) + len(INPUTS) >= 60


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("spec", WEIGHTS)
def test_weights(spec: str, tmp_path: Path) -> None:
    text = refused(fq.Config("own", [fq.Rule("0", weight=spec)]), tmp_path)
    first, line = text.split("\n")
    assert first == "compressed-tensors cannot hold 1 parts of the model as they are quantized:"
    assert line.startswith("  0: its weight is ")
    assert "; the nearest preset that it holds is " in line
    nearest = line.rpartition(" ")[2]
    assert nearest in {name for name in dir(fq.presets) if name.isupper()}
    model = fq.prepare(net(), nearest)
    fq.calibrate(model, [X], progress=False)
    assert fq.deliver(model, tmp_path / "nearest", "compressed-tensors").is_dir()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("spec", INPUTS)
def test_activations(spec: str, tmp_path: Path) -> None:
    words = spec.split(" dynamic")
    rule = fq.Rule("2", weight="int8 per_channel(0)", input=fq.TensorConfig(words[0], len(words) > 1))
    text = refused(fq.Config("own", [rule]), tmp_path)
    assert "\n  2: its input is " in text
    assert "; the nearest preset that it holds is " in text
