"""ModelOpt's folder: every layout against an expression of its own, with inputs and their scales."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fakequant as fq
from fakequant.errors import CheckpointError
from tests.support.quantized_folders import COLUMNS, E4M3, ROWS, X, net, random_fp8, read, scales, write

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
Layer = tuple[dict[str, Tensor], Tensor]


def random_fp4() -> tuple[Tensor, Tensor]:
    """Two inputs in a byte, and their values."""
    codes = torch.randint(0, 16, (ROWS, COLUMNS), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return codes[:, 0::2] | codes[:, 1::2] << 4, FP4[(codes & 7).long()] * torch.where(codes > 7, -1.0, 1.0)


def fp8() -> Layer:
    codes, scale = random_fp8(ROWS, COLUMNS), torch.tensor(0.0123)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.02)}, codes.float() * scale


def fp8_rows() -> Layer:
    codes, scale = random_fp8(ROWS, COLUMNS), scales(ROWS)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale[:, None]


def nvfp4() -> Layer:
    packed, values = random_fp4()
    own, shared = (random_fp8(ROWS, COLUMNS // 16).float().abs() + 0.5).to(E4M3), torch.tensor(0.00123)
    found = {"weight": packed, "weight_scale": own, "weight_scale_2": shared, "input_scale": torch.tensor(0.01)}
    return found, values * (own.float() * shared).repeat_interleave(16, 1)


def mxfp4() -> Layer:
    packed, values = random_fp4()
    powers = torch.arange(ROWS * COLUMNS // 32).reshape(ROWS, -1) % 20 + 110
    found = {"weight": packed, "weight_scale": powers.to(torch.uint8)}
    return found, values * torch.exp2(powers.float() - 127).repeat_interleave(32, 1)


def mxfp8() -> Layer:
    codes, powers = random_fp8(ROWS, COLUMNS), torch.arange(ROWS * COLUMNS // 32).reshape(ROWS, -1) % 20 + 110
    found = {"weight": codes, "weight_scale": powers.to(torch.uint8)}
    return found, codes.float() * torch.exp2(powers.float() - 127).repeat_interleave(32, 1)


def int8() -> Layer:
    codes, scale = random_fp8(ROWS, COLUMNS).view(torch.int8), scales(ROWS)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.05)}, codes * scale[:, None]


def int4(dtype: torch.dtype = torch.float32) -> Layer:
    codes = torch.randint(-8, 8, (ROWS, COLUMNS), generator=torch.Generator().manual_seed(0))
    low, scale = (codes & 15).to(torch.uint8), scales(ROWS, COLUMNS // 32, dtype=dtype)
    found = {"weight": low[0::2] | low[1::2] << 4, "weight_scale": scale}
    return found, codes * scale.float().repeat_interleave(32, 1)


def tiles() -> Layer:
    codes, scale = random_fp8(ROWS, COLUMNS), scales(1, 1, 1, 1)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale[0, 0]


NV = "float4_e2m1fn per_block(-1:16,pad) scale=float8_e4m3fn@per_tensor"
MX = "{} per_block(-1:32,pad) scale=float8_e8m0fnu:floor"
CASES: dict[str, tuple[Callable[[], Layer], str, str, str | None]] = {
    "FP8": (fp8, "FP8", "float8_e4m3fn per_tensor", "float8_e4m3fn per_tensor"),
    "FP8 rows": (fp8_rows, "FP8_PER_CHANNEL_PER_TOKEN", "float8_e4m3fn per_channel(0)", "float8_e4m3fn per_token"),
    "FP8 tiles": (tiles, "FP8_PB_WO", "float8_e4m3fn per_tensor", None),
    "NVFP4": (nvfp4, "NVFP4", NV, NV),
    "NVFP4 weights": (nvfp4, "W4A16_NVFP4", NV, None),
    "NVFP4 and FP8": (nvfp4, "W4A8_NVFP4_FP8", NV, "float8_e4m3fn per_tensor"),
    "MXFP4": (mxfp4, "MXFP4", MX.format("float4_e2m1fn"), None),
    "MXFP8": (mxfp8, "MXFP8", MX.format("float8_e4m3fn"), MX.format("float8_e4m3fn")),
    "INT8": (int8, "W8A8_SQ_PER_CHANNEL", "int8 per_channel(0)", "int8 per_tensor"),
    "INT4": (int4, "W4A16_AWQ", "int4 per_block(-1:32)", None),
    "INT4 in half": (lambda: int4(torch.float16), "W4A16_AWQ", "int4 per_block(-1:32) scale=float16", None),
}


def folder(path: Path, tensors: dict[str, Tensor], method: str, *, own_file: bool = False) -> Path:
    config = {"quant_algo": method, "kv_cache_quant_algo": None, "exclude_modules": ["1"]}
    made = write(path, tensors, {} if own_file else {"quant_method": "modelopt", **config})
    if own_file:
        (made / "config.json").write_text("{}")
        (made / "hf_quant_config.json").write_text(json.dumps({"quantization": config}))
    return made


@pytest.mark.parametrize("own_file", [False, True])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:modelopt")
def test_values_and_ranges_are_those_of_the_file(tmp_path: Path, name: str, own_file: bool) -> None:
    make, method, weight, input = CASES[name]
    tensors, values = make()
    model = read(folder(tmp_path, tensors, method, own_file=own_file))
    assert torch.equal(model[0].weight, values)
    assert str(model[0].weight_quantizer.spec) == weight
    assert (input is None) == (model[0].input_quantizer is None)
    if input is not None:
        assert str(model[0].input_quantizer.spec) == input
        if name == "NVFP4":
            assert torch.equal(model[0].input_quantizer.global_scale, 1 / tensors["input_scale"].reshape(1))
        if not model[0].input_quantizer.dynamic:
            assert torch.equal(model[0].input_quantizer.scale.reshape(()), tensors["input_scale"])
    assert model(X).isfinite().all()


def test_codes_and_scales_are_those_of_another_reader(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    converter: Any = import_module("compressed_tensors.entrypoints.convert.converters.modelopt_nvfp4")
    tensors, _ = nvfp4()
    named = {f"0.{key}": value for key, value in tensors.items()}
    theirs = converter.ModelOptNvfp4Converter(targets=["re:.*0"]).process(named)
    held = fq.snapshot(read(folder(tmp_path, tensors, "W4A16_NVFP4"))).weights["0.weight"]
    assert torch.equal(held.codes[:, 0::2] | held.codes[:, 1::2] << 4, theirs["0.weight_packed"])
    stored = held.spec.scale.split(held.scale)
    assert torch.equal(stored.codes.float(), theirs["0.weight_scale"].float())
    assert stored.shared is not None
    assert torch.equal(1 / stored.shared.reshape(()), theirs["0.weight_global_scale"])


def test_scales_before_a_layer_are_a_transform(tmp_path: Path) -> None:
    tensors, values = int4()
    factors = scales(COLUMNS, dtype=torch.bfloat16) + 1
    model = read(folder(tmp_path, {**tensors, "pre_quant_scale": factors}, "W4A16_AWQ"))
    expected = torch.nn.functional.linear(X * factors.float(), values, model[0].bias)
    assert torch.equal(model[0](X), expected)


def test_layers_have_methods_of_their_own(tmp_path: Path) -> None:
    tensors, _ = fp8()
    config = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"0": {"quant_algo": "FP8"}},
    }
    model = read(write(tmp_path, tensors, config))
    assert str(model[0].input_quantizer.spec) == "float8_e4m3fn per_tensor"


def test_what_is_left_out_is_said_once(tmp_path: Path) -> None:
    tensors, _ = fp8()
    more = {"k_proj.k_scale": torch.ones(()), "v_proj.v_scale": torch.ones(())}
    with pytest.warns(UserWarning, match="the cache of keys and values stays in float") as said:
        read(folder(tmp_path, {**tensors, **more}, "FP8"))
    assert len(said) == 1


DAMAGE: dict[str, tuple[Callable[[], Layer], str, Callable[[dict[str, Tensor]], Any], str]] = {
    "method": (fp8, "FP9", dict.copy, "quant_algo is 'FP9', which this reader does not know"),
    "cut": (fp8, "FP8", lambda x: x.update(weight=x["weight"][1:]), r"weight is .* of shape \[63, 96\]"),
    "no weight": (fp8, "FP8", lambda x: x.pop("weight"), "weight is None, and it has a weight_scale"),
    "float": (fp8, "FP8", lambda x: x.update(weight=x["weight"].float()), "weight is torch.float32, and it has"),
    "tiles": (fp8, "FP8", lambda x: x.update(weight_scale=torch.ones(7, 7)), r"weight_scale is .*\[7, 7\], not"),
    "range": (fp8, "FP8", lambda x: x.update(input_scale=torch.ones(2)), r"input_scale is .* of shape \[2\]"),
    "NaN": (fp8, "FP8", lambda x: x.update(weight_scale=torch.tensor(torch.nan)), "scale"),
    "NVFP4 scales": (nvfp4, "NVFP4", lambda x: x.update(weight_scale=x["weight_scale"].float()), "weight_scale is"),
    "swapped": (nvfp4, "NVFP4", lambda x: x.update(weight_scale_2=x["weight_scale"]), "weight_scale_2 is"),
    "no number": (mxfp4, "MXFP4", lambda x: x["weight_scale"].fill_(255), "weight_scale holds codes that stand"),
    "INT4 groups": (int4, "W4A16_AWQ", lambda x: x.update(weight_scale=torch.ones(ROWS, 5)), "no groups of 96"),
    "W4A8": (int4, "W4A8_AWQ", lambda x: x.update(weight_scale_2=torch.ones(())), "4 bits are scaled to FP8"),
    "low rank": (nvfp4, "NVFP4_SVD", lambda x: x.update(svdquant_lora_a=torch.ones(1)), "a product of low rank"),
    "DeepSeek": (fp8, "FP8", lambda x: x.update(weight_scale_inv=torch.ones(1)), "the layout of DeepSeek's files"),
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.filterwarnings("ignore:modelopt")
def test_damage_is_named(tmp_path: Path, name: str) -> None:
    make, method, damage, message = DAMAGE[name]
    tensors, _ = make()
    damage(tensors)
    with pytest.raises(CheckpointError, match=message):
        read(folder(tmp_path, tensors, method), net())
