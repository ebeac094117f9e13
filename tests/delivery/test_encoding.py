"""`encode`: the tensors of a delivery without files have the bits of the file, and `only` limits them."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import fakequant as fq
from fakequant.delivery import DeliveredTensors
from fakequant.errors import CheckpointError, ConfigError, ExportError
from fakequant.model.state.weight_codes import QuantizedWeights
from tests.support.language_models import BATCHES, llama, mixtral

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

_NV = "float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn@per_tensor"
_MX = "float4_e2m1fn per_block(-1:32) scale=float8_e8m0fnu:floor"
_TILES = "float8_e4m3fn per_block(0:32,-1:32,pad)"
_INT4 = "int4 per_block(-1:32)"
SERVED = ["w8a8_dynamic", "fp8", "fp8_block", "int4_group32", "nvfp4_weight_only", _MX, "uint4 per_block(-1:32)"]
"""Presets and specifications of weights in files of compressed-tensors."""


FLOAT = ("lm_head", "*embed*")


def prepared(what: str, net: nn.Module | None = None, *, ranges: bool = True, skip: Any = FLOAT) -> Any:
    own = [fq.Rule(one, weight=what, optional=True) for one in ("*proj", "*experts")] if " " in what else []
    model = fq.prepare(llama() if net is None else net, fq.Config("own", own) if own else what, skip=[*skip])
    if ranges:
        fq.calibrate(model, BATCHES, progress=False)
    return model


def in_file(folder: Path) -> tuple[dict[str, Tensor], dict[str, str], Any]:
    """Tensors, texts of the header, and the quantization in config.json."""
    tensors, texts = dict[str, Tensor](), dict[str, str]()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            texts |= file.metadata()
    texts.pop("fakequant")
    return tensors, texts, json.loads((folder / "config.json").read_text())["quantization_config"]


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert {*found} == {*expected}
    for name, tensor in found.items():
        one, two = tensor.contiguous().reshape(-1), expected[name].reshape(-1)
        assert (name, tensor.dtype, tensor.shape) == (name, expected[name].dtype, expected[name].shape)
        assert torch.equal(one.view(torch.uint8), two.view(torch.uint8)), name


def assert_delivered(found: DeliveredTensors, model: nn.Module, format: str, folder: Path) -> None:
    tensors, texts, said = in_file(fq.deliver(model, folder, format))
    assert_same(found, tensors)
    assert (found.metadata, found.config) == (texts, said)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", SERVED)
def test_tensors_are_those_of_the_file(what: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = prepared(what, llama(dtype=dtype))
    assert_delivered(fq.encode(model, "compressed-tensors"), model, "compressed-tensors", tmp_path)


@pytest.mark.parametrize(
    "what", ["int8_weight_only", _INT4, "int3 per_block(-1:32)", _NV, "float8_e4m3fn per_channel(0)"]
)
def test_tensors_of_torchao_are_those_of_the_file(what: str, tmp_path: Path) -> None:
    model = prepared(what)
    assert_delivered(fq.encode(model, "torchao"), model, "torchao", tmp_path)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_tensors_of_mlx_are_those_of_the_folder(dtype: torch.dtype | None, tmp_path: Path) -> None:
    model = prepared("mlx_4bit", skip=())
    found = fq.encode(model, "mlx", dtype=dtype)
    tensors, _, _ = in_file(fq.deliver(model if dtype is None else copy.deepcopy(model).to(dtype), tmp_path, "mlx"))
    assert_same(found, tensors)


@pytest.mark.parametrize("what", [_INT4, "int8 per_channel(0)", _NV, _MX, _TILES])
def test_experts_one_by_one(what: str, tmp_path: Path) -> None:
    model = prepared(what, mixtral())
    found = fq.encode(model, "compressed-tensors")
    assert any("experts.3.w2." in name for name in found)
    assert_delivered(found, model, "compressed-tensors", tmp_path)


@pytest.mark.parametrize("skip", [FLOAT, ()])
def test_a_tied_head_and_tables(skip: Any, tmp_path: Path) -> None:
    model = prepared("int4_group32", llama(tied=True), skip=skip)
    found = fq.encode(model, "compressed-tensors")
    assert "lm_head.weight" not in found
    assert_delivered(found, model, "compressed-tensors", tmp_path)
    assert [*fq.encode(model, "compressed-tensors", only="lm_head")] == ["model.embed_tokens.weight"]


def test_codes_that_a_solver_chose_and_keys_and_values(tmp_path: Path) -> None:
    config = fq.Config("own", [fq.Rule("*proj", weight=_INT4), fq.Rule("*attn", input="float8_e4m3fn", ops=("sdpa",))])
    model = fq.prepare(llama(), config, example=BATCHES[0])
    fq.calibrate(model, BATCHES, progress=False)
    fq.ptq.improve(model, BATCHES * 2, ["gptq"], judge=[], progress=False)
    found = fq.encode(model, "compressed-tensors")
    assert "model.layers.1.self_attn.k_scale" in found
    assert_delivered(found, model, "compressed-tensors", tmp_path)
    assert "model.layers.1.self_attn.k_scale" in fq.encode(model, "compressed-tensors", only="*.1.self_attn")


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("what", [*SERVED, "int4_group32 tied"])
def test_weights_are_rounded_first(what: str, ranges: bool, tmp_path: Path) -> None:
    """As `deliver` writes a copy of the model in the dtype of the server."""
    net = llama(tied="tied" in what)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.001)  # more bits than bfloat16 has
    needs = "nvfp4" in what or what == "fp8"  # scales that merged layers share, and those of static inputs
    model = prepared(what.removesuffix(" tied"), net, ranges=ranges or needs, skip=() if "tied" in what else FLOAT)
    plain, found = (fq.encode(model, "compressed-tensors", dtype=one) for one in (None, torch.bfloat16))
    assert_delivered(plain, model, "compressed-tensors", tmp_path / "plain")
    assert_delivered(found, copy.deepcopy(model).to(torch.bfloat16), "compressed-tensors", tmp_path / "half")
    name = "model.layers.0.self_attn.q_proj.weight"
    codes = next(key for key in (name, f"{name}_packed") if key in found)
    assert not torch.equal(plain[codes].view(torch.uint8), found[codes].view(torch.uint8))
    assert found["model.norm.weight"].dtype is torch.bfloat16
    assert {one.dtype for one in model.parameters()} == {torch.float32}


def test_torchao_says_the_dtype_of_the_server(tmp_path: Path) -> None:
    model = prepared(_INT4)
    found = fq.encode(model, "torchao", dtype=torch.bfloat16)
    assert_delivered(found, copy.deepcopy(model).to(torch.bfloat16), "torchao", tmp_path)


def names(model: nn.Module, only: Any) -> set[str]:
    return {*fq.encode(model, "compressed-tensors", only=only)}


def test_only_some_layers() -> None:
    model = prepared("int4_group32")
    o = "model.layers.0.self_attn.o_proj"
    own = {f"{o}.{end}" for end in ("weight_packed", "weight_scale", "weight_shape")}
    assert names(model, o) == names(model, [f"{o}.weight"]) == names(model, ["*.0.*o_proj"]) == own
    assert names(model, [o, "model.norm"]) == own | {"model.norm.weight"}
    whole = names(model, None)
    assert names(model, "model.layers.1") == {name for name in whole if name.startswith("model.layers.1.")}
    assert names(model, ["*"]) == names(model, [name for name, _ in model.named_parameters()]) == whole
    assert names(model, []) == set()


def test_only_one_parameter_of_a_layer_with_a_bias() -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    model = fq.prepare(net, "int4_group32", skip=["1"])
    assert names(model, "0.bias") == {"0.bias"}
    assert names(model, "0.weight") == {"0.weight_packed", "0.weight_scale", "0.weight_shape"}
    assert names(model, "1.weight") == {"1.weight"}


def test_only_experts_by_the_names_of_model_and_file() -> None:
    model = prepared(_INT4, mixtral())
    stack = next(name for name, _ in model.named_parameters() if name.endswith("0.mlp.experts.down_proj"))
    found = names(model, stack)
    assert {name.rsplit(".", 2)[1] for name in found} == {"w2"}
    assert len(found) == 3 * 4
    file = "model.layers.0.block_sparse_moe.experts.3.w1"
    assert names(model, file) == {f"{file}.weight_{end}" for end in ("packed", "scale", "shape")}


@pytest.mark.parametrize("what", ["nvfp4_weight_only", "fp8_block"])
@pytest.mark.parametrize("skip", [FLOAT, (*FLOAT, "*attn*")])
def test_weights_that_servers_merge_come_together(what: str, skip: Any) -> None:
    """Also in float: vLLM 0.32 computes NaN after it loaded q alone."""
    model, layer = prepared(what, skip=skip), "model.layers.0"
    found = {name.split(".")[-2] for name in names(model, [f"{layer}.self_attn.q_proj.weight", f"{layer}.mlp.up_proj"])}
    assert found == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    assert {name.split(".")[-2] for name in names(model, f"{layer}.self_attn.o_proj")} == {"o_proj"}


def test_tensors_are_made_when_they_are_asked_for(monkeypatch: Any) -> None:
    model, made = prepared("fp8_block", mixtral()), list[str]()
    get = QuantizedWeights.__getitem__
    monkeypatch.setattr(QuantizedWeights, "__getitem__", lambda self, name: made.append(name) or get(self, name))
    found = fq.encode(model, "compressed-tensors")
    assert made == []
    assert len(found.lazy["model.norm.weight"].shape) == 1
    dict(found.items())
    assert len(made) == len({*made})  # each stack is encoded once, for all of its experts and for codes and scales


def test_it_follows_training() -> None:
    """Weights without ranges of calibration have those of the present values, at each step."""
    model = prepared("fp8_block", ranges=False)
    name = "model.layers.0.self_attn.q_proj.weight"
    before = fq.encode(model, "compressed-tensors", only=name)[f"{name}_scale"].clone()
    with torch.no_grad():
        model.get_parameter(name).mul_(2)
    assert torch.equal(fq.encode(model, "compressed-tensors", only=name)[f"{name}_scale"], 2 * before)


def test_errors_say_what_to_do() -> None:
    model = prepared("int4_group32")
    with pytest.raises(ConfigError, match=r"only= has 'model\.layers\.0\.self_attn\.q_pro', .*did you mean .*q_proj"):
        fq.encode(model, "compressed-tensors", only=["model.layers.0.self_attn.q_pro"])
    with pytest.raises(ConfigError, match=r"only= has '\*nothing'"):
        fq.encode(model, "compressed-tensors", only=["*q_proj", "*nothing"])
    for only in (3, [3]):
        with pytest.raises(ConfigError, match="only= takes names of layers or tensors, got 3"):
            fq.encode(model, "compressed-tensors", only=only)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"such as torch\.bfloat16, got"):
        fq.encode(model, "compressed-tensors", dtype=torch.int8)
    with pytest.raises(ConfigError, match=r"such as torch\.bfloat16, got 'bfloat16'"):
        fq.encode(model, "compressed-tensors", dtype="bfloat16")  # type: ignore[arg-type]
    with pytest.raises(ExportError, match="gguf is a single file"):
        fq.encode(model, "gguf")
    with pytest.raises(ExportError, match="fakequant reads files of awq, but does not write them"):
        fq.encode(model, "awq")
    with pytest.raises(CheckpointError, match="unknown format 'vllm'"):
        fq.encode(model, "vllm")
    with pytest.raises(CheckpointError, match=r"unknown format \['mlx'\]"):
        fq.encode(model, ["mlx"])  # type: ignore[arg-type]
    with pytest.raises(ExportError, match="compressed-tensors cannot hold"):
        fq.encode(prepared("nf4 per_block(-1:64)"), "compressed-tensors")
    with pytest.raises(CheckpointError, match="prepare"):
        fq.encode(nn.Linear(2, 2), "compressed-tensors")


def test_searched_scales_are_in_the_same_files(tmp_path: Path) -> None:
    text = "float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn:searched@per_tensor"
    model = prepared(text)
    plain, found = (fq.encode(one, "compressed-tensors") for one in (prepared(_NV), model))
    assert (plain.config, {*plain}) == (found.config, {*found})
    assert_delivered(found, model, "compressed-tensors", tmp_path)
    assert fq.verify_delivery(tmp_path, model).passed
