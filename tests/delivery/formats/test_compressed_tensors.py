"""compressed-tensors: what transformers and the package load from our files is what the model computes."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fakequant as fq
from fakequant.delivery.folder import by_transformers
from fakequant.delivery.formats import compressed_tensors
from fakequant.errors import ExportError
from fakequant.nn.quantizer import Mode, quantizers
from tests.support.language_models import BATCHES, llama, logits, mixtral

pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

_FP8, _FP4 = "float8_e4m3fn", "float4_e2m1fn"
_MX = "per_block(-1:32) scale=float8_e8m0fnu:floor"
_OWN, _FP4_OWN = (f"per_block(-1:32) scale=float8_e8m0fnu:{rule} dynamic" for rule in ("even", "even_fp4"))
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


def quantization(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found


def assert_same_tensors(one: Path, two: Path) -> None:
    first, second = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    assert first.keys() == second.keys()
    assert [name for name in first if first[name].dtype != second[name].dtype] == []
    assert [n for n in first if not torch.equal(first[n].view(torch.uint8), second[n].view(torch.uint8))] == []


@pytest.mark.parametrize(("layout", "config"), CASES, ids=[f"{name}-{n}" for n, (name, _) in enumerate(CASES)])
def test_other_programs_compute_what_the_model_computes(layout: str, config: fq.Config, tmp_path: Path) -> None:
    model = prepared(config)
    folder = fq.deliver(model, tmp_path / "one", "compressed-tensors")
    assert quantization(folder)["format"] == layout
    report = fq.verify_delivery(folder, model, BATCHES)
    assert report.passed, str(report)
    assert "compressed-tensors 0." in report.runtime
    assert [row.differing for row in report.outputs] == [0] * (layout != "nvfp4-pack-quantized")
    again = fq.read(folder)
    assert torch.equal(logits(again), logits(model))
    assert_same_tensors(folder, fq.deliver(again, tmp_path / "two", "compressed-tensors"))


@pytest.mark.parametrize("weight", ["int4 per_block(-1:32)", "int8 per_channel(0)", f"{_FP4} {_MX}", _NV])
def test_experts_are_written_one_by_one(weight: str, tmp_path: Path) -> None:
    config = fq.Config("own", [fq.Rule("*proj", weight=weight), fq.Rule("*experts", weight=weight)])
    model = prepared(config, mixtral())
    folder = fq.deliver(model, tmp_path / "one", "compressed-tensors")
    names = {*load_file(folder / "model.safetensors")}
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight_scale" in names
    assert not any("gate_up_proj" in name for name in names)
    report = fq.verify_delivery(folder, model, BATCHES)
    assert report.passed, str(report)
    again = fq.read(folder)
    assert torch.equal(logits(again), logits(model))
    assert_same_tensors(folder, fq.deliver(again, tmp_path / "two", "compressed-tensors"))


@pytest.mark.parametrize(("inner", "is_loaded"), [(32, True), (128, True), (16, False)])
def test_experts_whose_weights_have_different_widths_are_read(inner: int, is_loaded: bool, tmp_path: Path) -> None:
    """Groups that are whole rows of the one weight and not of the other: they had one pattern for two schemes."""
    net = mixtral(intermediate_size=inner)
    model = prepared(fq.Config("own", [fq.Rule("*experts", weight="int4 per_block(-1:32,pad)")]), net)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        folder = fq.deliver(model, tmp_path, "compressed-tensors")
    assert any("transformers loads experts of one scheme alone" in str(one.message) for one in said) is not is_loaded
    assert fq.verify_delivery(folder, model, BATCHES).passed is is_loaded
    assert torch.equal(logits(fq.read(folder)), logits(model))


@pytest.mark.parametrize("inner", [16, 24, 48])
def test_tiles_over_two_weights_of_a_stack_are_refused_before_the_work(inner: int, tmp_path: Path) -> None:
    tiles = fq.Config("own", [fq.Rule("*experts", weight="float8_e4m3fn per_block(-2:32,-1:32,pad)")])
    model = prepared(tiles, mixtral(intermediate_size=inner))
    with pytest.raises(ExportError, match=rf"w1\.weight by itself, of {inner} rows, and scales are of 32"):
        fq.deliver(model, tmp_path / "new", "compressed-tensors")
    assert not (tmp_path / "new").exists()


def test_a_configuration_that_gives_a_layer_another_scheme_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    config = [fq.Rule("*proj", weight="int8 per_channel(0)"), fq.Rule("*experts", weight="int4 per_block(-1:32)")]
    monkeypatch.setattr(compressed_tensors, "_pattern", lambda bases: "re:.*")
    with pytest.raises(ExportError, match=r"cannot say in config\.json how .* is quantized: programs would take"):
        fq.deliver(prepared(fq.Config("own", config), mixtral()), tmp_path, "compressed-tensors")


def test_experts_and_other_layers_have_schemes_of_their_own(tmp_path: Path) -> None:
    config = [fq.Rule("*proj", weight="int8 per_channel(0)"), fq.Rule("*experts", weight="int4 per_block(-1:32)")]
    model = prepared(fq.Config("own", config), mixtral())
    folder = fq.deliver(model, tmp_path, "compressed-tensors")
    targets = [group["targets"] for group in quantization(folder)["config_groups"].values()]
    experts = r"re:model[.]layers[.]0[.]block_sparse_moe[.]experts[.]\d+[.]"
    assert targets == [[rf"{experts}(w1|w3)$", rf"{experts}w2$"], ["Linear"]]
    assert "model.layers.0.block_sparse_moe.gate" in quantization(folder)["ignore"]
    assert fq.verify_delivery(folder, model, BATCHES).passed
    assert torch.equal(logits(fq.read(folder)), logits(model))


@pytest.mark.parametrize("preset", ["INT4_GROUP32", rules("int4 per_block(-1:32)")], ids=["all", "float"])
def test_a_tied_head_stays_tied(preset: fq.Config | str, tmp_path: Path) -> None:
    model = prepared(preset, llama(tied=True))
    folder = fq.deliver(model, tmp_path, "compressed-tensors")
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    assert "lm_head" in quantization(folder)["ignore"]
    report = fq.verify_delivery(folder, model, BATCHES)
    assert report.passed, str(report)
    again: Any = fq.read(folder)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(logits(again), logits(model))


def test_layers_with_schemes_of_their_own(tmp_path: Path) -> None:
    last = fq.Rule("*down_proj", weight="int8 per_channel(0)", input="int8")
    head = fq.Rule("lm_head", weight="int4 per_channel(0)")
    model = prepared(rules("int4 per_block(-1:32)").with_rule(last, head))
    folder = fq.deliver(model, tmp_path, "compressed-tensors")
    groups = quantization(folder)["config_groups"].values()
    assert [group["targets"][-1] for group in groups] == ["lm_head", "model.layers.1.mlp.down_proj", "Linear"]
    assert quantization(folder)["format"] == "mixed-precision"
    assert fq.verify_delivery(folder, model, BATCHES).passed
    assert torch.equal(logits(fq.read(folder)), logits(model))


@pytest.mark.parametrize("scale", ["", " scale=bfloat16"], ids=["float32", "bfloat16"])
def test_models_in_bfloat16(scale: str, tmp_path: Path) -> None:
    model = prepared(rules(f"int4 per_block(-1:32){scale}"), llama(dtype=torch.bfloat16))
    folder = fq.deliver(model, tmp_path, "compressed-tensors")
    held = {tensor.dtype for name, tensor in load_file(folder / "model.safetensors").items() if "scale" in name}
    assert held == {torch.bfloat16 if scale else torch.float32}
    report = fq.verify_delivery(folder, model, BATCHES)
    assert report.passed, str(report)
    again = fq.read(folder)
    assert torch.equal(logits(again), logits(model))
    assert {str(q.spec.scale) for q in quantizers(again).values()} == {scale.strip()}


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
    with pytest.raises(ExportError, match=r"14 parts.*programs take other scales.*:even_fp4"):
        fq.deliver(prepared(config), tmp_path, "compressed-tensors")


@pytest.mark.parametrize("spec", [_FP8, "int8"])
@pytest.mark.parametrize("query", [True, False])
def test_keys_and_values(spec: str, query: bool, tmp_path: Path) -> None:
    config = rules("int8 per_channel(0)").with_rule(fq.Rule("*attn", input=spec, ops=("sdpa",)))
    model = fq.prepare(llama(), config, example=BATCHES[0])
    fq.calibrate(model, BATCHES, progress=False)
    for path, quantizer in quantizers(model).items():
        if path.endswith("query") and not query:
            quantizer.mode = Mode.OFF
    folder = fq.deliver(model, tmp_path / "one", "compressed-tensors")
    names = {name.rpartition(".")[2] for name in load_file(folder / "model.safetensors")}
    assert {"k_scale", "v_scale"} | ({"q_scale"} if query else set()) <= names
    assert (quantization(folder)["kv_cache_scheme"] is None) is query
    report = fq.verify_delivery(folder, model, BATCHES)
    assert report.passed, str(report)
    again = fq.read(folder)
    assert torch.equal(logits(again), logits(model))
    assert_same_tensors(folder, fq.deliver(again, tmp_path / "two", "compressed-tensors"))


def test_keys_and_values_of_some_layers_are_refused(tmp_path: Path) -> None:
    config = rules("int8 per_channel(0)").with_rule(fq.Rule("*0.self_attn", input=_FP8, ops=("sdpa",)))
    model = fq.prepare(llama(), config, example=BATCHES[0])
    fq.calibrate(model, BATCHES, progress=False)
    with pytest.raises(ExportError, match=r"model\.layers\.1\.self_attn: files have keys and values of all layers"):
        fq.deliver(model, tmp_path, "compressed-tensors")


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


def nvfp4_inputs() -> nn.Module:
    return fq.delivery.fix_global_scales(prepared(rules(_NV, f"{_NV} dynamic")), BATCHES)


def test_nvfp4_inputs_under_a_fixed_scale(tmp_path: Path) -> None:
    """transformers fails on the bfloat16 weights that the package makes; inputs are compared with the package alone."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import forward_quantize

    model = nvfp4_inputs()
    folder = fq.deliver(model, tmp_path / "one", "compressed-tensors")
    (group,) = quantization(folder)["config_groups"].values()
    assert group["input_activations"]["dynamic"] == "local"
    report = fq.verify_delivery(folder, model, BATCHES)
    assert report.passed, str(report)
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
    again = fq.read(folder)
    assert torch.equal(logits(again), logits(model))
    assert_same_tensors(folder, fq.deliver(again, tmp_path / "two", "compressed-tensors"))


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
