"""torchao: codes as they are in its tensor subclasses, its values and outputs, and files that are read and refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CheckpointError, ExportError
from tests.support.language_models import llava

X = torch.linspace(-3, 3, 5 * 64).reshape(5, 64)
NV = "float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn@per_tensor"
SPECS = [
    "int8 per_channel(0)",
    "int8 per_tensor",
    "int8_narrow per_channel(0)",
    *(f"int{bits} per_block(-1:32)" for bits in range(2, 9)),
    "int4 per_channel(0)",
    "int4 per_block(-1:32) asymmetric",
    *(f"uint{bits} per_block(-1:16)" for bits in (2, 3, 4, 5, 8)),
    "uint4 per_block(-1:32) scale=float16",
    "int4 per_block(-1:32) scale=bfloat16",
    "float8_e4m3fn per_channel(0)",
    "float8_e4m3fn per_tensor",
    NV,
]


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64, bias=False)).to(dtype)


def rule(pattern: str, spec: str) -> fq.Rule:
    return fq.Rule(pattern, weight=fq.TensorConfig(spec))


def prepared(spec: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = fq.prepare(net(dtype), fq.Config("own", (rule("*", spec),)))
    fq.calibrate(model, [X.to(dtype)], progress=False)
    return model


def tensors_of(path: Path) -> dict[str, Tensor]:
    return load_file(path / "model.safetensors")


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.filterwarnings("ignore::fakequant.errors.CoverageWarning")
def test_written_and_read_and_written_again(tmp_path: Path, spec: str) -> None:
    model = prepared(spec)
    path = fq.deliver(model, tmp_path / "one", "torchao")
    again: Any = fq.read(path, net())
    assert torch.equal(again(X), model(X))
    assert fq.verify_delivery(path, model).differing == 0
    two = tensors_of(fq.deliver(again, tmp_path / "two", "torchao"))
    one = tensors_of(path)
    assert {*one} == {*two}
    assert all(one[name].view(torch.uint8).equal(two[name].view(torch.uint8)) for name in one if one[name].dim())


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore::fakequant.errors.CoverageWarning")
def test_values_and_outputs_are_those_of_torchao(tmp_path: Path, spec: str, dtype: torch.dtype) -> None:
    pytest.importorskip("torchao")
    model: Any = prepared(spec, dtype)
    path = fq.deliver(model, tmp_path, "torchao")
    report = fq.verify_delivery(path, model, [X.to(dtype)])
    assert report.passed, report
    assert "torchao" in report.runtime
    support: Any = import_module("torchao.prototype.safetensors.safetensors_support")
    with safe_open(path / "model.safetensors", "pt") as file:
        said = {key: text for key, text in file.metadata().items() if key != "fakequant"}  # the mark of our files
    theirs, left = support.unflatten_tensor_state_dict(tensors_of(path), said)
    assert not left
    for number in (0, 2):
        assert torch.equal(
            theirs[f"{number}.weight"].dequantize(), fq.snapshot(model).weights[f"{number}.weight"].values()
        )
    flat, texts = support.flatten_tensor_state_dict(theirs)
    assert {*flat} == {*tensors_of(path)}
    assert {name: json.loads(text) for name, text in texts.items()} == {
        name: json.loads(text) for name, text in said.items() if name != "format"
    }


@pytest.mark.filterwarnings("ignore::fakequant.errors.CoverageWarning")
def test_transformers_loads_the_folder(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 50}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    model = transformers.LlamaForCausalLM(config).eval()
    rules = [rule("*proj", "int4 per_block(-1:16)"), rule("*o_proj", NV), fq.Rule("*q_proj")]
    fq.prepare(model, fq.Config("own", (*rules, rule("*v_proj", "float8_e4m3fn per_channel(0)"))))
    ids = torch.arange(32).reshape(2, 16)
    path = fq.deliver(model, tmp_path, "torchao", max_shard_size=10_000)
    assert len([*path.glob("*.safetensors")]) > 2
    report = fq.verify_delivery(path, model, [{"input_ids": ids}])
    assert report.passed, report
    assert "transformers" in report.runtime
    assert [row.max_abs for row in report.outputs] == [0, 0]
    again: Any = fq.read(path)
    assert torch.equal(again(ids).logits, model(ids).logits)


REFUSED = {
    "float6_e2m3fn per_channel(0)": "files have integers of 2 to 8 bits, float8_e4m3fn",
    "float8_e5m2 per_channel(0)": "files have integers of 2 to 8 bits",
    "nf4 per_block(-1:32)": "files have integers of 2 to 8 bits",
    "int1 per_channel(0)": "files have integers of 2 to 8 bits",
    "int12 per_channel(0)": "files have integers of 2 to 8 bits",
    "float8_e4m3fn per_block(-1:32)": "float8_e4m3fn has scales of tensors or rows",
    "float8_e4m3fn per_block(-1:32) scale=float8_e8m0fnu:floor": "float8_e4m3fn has scales of tensors or rows",
    "float4_e2m1fn per_block(-1:32) scale=float8_e8m0fnu:floor": "files have integers of 2 to 8 bits",
    "float4_e2m1fn per_block(-1:16)": "files have integers of 2 to 8 bits",
    "int8 per_channel(1)": "with scales of tensors, rows or groups of inputs",
    "int8 per_block(0:8,-1:8)": "with scales of tensors, rows or groups of inputs",
    "int4 per_block(-1:24,pad)": "groups must divide the weight, but",
    "int8 per_channel(0) multiplier": "files multiply codes by scales",
    "uint4 per_block(-1:32) scale=float16 offset=float16": "without offsets in units of x",
}


@pytest.mark.parametrize("spec", REFUSED)
@pytest.mark.filterwarnings("ignore::fakequant.errors.CoverageWarning")
def test_what_the_files_cannot_hold_is_refused(tmp_path: Path, spec: str) -> None:
    model = prepared(spec)
    with pytest.raises(ExportError) as raised:
        fq.deliver(model, tmp_path / "new", "torchao")
    assert re.search(rf"\n  (0|2 parts \(0, 2\)): its weight is {re.escape(spec)}, and ", str(raised.value))
    assert REFUSED[spec] in str(raised.value)
    assert "the nearest preset that it holds is" in str(raised.value)
    assert not (tmp_path / "new").exists()


def test_activations_and_other_layers_are_refused(tmp_path: Path) -> None:
    model = fq.prepare(net(), "int8_per_token")
    with pytest.raises(
        ExportError, match=r"2 parts \(0, 2\): its input is int8 per_token dynamic, and activations stay in float"
    ):
        fq.deliver(model, tmp_path, "torchao")
    convolution = fq.prepare(nn.Sequential(nn.Conv2d(2, 2, 1)), "int8_weight_only")
    with pytest.raises(ExportError, match="0: it quantizes weights of linear layers, and this is a Conv2d"):
        fq.deliver(convolution, tmp_path, "torchao")
    alone = fq.prepare(nn.Linear(8, 8), "int8_weight_only")
    with pytest.raises(ExportError, match="but the model itself is the layer; put it into"):
        fq.deliver(alone, tmp_path, "torchao")
    bare: Any = fq.prepare(net(), "int8_weight_only")
    bare.register_buffer("mean", torch.ones(1))
    with pytest.raises(ExportError, match="mean: files name the module of each tensor"):
        fq.deliver(bare, tmp_path / "new", "torchao")
    assert not [*tmp_path.iterdir()]


def change(key: str, how: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor], dict[str, str]], Any]:
    return lambda tensors, texts: tensors.update({key: how(tensors[key])})


def said(**values: Any) -> Callable[[dict[str, Tensor], dict[str, str]], Any]:
    def apply(tensors: dict[str, Tensor], texts: dict[str, str]) -> None:
        given = json.loads(texts["0.weight"])
        given["_data"] |= values
        texts["0.weight"] = json.dumps({**given, "_type": values.get("_type", given["_type"])})

    return apply


CODES, SCALE, POINT = (f"0._weight_{end}" for end in ("qdata", "scale", "zero_point"))
DAMAGE: dict[str, tuple[Callable[[dict[str, Tensor], dict[str, str]], Any], str]] = {
    "cut": (change(CODES, lambda x: x[1:]), r"of 0, _weight_qdata is torch.int8 of shape \[31, 64\]"),
    "lost": (lambda tensors, texts: tensors.pop(SCALE), "lacks 0._weight_scale"),
    "swapped": (change(SCALE, lambda x: x.T.contiguous()), r"_weight_scale is torch.float32 of shape \[2, 32\]"),
    "range": (change(CODES, lambda x: x.fill_(9)), "codes of 0.weight hold 9, but the codes of int4 are -8 to 7"),
    "points": (change(POINT, lambda x: x + 0.5), "zero points are not whole numbers"),
    "far points": (change(POINT, lambda x: x + 100), "zero"),
    "NaN": (change(SCALE, lambda x: x * torch.nan), "scale"),
    "no JSON": (
        lambda tensors, texts: texts.update({"0.weight": "{"}),
        "is not in the format torchao, or it is damaged: J",
    ),
    "deep JSON": (lambda tensors, texts: texts.update({"0.weight": "[" * 50_000}), "or it is damaged: RecursionError"),
    "text": (lambda tensors, texts: texts.update({"0.weight": '"x"'}), "or it is damaged"),
    "no text": (lambda tensors, texts: texts.pop("0.weight"), "lacks 0.weight"),
    "class": (said(_type="Int4TilePackedTo4dTensor"), "weight is a 'Int4TilePackedTo4dTensor'; this reader knows"),
    "activation": (said(activation_quantization="int8_asym_per_token"), "weight has activation_quantization = 'int8"),
    "target": (said(target_dtype={"_type": "torch.dtype", "_data": "load"}), "target_dtype is 'load'"),
    "one bit": (said(target_dtype={"_type": "torch.dtype", "_data": "int1"}), "target_dtype is 'int1'"),
    "block": (said(block_size=[1, 24]), r"block_size is \[1, 24\], not the whole weight"),
    "huge block": (said(block_size=[1, 10**15]), "block_size is"),
    "block text": (said(block_size="__import__('os')"), "block_size is"),
    "zero block": (said(block_size=[1, 0]), r"block_size is \[1, 0\], not two numbers"),
    "two": (lambda tensors, texts: tensors.update({"0.weight": torch.ones(32, 64)}), r"no place: 0\.weight"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(tmp_path: Path, name: str) -> None:
    damage, message = DAMAGE[name]
    path = fq.deliver(prepared("int4 per_block(-1:32)"), tmp_path, "torchao") / "model.safetensors"
    with safe_open(path, "pt") as file:
        texts = file.metadata()
    tensors = load_file(path)
    damage(tensors, texts)
    save_file(tensors, path, texts)
    with pytest.raises(CheckpointError, match=message):
        fq.read(tmp_path, net())


def test_layers_of_a_vision_language_model_are_compared_by_their_names_in_the_model(tmp_path):
    """torchao's tensors were looked for under the names of the file; transformers fails on them."""
    pytest.importorskip("torchao", reason="torchao is not installed: make test-delivery installs it")
    model = fq.prepare(llava(), "int4_group32", skip=["*vision_tower*", "*multi_modal_projector*", "*lm_head"])
    fq.calibrate(model)
    with pytest.warns(
        UserWarning, match=r"transformers does not load these files, because model\.language_model.* is called"
    ):
        folder = fq.deliver(model, tmp_path, "torchao")
    report = fq.verify_delivery(folder, model)
    assert "torchao 0." in report.runtime
    assert report.differing == 0
    assert "RuntimeError" in report.failed[0]
