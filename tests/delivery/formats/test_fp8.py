"""FP8 folders of DeepSeek, Qwen and Mistral: against expressions of their own, and what transformers loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fakequant as fq
from fakequant.errors import CheckpointError
from tests.support.language_models import language_model
from tests.support.quantized_folders import COLUMNS, E4M3, ROWS, X, random_fp8, read, scales, write

E8M0 = torch.float8_e8m0fnu
TILES = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 40]}
WHOLE = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
COUNTS = (ROWS // 32, -(-COLUMNS // 40))


def wide(scale: Tensor) -> Tensor:
    return scale.float().repeat_interleave(32, 0).repeat_interleave(40, 1)[:, :COLUMNS]


def tiles(dtype: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], Tensor]:
    codes, scale = random_fp8(ROWS, COLUMNS), scales(*COUNTS, dtype=dtype)
    return {"weight": codes, "weight_scale_inv": scale}, codes.float() * wide(scale)


def powers() -> tuple[dict[str, Tensor], Tensor]:
    codes = random_fp8(ROWS, COLUMNS)
    scale = (torch.arange(6).reshape(COUNTS) + 115).to(torch.uint8).view(E8M0)
    return {"weight": codes, "weight_scale_inv": scale}, codes.float() * wide(scale.float())


def whole(end: str = "weight_scale_inv", input: str = "activation_scale") -> tuple[dict[str, Tensor], Tensor]:
    codes, scale = random_fp8(ROWS, COLUMNS), torch.tensor(0.0123, dtype=torch.bfloat16)
    return {"weight": codes, end: scale, input: torch.tensor(0.02)}, codes.float() * scale.float()


@pytest.mark.parametrize(
    ("layer", "config", "weight", "input"),
    [
        (tiles(), TILES, "per_block(0:32,-1:40,pad)", "per_block(-1:40,pad)"),
        (tiles(torch.bfloat16), TILES, "per_block(0:32,-1:40,pad) scale=bfloat16", "per_block(-1:40,pad)"),
        (powers(), TILES, "per_block(0:32,-1:40,pad) scale=float8_e8m0fnu:floor", "per_block(-1:40,pad)"),
        (
            tiles(),
            {**TILES, "scale_fmt": "ue8m0"},
            "per_block(0:32,-1:40,pad)",
            "per_block(-1:40,pad) scale=float8_e8m0fnu:ceil",
        ),
        (whole(), WHOLE, "per_tensor scale=bfloat16", "per_tensor"),
        (whole("weight_scale", "input_scale"), WHOLE, "per_tensor scale=bfloat16", "per_tensor"),
    ],
)
def test_codes_scales_and_inputs(layer: Any, config: Any, weight: str, input: str, tmp_path: Path) -> None:
    tensors, values = layer
    model = read(write(tmp_path, tensors, config))
    held = fq.snapshot(model).weights["0.weight"]
    assert torch.equal(held.values(), values)
    assert torch.equal(held.codes.view(torch.uint8), tensors["weight"].view(torch.uint8))
    assert str(model[0].weight_quantizer.spec) == f"float8_e4m3fn {weight}"
    assert str(model[0].input_quantizer.spec) == f"float8_e4m3fn {input}"
    assert type(model[1]) is torch.nn.Linear
    inputs = X if model[0].input_quantizer.dynamic else (X / 0.02).clamp(-448, 448).to(E4M3).float() * 0.02
    if not model[0].input_quantizer.dynamic:
        assert torch.equal(model[0].input_quantizer(X), inputs)


def test_inputs_of_a_whole_weight_are_of_tokens_where_they_are_dynamic(tmp_path: Path) -> None:
    tensors, _ = whole()
    del tensors["activation_scale"]
    model = read(write(tmp_path, tensors, {**WHOLE, "activation_scheme": "dynamic"}))
    assert (str(model[0].input_quantizer.spec), model[0].input_quantizer.dynamic) == ("float8_e4m3fn per_token", True)


DAMAGE: dict[str, tuple[Callable[[dict[str, Tensor]], Any], dict[str, Any], str]] = {
    "no scale": (lambda x: x.pop("weight_scale_inv"), {}, "weight is torch.float8_e4m3fn with the scale None"),
    "a float with a scale": (lambda x: x.update(weight=torch.zeros(ROWS, COLUMNS)), {}, "weight is torch.float32"),
    "FP4": (lambda x: x.update(weight=torch.zeros(ROWS, COLUMNS // 2, dtype=torch.int8)), {}, "weight is torch.int8"),
    "a tile less": (lambda x: x.update(weight_scale_inv=scales(2, 2)), {}, r"\[2, 2\], not .* of \[2, 3\]"),
    "another tile": (lambda x: None, {"weight_block_size": [32, 0]}, "weight_block_size is .32, 0., not two numbers"),
    "one number": (lambda x: None, {"weight_block_size": 128}, "weight_block_size is 128, not two numbers"),
    "another scheme": (lambda x: None, {"activation_scheme": "none"}, "activation_scheme is 'none'"),
    "no range": (lambda x: None, {"activation_scheme": "static"}, "lacks 0.activation_scale"),
    "infinite": (lambda x: x.update(weight_scale_inv=scales(2, 3) / 0), {}, "scales are not finite"),
    "no power": (
        lambda x: x.update(weight_scale_inv=torch.full((2, 3), 255, dtype=torch.uint8)),
        {},
        "holds codes that stand for no number",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_folders_are_refused(name: str, tmp_path: Path) -> None:
    change, said, message = DAMAGE[name]
    tensors, _ = tiles()
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        fq.snapshot(read(write(tmp_path, tensors, {**TILES, **said}))).weights["0.weight"].values()


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_a_folder_of_transformers(kind: str, tmp_path: Path) -> None:
    """Written in the names of the hub, and loaded dequantized by transformers: the same values and logits."""
    pytest.importorskip("transformers")
    import transformers

    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 64, "head_dim": 32, "vocab_size": 40}
    sizes |= {"moe_intermediate_size": 32, "num_experts": 3} if kind == "qwen3_moe" else {}
    net = language_model(kind, **{**sizes, "num_attention_heads": 2, "num_key_value_heads": 1})
    net.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [one for one in tensors if one.endswith("proj.weight")]:
        high, wide = (-(-size // 32) for size in tensors[name].shape)
        blocks = tensors[name].unflatten(0, (high, 32)).unflatten(2, (wide, 32))
        scale = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scale[:, None, :, None]).clamp(-448, 448).to(E4M3).reshape(tensors[name].shape)
        tensors |= {name: codes, f"{name}_scale_inv": scale}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    said = json.loads((tmp_path / "config.json").read_text())
    said["quantization_config"] = {**TILES, "weight_block_size": [32, 32]}
    (tmp_path / "config.json").write_text(json.dumps(said))
    model, ids = fq.read(tmp_path), torch.arange(12).view(1, 12)
    how = transformers.FineGrainedFP8Config(weight_block_size=(32, 32), dequantize=True)
    theirs = type(net).from_pretrained(tmp_path, quantization_config=how, dtype=torch.float32).eval()
    plain: Any = fq.read(tmp_path, dequantize=True)
    own, other = plain.state_dict(), theirs.state_dict()
    assert {*own} == {*other}
    assert [name for name in own if not torch.equal(own[name], other[name])] == []
    with torch.no_grad(), fq.disabled(model):
        assert torch.equal(model(ids).logits, theirs(ids).logits)
