"""Folders of other programs as a whole: experts, transposed layers, and files that are damaged or hostile."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fakequant as fq
from fakequant.delivery.folder import FileNames
from fakequant.errors import CheckpointError
from tests.delivery.formats import test_bitsandbytes, test_modelopt
from tests.support.language_models import language_model
from tests.support.quantized_folders import awq, gptq, net, read, words, write
from tests.support.vision import import_torchvision

pytest.importorskip("transformers")

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 40}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1}
# The weights that are quantized, by the ends of their names, and how many layers have them.
MODELS: dict[str, tuple[Callable[[], Any], tuple[str, ...], int]] = {
    "llama": (lambda: language_model("llama", intermediate_size=64, **SMALL), ("_proj.weight",), 7),
    "experts": (
        lambda: language_model("qwen3_moe", moe_intermediate_size=32, num_experts=3, **SMALL),
        ("_proj.weight",),
        6,
    ),
    "transposed": (
        lambda: language_model("gpt2", n_positions=16, **SMALL),
        ("c_attn.weight", "c_proj.weight", "c_fc.weight"),
        4,
    ),
}


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:gptq. weights whose groups")
def test_a_model_of_transformers_is_built_from_its_folder(tmp_path: Path, name: str, scattered: bool) -> None:
    (make, coded, count), is_turned = MODELS[name], name == "transposed"
    torch.manual_seed(0)
    model, made = make(), np.random.default_rng(0)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    floats, stored = load_file(file), dict[str, Tensor]()
    for key, value in [*floats.items()]:
        if not key.endswith(coded):
            stored[key] = value
            continue
        rows, columns = reversed(value.shape) if is_turned else value.shape
        codes, points = made.integers(0, 16, (rows, columns)), made.integers(0, 16, (rows, columns // 16))
        scales = made.uniform(1e-3, 1e-2, points.shape).astype(np.float16)
        index = made.permutation(columns) // 16 if scattered else np.arange(columns) // 16
        values = torch.from_numpy(scales[:, index].astype(np.float32) * (codes - points[:, index]).astype(np.float32))
        floats[key] = values.T.contiguous() if is_turned else values
        found = {"qweight": words(codes, 4, 1).T, "qzeros": words((points - 1) % 16, 4, 0).T}
        found |= {"scales": torch.from_numpy(scales.T.copy()), "g_idx": torch.from_numpy(index.astype(np.int32))}
        stored |= {f"{key.removesuffix('weight')}{end}": one.contiguous() for end, one in found.items()}
    save_file(floats, file, {"format": "pt"})
    expected = type(model).from_pretrained(tmp_path).eval()
    save_file(stored, file, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    again: Any = fq.read(tmp_path)
    ids = torch.arange(12)[None]
    assert not again.training
    ours, theirs = again(ids).logits, expected(ids).logits
    # Inputs in another order are summed in another order.
    assert (ours - theirs).abs().max() <= (1e-6 if scattered else 0)
    assert len(fq.snapshot(again).weights) == count
    plain: Any = fq.read(tmp_path, dequantize=True)
    assert torch.equal(plain.eval()(ids).logits, theirs)
    assert not fq.nn.quantizers(plain)


def test_values_have_what_is_done_to_inputs(tmp_path: Path) -> None:
    tensors, values = test_modelopt.int4()
    factors = torch.linspace(0.5, 2, values.shape[1])
    config = {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}
    folder = write(tmp_path, {**tensors, "pre_quant_scale": factors}, config)
    model: Any = fq.read(folder, net(), dequantize=True)
    assert torch.equal(model[0].weight, values * factors)
    damaged: Any = torch.nn.Sequential(torch.nn.Linear(96, 64), torch.nn.Linear(64, 9))
    before = damaged[0].weight.clone()
    with pytest.raises(CheckpointError, match="does not fit the model"):
        fq.read(folder, damaged, dequantize=True)
    assert torch.equal(damaged[0].weight, before)


FORMATS: dict[str, Callable[[], tuple[dict[str, Tensor], dict[str, Any]]]] = {
    "awq": lambda: awq()[:2],
    "gptq": lambda: gptq()[:2],
    "bitsandbytes": lambda: (test_bitsandbytes.nf4(nested=True)[0], test_bitsandbytes.CONFIG),
    "modelopt": lambda: (test_modelopt.fp8()[0], {"quant_method": "modelopt", "quant_algo": "FP8"}),
}


class Calls:
    """What calls a function when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("executed"),))


def only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Calls()))


def as_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(pickle.dumps(Calls()))


def index(place: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        save_file(tensors, folder.parent / "other.safetensors")
        (folder / "model.safetensors").unlink()
        places = dict.fromkeys(tensors, place.format(folder.parent))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))

    return change


def header(text: bytes, length: int | None = None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        start = (len(text) if length is None else length).to_bytes(8, "little")
        (folder / "model.safetensors").write_bytes(start + text + bytes(8))

    return change


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])


HUGE = b'{"0.qweight":{"dtype":"I32","shape":[1000000000000,1000000],"data_offsets":[0,8]}}'
HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "pickles": (only_pickles, "pickles .* are not read"),
    "pickle": (as_safetensors, "model.safetensors cannot be read"),
    "cut": (cut, "model.safetensors cannot be read"),
    "huge": (header(HUGE), "model.safetensors cannot be read"),
    "long header": (header(b"{}", 1 << 60), "model.safetensors cannot be read"),
    "outside": (index("../other.safetensors"), r"there is no \.\./other.safetensors in it"),
    "absolute": (index("{}/other.safetensors"), "there is no /"),
    "no file": (index("none.safetensors"), "there is no none.safetensors"),
    "a folder": (index("."), r"there is no \. in it"),
    "no tensors": (lambda folder: save_file({}, folder / "model.safetensors"), "lacks"),
}


@pytest.mark.parametrize("damage", HOSTILE)
@pytest.mark.parametrize("name", FORMATS)
def test_hostile_files_are_named_and_not_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, damage: str
) -> None:
    monkeypatch.chdir(tmp_path)
    tensors, config = FORMATS[name]()
    folder = write(tmp_path / "model", tensors, config)
    assert read(folder)[0].weight_quantizer is not None
    change, message = HOSTILE[damage]
    change(folder)
    model = net()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        read(folder, model)
    assert not (tmp_path / "executed").exists()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_of_another_format_is_named(tmp_path: Path, name: str) -> None:
    _, config = FORMATS[name]()
    for other, make in FORMATS.items():
        tensors, _ = make()
        if other == name:
            continue
        with pytest.raises(CheckpointError, match=str(tmp_path)):
            read(write(tmp_path, tensors, config))


@pytest.mark.parametrize("kind", ["llama", "experts"])
def test_the_modules_of_a_model_are_walked_once(kind: str) -> None:
    """A walk for each tensor, in which transformers looks for its models, took 3 s for 128 layers."""
    make, *_ = MODELS[kind]
    model, walks = make(), []
    model.named_modules = lambda *args, **named: walks.append(1) or type(model).named_modules(model, *args, **named)
    names = FileNames(model)
    found = [names.split(name, tensor) for name, tensor in model.state_dict().items()]
    assert len(walks) == 1
    assert ({*model.state_dict()} == {name for pieces in found for name in pieces}) == (kind == "llama")


# A tensor of a file of transformers holds several of their weights: a query, a key and a value, or a gate and an up.
@pytest.mark.parametrize(
    ("kind", "format"),
    [*((kind, "compressed-tensors") for kind in ("nomic_bert", "hrm_text", "molmo2_text")), ("nomic_bert", "torchao")],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_weights_that_transformers_merges_in_a_file_are_apart(kind: str, format: str, tmp_path: Path) -> None:
    import_torchvision()
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SMALL, intermediate_size=64)
    net: Any = transformers.AutoModel.from_config(config).eval()
    model = fq.prepare(net, fq.Config("own", (fq.Rule("*_proj", weight=fq.TensorConfig("int8 per_channel(0)")),)))
    batch = {"input_ids": torch.arange(8)[None], "use_cache": False}
    folder = fq.deliver(model, tmp_path, format)
    again: Any = fq.read(folder)
    assert torch.equal(again(**batch)[0], model(**batch)[0])
    if format == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
        report = fq.verify_delivery(folder, model, [batch])
        assert (report.passed, [row.differing for row in report.outputs]) == (True, [0])
