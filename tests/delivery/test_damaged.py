"""Damaged folders are named in one clear error, the model stays as it was, and nothing in a folder is executed."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CheckpointError

X = torch.linspace(-3, 3, 3 * 64).reshape(3, 64)
Tensors = dict[str, Tensor]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rules = [fq.Rule("0", weight="uint4 per_block(-1:32)"), fq.Rule("2", weight="int8 per_channel(0)", input="int8")]
    model = fq.prepare(net(), fq.Config("own", rules))
    fq.calibrate(model, [X], progress=False)
    return fq.deliver(model, tmp_path / "file", "compressed-tensors")


def changed(folder: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def configured(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


def group(config: dict[str, Any], number: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = config["config_groups"][f"group_{number}"]
    return found


TENSORS: dict[str, Callable[[Tensors], Any]] = {
    "a missing tensor": lambda t: t.pop("0.weight_scale"),
    "no codes": lambda t: t.pop("2.weight"),
    "no bias": lambda t: t.pop("2.bias"),
    "no range of an input": lambda t: t.pop("2.input_scale"),
    "codes of another shape": lambda t: t.update({"0.weight_packed": t["0.weight_packed"][:, :-1].contiguous()}),
    "codes of another dtype": lambda t: t.update({"0.weight_packed": t["0.weight_packed"].float()}),
    "float codes": lambda t: t.update({"2.weight": t["2.weight"].float()}),
    "scales of another shape": lambda t: t.update({"0.weight_scale": t["0.weight_scale"][:-1].contiguous()}),
    "scales that are NaN": lambda t: t["0.weight_scale"].fill_(float("nan")),
    "infinite scales": lambda t: t["2.weight_scale"].fill_(float("-inf")),
    "scales below 0": lambda t: t["2.weight_scale"].neg_(),
    "another shape said": lambda t: t["0.weight_shape"].add_(1),
    "zero points of another shape": lambda t: t.update(
        {"0.weight_zero_point": t["0.weight_zero_point"][:-1].contiguous()}
    ),
    "layers exchanged": lambda t: t.update({"0.weight_packed": t["2.weight"], "2.weight": t["0.weight_packed"]}),
    "a bias of another shape": lambda t: t.update({"0.bias": t["0.bias"][:-1].contiguous()}),
    "an order of inputs": lambda t: t.update({"0.weight_g_idx": torch.arange(64, dtype=torch.int32)}),
    "a tensor of no module": lambda t: t.update({"4.weight": torch.ones(2, 2)}),
    "a sparse mask": lambda t: t.update({"2.bitmask": torch.ones(2, 2)}),
}
CONFIGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no groups": lambda c: c.pop("config_groups"),
    "groups that are a list": lambda c: c.update(config_groups=[]),
    "groups that are text": lambda c: c.update(config_groups="all"),
    "a group that is none": lambda c: c["config_groups"].update(group_0=None),
    "no targets": lambda c: group(c).pop("targets"),
    "other bits": lambda c: group(c)["weights"].update(num_bits=5),
    "bits that are text": lambda c: group(c)["weights"].update(num_bits="four"),
    "17 bits": lambda c: group(c)["weights"].update(num_bits=17),
    "an unknown type": lambda c: group(c)["weights"].update(type="posit"),
    "an unknown strategy": lambda c: group(c, 1)["weights"].update(strategy="row"),
    "groups of 0": lambda c: group(c, 1)["weights"].update(strategy="group", group_size=0),
    "groups of text": lambda c: group(c, 1)["weights"].update(strategy="group", group_size="32"),
    "other groups": lambda c: group(c, 1)["weights"].update(strategy="group", group_size=16),
    "another layout": lambda c: group(c).update(format="marlin-24"),
    "a broken pattern": lambda c: group(c).update(targets=["re:("]),
    "rotations": lambda c: c.update(transform_config={"config_groups": {"u": {}}}),
    "sparsity": lambda c: c.update(sparsity_config={"format": "sparse-24-bitmask"}),
    "keys and values": lambda c: c.update(kv_cache_scheme={"num_bits": 8, "type": "float"}),
    "a local range": lambda c: group(c, 1)["weights"].update(dynamic="local"),
}


def assert_refused(folder: Path) -> str:
    model = net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError) as raised:
        fq.read(folder, model)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert type(model[0]) is nn.Linear
    return str(raised.value)


def test_the_folder_is_good(folder: Path) -> None:
    assert fq.read(folder, net())(X).shape == (3, 64)


@pytest.mark.parametrize("change", TENSORS.values(), ids=TENSORS.keys())
def test_tensors(folder: Path, change: Callable[[Tensors], Any]) -> None:
    changed(folder, change)
    assert len(assert_refused(folder)) > 30


@pytest.mark.parametrize("change", CONFIGS.values(), ids=CONFIGS.keys())
def test_configurations(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    configured(folder, change)
    assert str(folder) in assert_refused(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.99])
def test_cut_files(folder: Path, name: str, share: float) -> None:
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: int(len(data) * share)])
    assert_refused(folder)


@pytest.mark.parametrize("text", ["[]", "3", "null", "{", "[" * 100_000, "\x00", '{"quantization_config": 3}'])
def test_no_configuration(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    assert_refused(folder)


@pytest.mark.parametrize(
    "place", ["../../secret.safetensors", "/etc/passwd", "none.safetensors", "config.json", 3, None]
)
def test_an_index_that_names_no_shard(folder: Path, place: Any) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"0.bias": place}}))
    assert_refused(folder)


def test_an_index_of_other_shards(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    places = dict.fromkeys(tensors, "b.safetensors")
    save_file({name: one for name, one in tensors.items() if not name.startswith("2")}, folder / "b.safetensors")
    file.unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert "where its index says" in assert_refused(folder)


class _Bomb:
    """Says that it was executed."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('executed')",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "model.pt"])
def test_pickles_are_not_read(folder: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(_Bomb()))
    (folder / "modeling_own.py").write_text("raise SystemExit('executed')")
    text = assert_refused(folder)
    assert "pickles (.bin, .pt) are not read" in text or "cannot be read" in text


def test_code_of_a_folder_is_not_run(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Own"], "auto_map": {"AutoModel": "modeling_own.Own"}, "model_type": "own"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_own.py").write_text("raise SystemExit('executed')")
    with pytest.raises(CheckpointError, match=r"the architecture 'Own'|transformers is not installed"):
        fq.read(folder)


@pytest.mark.parametrize("name", ["system", "AutoModel", "BertConfig", "__name__", 3, ["Llama"]])
def test_architectures_that_are_none(folder: Path, name: Any) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
    with pytest.raises(CheckpointError, match="the architecture"):
        fq.read(folder)


def test_a_package_that_does_not_fit_transformers_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        __version__ = "5"

        def __getattr__(self, name: str) -> Any:
            raise ModuleNotFoundError(name) from RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setitem(sys.modules, "transformers", Broken())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(CheckpointError, match=r"import LlamaForCausalLM: RuntimeError: operator torch.* fit each"):
        fq.read(folder)


def test_another_model(folder: Path) -> None:
    for other in (nn.Sequential(nn.Linear(64, 32)), nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 64))):
        with pytest.raises(CheckpointError):
            fq.read(folder, other)


PATTERNS = {
    "a repeat of a repeat": (r"(\w+\.?)+$$X", "a repeat of a part that repeats"),
    "alternatives of nothing": (r"(?:(?:\w?){8}){8}$X", "too many repeats and alternatives"),
    "many repeats": (".*" * 12 + "$X", "too many repeats and alternatives"),
    "an open group": ("(" * 50, "missing"),
    "a long one": ("a" * 5_000, "5000 characters"),
}


@pytest.mark.parametrize("place", ["ignore", "targets"])
@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_that_takes_for_ever_is_refused(name: str, place: str, folder: Path) -> None:
    pattern, reason = PATTERNS[name]

    def change(config: dict[str, Any]) -> None:
        (group(config) if place == "targets" else config).update({place: [f"re:{pattern}"]})

    configured(folder, change)
    with pytest.raises(CheckpointError, match=f"the pattern .* for names of layers has {reason}"):
        fq.read(folder, net())


@pytest.mark.parametrize("pattern", ["re:.*[02]", r"re:^(?!.*vision)\d+$", r"re:(0|1|2)(\.\w+)?$"])
def test_patterns_that_files_have_are_taken(pattern: str, folder: Path) -> None:
    configured(folder, lambda config: config.update(ignore=[pattern]))
    with pytest.raises(CheckpointError, match=r"lacks 0\.weight|no place"):  # all layers are left in float
        fq.read(folder, net())


@pytest.mark.parametrize("value", [255, 254])
def test_exponents_that_are_no_scales_are_named(value: int, tmp_path: Path) -> None:
    rules = fq.Config("own", [fq.Rule("*", weight="float4_e2m1fn per_block(-1:32) scale=float8_e8m0fnu:floor")])
    path = fq.deliver(fq.prepare(net(), rules), tmp_path, "compressed-tensors")
    changed(path, lambda tensors: tensors["2.weight_scale"].fill_(value))
    if value == 254:
        assert not fq.read(path, net())[2].weight.isnan().any()
    else:
        with pytest.raises(CheckpointError, match=r"hold NaN|of 2\.weight, scales are not finite"):
            fq.read(path, net())


def test_a_name_that_is_too_long_is_no_raw_error(tmp_path: Path) -> None:
    for call in (lambda path: fq.read(path, net()), lambda path: fq.verify_delivery(path, fq.prepare(net(), "int8"))):
        with pytest.raises(CheckpointError, match="cannot be read: File name too long"):
            call(tmp_path / ("a" * 300))


@pytest.mark.parametrize("status", ["frozen", "compressed", "initialized"])
def test_the_tensors_say_whether_there_are_codes(status: str, folder: Path) -> None:
    """Large collections of files say "frozen" of compressed weights."""
    configured(folder, lambda config: config.update(quantization_status=status, sparsity_config={"format": "dense"}))
    assert fq.read(folder, net())[0].weight_quantizer.spec.format.bits == 4


@pytest.mark.parametrize("place", ["compression_config", "text_config"])
def test_the_quantization_is_found_where_files_have_it(place: str, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    said = config.pop("quantization_config")
    config[place] = {"quantization_config": said} if place == "text_config" else said
    (folder / "config.json").write_text(json.dumps(config))
    assert fq.read(folder, net())[0].weight_quantizer.spec.format.bits == 4


@pytest.mark.parametrize("method", ["hqq", "quanto", "quark", None])
def test_another_method_is_named_with_what_to_do(method: str | None, folder: Path) -> None:
    configured(folder, lambda config: (config.clear(), config.update({"quant_method": method} if method else {})))
    expected = f"is quantized by '{method}', but the formats that are read are .*dequantized by the program"
    with pytest.raises(CheckpointError, match=expected if method else r"is a model in float: its config\.json says"):
        fq.read(folder, net())


@pytest.mark.parametrize(("layer", "place"), [("0", (5, 1)), ("2", (50, 0))])
def test_codes_under_a_scale_of_0_are_values_of_0(folder: Path, layer: str, place: tuple[int, int]) -> None:
    before = fq.read(folder, net())
    changed(folder, lambda tensors: tensors[f"{layer}.weight_scale"][place].zero_())
    after = fq.read(folder, net())
    for name in ("0", "2"):
        old, new = (getattr(model, name).quantized_weight().detach().clone() for model in (before, after))
        groups = new.unflatten(1, (2 if name == "0" else 1, -1))
        if name == layer:
            assert not groups[place].any()
            old.view(groups.shape)[place] = 0
        assert torch.equal(new, old)
