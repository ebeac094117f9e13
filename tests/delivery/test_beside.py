"""What lies beside the weights of a delivery: what loads the model, and nothing of the user's."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.delivery.delivering import beside
from tests.support.language_models import BATCHES, logits, mixtral

pytest.importorskip("safetensors", reason="safetensors is not installed")


class Net(nn.Sequential):
    """A model that says where it was loaded from, as those of transformers do."""

    main_input_name = "input_ids"

    def __init__(self, source: object = "", **config: Any) -> None:
        super().__init__(nn.Linear(64, 32))
        self.name_or_path = str(source)
        self.config = SimpleNamespace(model_type="own", to_json_string=lambda: json.dumps(config), **config)


def folder(path: Path, *names: str, **contents: str) -> Path:
    path.mkdir(exist_ok=True, parents=True)
    for name, text in {**dict.fromkeys(names, "of the source"), **contents}.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


def delivered(source: object, out: Path, **config: Any) -> list[str]:
    """The warnings of a delivery."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fq.deliver(fq.prepare(Net(source, **config), "int4_group32"), out, "compressed-tensors")
    return [str(one.message) for one in said]


OURS = ("config.json", "model.safetensors")


def test_known_names_are_copied_and_others_stay_where_they_are(tmp_path: Path) -> None:
    known = ("tokenizer.json", "vocab.txt", "merges.txt", "chat_template.jinja", "spiece.model", "LICENSE")
    others = ("secrets.env", "data.csv", "README.md", "adapter_config.json", ".netrc", "train.py", "optimizer.pt")
    source = folder(tmp_path / "source", *known, *others, "config.json")
    with open(source / "tokenizer.model", "wb") as file:
        file.truncate(65 << 20)
    said = delivered(source, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*OURS, *known}
    assert len(said) == 1
    assert "the folder lacks tokenizer.model, which are larger than 64 MB" in said[0]


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer.json", "chat_template.jinja"])
def test_a_file_of_the_user_stays_and_is_named(name: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "source", name, **{"README.md": "the float model"})
    out = folder(tmp_path / "out", "README.md", "notes.txt")
    (out / name).write_text("mine")
    assert f"{name} in {out} were kept, but differ from" in delivered(source, out)[0]
    assert (out / name).read_text() == "mine"
    assert (out / "README.md").read_text() == "of the source"
    (out / name).unlink()
    assert delivered(source, out) == []
    (source / name).write_text("newer")  # what a delivery wrote, the next one replaces
    assert delivered(source, out) == []
    assert (out / name).read_text() == "newer"
    (out / name).write_text("edited")
    assert f"{name} in {out} were kept, but differ from" in delivered(source, out)[0]
    assert (out / name).read_text() == "edited"


def test_a_name_of_the_hub_is_looked_up_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants: Any = pytest.importorskip("huggingface_hub.constants", reason="huggingface_hub is not installed")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    repository = tmp_path / "cache" / "models--some--llama"
    snapshot = folder(repository / "snapshots" / ("a" * 40), "config.json", "tokenizer.json")
    folder(repository / "refs", main="a" * 40)
    monkeypatch.chdir(folder(tmp_path / "here"))
    folder(tmp_path / "here" / "some" / "llama", **{"config.json": '{"model_type": "bert"}', "vocab.txt": ""})
    assert delivered("some/llama", tmp_path / "out") == []
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*OURS, "tokenizer.json"}
    (snapshot / "tokenizer.json").unlink()
    assert "lacks the tokenizer of some/llama, which is not in the cache" in delivered("some/llama", tmp_path / "b")[0]
    for name in ("some/other", "no name\0at all", "a/b/c/d", "/not/there"):
        assert "which is not a folder here and not in the cache" in delivered(name, tmp_path / "c")[0]


def test_own_code_is_copied_with_what_it_imports(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    source = folder(tmp_path / "source", "train.py", "tokenizer.json")
    folder(source, **{"modeling_own.py": "from .layers_own import Layer\n", "layers_own.py": "class Layer: ...\n"})
    given = {"auto_map": {"AutoModel": "modeling_own.Own", "AutoTokenizer": [None, "other/repository--tok.Tok"]}}
    assert delivered(source, tmp_path / "out", **given) == []
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *OURS, "modeling_own.py", "layers_own.py", "tokenizer.json",
    }  # fmt: skip
    (source / "modeling_own.py").unlink()
    assert (
        "lacks modeling_own.py, the code of the model that config.json names"
        in (delivered(source, tmp_path / "b", **given)[0])
    )
    assert beside(Net("", **given))[1]


def test_modules_of_a_sentence_encoder_are_copied(tmp_path: Path) -> None:
    modules = [{"path": ""}, {"path": "1_Pooling"}, {"path": "../up"}, {"path": ".."}, 3, {"path": 7}, {}]
    source = folder(tmp_path / "source", "1_Pooling/config.json", "1_Pooling/notes.txt", "tokenizer.json")
    folder(source, **{"modules.json": json.dumps(modules)})
    out = tmp_path / "out"
    assert delivered(source, out) == []
    assert sorted(str(one.relative_to(out)) for one in out.rglob("*") if one.is_file()) == sorted(
        [*OURS, "1_Pooling/config.json", "modules.json", "tokenizer.json"]
    )
    (source / "1_Pooling" / "config.json").unlink()
    assert "lacks 1_Pooling, which modules.json names" in delivered(source, tmp_path / "b")[0]
    for damaged in ("", "{}", "[[[", "7", "\ud800"):
        (source / "modules.json").write_bytes(damaged.encode("utf-8", "surrogatepass"))
        assert delivered(source, tmp_path / "c") == []


def test_a_model_without_a_source_gets_its_generation_config(tmp_path: Path) -> None:
    model = Net()
    model.generation_config = SimpleNamespace(to_json_string=lambda: "{}")  # type: ignore[assignment]
    assert beside(model) == ({"generation_config.json": b"{}"}, [])
    assert torch.equal(model[0].weight, model[0].weight)
    assert beside(nn.Linear(2, 2)) == ({}, [])


EXTRA = {
    "MTP layers": {"model.layers.92.eh_proj.weight": (64, 128), "model.layers.92.enorm.weight": (64,)},
    "another prefix": {"mtp.fc.weight": (64, 64)},
    "a tower": {"visual.blocks.0.attn.proj.weight": (8, 8), "visual.blocks.0.attn.proj.bias": (8,)},
}


@pytest.mark.parametrize("what", EXTRA)
def test_what_the_class_does_not_load_is_copied_or_named(what: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from safetensors.torch import load_file, save_file

    source = tmp_path / "source"
    mixtral(intermediate_size=32).save_pretrained(source)
    extra = {name: torch.randn(shape) for name, shape in EXTRA[what].items()}
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    held = load_file(source / "model.safetensors")
    save_file({**held, **extra, **buffers}, source / "model.safetensors", {"format": "pt"})
    config = fq.presets.INT4_GROUP32.with_rule(fq.Rule("lm_head"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = fq.prepare(transformers.MixtralForCausalLM.from_pretrained(source).eval(), config)
        fq.calibrate(model)
        plain = fq.deliver(model, tmp_path / "plain", "compressed-tensors")
        path = fq.improve_folder(source, tmp_path / "out", config, BATCHES, ("ranges",), progress=False).path
    assert [str(one.message) for one in said if "plain lacks" in str(one.message)] == [
        f"{plain} lacks {', '.join(sorted(extra))} of {source}, such as layers for speculative decoding, which "
        "MixtralForCausalLM does not load; improve_folder copies these tensors"
    ]
    assert path is not None
    found = load_file(path / "model.safetensors")
    assert {*found} - {*load_file(plain / "model.safetensors")} == {*extra}
    assert all(torch.equal(found[name], extra[name]) for name in extra)
    ignored = json.loads((path / "config.json").read_text())["quantization_config"]["ignore"]
    assert all(name.removesuffix(".weight") in ignored for name in extra if extra[name].dim() == 2)
    with pytest.warns(UserWarning, match="stay in the file, because MixtralForCausalLM does not load them"):
        again = fq.read(path)
    assert torch.equal(logits(again), logits(fq.read(path, mixtral(intermediate_size=32))))
    assert torch.equal(logits(transformers.MixtralForCausalLM.from_pretrained(path).eval()), logits(again))
