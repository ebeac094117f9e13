"""MLX: codes as they are in its folders, its values and logits, its own folders, and files that are refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CheckpointError, ExportError, QParamsError
from tests.support.language_models import IDS, llama, mixtral

X = torch.linspace(-3, 3, 5 * 128).reshape(5, 128)
BF16 = "scale=bfloat16 offset=bfloat16"
AFFINE = [f"uint{bits} per_block(-1:{size}) {BF16}" for bits in (2, 3, 4, 5, 6, 8) for size in (64, 32)]
MXFP4, MXFP8, NVFP4 = FLOATS = [
    "float4_e2m1fn per_block(-1:32) scale=float8_e8m0fnu:floor",
    "float8_e4m3fn per_block(-1:32) scale=float8_e8m0fnu:ceil",
    "float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn",
]
FORMATS = [*AFFINE, *FLOATS]
OTHERS = [
    *(f"int{bits} per_block(-1:32) scale=bfloat16" for bits in (2, 3, 4, 5, 6, 8)),
    "int4 per_block(-1:32)",
    "int8_narrow per_channel(0) scale=float16",
    "int4 per_block(-1:64,pad) scale=float16:signed",
    "uint4 per_block(-1:64) symmetric",
    "uint4 per_block(-1:128) offset=float32",
    "uint8 per_block(-1:64) offset=float32:signed",
]
MODES = {"float4_e2m1fn32": ("mxfp4", 4), "float8_e4m3fn32": ("mxfp8", 8), "float4_e2m1fn16": ("nvfp4", 4)}
pytestmark = pytest.mark.filterwarnings("ignore::fakequant.errors.CoverageWarning")


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 8, bias=False)).to(dtype)


def config_of(spec: str) -> fq.Config:
    table = fq.Rule("*", weight=fq.TensorConfig(spec), layers=("Embedding",), optional=True, tied=True)
    return fq.Config("own", (fq.Rule("*", weight=fq.TensorConfig(spec)), table))


def prepared(spec: str, model: nn.Module | None = None) -> nn.Module:
    found = fq.prepare(net() if model is None else model, config_of(spec))
    fq.calibrate(found, progress=False)
    return found


def tensors_of(path: Path) -> dict[str, Tensor]:
    return load_file(path / "model.safetensors")


def settings_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())


def unpacked(weight: Tensor, bits: int) -> np.ndarray[Any, Any]:
    """Codes [rows, columns] of a stream of bits, by numpy alone."""
    stream = np.unpackbits(weight.view(torch.uint8).numpy(), axis=1, bitorder="little")
    return stream.reshape(len(weight), -1, bits) @ (1 << np.arange(bits))


def by_numpy(held: dict[str, Tensor], base: str, said: dict[str, Any]) -> np.ndarray[Any, Any]:
    """The values of a weight as MLX's documentation has them, in float32."""
    codes, size = unpacked(held[f"{base}.weight"], said["bits"]), said["group_size"]
    scales = held[f"{base}.scales"]
    if said["mode"] == "affine":
        wide = [np.repeat(held[f"{base}.{end}"].float().numpy(), size, 1) for end in ("scales", "biases")]
        return codes.astype(np.float32) * wide[0] + wide[1]
    fp4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    fp8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    values = fp8[codes] if said["bits"] == 8 else np.where(codes > 7, -fp4[codes & 7], fp4[codes & 7])
    scale = (
        fp8[scales.numpy()] if said["mode"] == "nvfp4" else np.ldexp(np.float32(1), scales.numpy().astype(int) - 127)
    )
    return values * np.repeat(scale, size, 1)


@pytest.mark.parametrize("spec", [*FORMATS, *OTHERS])
def test_the_files_hold_the_values_and_read_back_to_the_same_files(tmp_path: Path, spec: str) -> None:
    model: Any = prepared(spec)
    path = fq.deliver(model, tmp_path / "one", "mlx")
    said, held = settings_of(path)["quantization"], tensors_of(path)
    weights = fq.snapshot(model).weights
    for base in ("0", "2"):
        values = torch.from_numpy(by_numpy(held, base, said))
        exact = weights[f"{base}.weight"].values()
        if spec == "int4 per_block(-1:32)":  # 2 roundings there, 1 here
            step = weights[f"{base}.weight"].scale.max()
            assert not torch.equal(values, exact)
            torch.testing.assert_close(values, exact, rtol=0, atol=float(step) * 2.0**-19)
        else:
            assert torch.equal(values, exact)
        shift = 8 if spec.startswith("int4") else None
        if shift:
            assert np.array_equal(unpacked(held[f"{base}.weight"], 4) - shift, weights[f"{base}.weight"].codes.numpy())
    again: Any = fq.read(path, net())
    assert torch.equal(again(X), model(X))
    assert again[0].weight_quantizer.spec == model[0].weight_quantizer.spec
    assert fq.verify_delivery(path, model).differing == 0
    two = tensors_of(fq.deliver(again, tmp_path / "two", "mlx"))
    assert {*two} == {*held}
    assert all(torch.equal(two[name], held[name]) for name in held)


def test_the_layout_is_the_one_of_mlx(tmp_path: Path) -> None:
    model = fq.prepare(
        net(), fq.Config("own", (*config_of(AFFINE[4]).rules, fq.Rule("2", weight=fq.TensorConfig(MXFP8))))
    )
    path = fq.deliver(model, tmp_path, "mlx")
    own = {"group_size": 32, "bits": 8, "mode": "mxfp8"}
    said = settings_of(path)
    assert said["quantization"] == {"group_size": 64, "bits": 4, "mode": "affine", "2": own}
    assert said["quantization_config"] == said["quantization"]
    held = {name: (one.dtype, [*one.shape]) for name, one in tensors_of(path).items()}
    assert held == {
        "0.weight": (torch.uint32, [128, 16]),
        "0.scales": (torch.float32, [128, 2]),
        "0.biases": (torch.float32, [128, 2]),
        "0.bias": (torch.float32, [128]),
        "2.weight": (torch.uint32, [8, 32]),
        "2.scales": (torch.uint8, [8, 4]),
    }


@pytest.mark.parametrize("name", ["MLX_4BIT", "MLX_6BIT", "MLX_8BIT", "MLX_MXFP4", "MLX_NVFP4"])
@pytest.mark.parametrize("tied", [False, True])
def test_presets_quantize_embeddings_and_tied_heads(tmp_path: Path, name: str, tied: bool) -> None:
    pytest.importorskip("transformers")
    model: Any = fq.prepare(llama(tied=tied), name)
    fq.calibrate(model, progress=False)
    path = fq.deliver(model, tmp_path, "mlx", max_shard_size=100_000)
    assert len([*path.glob("*.safetensors")]) > 1
    again: Any = fq.read(path)
    table = again.model.embed_tokens
    assert table.weight_quantizer.spec == model.model.embed_tokens.weight_quantizer.spec
    assert again.lm_head.weight_quantizer.spec == table.weight_quantizer.spec
    assert (again.lm_head.weight is table.weight) is tied
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    report = fq.verify_delivery(path, model)
    assert report.differing == 0
    assert report.exact


def test_rotary_settings_have_the_names_that_mlx_lm_reads(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 50}
    scaled = {"rope_type": "linear", "factor": 2.0}
    for rope, expected in (({"rope_type": "default"}, None), (scaled, scaled)):
        own = {"rope_theta": 5e5, **rope}
        config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, rope_parameters=own)
        model = fq.prepare(transformers.LlamaForCausalLM(config).eval(), "mlx_4bit")
        path = fq.deliver(model, tmp_path / str(len(rope)), "mlx")
        said = settings_of(path)
        assert (said["rope_theta"], said["rope_scaling"]) == (5e5, expected)
        assert fq.read(path).config.rope_parameters == own  # type: ignore[union-attr]


def test_a_model_that_was_read_does_not_say_so_in_another_format(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = fq.read(fq.deliver(prepared("int4 per_block(-1:32)", llama()), tmp_path / "one", "mlx"))
    assert "quantization" not in settings_of(fq.deliver(model, tmp_path / "two", "torchao"))


# MLX's own files have no specification in their header, and scales of either sign.


def as_mlx_quantizes(w: Tensor, bits: int, size: int) -> dict[str, Tensor]:
    """A weight as `mx.quantize` has it: of the ends of a group, the one farther from 0 is a value."""
    grouped = w.float().unflatten(1, (-1, size))
    low, high, steps = grouped.amin(-1), grouped.amax(-1), 2**bits - 1
    is_low = low.abs() > high.abs()
    scale = ((high - low) / steps).clamp(min=1e-7) * torch.where(is_low, 1.0, -1.0)
    edge = torch.where(is_low, low, high)
    first = (edge / scale).round()
    scale = torch.where(first != 0, edge / first, scale).to(w.dtype)
    bias = torch.where(first != 0, edge, 0.0).to(w.dtype)
    codes = ((grouped - bias.float()[..., None]) / scale.float()[..., None]).round().clamp(0, steps).flatten(1)
    words = (codes.long().numpy()[..., None] >> np.arange(bits)) & 1
    stream = np.packbits(words.astype(np.uint8).reshape(len(w), -1), axis=1, bitorder="little")
    return {"weight": torch.from_numpy(stream).view(torch.uint32), "scales": scale, "biases": bias}


def foreign(path: Path, bits: int, size: int, dtype: torch.dtype = torch.bfloat16, **said: Any) -> Path:
    """A folder as mlx-lm writes it, without the texts of ours."""
    path.mkdir(exist_ok=True)
    state = net(dtype).state_dict()
    held = {"0.bias": state["0.bias"]}
    for base in ("0", "2"):
        held |= {f"{base}.{end}": one for end, one in as_mlx_quantizes(state[f"{base}.weight"], bits, size).items()}
    save_file(held, path / "model.safetensors", {"format": "mlx"})
    layout = {"group_size": size, "bits": bits, **said}
    (path / "config.json").write_text(json.dumps({"quantization": layout, "quantization_config": layout}))
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("bits", "size"), [(2, 32), (3, 64), (4, 64), (5, 32), (6, 128), (8, 64)])
def test_files_of_others_read_back_to_the_same_codes(tmp_path: Path, dtype: torch.dtype, bits: int, size: int) -> None:
    path = foreign(tmp_path / "theirs", bits, size, dtype, mode="affine")
    held = tensors_of(path)
    assert bool((held["0.scales"] < 0).any())
    assert bool((held["0.scales"] > 0).any())
    model = fq.read(path, net(dtype))
    for base in ("0", "2"):
        coded = fq.snapshot(model).weights[f"{base}.weight"]
        assert np.array_equal(coded.codes.numpy(), unpacked(held[f"{base}.weight"], bits))
        values = by_numpy(held, base, {"bits": bits, "group_size": size, "mode": "affine"})
        assert torch.equal(coded.values(), torch.from_numpy(values).to(dtype))
    again = tensors_of(fq.deliver(model, tmp_path / "ours", "mlx"))
    assert {*again} == {*held}
    assert all(torch.equal(again[name], held[name]) for name in held)


def test_a_layer_is_read_by_its_own_layout(tmp_path: Path) -> None:
    path = foreign(tmp_path, 4, 64)
    two = as_mlx_quantizes(net(torch.bfloat16)[2].weight.detach(), 8, 32)  # type: ignore[index]
    save_file(tensors_of(path) | {f"2.{end}": one for end, one in two.items()}, path / "model.safetensors")
    for own in ({"2": {"group_size": 32, "bits": 8}}, {}):  # mlx-lm takes the layout of what is not named from shapes
        (path / "config.json").write_text(json.dumps({"quantization": {"group_size": 64, "bits": 4, **own}}))
        model: Any = fq.read(path, net(torch.bfloat16))
        assert "uint8 per_block(-1:32)" in str(model[2].weight_quantizer.spec)
        assert "uint4 per_block(-1:64)" in str(model[0].weight_quantizer.spec)


def test_a_layer_in_float_stays_so(tmp_path: Path) -> None:
    path = foreign(tmp_path, 4, 64)
    held = {name: one for name, one in tensors_of(path).items() if not name.startswith("2.")}
    save_file(held | {"2.weight": net(torch.bfloat16).state_dict()["2.weight"]}, path / "model.safetensors")
    model: Any = fq.read(path, net(torch.bfloat16))
    assert type(model[2]) is nn.Linear
    assert torch.equal(model[2].weight, net(torch.bfloat16)[2].weight)  # type: ignore[index]


REFUSED = {
    "nf4 per_block(-1:64)": "files have integers of 2, 3, 4, 5, 6, 8 bits in groups of 32, 64, 128 inputs",
    "int7 per_block(-1:64) scale=bfloat16": "files have integers of 2, 3, 4, 5, 6, 8 bits",
    "int4 per_block(-1:16)": "in groups of 32, 64, 128 inputs",
    "int4 per_tensor": "groups divide the 128 inputs of a row",
    "int4 per_block(-1:96,pad)": "groups divide the 128 inputs of a row",
    "uint4 per_block(-1:64)": "give offset=bfloat16",
    "uint4 per_block(-1:32)": "give offset=bfloat16",
    "int4 per_block(-1:32) scale=uint6@per_block(-1:4)/float16": "have no scales of scales",
    "int4 per_block(-1:32) multiplier": "files multiply codes by scales",
    "float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn@per_tensor": "scale=float8_e4m3fn",
    "float8_e5m2 per_block(-1:32) scale=float8_e8m0fnu:floor": "float8_e4m3fn per_block(-1:32)",
    "float4_e2m1fn per_block(-1:32)": "float4_e2m1fn per_block(-1:32) scale=float8_e8m0fnu",
}


@pytest.mark.parametrize("spec", REFUSED)
def test_what_the_files_cannot_hold_is_refused(tmp_path: Path, spec: str) -> None:
    with pytest.raises(ExportError, match="mlx cannot hold 2 parts") as caught:
        fq.deliver(prepared(spec), tmp_path / "new", "mlx")
    assert REFUSED[spec] in str(caught.value)
    _, found, nearest = str(caught.value).rpartition("the nearest preset that it holds is ")
    assert found
    assert not nearest.startswith("GGUF")  # which mlx holds, and nobody wants there
    assert not (tmp_path / "new").exists()


def test_quantized_inputs_and_other_layers_are_refused(tmp_path: Path) -> None:
    model = fq.prepare(net(), "w8a8_dynamic")
    with pytest.raises(ExportError, match="activations stay in float in these files"):
        fq.deliver(model, tmp_path, "mlx")
    conv = fq.prepare(nn.Sequential(nn.Conv2d(64, 8, 1)), "int8_weight_only")
    with pytest.raises(ExportError, match="linear layers and embeddings, and this is a Conv2d"):
        fq.deliver(conv, tmp_path, "mlx")
    pytest.importorskip("transformers")
    with pytest.raises(ExportError, match="and this is a MixtralExperts"):
        fq.deliver(fq.prepare(mixtral(), "mlx_4bit"), tmp_path, "mlx")


def test_a_name_of_a_setting_is_refused_for_a_layer(tmp_path: Path) -> None:
    class Bits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bits = nn.Linear(64, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.bits(x)

    with pytest.raises(ExportError, match="has the name of this layer; put the model into"):
        fq.deliver(prepared(AFFINE[4], Bits()), tmp_path, "mlx")


@pytest.mark.parametrize("spec", ["int4 per_block(-1:64)", "int4 per_block(-1:64) scale=float16"])
def test_scales_that_the_dtype_of_the_model_does_not_hold_are_refused(tmp_path: Path, spec: str) -> None:
    with pytest.raises(ExportError, match=r"dtype of the model, torch\.bfloat16, which does not hold them all"):
        fq.deliver(prepared(spec, net(torch.bfloat16)), tmp_path, "mlx")


def test_biases_that_would_change_are_refused(tmp_path: Path) -> None:
    model = net(torch.float16)
    with torch.no_grad():
        model[0].weight[3] *= 1e-4  # type: ignore[index]  # whose scales are subnormal numbers of float16
    with pytest.raises(ExportError, match=r"cannot hold 0\.weight: .* numbers of torch\.float16.*scale=float16"):
        fq.deliver(prepared(AFFINE[4], model), tmp_path / "new", "mlx")
    assert not (tmp_path / "new").exists()
    fq.deliver(prepared(AFFINE[4], net(torch.float16)), tmp_path, "mlx")


def change(**tensors: Callable[[Tensor], Tensor | None]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        held = tensors_of(path)
        for key, made in tensors.items():
            base, end = key[1:].split("_")
            found = made(held.pop(f"{base}.{end}", torch.empty(0)))
            held |= {} if found is None else {f"{base}.{end}": found.contiguous()}
        with safe_open(path / "model.safetensors", "pt") as file:
            said = file.metadata()
        save_file(held, path / "model.safetensors", said)

    return damage


def say(**values: Any) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        said = settings_of(path)
        said["quantization"] |= values
        (path / "config.json").write_text(json.dumps(said))

    return damage


def header(text: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        save_file(tensors_of(path), path / "model.safetensors", {"specifications of the weights": text})

    return damage


def cut(path: Path) -> None:
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[: len(whole) - 40])


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "no scales": (change(_0_scales=lambda x: None), r"lacks 0\.scales"),
    "no biases": (change(_0_biases=lambda x: None), r"lacks 0\.biases"),
    "no weight": (change(_0_weight=lambda x: None), r"lacks 0\.weight"),
    "a part of the rows": (change(_0_weight=lambda x: x[:5]), r"of 0, weight is torch\.uint32 of shape \[5, 16\]"),
    "a word less": (change(_0_weight=lambda x: x[:, 1:]), "of 0, weight is"),
    "no words": (change(_0_weight=lambda x: x[:, :0]), "of 0, weight is"),
    "a flat weight": (change(_0_weight=lambda x: x.flatten()), "of 0, weight is"),
    "signed words": (change(_0_weight=lambda x: x.view(torch.int32)), r"of 0, weight is torch\.int32"),
    "fewer scales": (change(_0_scales=lambda x: x[:, :1]), "of 0, biases is"),
    "three scales": (change(_0_scales=lambda x: x[:, [0, 0, 0]]), "of 0, .*scales"),
    "scales of fewer rows": (change(_0_scales=lambda x: x[:4]), "of 0, scales is"),
    "no groups": (change(_0_scales=lambda x: x[:, :0]), "of 0, scales is"),
    "integers as scales": (change(_0_scales=lambda x: x.to(torch.int64)), "of 0, scales is"),
    "bytes as scales": (change(_0_scales=lambda x: x.to(torch.uint8)), "of 0, .* mode"),
    "biases of another dtype": (change(_0_biases=lambda x: x.double()), "of 0, biases is"),
    "a scale that is NaN": (change(_0_scales=lambda x: x.fill_(math.nan)), "of 0, scales are not finite"),
    "an infinite bias": (change(_0_biases=lambda x: x.fill_(math.inf)), "of 0, biases are not finite"),
    "a tensor more": (change(_0_global=lambda x: torch.ones(1)), "no place: 0.global"),
    "an unknown mode": (say(mode="int4"), "mode is 'int4'; this reader knows affine"),
    "7 bits": (say(bits=7), "bits 7 in the mode affine"),
    "1 bit": (say(bits=1), "bits 1 in the mode affine"),
    "a group of 7": (say(group_size=7), "group_size is 7"),
    "a group of a text": (say(group_size="64"), "group_size is '64'"),
    "a group of a fraction": (say(group_size=64.0), "group_size is 64.0"),
    "4 bits of mxfp8": (say(mode="mxfp8"), "group_size is 64 and bits 4 in the mode mxfp8"),
    "a layer of 8 bits": (say(**{"0": {"group_size": 64, "bits": 8}}), "of 0, weight is"),
    "a layer in groups of 32": (say(**{"0": {"group_size": 32, "bits": 4}}), "of 0, scales is"),
    "a layer of 7 bits": (say(**{"0": {"group_size": 64, "bits": 7}}), "of 0, .* bits 7"),
    "a layer that is none": (say(**{"0": False}), "of 0, .* quantization is False"),
    "a layer of mxfp4": (say(**{"0": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}), "of 0, scales is"),
    "a header of another layout": (header('{"0": "int8 per_block(-1:64)"}'), "of 0, the header says int8"),
    "a header of no specification": (header('{"0": "int4 per_moon"}'), "of 0, the header has no specification"),
    "a header of a list": (header("[]"), "of 0, the header has no specification"),
    "a header that is not JSON": (header("{"), "of 0, the header has no specification"),
    "a header without offsets": (
        header('{"0": "int4 per_block(-1:64)"}'),
        r"of 0, (biases are not scales \* -8|scales are negative)",
    ),
    "a file that is cut off": (cut, "model.safetensors cannot be read"),
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("own", [True, False])
def test_damaged_files_are_refused(tmp_path: Path, name: str, own: bool) -> None:
    damage, expected = DAMAGE[name]
    path = fq.deliver(prepared(AFFINE[4]), tmp_path, "mlx") if own else foreign(tmp_path, 4, 64, torch.float32)
    fq.read(path, net())
    damage(path)
    with pytest.raises(CheckpointError, match=expected) as caught:
        fq.read(path, net())
    assert str(path) in str(caught.value)


def test_damaged_scales_of_8_bits_are_refused(tmp_path: Path) -> None:
    for number, (spec, byte) in enumerate(((MXFP4, 255), (NVFP4, 127), (NVFP4, 255))):
        path = fq.deliver(prepared(spec), tmp_path / str(number), "mlx")
        change(_2_scales=lambda x, byte=byte: x.fill_(byte))(path)
        with pytest.raises(CheckpointError, match="of 2, scales"):
            fq.read(path, net())


def test_quantized_activations_of_the_file_are_refused(tmp_path: Path) -> None:
    path = fq.deliver(prepared(NVFP4), tmp_path, "mlx")
    (path / "config.json").write_text(json.dumps({**settings_of(path), "quantize_activations": True}))
    with pytest.raises(CheckpointError, match="quantize_activations"):
        fq.read(path, net())


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_scales_in_float32_may_be_negative_under_an_offset_of_either_sign(bits: int) -> None:
    spec = fq.QuantSpec.parse(f"uint{bits} per_block(-1:64) offset=float32:signed")
    torch.manual_seed(0)
    x, scale, offset = torch.randn(65, 256), torch.rand(65, 4) + 0.01, torch.randn(65, 4)
    scale *= torch.where(torch.rand(65, 4) < 0.5, -1.0, 1.0)
    wide, shift = scale.repeat_interleave(64, 1), offset.repeat_interleave(64, 1)
    codes = ((x + shift) / wide).round().clamp(0, 2**bits - 1)
    assert torch.equal(fq.quantize(x, spec, scale=scale, zero_point=offset)[0].float(), codes)
    assert torch.equal(fq.fake_quantize(x, spec, scale=scale, zero_point=offset), codes * wide - shift)
    for bad in (0.0, math.nan, math.inf):
        with pytest.raises(QParamsError, match="scale must be a positive, finite number"):
            fq.fake_quantize(x, spec, scale=torch.full_like(scale, bad), zero_point=offset)
    with pytest.raises(QParamsError, match="scale must be a positive, finite number"):
        fq.fake_quantize(x, str(spec).replace(":signed", ""), scale=scale, zero_point=offset)


# What follows runs MLX.


def mlx() -> Any:
    pytest.importorskip("mlx_lm", reason="mlx and mlx-lm are not installed; `make engines` installs them")
    return import_module("mlx.core")


def ratio(ours: Tensor, theirs: Tensor) -> float:
    """The signal over the noise, in dB."""
    return 10 * math.log10(float(ours.square().sum() / (ours - theirs).square().sum()))


@pytest.mark.parametrize("spec", [*FORMATS, *(one for one in OTHERS if "channel" not in one)])
def test_values_and_logits_are_those_of_mlx(tmp_path: Path, spec: str) -> None:
    mlx()
    model: Any = prepared(spec, llama())
    ids = torch.randint(512, (2, 32), generator=torch.Generator().manual_seed(1))
    report = fq.verify_delivery(fq.deliver(model, tmp_path, "mlx"), model, [ids])
    assert report.passed, report
    assert report.runtime.endswith("mlx 0.32.4, mlx-lm 0.32.2")
    assert report.differing == 0
    counted = sum(row.elements for row in report.rows)
    numbers = sum(one.numel() for one in model.parameters())
    # Codes and values of all weights, unless MLX rounds the values elsewhere, which the report says then.
    assert (counted > 2 * numbers) is (spec != "int4 per_block(-1:32)") is (not report.not_run)
    assert report.outputs[0].sqnr >= 120
    assert report.outputs[0].same_argmax == IDS.numel() * 2


@pytest.mark.parametrize("name", ["MLX_4BIT", "MLX_MXFP4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_tied_model_in_half_precision(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    mlx()
    model: Any = fq.prepare(llama(tied=True, dtype=dtype), name)
    fq.calibrate(model, progress=False)
    report = fq.verify_delivery(fq.deliver(model, tmp_path, "mlx"), model, [IDS])
    assert report.passed, report
    assert report.differing == 0
    assert "and the model once" in str(report.not_run)


@pytest.mark.parametrize("mode", ["affine", "mxfp4", "mxfp8", "nvfp4"])
def test_all_codes_under_all_scales_are_those_of_mlx(mode: str) -> None:
    mx = mlx()
    bits, size = {"affine": (8, 32), "mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}[mode]
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 256 * 8 // bits // size)
    if mode == "affine":
        random = torch.Generator().manual_seed(0)
        held = [torch.randn(scales.shape, generator=random).bfloat16().float() for _ in range(2)]
    else:
        scales = scales.clamp(max=254) if mode != "nvfp4" else scales % 127  # without NaN
        held = [scales]
    words = codes.view(torch.uint32)
    arrays = [mx.array(one.numpy()) for one in (words, *held)]
    found = np.array(mx.dequantize(*arrays, group_size=size, bits=bits, mode=mode, dtype=mx.float32))
    named: dict[str, Tensor] = dict(zip(("0.weight", "0.scales", "0.biases"), (words, *held), strict=False))
    expected = by_numpy(named, "0", {"group_size": size, "bits": bits, "mode": mode})
    assert np.array_equal(found, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("size", "bits", "mode"),
    [(64, 4, "affine"), (32, 3, "affine"), (128, 8, "affine"), (32, 4, "mxfp4"), (32, 8, "mxfp8"), (16, 4, "nvfp4")],
)
def test_folders_of_mlx_lm_are_read(tmp_path: Path, dtype: torch.dtype, size: int, bits: int, mode: str) -> None:
    mx = mlx()
    with patch("resource.setrlimit"):
        utils: Any = import_module("mlx_lm.utils")
    source, theirs = tmp_path / "source", tmp_path / "theirs"
    float_model: Any = llama(dtype=dtype)
    float_model.save_pretrained(source)
    loaded, config = utils.load_model(source)
    own = {"group_size": 32, "bits": 8, "mode": "affine"}

    def predicate(path: str, module: Any) -> bool | dict[str, Any]:
        return own if "down_proj" in path else "k_proj" not in path

    quantized, config = utils.quantize_model(loaded, config, size, bits, mode, quant_predicate=predicate)
    utils.save_model(theirs, quantized)
    utils.save_config(config, theirs / "config.json")
    model: Any = fq.read(theirs)
    held, weights = tensors_of(theirs), fq.snapshot(model).weights
    assert len(weights) == 14
    for name in weights:
        base, one = name.removesuffix(".weight"), weights[name]
        used = own if "down_proj" in base else {"group_size": size, "bits": bits, "mode": mode}
        assert np.array_equal(one.codes.view(torch.uint8).numpy(), unpacked(held[name], used["bits"]))
        assert torch.equal(one.values(), torch.from_numpy(by_numpy(held, base, used)).to(dtype))
    again = tensors_of(fq.deliver(model, tmp_path / "ours", "mlx"))
    assert {*again} == {*held}
    assert all(torch.equal(again[name], held[name]) for name in held)
    report = fq.verify_delivery(theirs, model, [IDS])
    assert report.passed, report
    logits = torch.from_numpy(np.array(utils.load_model(theirs)[0](mx.array(IDS.numpy())).astype(mx.float32)))
    assert ratio(model(IDS).logits.detach().float(), logits) > (120 if dtype is torch.float32 else 25)


def test_an_architecture_that_mlx_lm_lacks_is_said(tmp_path: Path) -> None:
    mlx()
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 50}
    config = transformers.BertConfig(**sizes, num_attention_heads=2)
    model = fq.prepare(transformers.BertForMaskedLM(config).eval(), "mlx_4bit")
    report = fq.verify_delivery(fq.deliver(model, tmp_path, "mlx"), model)
    assert report.passed, report
    assert "Model type bert not supported" in str(report.not_run)
    alone = fq.verify_delivery(fq.deliver(prepared(AFFINE[0]), tmp_path / "alone", "mlx"), prepared(AFFINE[0]))
    assert "it loads models of transformers alone" in str(alone.not_run)


def test_a_damaged_file_that_mlx_lm_does_not_load_is_a_fault(tmp_path: Path) -> None:
    mlx()
    model = prepared(AFFINE[4], llama())
    path = fq.deliver(model, tmp_path, "mlx")
    said = settings_of(path)
    (path / "config.json").write_text(json.dumps({**said, "num_attention_heads": 3}))
    report = fq.verify_delivery(path, model, [IDS])
    assert not report.passed
    assert report.failed
