"""compressed-tensors: what transformers and the package load from our files is what the model computes."""

from __future__ import annotations

import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fakequant as fq
from fakequant.delivery.folder import by_transformers
from fakequant.delivery.formats import compressed_tensors
from fakequant.delivery.schemes import PACKED, how_to_load, missed_cache
from fakequant.errors import CheckpointError, ConfigError, ExportError, ShapeError
from fakequant.nn.quantizer import Mode, quantizers
from tests.support.language_models import BATCHES, language_model, llama, llava, logits, mixtral

pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

_FP8, _FP4 = "float8_e4m3fn", "float4_e2m1fn"
_MX = "per_block(-1:32) scale=float8_e8m0fnu:floor"
_OWN, _FP4_OWN = (f"per_block(-1:32) scale=float8_e8m0fnu:{rule} dynamic" for rule in ("even", "even_fp4"))
_PADDED = "per_block(-1:32,pad) scale=float8_e8m0fnu:floor"
_NV = f"{_FP4} per_block(-1:16) scale=float8_e4m3fn@per_tensor"


def rules(weight: str, input: str | None = None, pattern: str = "*proj") -> fq.Config:
    words = (input or "").split(" dynamic")
    activation = fq.TensorConfig(words[0], len(words) > 1) if input else None
    return fq.Config("own", [fq.Rule(pattern, weight=weight, input=activation)])


INPUTS = [
    rules(f"{_FP4} {_MX}", f"{_FP4} {_OWN}"),
    rules(f"{_FP4} {_MX}", f"{_FP8} {_FP4_OWN}"),
    rules(f"{_FP4} {_MX}", f"{_FP8} per_block(-1:128) dynamic"),
    rules(f"float6_e2m3fn {_MX}", f"float6_e2m3fn {_OWN}"),
    rules(f"float6_e2m3fn {_MX}", f"{_FP8} {_FP4_OWN}"),
    rules(f"{_FP8} {_MX}", f"{_FP8} {_FP4_OWN}"),
]
"""Inputs that are quantized beside weights under powers of two."""
LAYOUTS = {
    "pack-quantized": [
        *(rules(f"int{bits} per_block(-1:32)") for bits in range(2, 9)),
        *(
            rules(spec)
            for spec in ("int4 per_block(-1:128)", "int4 per_channel(0)", "int7", "int8_narrow per_channel(0)")
        ),
        *(rules(f"uint{bits} per_block(-1:32)") for bits in (2, 3, 4, 5, 8)),
        *(rules(spec) for spec in ("uint4", "uint3 per_channel(0)", "int4 per_block(-1:64) asymmetric")),
        rules("int4 per_block(-1:32) scale=float16"),
    ],
    "int-quantized": [
        rules("int8 per_channel(0)", "int8"),
        rules("int8", "uint8"),
        rules("uint8 per_channel(0)", "uint8"),
        rules("int4 per_block(-1:32)", "int8"),
        rules("int8 per_channel(0)", "uint8 per_token dynamic"),
    ],
    "float-quantized": [
        rules(_FP8, _FP8),
        rules(f"{_FP8} per_channel(0)", f"{_FP8} per_token dynamic"),
        rules(f"{_FP8} per_block(0:128,-1:128,pad)", f"{_FP8} per_block(-1:128) dynamic"),
        rules(f"{_FP8} per_block(0:96,-1:128,pad)", f"{_FP8} dynamic"),
    ],
    "naive-quantized": [rules(f"{_FP8} per_channel(0)"), rules(f"{_FP8} per_block(-1:64)")],
    "mxfp4-pack-quantized": [
        rules(f"{_FP4} {_MX}"),
        rules(f"{_FP4} per_block(-1:32) scale=float8_e8m0fnu:ceil"),
        *INPUTS[:3],
    ],
    "mxfp6-pack-quantized": [rules(f"float6_e2m3fn {_MX}"), *INPUTS[3:5]],
    "mxfp8-quantized": [rules(f"{_FP8} {_MX}"), *INPUTS[5:]],
    "nvfp4-pack-quantized": [rules(_NV)],
}
CASES = [(name, one) for name, held in LAYOUTS.items() for one in held]


def prepared(config: fq.Config | str, model: nn.Module | None = None) -> nn.Module:
    found = fq.prepare(llama() if model is None else model, config)
    fq.calibrate(found, BATCHES, progress=False)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float32])
def test_scales_of_more_bits_than_the_model_need_another_way_to_load(scales: torch.dtype, dtype: torch.dtype) -> None:
    schemes = [{"format": "int-quantized", "weights": {"symmetric": True}}]
    way = how_to_load(schemes, {"0.weight": torch.ones(1), "0.weight_scale": torch.ones(1, dtype=scales)}, dtype)
    assert way.endswith("or rounds scales") is (scales is torch.float32 and dtype is torch.bfloat16)
    assert bool(way) is (scales is torch.float32 and dtype is torch.bfloat16)


def quantization(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found


def assert_same_tensors(one: Path, two: Path) -> None:
    first, second = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    assert first.keys() == second.keys()
    assert [name for name in first if first[name].dtype != second[name].dtype] == []
    assert [n for n in first if not torch.equal(first[n].view(torch.uint8), second[n].view(torch.uint8))] == []


def delivered(model: nn.Module, tmp_path: Path) -> tuple[Path, Any]:
    """A folder that other programs compute as the model, and that is read and written again as it is."""
    folder = fq.deliver(model, tmp_path / "one", "compressed-tensors")
    report = fq.verify_delivery(folder, model, BATCHES)
    assert report.passed, str(report)
    again = fq.read(folder)
    assert torch.equal(logits(again), logits(model))
    assert_same_tensors(folder, fq.deliver(again, tmp_path / "two", "compressed-tensors"))
    return folder, report


@pytest.mark.parametrize(("layout", "config"), CASES, ids=[f"{name}-{n}" for n, (name, _) in enumerate(CASES)])
def test_other_programs_compute_what_the_model_computes(layout: str, config: fq.Config, tmp_path: Path) -> None:
    folder, report = delivered(prepared(config), tmp_path)
    assert quantization(folder)["format"] == layout
    assert "compressed-tensors 0." in report.runtime
    assert [row.differing for row in report.outputs] == [0] * (layout != "nvfp4-pack-quantized")


@pytest.mark.parametrize("weight", ["int4 per_block(-1:32)", "int8 per_channel(0)", f"{_FP4} {_MX}", _NV])
def test_experts_are_written_one_by_one(weight: str, tmp_path: Path) -> None:
    config = fq.Config("own", [fq.Rule("*proj", weight=weight), fq.Rule("*experts", weight=weight)])
    folder, _ = delivered(prepared(config, mixtral()), tmp_path)
    names = {*load_file(folder / "model.safetensors")}
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight_scale" in names
    assert not any("gate_up_proj" in name for name in names)


@pytest.mark.parametrize(("inner", "is_loaded"), [(32, True), (128, True), (16, False)])
def test_experts_whose_weights_have_different_widths_are_read(inner: int, is_loaded: bool, tmp_path: Path) -> None:
    """Groups that are whole rows of the one weight and not of the other: they had one pattern for two schemes."""
    net = mixtral(intermediate_size=inner)
    model = prepared(fq.Config("own", [fq.Rule("*experts", weight="int4 per_block(-1:32,pad)")]), net)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        folder = fq.deliver(model, tmp_path, "compressed-tensors")
    assert any("stacked experts of one scheme alone" in str(one.message) for one in said) is not is_loaded
    assert fq.verify_delivery(folder, model, BATCHES).passed is is_loaded
    assert torch.equal(logits(fq.read(folder)), logits(model))


@pytest.mark.parametrize("inner", [16, 24, 48])
def test_tiles_over_two_weights_of_a_stack_are_refused_before_the_work(inner: int, tmp_path: Path) -> None:
    tiles = fq.Config("own", [fq.Rule("*experts", weight="float8_e4m3fn per_block(-2:32,-1:32,pad)")])
    model = prepared(tiles, mixtral(intermediate_size=inner))
    with pytest.raises(ExportError, match=rf"w1\.weight alone, with {inner} rows, but a scale is for 32 rows"):
        fq.deliver(model, tmp_path / "new", "compressed-tensors")
    assert not (tmp_path / "new").exists()


NARROW = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1}


class Wrapped(nn.Module):
    """A model whose experts transformers does not know by their path."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: Any = mixtral()

    def forward(self, **inputs: Any) -> torch.Tensor:
        return self.inner(**inputs).logits


def granite() -> Any:
    return language_model("granitemoe", **NARROW, intermediate_size=32, num_local_experts=2)


@pytest.mark.parametrize("make", [granite, Wrapped])
def test_experts_that_transformers_does_not_divide_are_refused(make: Any, tmp_path: Path) -> None:
    model = prepared(fq.Config("own", [fq.Rule("*experts", weight="int4 per_block(-1:32,pad)")]), make())
    with pytest.raises(ExportError, match=r"transformers does not divide the tensor of this model's experts; leave"):
        fq.deliver(model, tmp_path / "new", "compressed-tensors")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("target", [None, "vllm"])
def test_layers_with_inputs_of_other_widths_are_not_merged(target: str | None, tmp_path: Path) -> None:
    """The key of RWKV's feed-forward reads the input, and its value reads the key's result."""
    net = nn.ModuleDict({"ffn": nn.ModuleDict({"key": nn.Linear(32, 64), "value": nn.Linear(64, 32)})})
    net["ffn"]["value"].weight.data.mul_(7)
    model = fq.prepare(net, "NVFP4_WEIGHT_ONLY", target=target)
    fq.calibrate(model)
    assert len({*global_scales(fq.deliver(model, tmp_path, "compressed-tensors")).values()}) == 2
    alone = fq.encode(model, "compressed-tensors", only=["ffn.key"])
    assert {name.rpartition(".")[0] for name in alone} == {"ffn.key"}


def mamba() -> Any:
    return language_model("mamba2", **NARROW, num_heads=4, head_dim=16, state_size=4, n_groups=1, chunk_size=4)


def with_infinity() -> Any:
    net: Any = llama()
    net.config.limits = {"low": -math.inf, "high": [1.0, math.inf]}
    return net


@pytest.mark.parametrize("make", [mamba, with_infinity])
@pytest.mark.parametrize("format", ["compressed-tensors", "torchao"])
def test_a_configuration_with_infinity_is_read(format: str, make: Any, tmp_path: Path) -> None:
    model = prepared(fq.Config("own", [fq.Rule(layers="Linear", weight="int4 per_block(-1:32,pad)")]), make())
    again: Any = fq.read(fq.deliver(model, tmp_path, format))
    assert again.config.to_dict().get("limits") == model.config.to_dict().get("limits")
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize(("format", "file"), [("compressed-tensors", ""), ("torchao", ""), ("gguf", "model.gguf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_buffers_that_no_file_holds_are_named_where_they_are_rounded(
    dtype: torch.dtype, format: str, file: str, tmp_path: Path
) -> None:
    preset = "gguf_q8_0" if file else fq.Config("own", [fq.Rule("*proj", weight="int4 per_block(-1:32)")])

    def said(net: nn.Module, place: str) -> tuple[bool, str]:
        model = prepared(preset, net)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            path = fq.deliver(model, tmp_path / place / file, format)
        found = [str(one.message) for one in caught if "rounds them" in str(one.message)]
        return torch.equal(logits(fq.read(path)), logits(model)), "".join(found)

    name = str(dtype).removeprefix("torch.")
    equal, text = said(llama().to(dtype), "moved")
    assert not equal
    assert text == (
        f"model.rotary_emb.inv_freq, model.rotary_emb.original_inv_freq: {name} here, and in no file; programs compute "
        "them anew in float32, so that their outputs are not those of this model. Load the float model by "
        "from_pretrained(dtype=...), and not by model.to(dtype), which rounds them"
    )
    net: Any = llama()
    net.save_pretrained(tmp_path / "float")
    assert said(type(net).from_pretrained(tmp_path / "float", dtype=dtype), "loaded") == (True, "")


def test_a_configuration_that_gives_a_layer_another_scheme_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    config = [fq.Rule("*proj", weight="int8 per_channel(0)"), fq.Rule("*experts", weight="int4 per_block(-1:32)")]
    monkeypatch.setattr(compressed_tensors, "_pattern", lambda bases: "re:.*")
    with pytest.raises(ExportError, match=r"cannot say in config\.json how .* is quantized: programs would take"):
        fq.deliver(prepared(fq.Config("own", config), mixtral()), tmp_path, "compressed-tensors")


def test_experts_and_other_layers_have_schemes_of_their_own(tmp_path: Path) -> None:
    config = [fq.Rule("*proj", weight="int8 per_channel(0)"), fq.Rule("*experts", weight="int4 per_block(-1:32)")]
    folder, _ = delivered(prepared(fq.Config("own", config), mixtral()), tmp_path)
    targets = [group["targets"] for group in quantization(folder)["config_groups"].values()]
    experts = r"re:model[.]layers[.]0[.]block_sparse_moe[.]experts[.]\d+[.]"
    assert targets == [[rf"{experts}(w1|w3)$", rf"{experts}w2$"], ["Linear"]]
    assert "model.layers.0.block_sparse_moe.gate" in quantization(folder)["ignore"]


@pytest.mark.parametrize("preset", ["INT4_GROUP32", rules("int4 per_block(-1:32)")], ids=["all", "float"])
def test_a_tied_head_stays_tied(preset: fq.Config | str, tmp_path: Path) -> None:
    folder, _ = delivered(prepared(preset, llama(tied=True)), tmp_path)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    assert "lm_head" in quantization(folder)["ignore"]
    again: Any = fq.read(folder)
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_layers_with_schemes_of_their_own(tmp_path: Path) -> None:
    last = fq.Rule("*down_proj", weight="int8 per_channel(0)", input="int8")
    head = fq.Rule("lm_head", weight="int4 per_channel(0)")
    folder, _ = delivered(prepared(rules("int4 per_block(-1:32)").with_rule(last, head)), tmp_path)
    groups = quantization(folder)["config_groups"].values()
    assert [group["targets"][-1] for group in groups] == ["lm_head", "model.layers.1.mlp.down_proj", "Linear"]
    assert quantization(folder)["format"] == "mixed-precision"


@pytest.mark.parametrize("scale", ["", " scale=bfloat16"], ids=["float32", "bfloat16"])
def test_models_in_bfloat16(scale: str, tmp_path: Path) -> None:
    folder, _ = delivered(prepared(rules(f"int4 per_block(-1:32){scale}"), llama(dtype=torch.bfloat16)), tmp_path)
    held = {tensor.dtype for name, tensor in load_file(folder / "model.safetensors").items() if "scale" in name}
    assert held == {torch.bfloat16 if scale else torch.float32}
    assert {str(q.spec.scale) for q in quantizers(fq.read(folder)).values()} == {scale.strip()}


@pytest.mark.parametrize("config", [one for one in INPUTS if "e8m0" in str(one.rules[0].input)], ids=range(5))
def test_inputs_under_powers_of_two(config: fq.Config, tmp_path: Path) -> None:
    """transformers runs them in bfloat16 by its usual call, and in float32 not at all."""
    model = prepared(config, llama(dtype=torch.bfloat16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        folder = fq.deliver(model, tmp_path / "half", "compressed-tensors")
    assert torch.equal(logits(by_transformers(folder, torch.bfloat16)), logits(model))
    with pytest.warns(UserWarning, match="loads these files in bfloat16, which the model is not"):
        folder = fq.deliver(prepared(config), tmp_path / "whole", "compressed-tensors")
    with pytest.raises(RuntimeError, match="same dtype"):
        logits(by_transformers(folder, torch.float32))


def test_other_inputs_in_bfloat16_are_not_compared(tmp_path: Path) -> None:
    model = prepared(INPUTS[2], llama(dtype=torch.bfloat16))
    report = fq.verify_delivery(fq.deliver(model, tmp_path, "compressed-tensors"), model, BATCHES)
    assert report.passed, str(report)
    assert "rounds scales of dynamic inputs to torch.bfloat16" in report.not_run[0]


def test_inputs_have_the_rule_of_the_package(tmp_path: Path) -> None:
    config = rules(f"{_FP8} {_MX}", f"{_FP8} {_OWN}")
    with pytest.raises(ExportError, match=r"14 parts.*programs compute dynamic scales in other ways.*:even_fp4"):
        fq.deliver(prepared(config), tmp_path, "compressed-tensors")


def attending(spec: str, pattern: str = "*attn", *, query: bool = True, **sizes: Any) -> nn.Module:
    """A model with quantized keys and values."""
    config = rules("int8 per_channel(0)").with_rule(fq.Rule(pattern, input=spec, ops=("sdpa",)))
    model = fq.prepare(llama(**sizes), config, example=BATCHES[0])
    fq.calibrate(model, BATCHES, progress=False)
    for path, quantizer in quantizers(model).items():
        if path.endswith("query") and not query:
            quantizer.mode = Mode.OFF
    return model


@pytest.mark.parametrize("spec", [_FP8, "int8"])
@pytest.mark.parametrize("query", [True, False])
def test_keys_and_values(spec: str, query: bool, tmp_path: Path) -> None:
    folder, _ = delivered(attending(spec, query=query), tmp_path)
    names = {name.rpartition(".")[2] for name in load_file(folder / "model.safetensors")}
    assert {"k_scale", "v_scale"} | ({"q_scale"} if query else set()) <= names
    assert (quantization(folder)["kv_cache_scheme"] is None) is query


_HEADS = "per_channel(1)"


@pytest.mark.parametrize("spec", [f"{_FP8} {_HEADS}", f"int8 {_HEADS}", f"{_FP8} per_channel(-3)"])
@pytest.mark.parametrize("query", [True, False])
def test_keys_and_values_of_each_head(spec: str, query: bool, tmp_path: Path) -> None:
    folder, _ = delivered(attending(spec, query=query), tmp_path)
    stored, said = load_file(folder / "model.safetensors"), quantization(folder)
    shapes = {name: (*x.shape,) for name, x in stored.items() if re.search("1.self_attn.[qkv]_scale", name)}
    heads = {"k": (2, 1, 1), "v": (2, 1, 1)} | ({"q": (4, 1, 1)} if query else {})
    assert shapes == {f"model.layers.1.self_attn.{name}_scale": shape for name, shape in heads.items()}
    group = said["config_groups"]["group_0"]["input_activations"] if query else said["kv_cache_scheme"]
    assert group["strategy"] == "attn_head"
    assert len({float(x) for x in stored["model.layers.0.self_attn.k_scale"].flatten()}) == 2


def test_one_head_of_keys_and_values_is_a_head(tmp_path: Path) -> None:
    folder, _ = delivered(attending(f"{_FP8} {_HEADS}", query=False, num_key_value_heads=1), tmp_path)
    assert load_file(folder / "model.safetensors")["model.layers.0.self_attn.k_scale"].shape == (1, 1, 1)


def changed(folder: Path, scheme: dict[str, Any], change: Any) -> Path:
    """A folder whose scales of keys and values are others, and whose scheme says so."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] |= scheme
    (folder / "config.json").write_text(json.dumps(config))
    stored = load_file(folder / "model.safetensors")
    stored = {name: change(x).contiguous() if re.search("[kv]_scale", name) else x for name, x in stored.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_scales_of_heads_in_a_row_are_read_as_they_are(tmp_path: Path) -> None:
    """As other programs write them: [heads]."""
    model = attending(f"{_FP8} {_HEADS}", query=False)
    folder = changed(fq.deliver(model, tmp_path, "compressed-tensors"), {}, torch.flatten)
    assert torch.equal(logits(fq.read(folder)), logits(model))


def test_scales_that_are_not_those_of_the_scheme_are_refused(tmp_path: Path) -> None:
    model = attending(f"{_FP8} {_HEADS}", query=False)
    folder = changed(fq.deliver(model, tmp_path / "a", "compressed-tensors"), {"strategy": "tensor"}, torch.flatten)
    with pytest.raises(CheckpointError, match=r"0\.self_attn\.k_scale in .* has 2 numbers, but its scheme has one"):
        fq.read(folder)
    folder = changed(fq.deliver(model, tmp_path / "b", "compressed-tensors"), {}, lambda x: x.repeat(2, 1, 1)[:3])
    with pytest.raises(ShapeError, match=r"key has a scale of shape \[1, 3, 1, 1\], which does not fit"):
        logits(fq.read(folder))


def test_layers_have_no_scales_of_heads(tmp_path: Path) -> None:
    folder = fq.deliver(prepared(rules("int8 per_channel(0)", "int8")), tmp_path, "compressed-tensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"]["strategy"] = "attn_head"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="the strategy attn_head is for attention"):
        fq.read(folder)


def test_keys_and_values_of_some_layers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"model\.layers\.1\.self_attn: files have keys and values of all layers"):
        fq.deliver(attending(_FP8, "*0.self_attn"), tmp_path, "compressed-tensors")


def test_the_global_scale_of_nvfp4_comes_back_exactly(tmp_path: Path) -> None:
    """1/x rounded is no inverse: of some numbers the reciprocal of the reciprocal is another one."""
    layers = [nn.Linear(32, 32, bias=False) for _ in range(40)]
    for number, layer in enumerate(layers):
        layer.weight.data.mul_(1 + number / 41)
    model = fq.prepare(nn.Sequential(*layers), fq.Config("own", [fq.Rule("*", weight=_NV)]))
    fq.calibrate(model, [torch.randn(2, 32)], progress=False)
    stored = load_file(fq.deliver(model, tmp_path, "compressed-tensors") / "model.safetensors")
    exact = [quantizers(model)[f"{n}._weight_quantizer"].scale for n in range(40)]
    plain = [stored[f"{n}.weight_scale"].float() / stored[f"{n}.weight_global_scale"] for n in range(40)]
    assert sum(not torch.equal(one, two) for one, two in zip(exact, plain, strict=True)) > 5
    again = fq.read(tmp_path, nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(40))))
    found = [quantizers(again)[f"{n}._weight_quantizer"].scale for n in range(40)]
    assert all(torch.equal(one, two) for one, two in zip(exact, found, strict=True))


def global_scales(folder: Path) -> dict[str, float]:
    """The stored scales of the tensor, by layer."""
    stored = load_file(folder / "model.safetensors")
    return {
        name.removesuffix(".weight_global_scale").removeprefix("model.layers."): float(x)
        for name, x in stored.items()
        if name.endswith("weight_global_scale")
    }


class ToQkv(nn.Module):
    """Projections as in diffusion transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.to_q(x).sum() + self.to_k(x).sum() + self.to_v(x).sum()


@pytest.mark.parametrize("preset", ["NVFP4_WEIGHT_ONLY", "NVFP4_FOUR_OVER_SIX"])
@pytest.mark.parametrize("step", ["calibrate", "improve", "both"])
def test_layers_that_servers_merge_have_one_global_scale(step: str, preset: str, tmp_path: Path) -> None:
    net: Any = llama()
    with torch.no_grad():
        net.model.layers[0].self_attn.q_proj.weight.mul_(3)
        net.model.layers[1].mlp.up_proj.weight.div_(5)
    model = fq.prepare(net, preset, skip=["lm_head", "*embed_tokens"])
    if step != "improve":
        fq.calibrate(model)
    if step != "calibrate":
        fq.ptq.improve(model, BATCHES * 2, ["ranges", "gptq"], judge=[], progress=False)
    folder = fq.deliver(model, tmp_path, "compressed-tensors")
    found = global_scales(folder)
    for layer in "01":
        assert len({found[f"{layer}.self_attn.{name}_proj"] for name in "qkv"}) == 1
        assert found[f"{layer}.mlp.gate_proj"] == found[f"{layer}.mlp.up_proj"]
        assert found[f"{layer}.mlp.down_proj"] != found[f"{layer}.mlp.up_proj"]
    assert fq.verify_delivery(folder, model).passed
    assert torch.equal(logits(fq.read(folder)), logits(model))


def test_projections_of_other_names_are_merged_too(tmp_path: Path) -> None:
    net = nn.Sequential(ToQkv())
    net[0].to_k.weight.data.mul_(7)
    model = fq.prepare(net, "NVFP4_WEIGHT_ONLY")
    fq.calibrate(model)
    assert len({*global_scales(fq.deliver(model, tmp_path, "compressed-tensors")).values()}) == 1


def test_merged_layers_under_several_global_scales_are_refused(tmp_path: Path) -> None:
    model: Any = fq.prepare(nn.Sequential(ToQkv()), "NVFP4_WEIGHT_ONLY")
    fq.calibrate(model)
    model[0].to_v.weight_quantizer.scale *= 0.77
    with pytest.raises(
        ExportError, match=r"servers merge 0\.to_q\.weight, .* call fakequant\.calibrate\(model\) before deliver"
    ):
        fq.deliver(model, tmp_path / "new", "compressed-tensors")
    assert not (tmp_path / "new").exists()


def inputs_of(folder: Path, model: nn.Module | None = None) -> set[str]:
    read = quantizers(fq.read(folder, model) if model is not None else fq.read(folder))
    return {str(one.spec) for path, one in read.items() if path.endswith("input_quantizer")}


@pytest.mark.parametrize("preset", ["W8A8_DYNAMIC", "W8A8_TRANSFORMERS"])
def test_dynamic_int8_comes_back_by_its_rule_and_is_compared_by_that_of_transformers(
    preset: str, tmp_path: Path
) -> None:
    """Files do not say how scales are chosen: vLLM has amax / 127, and transformers amax / 127.5."""
    model = fq.prepare(llama(), preset, skip=["lm_head", "*embed_tokens"])
    fq.calibrate(model)
    folder = fq.deliver(model, tmp_path, "compressed-tensors")
    (config,) = [rule.input for rule in getattr(fq.presets, preset).rules if rule.input]
    assert inputs_of(folder) == {str(config.spec)}
    assert torch.equal(logits(fq.read(folder)), logits(model))
    report = fq.verify_delivery(folder, model)
    assert report.passed
    assert [row.differing for row in report.outputs] == [0]
    assert any("amax / 127.5" in note for note in report.not_run) is (preset == "W8A8_DYNAMIC")
    assert inputs_of(folder) == {str(config.spec)}  # comparing changed no quantizer


def test_a_file_of_another_writer_has_the_rule_of_servers(tmp_path: Path) -> None:
    model = fq.prepare(nn.Sequential(nn.Linear(32, 32)), "W8A8_TRANSFORMERS")
    folder = fq.deliver(model, tmp_path, "compressed-tensors")
    file = folder / "model.safetensors"
    save_file(load_file(file), file, {"format": "pt"})
    assert inputs_of(folder, nn.Sequential(nn.Linear(32, 32))) == {"int8 per_token reciprocal"}


@pytest.mark.parametrize(
    "spec",
    [
        "int8 per_token dynamic",
        "int4 per_token reciprocal dynamic",
        "int8 reciprocal",
        "int8 per_token multiplier dynamic",
    ],
)
def test_other_rules_of_int8_inputs_are_refused(spec: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="its input is"):
        fq.deliver(prepared(rules("int8 per_channel(0)", spec)), tmp_path / "new", "compressed-tensors")


@pytest.mark.parametrize("preset", ["W8A8_DYNAMIC", "FP8_DYNAMIC"])
def test_experts_with_quantized_inputs_are_said(preset: str, tmp_path: Path) -> None:
    model = prepared(getattr(fq.presets, preset).with_rule(fq.Rule("lm_head"), fq.Rule("*embed_tokens")), mixtral())
    with pytest.warns(
        UserWarning, match=r"transformers does not load these files: .*experts: its input is .* in float; quantize only"
    ):
        folder = fq.deliver(model, tmp_path, "compressed-tensors")
    assert not fq.verify_delivery(folder, model).passed


@pytest.mark.parametrize("preset", ["W8A8_TRANSFORMERS", "FP8", "W8A8_DYNAMIC", "FP8_DYNAMIC"])
def test_transformers_takes_experts_with_quantized_weights_alone(preset: str, tmp_path: Path) -> None:
    said = r"layers\.0\.mlp\.experts: its input is .*in float; .*: prepare\(\.\.\., rules=\{'\*experts\*': "
    with pytest.raises(ConfigError, match=f"^transformers cannot load {preset}: .*{said}'int8_weight_only'"):
        fq.prepare(mixtral(), preset, BATCHES[0], target="transformers")
    with pytest.raises(ExportError, match=said):
        fq.deliver(prepared(getattr(fq.presets, preset), mixtral()), tmp_path / "new", target="transformers")
    assert not (tmp_path / "new").exists()
    how: Any = {"rules": {"*experts*": "int8_weight_only"}, "skip": ["*embed_tokens"]}
    model = fq.prepare(mixtral(), preset, BATCHES[0], target="transformers", **how)
    fq.calibrate(model, BATCHES, progress=False)
    report = fq.verify_delivery(fq.deliver(model, tmp_path / "new", target="transformers"), model, BATCHES)
    assert [row.differing for row in report.outputs] == [0]


@pytest.mark.parametrize("preset", ["INT4_GROUP32", "INT8_WEIGHT_ONLY", "W8A8_TRANSFORMERS", "FP8_DYNAMIC"])
def test_experts_in_float_beside_other_layers_load(preset: str, tmp_path: Path) -> None:
    model = fq.prepare(mixtral(), preset, target="transformers", skip=["*experts*", "*embed_tokens"])
    delivered(model, tmp_path)


def test_a_convolution_of_several_tensors_of_a_file_loads(tmp_path: Path) -> None:
    """transformers decompresses all tensors that it merges as it does experts; here of three convolutions in float."""
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16}
    kinds = ["linear_attention", "full_attention"]
    net = language_model("olmo_hybrid", linear_value_head_dim=16, layer_types=kinds, **sizes)
    delivered(prepared(rules("int4 per_block(-1:32)"), net), tmp_path)


def test_a_convolution_in_float_beside_experts_is_said(tmp_path: Path) -> None:
    sizes = {"num_experts": 2, "num_experts_per_token": 1, "moe_intermediate_size": 32, "num_key_value_heads": 4}
    net = language_model("kimi_linear", num_hidden_layers=2, first_k_dense_replace=0, **sizes)
    model = prepared(fq.Config("own", [fq.Rule("*experts", weight="int4 per_block(-1:32)")]), net)
    with pytest.warns(UserWarning, match=r"does not load model\.layers\.0\.self_attn\.conv1d\..* beside experts"):
        folder = fq.deliver(model, tmp_path, "compressed-tensors")
    assert torch.equal(logits(fq.read(folder)), logits(model))


@pytest.mark.parametrize("kind", ["t5", "modernbert"])
def test_classes_whose_initialization_reads_packed_weights(kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 40}
    sizes |= {"d_model": 32, "num_layers": 1, "d_ff": 64, "num_heads": 2, "d_kv": 16} if kind == "t5" else {}
    llama()  # imports torchvision
    import transformers

    config = transformers.AutoConfig.for_model(kind, **sizes, intermediate_size=64, pad_token_id=0)
    net = transformers.AutoModel.from_config(config).eval()
    layers = [fq.Rule("*", weight="int4 per_channel(0)", layers="Linear")]
    model, before = fq.prepare(net, fq.Config("own", layers)), torch.get_rng_state()
    with pytest.warns(
        UserWarning, match=r"loads these files with dequantize=True .* to initialize the class, which reads"
    ):
        folder = fq.deliver(model, tmp_path, "compressed-tensors")
    assert torch.equal(torch.get_rng_state(), before)
    batch: Any = {"input_ids": torch.arange(8)[None]}
    batch |= {"decoder_input_ids": batch["input_ids"], "use_cache": False} if kind == "t5" else {}
    report = fq.verify_delivery(folder, model, [batch])
    assert report.passed, str(report)
    assert {row.differing for row in report.outputs} == {0}


@pytest.mark.parametrize(
    ("gated", "input", "reason"),
    [
        (True, None, r"it needs dequantize=True, which fails on mlp\.gate_proj\.weight, which it merges in files"),
        (False, "int8", r"it fails on mlp\.gate_proj\.weight of this class, which it merges in files, without codes"),
    ],
)
def test_files_that_transformers_does_not_load(gated: bool, input: str | None, reason: str, tmp_path: Path) -> None:
    """DINOv2 reads packed weights to initialize; transformers merges a gate and an up that only some models have."""
    llama()  # imports torchvision
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    config = transformers.Dinov2Config(**sizes, use_swiglu_ffn=gated)
    layers = [fq.Rule("*", weight="int4 per_channel(0)", input=input, layers="Linear")]
    model, batch = (
        fq.prepare(transformers.Dinov2Model(config).eval(), fq.Config("own", layers)),
        torch.randn(1, 3, 8, 8),
    )
    fq.calibrate(model, [batch])
    with pytest.warns(UserWarning, match=f"transformers loads these files in no way: {reason}"):
        folder = fq.deliver(model, tmp_path, "compressed-tensors")
    assert not fq.verify_delivery(folder, model, [batch]).passed
    assert torch.equal(fq.read(folder)(batch)[0], model(batch)[0])


def test_experts_in_one_tensor_stay_in_float(tmp_path: Path) -> None:
    """GPT-OSS has its experts as [in, out], which no file has as codes."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_local_experts": 2, "head_dim": 16}
    net = language_model("gpt_oss", **sizes, num_experts_per_tok=1)
    model = prepared(rules("int8 per_channel(0)"), net)
    folder, _ = delivered(model, tmp_path)
    assert "model.layers.0.mlp.experts" in quantization(folder)["ignore"]


_OF_ROWS = "loads this format of stacked experts with a scale for each row alone; quantize experts in integers"
_OF_ONE = "loads stacked experts of one scheme alone, and the model has"


@pytest.mark.parametrize(
    ("experts", "reason"),
    [
        ([_NV], "loads this format of stacked experts without its second-level scale; quantize experts in integers"),
        ([f"{_FP8} per_block(-1:32)"], _OF_ROWS),
        ([f"{_FP8} per_block(-2:32,-1:32)"], _OF_ROWS),
        ([f"{_FP8} {_MX}"], _OF_ROWS),
        (["int8 per_channel(0)", "int4 per_channel(0)"], f"{_OF_ONE} several schemes beside .*quantize all .* alike"),
        (["int8 per_channel(0)", None], rf"{_OF_ONE} model\.layers\.1\.mlp\.experts\..* in float beside"),
    ],
)
def test_experts_of_which_transformers_loads_other_values(experts: Any, reason: str, tmp_path: Path) -> None:
    own = [fq.Rule(f"*{at}.mlp.experts", weight=one) for at, one in enumerate(experts)]
    config = fq.Config("own", [fq.Rule("*proj", weight="int8 per_channel(0)"), *own])
    with pytest.raises(ConfigError, match=f"transformers cannot load own: .*{reason}"):
        fq.prepare(mixtral(num_hidden_layers=len(experts)), config, target="transformers")
    model = prepared(config, mixtral(num_hidden_layers=len(experts)))
    with pytest.warns(UserWarning, match=f"transformers does not load these files: .*{reason}"):
        folder = fq.deliver(model, tmp_path / "new", "compressed-tensors")
    assert torch.equal(logits(fq.read(folder)), logits(model))
    with pytest.raises(ExportError, match=reason):
        fq.deliver(model, tmp_path / "new", target="transformers")


@pytest.mark.parametrize(("preset", "other"), [("INT8", "W8A8_DYNAMIC"), ("FP8", "FP8_DYNAMIC")])
def test_experts_with_fixed_ranges_are_refused(preset: str, other: str) -> None:
    said = (
        rf"experts: its input is .*, but servers load stacked experts only with a dynamic .* that it holds is {other}"
    )
    with pytest.raises(ConfigError, match=said):
        fq.prepare(mixtral(), preset, skip=["lm_head"], target="vllm")


def test_the_cache_that_transformers_misses_is_said_and_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers 5.24 renamed the argument by which compressed-tensors 0.20 puts its quantized cache."""
    model = attending("int8", query=False)
    assert missed_cache(module for path, module in llama().named_modules() if path.endswith("self_attn")) == ""
    monkeypatch.setattr("fakequant.delivery.schemes._CACHE", {"another_name"})
    with pytest.warns(UserWarning, match="Keys and values stay in float in transformers: LlamaAttention takes"):
        folder = fq.deliver(model, tmp_path, "compressed-tensors")
    assert any("Keys and values stay in float" in note for note in fq.verify_delivery(folder, model).not_run)


_VISION = ["*vision_tower*", "*multi_modal_projector*"]


@pytest.mark.parametrize(
    ("preset", "skip"),
    [
        ("W8A8_DYNAMIC", [*_VISION, "*lm_head", "*embed_tokens"]),
        ("INT4_GROUP32", [*_VISION, "*lm_head"]),
        ("INT8_WEIGHT_ONLY", ["*lm_head", "*patch_embedding"]),
        ("mixed", [*_VISION, "*lm_head"]),
    ],
)
def test_layers_of_a_vision_language_model_are_the_same_ones_in_transformers(
    preset: str, skip: list[str], tmp_path: Path
) -> None:
    """Its files name layers otherwise than the model: `language_model.model` is `model.language_model` there."""
    config: Any = preset
    if preset == "mixed":
        config = fq.presets.INT4_GROUP32.with_rule(fq.Rule("*down_proj", weight="int8 per_channel(0)"))
    model = fq.prepare(llava(), config, skip=skip)
    fq.calibrate(model)
    folder = fq.deliver(model, tmp_path, "compressed-tensors")
    ids = torch.arange(2, 18).reshape(2, 8).clone()
    ids[:, 1:5] = 63
    batch = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 8, 8)}
    for report in (fq.verify_delivery(folder, model), fq.verify_delivery(folder, model, [batch])):
        assert report.passed, str(report)
        assert [row.differing for row in report.outputs if row.name.startswith("output 0")] == [0]
    assert torch.equal(fq.read(folder)(**batch).logits, model(**batch).logits)


def test_outputs_are_compared_without_batches_too(tmp_path: Path) -> None:
    """A folder whose head is taken for quantized has the right codes, and computes something else."""
    model = prepared(rules("int8 per_channel(0)"))
    folder = fq.deliver(model, tmp_path, "compressed-tensors")
    report = fq.verify_delivery(folder, model)
    assert (report.passed, report.inputs, report.batches) == (True, "dummy_inputs", 1)
    assert [row.differing for row in report.outputs] == [0]
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] *= 1.5
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert fq.verify_delivery(folder, model).far == ["output 0 in " + report.runtime.rpartition(", ")[2]]


def test_models_without_inputs_of_their_own_say_that_outputs_are_not_compared(tmp_path: Path) -> None:
    model = prepared(rules("int8 per_channel(0)"), llama())
    folder = fq.deliver(model, tmp_path, "compressed-tensors")
    model.dummy_inputs  # noqa: B018  a property of the class
    type(model).dummy_inputs = property(lambda _: {"input_ids": torch.tensor([[10**6]])})  # type: ignore[attr-defined]
    try:
        report = fq.verify_delivery(folder, model)
    finally:
        del type(model).dummy_inputs  # type: ignore[attr-defined]
    assert report.outputs == []
    assert "the model does not run on its dummy_inputs (IndexError" in report.not_run[0]


def nvfp4_inputs() -> nn.Module:
    return fq.delivery.fix_global_scales(prepared(rules(_NV, f"{_NV} dynamic")), BATCHES)


def test_nvfp4_inputs_under_a_fixed_scale(tmp_path: Path) -> None:
    """transformers fails on the bfloat16 weights that the package makes; inputs are compared with the package alone."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import forward_quantize

    model = nvfp4_inputs()
    folder, report = delivered(model, tmp_path)
    (group,) = quantization(folder)["config_groups"].values()
    assert group["input_activations"]["dynamic"] == "local"
    assert "decompresses NVFP4 in bfloat16" in report.not_run[0]
    with pytest.raises(RuntimeError, match="same dtype"):
        logits(by_transformers(folder, torch.float32))
    loaded, x = by_transformers(folder, torch.float32), torch.randn(3, 512) * torch.logspace(-4, 2, 3)[:, None]
    for path, layer in loaded.named_modules():
        if path.endswith("proj"):
            args = QuantizationArgs.model_validate(group["input_activations"])
            columns = x[:, : model.get_submodule(path).in_features]
            theirs = forward_quantize(layer, columns, "input", args)
            assert torch.equal(theirs, quantizers(model)[f"{path}._input_quantizer"](columns)), path


def test_any_fixed_scale_of_a_file_comes_back(tmp_path: Path) -> None:
    model = nvfp4_inputs()
    for number, quantizer in enumerate(one for one in quantizers(model).values() if one.dynamic):
        quantizer.fix_global_scale(torch.tensor([1 + number / 41]))
    again = fq.read(fq.deliver(model, tmp_path, "compressed-tensors"))
    assert torch.equal(logits(again), logits(model))
    quantizers(model)["model.layers.1.mlp.down_proj._input_quantizer"].global_scale *= 2
    assert not fq.verify_delivery(tmp_path, model).passed


def test_nvfp4_inputs_without_a_fixed_scale_are_refused(tmp_path: Path) -> None:
    model = prepared(rules(_NV, f"{_NV} dynamic"))
    with pytest.raises(ExportError, match=r"14 parts.*call fakequant\.delivery\.fix_global_scales\(model, batches\)"):
        fq.deliver(model, tmp_path, "compressed-tensors")


def test_what_one_should_know_is_said_once(tmp_path: Path) -> None:
    model = prepared(fq.Config("own", [fq.Rule("*", weight="uint4 per_block(-1:32)"), fq.Rule("lm_head")]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fq.deliver(model, tmp_path, "compressed-tensors")
    assert [str(one.message) for one in caught if "compressed-tensors" in str(one.message)] == [
        "compressed-tensors: model.embed_tokens.weight in float, with the values of the codes: programs load no "
        "quantized embeddings; transformers loads these files with dequantize=True in its CompressedTensorsConfig: "
        "else it fails on zero points, or rounds scales"
    ]


@pytest.mark.parametrize("kind", ["llama", "mixtral", "bert"])
def test_a_base_model_reads_the_folder_of_one_with_a_head(kind: str, tmp_path: Path) -> None:
    import transformers

    if kind == "bert":
        sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
        made = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, num_hidden_layers=1)).eval()
    else:
        made = llama() if kind == "llama" else mixtral()
    model = fq.prepare(made, "int4_group32", skip=["cls*", "*word_embeddings"] if kind == "bert" else ["lm_head"])
    fq.calibrate(model)
    folder = fq.deliver(model, tmp_path, "compressed-tensors")
    base = type(getattr(made, made.base_model_prefix))
    options = {"add_pooling_layer": False} if kind == "bert" else {}
    with pytest.warns(UserWarning, match="stay in the file, because .* does not load them"):
        found = fq.read(folder, base(made.config, **options).eval())
    ours = getattr(model, made.base_model_prefix)(**BATCHES[0]).last_hidden_state
    assert torch.equal(found(**BATCHES[0]).last_hidden_state, ours)


@pytest.mark.parametrize("spec", ["int4 per_block(-1:32)", "uint4 per_block(-1:32)"])
@pytest.mark.parametrize("kind", ["scattered", "unequal", "plain", "unset", "absent"])
def test_groups_whose_inputs_lie_anywhere(kind: str, spec: str, tmp_path: Path) -> None:
    """Files of GPTQ with the order of activations "group": the scale of input i is that of group `weight_g_idx[i]`."""
    torch.manual_seed(0)
    net, columns = nn.Sequential(nn.Linear(96, 16)), torch.arange(96)
    folder = fq.deliver(prepared_rows(net, spec), tmp_path, "compressed-tensors")
    held = fq.snapshot(fq.read(folder, nn.Sequential(nn.Linear(96, 16)))).weights["0.weight"]
    index = {"scattered": columns[torch.randperm(96)] // 32, "unequal": (columns // 20).clamp_max(2)}.get(
        kind, columns // 32
    )
    tensors, said = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    stored = index if kind != "unset" else torch.full((96,), -1)
    if kind != "absent":
        tensors["0.weight_g_idx"] = stored.to(torch.int32)
    save_file(tensors, folder / "model.safetensors")
    said["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    (folder / "config.json").write_text(json.dumps(said))
    point = 0 if held.zero_point is None else held.zero_point[:, index].float()
    weight = (held.codes.float() - point) * held.scale[:, index]
    plain: Any = fq.read(folder, nn.Sequential(nn.Linear(96, 16)), dequantize=True)
    assert torch.equal(plain[0].weight, weight)
    x, model = torch.randn(3, 96), fq.read(folder, nn.Sequential(nn.Linear(96, 16)))
    assert torch.allclose(model(x), plain(x), atol=1e-5)


def test_groups_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    folder = fq.deliver(
        prepared_rows(nn.Sequential(nn.Linear(96, 16)), "int4 per_block(-1:32)"), tmp_path, "compressed-tensors"
    )
    tensors, said = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    said["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    (folder / "config.json").write_text(json.dumps(said))
    for index, message in (
        (torch.arange(96) // 24, "names groups beyond the 3"),
        (torch.arange(95) // 32, "weight_g_idx is"),
    ):
        save_file({**tensors, "0.weight_g_idx": index.to(torch.int32)}, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            fq.read(folder, nn.Sequential(nn.Linear(96, 16)))


def prepared_rows(net: nn.Module, spec: str) -> nn.Module:
    model = fq.prepare(net, fq.Config("own", [fq.Rule("*", weight=spec)]))
    fq.calibrate(model)
    return model


def test_e4m3_scales_without_one_of_the_tensor_are_refused(tmp_path: Path) -> None:
    spec = "float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn"
    model = fq.prepare(nn.Sequential(nn.Linear(64, 64)), fq.Config("own", (fq.Rule("*", weight=spec),)))
    with pytest.raises(ExportError, match="float8_e4m3fn@per_tensor"):
        fq.deliver(model, tmp_path, "compressed-tensors")


@pytest.mark.parametrize("spec", [f"{_FP4} per_block(-1:16,pad) scale=float8_e4m3fn@per_tensor", f"{_FP4} {_PADDED}"])
@pytest.mark.parametrize("columns", [1, 8, 24])
def test_rows_that_are_no_whole_groups_are_refused(spec: str, columns: int, tmp_path: Path) -> None:
    model = prepared_rows(nn.Sequential(nn.Linear(columns, 64)), spec)
    with pytest.raises(ExportError, match=f"groups divide the inputs, and {columns} is not a multiple of "):
        fq.deliver(model, tmp_path / "new", "compressed-tensors")


@pytest.mark.parametrize(("count", "start"), [(1, "with dequantize=True"), (2, "in part: it needs dequantize=True")])
def test_how_transformers_loads_zero_points_of_several_schemes(count: int, start: str) -> None:
    scheme = {"format": PACKED, "weights": {"symmetric": False}}
    assert how_to_load([scheme] * count, {}, torch.float32).startswith(start)
