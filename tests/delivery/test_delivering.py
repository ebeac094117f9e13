"""`deliver`, `read` and `verify_delivery`: what a format says is asked before the work, and files are written whole."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import fakequant as fq
from fakequant.delivery import DeliveryFormat, Part, delivery_formats, fix_global_scales, register_delivery
from fakequant.delivery.delivering import refuse_replacing
from fakequant.delivery.format import _added
from fakequant.errors import CalibrationError, CheckpointError, ExportError, OutputError
from fakequant.model.state.snapshots import TensorFile, read_folder, write_folder
from tests.support.language_models import llama

X = torch.linspace(-3, 3, 3 * 64).reshape(3, 64)


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64, bias=False))


def prepared(preset: fq.Config | str = "INT4_GROUP32") -> nn.Module:
    model = fq.prepare(net(), preset)
    fq.calibrate(model, [X], progress=False)
    return model


class Own(DeliveryFormat):
    """Weights of 8 bits as they are, in one file."""

    name = "own"
    suffix = ".own"

    def why_not(self, part: Part) -> str | None:
        bits = part.operands["weight"].spec.format.bits
        return None if bits == 8 and "input" not in part.operands else f"it has 8 bits, and {part.path} has {bits}"

    def encode(self, state: fq.QuantizedState, model: nn.Module, parts: Sequence[Part]) -> dict[str, Iterable[bytes]]:
        plan = json.dumps({"plan": state.plan, "names": [part.weight for part in parts]}).encode()
        return {"model.own": (part for part in (len(plan).to_bytes(8, "little"), plan))}

    def recognizes(self, path: Path) -> bool:
        return path.suffix == ".own"

    def decode(self, path: Path, model: nn.Module) -> fq.QuantizedState:
        data = path.read_bytes()
        plan = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return fq.QuantizedState.from_plan(plan["plan"], model.state_dict())


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_added, "own", Own())


@pytest.mark.usefixtures("own")
def test_a_format_of_another_is_one_class_and_one_file(tmp_path: Path) -> None:
    assert {"own", "compressed-tensors"} <= {*delivery_formats()}
    model = prepared("INT8_WEIGHT_ONLY")
    assert fq.deliver(model, tmp_path, "own") == tmp_path / "model.own"
    path = fq.deliver(model, tmp_path / "deep" / "net.own", "own")
    assert path == tmp_path / "deep" / "net.own"
    assert [one.name for one in path.parent.iterdir()] == ["net.own"]
    assert torch.equal(fq.read(path, net())[0].weight, net()[0].weight)


def test_registering_replaces_one_of_the_same_name() -> None:
    first, second = Own(), Own()
    register_delivery(first)
    register_delivery(second)
    assert delivery_formats()["own"] is second
    del _added["own"]


@pytest.mark.parametrize("given", [Own, DeliveryFormat, "own", None, type("Nameless", (), {})()])
def test_what_is_no_instance_is_not_registered(given: Any) -> None:
    before = {**_added}
    with pytest.raises(CheckpointError, match=r"register_delivery takes a DeliveryFormat with a name, not .*brackets"):
        register_delivery(given)
    assert _added == before


class Tensors(Own):
    """Folders of any files."""

    suffix = ""

    def __init__(self, files: dict[str, Any]) -> None:
        self.files = files

    def encode(self, state: fq.QuantizedState, model: nn.Module, parts: Sequence[Part]) -> dict[str, Any]:
        return self.files


@pytest.mark.parametrize(
    ("files", "names"),
    [
        ({"own.json": b"{}"}, {"own.json"}),
        ({"model.safetensors": {"a": torch.ones(4)}}, {"model.safetensors"}),
        (
            {"own.safetensors": {"a": torch.ones(8), "b": torch.ones(8)}, "own.json": b"{}"},
            {
                "own-00001-of-00002.safetensors",
                "own-00002-of-00002.safetensors",
                "own.safetensors.index.json",
                "own.json",
            },
        ),
        (
            {"x.safetensors": TensorFile({"a": torch.ones(1)}), "y.safetensors": TensorFile({"a": torch.ones(2)})},
            {"x.safetensors", "y.safetensors"},
        ),
    ],
)
def test_any_file_of_tensors_is_sharded(
    files: dict[str, Any], names: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_added, "own", Tensors(files))
    folder = fq.deliver(prepared("INT8_WEIGHT_ONLY"), tmp_path, "own", max_shard_size=40)
    assert {path.name for path in folder.iterdir()} == names
    held = sum(len(load_file(path)) for path in folder.glob("*.safetensors"))
    assert held == sum(len(content) for content in files.values() if not isinstance(content, bytes))


@pytest.mark.usefixtures("own")
def test_all_that_a_format_cannot_hold_is_named_before_the_work(tmp_path: Path) -> None:
    rules = fq.Config([fq.Rule("*", weight="int4"), fq.Rule("2", "int8_weight_only")])
    with pytest.raises(ExportError) as raised:
        fq.deliver(prepared(rules), tmp_path / "new", "own")
    assert str(raised.value) == (
        "own cannot hold 1 part of the model as it is quantized:\n"
        "  0: it has 8 bits, and 0 has 4; the nearest preset that it holds is INT8_WEIGHT_ONLY"
    )
    assert not (tmp_path / "new").exists()


def test_shards_hold_the_same_tensors_as_one_file(tmp_path: Path) -> None:
    model = prepared()
    whole = load_file(fq.deliver(model, tmp_path / "whole", "compressed-tensors") / "model.safetensors")
    folder = fq.deliver(model, tmp_path / "parts", "compressed-tensors", max_shard_size=1500)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted({*index["weight_map"].values()})
    assert len(files) > 1
    assert files == [f"model-{n + 1:05}-of-{len(files):05}.safetensors" for n in range(len(files))]
    found = {name: tensor for file in files for name, tensor in load_file(folder / file).items()}
    assert {*found} == {*whole} == {*index["weight_map"]}
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in whole.values())
    assert torch.equal(fq.read(folder, net())(X), model(X))


def test_weights_of_another_model_are_not_left_beside(tmp_path: Path) -> None:
    model = prepared()
    folder = fq.deliver(model, tmp_path, "compressed-tensors", max_shard_size=1500)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(OutputError, match="holds weights of another model, model-00001"):
        fq.deliver(model, tmp_path, "compressed-tensors")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    fq.deliver(model, tmp_path, "compressed-tensors", max_shard_size=1500)  # the same files are replaced


def test_texts_of_a_header_and_copies(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 3_000_000)
    tensors = TensorFile({"t": torch.ones(3)}, {"made by": "hand"})
    write_folder(tmp_path, {"t.safetensors": tensors, "copy.json": tmp_path / "a", "parts": iter([b"a", b"b"])})
    assert (tmp_path / "copy.json").read_bytes() == (tmp_path / "a").read_bytes()
    assert (tmp_path / "parts").read_bytes() == b"ab"
    assert vars(read_folder(tmp_path)["t.safetensors"])["metadata"] == {"made by": "hand"}
    assert torch.equal(load_file(tmp_path / "t.safetensors")["t"], torch.ones(3))


def test_unknown_formats_and_paths_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="unknown format 'compressed_tensor'; did you mean compressed-tensors"):
        fq.deliver(prepared(), tmp_path, "compressed_tensor")
    with pytest.raises(CheckpointError, match=r"there is no .*; give the file or folder"):
        fq.read(tmp_path / "none", net())
    with pytest.raises(CheckpointError, match="has none of the formats"):
        fq.read(tmp_path, net())
    with pytest.raises(CheckpointError, match=r"does not say which model it holds|names the architecture None"):
        fq.read(fq.deliver(prepared(), tmp_path, "compressed-tensors"))


def test_a_file_has_the_same_bytes_each_time(tmp_path: Path) -> None:
    tensors = TensorFile({"a": torch.ones(4)}, {f"key {number}": "text" for number in range(20)})
    for name in "ab":
        write_folder(tmp_path, {f"{name}.safetensors": tensors})
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert safe_open(tmp_path / "a.safetensors", "pt").metadata() == tensors.metadata


def contents(folder: Path) -> dict[str, bytes]:
    return {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


def generation(folder: Path, *models: nn.Module) -> int | None:
    """Which of some models a folder holds whole; None if it is refused."""
    try:
        found, said = fq.read(folder, net()), ""
    except CheckpointError as error:
        found, said = None, str(error)
    if found is None:
        assert "deliver again" in said or not [*folder.glob("*.safetensors")]
        return None
    (number,) = [n for n, one in enumerate(models) if torch.equal(found(X), one(X))]
    return number


@pytest.mark.parametrize("format", ["compressed-tensors", "torchao", "mlx"])
@pytest.mark.parametrize("place", ["itself", "link", "relative", "cache", "below a link"])
def test_the_folder_of_the_float_model_is_not_written(
    place: str, format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    save_file(net().state_dict(), source / "model.safetensors")
    (source / "config.json").write_text("{}")
    before, target = contents(source), source
    if place in ("link", "below a link"):
        target = tmp_path / "link"
        target.symlink_to(source, target_is_directory=True)
        target = target / "." if place == "below a link" else target
    elif place == "relative":
        monkeypatch.chdir(source)
        target = Path()
    elif place == "cache":
        target = tmp_path / "snapshot"
        target.mkdir()
        for name in before:
            (target / name).symlink_to(source / name)
    with pytest.raises(OutputError, match=r"is a link to|config\.json, model\.safetensors, which fakequant"):
        fq.deliver(prepared(), target, format)
    assert contents(source) == before
    assert {path.name for path in target.iterdir()} == {*before}


def test_a_link_out_of_the_folder_is_not_written_through(tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    fq.deliver(prepared(), blobs, "compressed-tensors")
    fq.save(prepared(), tmp_path / "saved")
    for source in (blobs, tmp_path / "saved"):
        before, snapshot = contents(source), tmp_path / f"{source.name} seen"
        snapshot.mkdir()
        for name in before:
            (snapshot / name).symlink_to(source / name)
        give = ("compressed-tensors",) if source == blobs else ()
        with pytest.raises(OutputError, match=r"it is a link to .*give another folder, or remove the link"):
            (fq.deliver if give else fq.save)(prepared(), snapshot, *give)
        assert contents(source) == before


def test_a_file_of_another_is_not_replaced_by_one_of_a_suffix(tmp_path: Path) -> None:
    (tmp_path / "net.gguf").write_bytes(b"GGUF, mine")
    with pytest.raises(OutputError, match=r"net\.gguf, which fakequant\.deliver did not write"):
        refuse_replacing(delivery_formats()["gguf"], tmp_path / "net.gguf", ["net.gguf"])
    refuse_replacing(delivery_formats()["gguf"], tmp_path / "other.gguf", ["other.gguf"])


def test_a_kill_between_any_two_names_leaves_one_model_or_none(tmp_path: Path) -> None:
    first, second = prepared(), fq.prepare(net(1), "INT4_GROUP32")
    for size in (5 * 10**9, 1500):
        seen, place = set[int | None](), 0
        while True:
            folder = tmp_path / f"{size} {place}"
            fq.deliver(first, folder, "compressed-tensors", max_shard_size=size)
            child = os.fork()
            if not child:
                left = iter(range(place))

                def counted(own: Any, left: Any = left) -> Any:
                    def act(*args: Any) -> None:
                        if next(left, None) is None:
                            os._exit(9)
                        own(*args)

                    return act

                os.rename, os.replace = counted(os.rename), counted(os.replace)
                fq.deliver(second, folder, "compressed-tensors", max_shard_size=size)
                os._exit(0)
            was_killed = os.WEXITSTATUS(os.waitpid(child, 0)[1])
            seen.add(generation(folder, first, second))
            if not was_killed:
                break
            fq.deliver(second, folder, "compressed-tensors", max_shard_size=size)
            assert generation(folder, first, second) == 1
            assert not [*folder.glob(".*")]
            place += 1
        assert (place, seen) == (4 if size > 1500 else 2 * len([*folder.iterdir()]), {0, 1, None})


@pytest.mark.parametrize("call", ["rename", "replace"])
def test_a_name_that_cannot_be_given_brings_the_old_files_back(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = prepared(), fq.prepare(net(1), "INT4_GROUP32")
    fq.deliver(first, tmp_path, "compressed-tensors", max_shard_size=1500)
    before, own = contents(tmp_path), getattr(os, call)
    for place in range(len(before)):
        left = iter(range(place))

        def fails(one: Any, other: Any, left: Any = left) -> None:
            if next(left, None) is None:
                raise PermissionError(1, "Operation not permitted")
            own(one, other)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, fails if call == "replace" else once(fails, own))
            with pytest.raises(OutputError, match="Operation not permitted"):
                fq.deliver(second, tmp_path, "compressed-tensors", max_shard_size=1500)
        assert contents(tmp_path) == before


def once(fails: Any, own: Any) -> Any:
    """A function that fails one time, and then does what it should."""
    failed = []

    def act(*args: Any) -> None:
        if failed:
            return own(*args)
        try:
            return fails(*args)
        except OSError:
            failed.append(1)
            raise

    return act


def test_two_deliveries_at_once_give_one_of_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, own = prepared(), fq.prepare(net(1), "INT4_GROUP32"), os.replace
    reached, errors = threading.Event(), list[BaseException]()

    def slow(*args: Any) -> None:
        own(*args)
        if threading.current_thread().name == "first":
            reached.set()
            time.sleep(0.05)

    def deliver(model: nn.Module, size: int) -> None:
        try:
            fq.deliver(model, tmp_path / "out", "compressed-tensors", max_shard_size=size)
        except OutputError as error:
            errors.append(error)

    monkeypatch.setattr(os, "replace", slow)
    for size in (1500, 5 * 10**9):
        thread = threading.Thread(name="first", target=deliver, args=(first, 1500))
        thread.start()
        assert reached.wait(30)
        deliver(second, size)
        thread.join()
        assert generation(tmp_path / "out", first, second) == (1 if size == 1500 else 0)
    assert [str(error) for error in errors if "holds weights of another model" not in str(error)] == []


CONFIGS: dict[str, tuple[Any, ...]] = {
    "hidden_size": (0, -1, 2**20, 2**40, "x", None, 1.5, 10**30),
    "num_hidden_layers": (10**6, -1, "x", 2**62, 1.5),
    "num_attention_heads": (0, -2, "a", 2**20),
    "vocab_size": (2**33, -1),
    "head_dim": (0, 2**30),
    "hidden_act": ("bogus", None, 3),
    "architectures": (["pipeline"], ["AutoModel"], ["PreTrainedModel"], "LlamaForCausalLM", [["a"]], ["BertModel"]),
    "dtype": ("float99", 3),
    "rope_parameters": ({"rope_type": "x"}, 3),
    "max_position_embeddings": (-1,),
    "num_labels": (10**9, -1),
    "layer_types": (["x"] * 3, ["full_attention"] * 10**5),
}


@pytest.mark.parametrize("key", CONFIGS)
def test_a_hostile_configuration_is_refused_without_a_model(key: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    model = llama()
    path = fq.deliver(fq.prepare(model, "int4_group32"), tmp_path, "compressed-tensors")
    whole, begun = json.loads((path / "config.json").read_text()), time.monotonic()
    for value in CONFIGS[key]:
        (path / "config.json").write_text(json.dumps({**whole, key: value}))
        try:
            fq.read(path)
        except CheckpointError:
            continue
        assert key in ("max_position_embeddings", "num_labels", "head_dim", "vocab_size"), value
    assert time.monotonic() - begun < 10


def test_code_that_a_configuration_names_is_not_taken(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    path = fq.deliver(fq.prepare(llama(), "int4_group32"), tmp_path, "compressed-tensors")
    values = json.loads((path / "config.json").read_text())
    for key in ("attn_implementation", "_attn_implementation", "experts_implementation"):
        (path / "config.json").write_text(json.dumps({**values, key: "kernels-community/x"}))
        assert fq.read(path).config._attn_implementation != "kernels-community/x"


BATCHES = [torch.full((2, 32), 1.0), torch.full((3, 32), -2.0)]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, is_second: bool = False) -> torch.Tensor:
        return self.two(x) if is_second else self.one(x)


def test_the_largest_magnitude_of_all_batches_counts() -> None:
    model = fq.prepare(Branches(), "nvfp4", skip=[])
    fix_global_scales(model, BATCHES, forward=lambda m, x: (m(x), m(x / 4, is_second=True)))
    assert torch.equal(model.one.input_quantizer.global_scale, torch.tensor([448 * 6 / 2.0]))
    assert torch.equal(model.two.input_quantizer.global_scale, torch.tensor([448 * 6 / 0.5]))


def test_a_layer_that_no_batch_reaches_is_named_and_nothing_changes() -> None:
    model = fq.prepare(Branches(), "nvfp4", skip=[])
    with pytest.raises(CalibrationError, match=r"two\._input_quantizer got only zeros, or no data"):
        fix_global_scales(model, BATCHES)
    assert model.one.input_quantizer.global_scale is None
    assert not model.one.input_quantizer._forward_pre_hooks


def test_a_model_without_such_inputs_is_refused() -> None:
    with pytest.raises(CalibrationError, match="no dynamic input has block scales and a per-tensor scale"):
        fix_global_scales(fq.prepare(Branches(), "int8_per_token", skip=[]), BATCHES)
