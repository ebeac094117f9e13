import os
from pathlib import Path

import pytest

from fakequant.errors import OutputError
from fakequant.files import writable_folder, write_whole


def test_write_whole_replaces(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_whole(path, b"old")
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_whole(path, b"old")

    def full(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_writable_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    folder = writable_folder(tmp_path / "a" / "b")
    assert folder.is_dir()
    assert list(folder.iterdir()) == []


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(OutputError, match=r"cannot write to .*a.*: .*; choose another folder"):
        writable_folder(tmp_path / "a" / "b")
