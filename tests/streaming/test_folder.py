"""A model that is chosen block after block gets the bits of the model in memory, also after a kill, and says of damage
what to do; its folder loses what the run wrote, and nothing else.
"""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CheckpointError, ConfigError, FakeQuantError, OutputError
from fakequant.files import locked
from fakequant.streaming import choosing, improve_folder
from fakequant.streaming.blocks import Work
from tests.support import ranks
from tests.support.streamed import Block, batches, decoder, streamed, whole, without_weights

pytest.importorskip("safetensors", reason="safetensors is not installed")
GPTQ = ("ranges", "gptq")


def unmasked(ids: Tensor) -> Tensor:
    return ids > 0


def differing(one: nn.Module, other: nn.Module) -> list[str]:
    """The weights with other codes or scales, of those that both have as codes."""
    first, second = fq.snapshot(one).weights, fq.snapshot(other).weights
    names = [name for name in first if name in second]
    assert len(names) >= 6
    return [
        name
        for name in names
        if not torch.equal(first[name].codes, second[name].codes)
        or not torch.equal(first[name].scale, second[name].scale)
    ]


STATIC = [("int8", ("input", "ranges", "gptq", "drift", "bias"))]


@pytest.mark.parametrize("mask", [None, unmasked], ids=["all tokens", "mask"])
@pytest.mark.parametrize(
    ("preset", "steps"),
    [("int4_group32", "fast"), ("int4_group32", GPTQ), ("W8A8_DYNAMIC", "best"), *STATIC],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_codes_are_those_of_the_model_in_memory(preset: str, steps: Any, mask: Any, tmp_path: Path) -> None:
    found = streamed(decoder(), tmp_path, preset, steps, mask)
    left_out = {"smooth", "rotate", "adaround"} | ({"damping", "descend"} if steps == "fast" else set())
    plain = [step for step in fq.ptq.STEPS if step not in left_out] if isinstance(steps, str) else steps
    expected = whole(decoder(), preset, plain, mask)
    assert differing(expected, fq.read(tmp_path, decoder())) == []
    assert {row.layer for row in found.layers} == {
        "embed", "head", *(f"blocks.{n}.{name}" for n in range(3) for name in ("up", "down"))
    }  # fmt: skip
    assert found.remaining_error < 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(("preset", "steps"), [("int4_group32", GPTQ), *STATIC], ids=["weights", "inputs"])
def test_a_repeated_batch_counts_once(preset: str, steps: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = batches(3)
    monkeypatch.setattr("tests.support.streamed.batches", lambda: [first, second, first.clone(), third, second])
    streamed(decoder(), tmp_path, preset, steps)
    assert differing(whole(decoder(), preset, steps), fq.read(tmp_path, decoder())) == []


def test_a_device_gets_blocks_and_batches(tmp_path: Path) -> None:
    """No other device is here: the dtype of weights that `load` gives in another one is that of the model."""
    empty, load = without_weights(decoder())
    given = {"device": "cpu", "load": lambda path: {name: x.double() for name, x in load(path).items()}}
    improve_folder(empty, tmp_path / "device", "int4_group32", batches(), "fast", **given)
    streamed(decoder(), tmp_path / "plain", "int4_group32", "fast")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("device", "plain")]
    assert files[0] == files[1]


def test_a_thread_reads_the_next_block_while_a_device_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its context and with its default device; each block is read once for the choice, its errors name it."""
    empty, load = without_weights(decoder())
    asked, is_read, improved = list[Any](), threading.Event(), choosing.improved
    present = ContextVar("present", default=0)
    present.set(7)

    def loaded(path: str) -> Any:
        asked.append((path, threading.get_ident() == main, present.get(), torch.get_default_device().type))
        if path == "blocks.1":
            is_read.set()
        return load(path)

    def choose(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        assert is_read.wait(60)  # the second block, before the first one is chosen
        return improved(module, *args, **kwargs)

    main = threading.get_ident()
    monkeypatch.setattr(choosing, "improved", choose)
    improve_folder(empty, tmp_path / "device", "int4_group32", batches(), GPTQ, device="cpu", load=loaded)
    assert [one for one in asked if one[0].startswith("blocks")] == [
        ("blocks.0", True, 7, "cpu"), ("blocks.1", False, 7, "cpu"), ("blocks.2", False, 7, "cpu")
    ]  # fmt: skip

    def missing(path: str) -> Any:
        return {} if path == "blocks.2" else load(path)

    def broken(path: str) -> Any:
        return {"up.weight": 1 / 0} if path == "blocks.1" else load(path)

    for wrong, words in ((missing, "blocks.2 has no values for"), (broken, "blocks.1 cannot be loaded: ZeroDivision")):
        empty = without_weights(decoder())[0]
        with pytest.raises(CheckpointError, match=words):
            improve_folder(empty, tmp_path / "x", "int4_group32", batches(), GPTQ, device="cpu", load=wrong)


def test_an_unknown_device_is_named(tmp_path: Path) -> None:
    load = without_weights(decoder())[1]
    with pytest.raises(ConfigError, match="device='gpu' is not a device, such as 'cuda'"):
        improve_folder(
            without_weights(decoder())[0], tmp_path / "x", "int4_group32", batches(), device="gpu", load=load
        )


def test_a_part_of_the_blocks_and_a_tied_table(tmp_path: Path) -> None:
    """Blocks after the last quantized one do not run, and their weights go to the file as they are."""
    rules = fq.Config("two", [fq.Rule("blocks.[01].*", weight="int4 per_block(-1:32)")])
    streamed(decoder(tied=True), tmp_path, rules, "fast")
    expected, found = whole(decoder(tied=True), rules, ["ranges", "gptq", "drift", "bias"]), decoder(tied=True)
    fq.read(tmp_path, found)
    names = list(fq.snapshot(found).weights)
    assert names == [f"blocks.{n}.{name}.weight" for n in (0, 1) for name in ("up", "down")]
    for ids in batches():
        assert torch.equal(found(ids), expected(ids))


class Killed(BaseException):
    pass


@contextmanager
def killed_at_the_end() -> Iterator[None]:
    """A run is killed after its last block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choosing.Blocks, "improve_rest", lambda *_: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            yield


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


PLACES: dict[str, tuple[Any, str]] = {
    "choosing": (choosing, "improved"),
    "hidden states": (Work, "put_hidden"),
    "block": (Work, "put_block"),
    "after a block": (Work, "forget_hidden"),
    "head": (choosing.Blocks, "improve_rest"),
}


@pytest.fixture(scope="module")
def bytes_of_a_whole_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    streamed(decoder(), folder := tmp_path_factory.mktemp("whole"), "int4_group32", "fast")
    return bytes_of(folder)


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("place", PLACES)
def test_a_run_that_was_killed_goes_on_to_the_same_bytes(
    place: str,
    before: bool,
    bytes_of_a_whole_run: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner, name = PLACES[place]
    own, calls, chosen = getattr(owner, name), [0], []

    def killed(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2 or name == "improve_rest":
            if not before:
                own(*args, **kwargs)
            raise Killed
        return own(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, killed)
        with pytest.raises(Killed):
            streamed(decoder(), tmp_path / "killed", "int4_group32", "fast")
    improved = choosing.improved
    monkeypatch.setattr(choosing, "improved", lambda *args, **kwargs: chosen.append(1) or improved(*args, **kwargs))
    streamed(decoder(), tmp_path / "killed", "int4_group32", "fast")
    assert bytes_of(tmp_path / "killed") == bytes_of_a_whole_run
    assert not (tmp_path / "killed" / ".unfinished").exists()
    assert len(chosen) < 4  # finished blocks are not chosen again


def test_a_folder_of_another_run_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    with killed_at_the_end():
        streamed(decoder(), tmp_path, "int4_group32", "fast")
    with pytest.raises(CheckpointError, match=r"3 blocks of a call with other steps; .*remove the folder"):
        streamed(decoder(), tmp_path, "int4_group32", GPTQ)
    with pytest.raises(CheckpointError, match="other model, quantization or blocks"):
        streamed(decoder(), tmp_path, "int8_weight_only", "fast")
    hidden = next((tmp_path / ".unfinished").glob("hidden*"))
    hidden.write_bytes(hidden.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match=r"damaged.*remove"):
        streamed(decoder(), tmp_path, "int4_group32", "fast")


def test_a_model_in_memory_and_missing_or_misshaped_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a model with all parameters on the meta device"):
        improve_folder(decoder(), tmp_path, "int4_group32", batches())
    empty, load = without_weights(decoder())

    def lacks(path: str) -> dict[str, Tensor]:
        return {name: x for name, x in load(path).items() if name != "down.weight"}

    def cut(path: str) -> dict[str, Tensor]:
        return {name: x[:1] for name, x in load(path).items()}

    with pytest.raises(CheckpointError, match=r"blocks\.0 has no values for down.weight"):
        improve_folder(empty, tmp_path / "out", "int4_group32", batches(), load=lacks)
    assert not [*tmp_path.iterdir()]
    empty, _ = without_weights(decoder())
    with pytest.raises(CheckpointError, match="has the shape"):
        improve_folder(empty, tmp_path / "b", "int4_group32", batches(), load=cut)


def _rank(rank: int, folder: Path) -> None:
    empty, load = without_weights(decoder())
    own = batches(6)[rank::2]
    improve_folder(empty, folder / "two", "int4_group32", own, GPTQ, load=load, group=dist.group.WORLD)


def _one_fails(rank: int, folder: Path) -> None:
    """What the second process alone gets wrong; the first one hears of it, and neither waits for the other."""
    given: Any = {"config": "int4_group32", "batches": batches(4)[rank::2], "steps": GPTQ}

    def broken() -> Any:
        yield batches(1)[0]
        raise RuntimeError("the disk is gone")

    cases: list[tuple[dict[str, Any], str]] = [
        ({"batches": broken()}, "the disk is gone"),
        ({"batches": []}, "needs batches"),
        ({"batches": [torch.full_like(one, -1) for one in batches(1)]}, "index out of range"),
        ({"steps": "fsat"}, "unknown steps"),
        ({"format": "no"}, "no"),
        ({"steps": "fast"}, "the processes got other arguments: rank [01] differs at steps"),
        ({"config": "int4_group64"}, "the processes got other arguments: rank [01] differs at quantization"),
        ({"load": None}, "load"),
    ]
    for number, (other, text) in enumerate(cases):
        empty, load = without_weights(decoder())
        own, begun = {**given, "load": load, "group": dist.group.WORLD, **(other if rank else {})}, time.monotonic()
        with pytest.raises((FakeQuantError, RuntimeError, IndexError), match=f"{text}|the process of rank 1 failed"):
            improve_folder(empty, folder / str(number), own.pop("config"), own.pop("batches"), progress=False, **own)
        assert time.monotonic() - begun < 30


def test_an_error_of_one_process_is_one_of_both(tmp_path: Path) -> None:
    ranks.run((_one_fails,), tmp_path)


def test_two_processes_choose_the_codes_of_one(tmp_path: Path) -> None:
    if not dist.is_gloo_available():
        pytest.skip("this build of torch has no gloo")
    ranks.run((_rank,), tmp_path)
    empty, load = without_weights(decoder())
    improve_folder(empty, tmp_path / "one", "int4_group32", batches(6), GPTQ, load=load)
    assert bytes_of(tmp_path / "two") == bytes_of(tmp_path / "one")


def test_the_source_stays_as_it_is(tmp_path: Path) -> None:
    model = decoder()
    before = copy.deepcopy(model.state_dict())
    streamed(model, tmp_path, "int4_group32", "fast")
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    assert isinstance(model.blocks[0], Block)


def test_folders_that_would_be_lost_or_mixed_up_are_refused(tmp_path: Path) -> None:
    empty, load = without_weights(decoder())
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "thesis.txt").write_text("mine")
    for target, work, error, message in (
        ("out", "own", CheckpointError, "holds other files, thesis.txt"),
        ("out", "out", ConfigError, "is the target, too"),
    ):
        empty, load = without_weights(decoder())
        with pytest.raises(error, match=message):
            improve_folder(empty, tmp_path / target, "int4_group32", batches(), load=load, work=tmp_path / work)
    assert (tmp_path / "own" / "thesis.txt").read_text() == "mine"
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(OutputError, match=r"holds weights already, pytorch_model.bin"):
        streamed(decoder(), tmp_path / "held", "int4_group32", "fast")


def test_a_run_with_other_weights_masks_or_calls_does_not_go_on(tmp_path: Path) -> None:
    with killed_at_the_end():
        streamed(decoder(), tmp_path, "int4_group32", "fast")
    for block in range(3):
        other = decoder()
        with torch.no_grad():
            other.blocks[block].up.weight[0, 0] += 1  # type: ignore[union-attr, operator, index]
        with pytest.raises(CheckpointError, match=rf"3 blocks .* other weights in blocks\.{block}; .*remove"):
            streamed(other, tmp_path, "int4_group32", "fast")
    other = decoder()
    with torch.no_grad():
        other.embed.weight[0, 0] += 1
    for model, mask in ((other, None), (decoder(), unmasked)):
        with pytest.raises(CheckpointError, match="other weights, batches, masks or forward"):
            streamed(model, tmp_path, "int4_group32", "fast", mask)


def test_a_buffer_that_no_state_has_counts_as_a_weight(tmp_path: Path) -> None:
    def with_buffer(value: float) -> nn.Module:
        model = decoder()
        model.blocks[1].register_buffer("shift", torch.full((4,), value), persistent=False)  # type: ignore[union-attr]
        return model

    def run(value: float) -> None:
        model = with_buffer(value)
        empty = copy.deepcopy(model).to("meta")

        def load(path: str) -> Any:
            own = model.get_submodule(path)
            return {**own.state_dict(), **dict(own.named_buffers())}

        improve_folder(empty, tmp_path, "int4_group32", batches(), load=load, progress=False)

    with killed_at_the_end():
        run(1.0)
    with pytest.raises(CheckpointError, match=r"other weights in blocks\.1"):
        run(2.0)


def test_a_target_has_one_run_at_a_time(tmp_path: Path) -> None:
    (tmp_path / ".unfinished").mkdir()
    with locked(tmp_path / ".unfinished"), pytest.raises(OutputError, match="another process"):
        streamed(decoder(), tmp_path, "int4_group32", "fast")
    streamed(decoder(), tmp_path, "int4_group32", "fast")


@pytest.mark.parametrize(
    "error", [FileNotFoundError("shard 3"), ValueError("damaged"), KeyError("up.weight")], ids=repr
)
@pytest.mark.parametrize("path", ["", "blocks.1"])
def test_what_fails_while_a_block_is_loaded_names_the_block(path: str, error: Exception, tmp_path: Path) -> None:
    empty, load = without_weights(decoder())

    def failing(own: str) -> Any:
        if own == path:
            raise error
        return load(own)

    with pytest.raises(CheckpointError, match=f"{path or 'the model'}.* cannot be loaded: {type(error).__name__}"):
        improve_folder(empty, tmp_path, "int4_group32", batches(), load=failing)


pytest.importorskip("safetensors", reason="safetensors is not installed")

MINE = (
    *("run-2026-03-01.json", "block-diagrams/thesis.txt", "hidden-gems.txt", "copies-of-keys/k.txt"),
    *("block-00001/thesis.txt", "hidden-00001-0.safetensors", "copies-0/k.txt", "run-0.json", "run-1.json"),
)


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


@pytest.mark.parametrize("is_refused_later", [False, True])
@pytest.mark.parametrize("name", MINE)
def test_a_file_of_the_user_is_refused_and_stays(name: str, is_refused_later: bool, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_text('{"my": "log"}')
    before = files_in(folder)
    empty, load = without_weights(decoder())
    with pytest.raises(CheckpointError, match=f"holds other files, {name.partition('/')[0]}; remove them"):
        fq.improve_folder(
            empty,
            tmp_path / "out",
            "int4_group32",
            batches(),
            load=(lambda _: {}) if is_refused_later else load,
            work=folder,
        )
    assert files_in(folder) == before
    assert not (tmp_path / "out").exists()


def test_files_of_the_user_in_a_folder_of_a_run_stay(tmp_path: Path) -> None:
    work = Work(tmp_path / "work", 0)
    work.mark()
    work.begin({"steps": "fast"})
    work.put_block(1, fq.prepare(nn.Sequential(nn.Linear(4, 4)), "int8_weight_only"), [], "digest")
    mine = ("block-00001/notes.txt", "block-00001/model-0123456789abcdef.safetensors", ".hidden.txt")
    for name in mine:
        (work.folder / name).write_text("mine")
    Work(tmp_path / "work", 0).remove()
    assert files_in(work.folder) == dict.fromkeys(mine, b"mine")


def test_a_kill_while_the_folder_is_removed_is_gone_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it comes: what says that the folder holds a run goes last."""
    remove, places = Work.remove, list[int]()

    def killed(work: Work) -> None:
        unlink, left = Path.unlink, iter(range(len(places)))

        def cut(path: Path, missing_ok: bool = False) -> None:
            if next(left, None) is None:
                raise Killed
            unlink(path, missing_ok)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", cut)
            remove(work)

    monkeypatch.setattr(Work, "remove", killed)
    while True:
        target = tmp_path / str(len(places))
        try:
            streamed(decoder(), target, "int4_group32", ("ranges",))
        except Killed:
            places.append(1)
        else:
            break
        assert Work.is_begun(target / ".unfinished")
        if len(places) in (1, 5, 9):
            with monkeypatch.context() as patch:
                patch.setattr(Work, "remove", remove)
                streamed(decoder(), target, "int4_group32", ("ranges",))
            assert sorted(one.name for one in target.iterdir()) == ["config.json", "model.safetensors"]
    assert len(places) > 9


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weights": 1, "layers": []}', '{"weights": "", "layers": [1]}', "\x00"]
)
def test_a_damaged_file_of_a_block_is_named(content: str, tmp_path: Path) -> None:
    work = Work(tmp_path, 0)
    work.mark()
    work.put_block(0, None, [], "digest")
    (tmp_path / "block-00000" / "layers.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"layers\.json is damaged: .*; remove"):
        work.layers(0)


def test_the_file_of_a_suffix_beside_that_of_the_user_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF, mine")
    for target in (tmp_path, tmp_path / "model.gguf"):
        empty, load = without_weights(decoder())
        with pytest.raises(OutputError, match=r"model\.gguf, which fakequant\.deliver did not write"):
            fq.improve_folder(empty, target, "int4_group32", batches(), load=load, format="gguf")
    assert files_in(tmp_path) == {"model.gguf": b"GGUF, mine"}
    (tmp_path / "model.gguf").rename(tmp_path / "config.json")
    empty, load = without_weights(decoder())
    with pytest.raises(OutputError, match=r"config\.json, which fakequant\.deliver did not write"):
        fq.improve_folder(empty, tmp_path, "int4_group32", batches(), load=load)


@pytest.mark.parametrize("what", ["a name", "one more", "one less", "another weight", "nothing left"])
def test_a_finished_block_with_other_layers_is_refused(what: str, tmp_path: Path) -> None:
    empty, load = without_weights(decoder())

    def stops(path: str) -> object:
        if path == "blocks.2":
            raise Killed
        return load(path)

    how = {"work": tmp_path / "work", "progress": False}
    with pytest.raises(Killed):
        fq.improve_folder(empty, tmp_path / "out", "int4_group32", batches(), ("ranges",), load=stops, **how)  # type: ignore[arg-type]
    path = tmp_path / "work" / "block-00001" / "fakequant.json"
    values = json.loads(path.read_text())
    first = next(iter(values["layers"]))
    entry = values["layers"][first] if what == "one more" else values["layers"].pop(first)
    if what in ("a name", "one more"):
        values["layers"]["x"] = entry
    if what == "another weight":
        values["packed"] = {"up.bias": next(iter(values["packed"].values()))}
    path.write_text(json.dumps(values))
    if what == "nothing left":
        path.unlink()
    empty, load = without_weights(decoder())
    with pytest.raises(CheckpointError, match=r"block-00001 is damaged: .*; remove"):
        fq.improve_folder(empty, tmp_path / "out", "int4_group32", batches(), ("ranges",), load=load, **how)  # type: ignore[arg-type]
    assert not [*tmp_path.glob("out/*.safetensors")]
