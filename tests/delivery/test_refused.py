"""What a format cannot hold is refused before the work, by layer, with the reason and the nearest preset."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrize import remove_parametrizations

import fakequant as fq
from fakequant.errors import ConfigError, ExportError
from tests.support.language_models import language_model

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
        "float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn:four_over_six@per_tensor dynamic",
        "float8_e4m3fn per_block(-1:36,pad) dynamic",
    ),
]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 96))


def refusal(model: nn.Module, folder: Path, format: str = "compressed-tensors") -> str:
    with pytest.raises(ExportError) as raised:
        fq.deliver(model, folder / "new", format)
    assert not (folder / "new").exists()
    return str(raised.value)


def prepared(config: fq.Config | str) -> nn.Module:
    model = fq.prepare(net(), config)
    fq.calibrate(model, [X], progress=False)
    return model


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("spec", WEIGHTS)
def test_weights(spec: str, tmp_path: Path) -> None:
    text = refusal(prepared(fq.Config("own", [fq.Rule("0", weight=spec)])), tmp_path)
    first, line = text.split("\n")
    assert first == "compressed-tensors cannot hold 1 part of the model as it is quantized:"
    assert line.startswith("  0: its weight is ")
    assert "; the nearest preset that it holds is " in line
    nearest = line.rpartition(" ")[2]
    assert nearest in {name for name in dir(fq.presets) if name.isupper()}
    assert fq.deliver(prepared(nearest), tmp_path / "nearest", "compressed-tensors").is_dir()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("spec", INPUTS)
def test_activations(spec: str, tmp_path: Path) -> None:
    words = spec.split(" dynamic")
    rule = fq.Rule("2", weight="int8 per_channel(0)", input=fq.TensorConfig(words[0], len(words) > 1))
    text = refusal(prepared(fq.Config("own", [rule])), tmp_path)
    assert "\n  2: its input is " in text
    assert "; the nearest preset that it holds is " in text


@pytest.mark.parametrize(("preset", "nearest"), [("MXFP4", "NVFP4"), ("INT8_PER_TOKEN", "W8A8_DYNAMIC")])
def test_the_nearest_preset_has_the_format_of_the_weight(preset: str, nearest: str, tmp_path: Path) -> None:
    assert refusal(prepared(preset), tmp_path).endswith(f"; the nearest preset that it holds is {nearest}")


COMPUTED = (
    "its weight is computed (weight_norm, pruning, a parametrization); make it a parameter first, for example by "
)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("format", ["compressed-tensors", "torchao", "mlx"])
@pytest.mark.parametrize(
    ("change", "finish"),
    [
        (nn.utils.parametrizations.weight_norm, lambda x: remove_parametrizations(x, "weight")),
        (nn.utils.parametrizations.orthogonal, lambda x: remove_parametrizations(x, "weight")),
        (nn.utils.weight_norm, nn.utils.remove_weight_norm),
        (lambda x: prune.l1_unstructured(x, "weight", 0.5), lambda x: prune.remove(x, "weight")),
    ],
    ids=["weight_norm", "orthogonal", "hook", "pruned"],
)
def test_weights_that_are_computed(change: Any, finish: Any, format: str, tmp_path: Path) -> None:
    preset, target = {
        "compressed-tensors": ("int4_group32", "vllm"),
        "torchao": ("int4_group32", "torchao"),
        "mlx": ("mlx_4bit", "mlx"),
    }[format]
    models: list[Any] = [nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 128)) for _ in range(2)]
    for one in models:
        change(one[0])
    with pytest.raises(ConfigError, match=re.escape(COMPUTED)):
        fq.prepare(models[0], preset, target=target)
    model = fq.prepare(models[1], preset)
    fq.calibrate(model)
    assert refusal(model, tmp_path, format).endswith(f"\n  0: {COMPUTED}prune.remove or remove_parametrizations")
    finish(model[0])
    assert fq.verify_delivery(fq.deliver(model, tmp_path / "new", format), model).passed


def test_a_layer_is_counted_once(tmp_path: Path) -> None:
    model = fq.prepare(net(), "INT8_WEIGHT_ONLY")
    fq.qat.set_scales(model, fq.qat.Scales.LEARNED)
    expected = "cannot hold 2 parts of the model as they are quantized:\n  2 parts (0, 2): its range is learned; "
    assert expected in refusal(model, tmp_path)


@pytest.mark.parametrize("preset", ["INT8", "INT8_AFFINE", "int8 per_channel(0)"])
@pytest.mark.parametrize("format", ["compressed-tensors", "torchao"])  # gguf holds no such model at all
def test_ranges_that_no_data_has_set(preset: str, format: str, tmp_path: Path) -> None:
    is_output = "per_channel" in preset
    rule = fq.Rule("*", weight=preset, output="int8" if is_output else None) if is_output else None
    text = refusal(fq.prepare(net(), fq.Config("own", [rule]) if rule else preset), tmp_path, format)
    name = "output" if is_output else "input"
    expected = f"\n  2 parts (0, 2): its {name} has no range yet; call fakequant.calibrate(model, batches) before"
    assert text.endswith(expected)


@pytest.mark.parametrize("format", ["compressed-tensors", "torchao", "mlx"])
@pytest.mark.parametrize("preset", ["INT4_GROUP32", "INT8_WEIGHT_ONLY", "INT8"])
def test_models_in_float64(preset: str, format: str, tmp_path: Path) -> None:
    model = fq.prepare(net().double(), preset)
    fq.calibrate(model, [X.double()], progress=False)
    text = refusal(model, tmp_path, format)
    assert (
        "\n  2 parts (0, 2): it is in float64, whose scales files round to float32; convert it by model.float()" in text
    )


@pytest.mark.parametrize("format", ["compressed-tensors", "torchao"])
@pytest.mark.parametrize(
    "spec", ["int4 per_block(-1:32) scale=float16:signed", "int8 per_channel(0) scale=float16:signed", "gguf_q4_0"]
)
def test_signed_scales(spec: str, format: str, tmp_path: Path) -> None:
    config = spec if spec.startswith("gguf") else fq.Config("own", [fq.Rule("*", weight=spec)])
    text = refusal(fq.prepare(net(), config), tmp_path, format)
    assert "programs expect positive scales, but these have signs; the nearest preset that it holds is " in text


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(16, 32), nn.Linear(32, 32), nn.Linear(32, 16, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.table(x)))


@pytest.mark.parametrize("preset", ["FP8", "INT8_AFFINE", "W8A8_DYNAMIC", "INT8"])
def test_inputs_of_a_tied_head(preset: str, tmp_path: Path) -> None:
    def ready(preset: str, skip: list[str]) -> nn.Module:
        model = fq.prepare(Tied(), preset, skip=skip)
        fq.calibrate(model, [torch.arange(16)], progress=False)
        return model

    text = refusal(ready(preset, []), tmp_path)
    assert "these files hold its weight in float, like all tables and tied weights, and have no place for" in text
    assert text.endswith("; leave the layers in float by prepare(..., skip=['head', 'table'])")
    assert fq.deliver(ready(preset, ["head", "table"]), tmp_path / "cured", "compressed-tensors").is_dir()
    text = refusal(ready(preset, ["head"]), tmp_path)
    assert text.endswith(
        "table: head has the same weight and no quantizer; leave both in float by prepare(..., skip=['table', 'head'])"
    )
    assert "skip=['head', 'table'])" in refusal(ready(preset, ["table"]), tmp_path)


@pytest.mark.parametrize("format", ["compressed-tensors", "torchao"])
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: nn.Linear(64, 64), "the model: files name the layer of each tensor"),
        (lambda: nn.Linear(64, 64, bias=False), "the model: files name the layer of each tensor"),
        (
            lambda: nn.Sequential(nn.Embedding(16, 64)),
            "0: these files hold tables and tied weights in float, and the model",
        ),
        (lambda: nn.Embedding(16, 64), "the model has no other quantized weights"),
    ],
)
def test_layers_without_names_and_tables_alone(make: Any, text: str, format: str, tmp_path: Path) -> None:
    model = fq.prepare(make(), fq.Config("own", [fq.Rule("*", weight="int8 per_channel(0)")]))
    assert text in refusal(model, tmp_path, format)


@pytest.mark.parametrize("target", ["transformers", "torchao", "mlx"])
def test_layers_of_gpt_2_are_refused_before_the_work_with_the_cure(target: str) -> None:
    model, preset = language_model("gpt2", n_positions=16), "MLX_4BIT" if target == "mlx" else "INT4_GROUP32"
    said = r"this is a Conv1D, whose weight is \[in, out\], for which transformers loads no codes"
    others = r"GGUF files of GPT-2 \(a preset GGUF_\.\.\.\) and export_onnx hold it"
    with pytest.raises(ConfigError, match=f"(?s)cannot hold 8 parts .*{said}; {others}; leave it in float by Rule"):
        fq.prepare(model, preset, target=target)


def test_files_of_gpt_2_that_the_refusal_names_are_written(tmp_path: Path) -> None:
    model = fq.prepare(language_model("gpt2"), "GGUF_Q8_0", target="llama.cpp")
    with pytest.warns(UserWarning, match="the file has no tokenizer"):
        assert fq.verify_delivery(fq.deliver(model, tmp_path, target="llama.cpp"), model).passed
    model, ids = (
        fq.prepare(language_model("gpt2", n_positions=16, num_hidden_layers=1), "INT4_GROUP32"),
        torch.ones(1, 8),
    )
    fq.export_onnx(model, ids.long(), tmp_path / "model.onnx")
    assert fq.verify_onnx(tmp_path / "model.onnx", model).exact


def _linear_for_conv1d(model: Any) -> None:
    """GPT-2 with linear layers of the same values in the places of its Conv1D."""
    for block in model.transformer.h:
        for owner, name in ((block.attn, "c_attn"), (block.attn, "c_proj"), (block.mlp, "c_fc"), (block.mlp, "c_proj")):
            turned = getattr(owner, name)
            linear = nn.Linear(*turned.weight.shape)
            linear.weight.data, linear.bias.data = turned.weight.data.T.contiguous(), turned.bias.data
            setattr(owner, name, linear)


def _narrow(model: Any) -> None:
    """A Llama whose first MLP lost half of its channels."""
    mlp, size = model.model.layers[0].mlp, model.config.intermediate_size // 2
    mlp.gate_proj, mlp.up_proj = (nn.Linear(model.config.hidden_size, size, bias=False) for _ in range(2))
    mlp.down_proj = nn.Linear(size, model.config.hidden_size, bias=False)


def _more(model: Any) -> None:
    """A Llama with a layer that its class does not have."""
    model.lm_head = nn.Sequential(model.lm_head, nn.Linear(model.config.vocab_size, model.config.vocab_size))


@pytest.mark.parametrize("format", ["compressed-tensors", "torchao", "mlx"])
@pytest.mark.parametrize(
    ("kind", "change", "text"),
    [
        (
            "gpt2",
            _linear_for_conv1d,
            r"GPT2LMHeadModel makes a Conv1D with a weight \[256, 768\] there .* has a Linear with",
        ),
        (
            "llama",
            _narrow,
            r"LlamaForCausalLM makes a Linear with a weight \[512, 256\] .* has a Linear with a weight \[256, 256\]",
        ),
        ("llama", _more, "LlamaForCausalLM makes nothing there"),
    ],
)
def test_layers_that_the_class_makes_otherwise_are_refused(
    kind: str, change: Any, text: str, format: str, tmp_path: Path
) -> None:
    """Loaders make the model anew by its configuration: they would load these tensors into nothing, and say nothing."""
    model = language_model(kind)
    change(model)
    preset = "MLX_4BIT" if format == "mlx" else "INT4_GROUP32"
    model = fq.prepare(model, preset, skip=[])
    with pytest.raises(ExportError, match=f"(?s){text}"):
        fq.deliver(model, tmp_path / "out", format=format)
    assert not (tmp_path / "out").exists()
