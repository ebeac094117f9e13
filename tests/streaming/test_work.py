"""The folder of a run: it removes what it wrote, and nothing else, and says of damage what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

import fakequant as fq
from fakequant.errors import CheckpointError, OutputError
from fakequant.streaming.work import Work
from tests.support.streamed import batches, decoder, streamed, without_weights

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


class Killed(BaseException):
    pass


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


def test_a_run_says_of_itself_what_it_is(tmp_path: Path) -> None:
    work = Work(tmp_path / "a", 1)
    work.mark()
    assert json.loads((tmp_path / "a" / "run-1.json").read_text()) == {"version of fakequant": fq.__version__}


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
