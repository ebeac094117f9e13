import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from fakequant.errors import OutputError
from fakequant.files import abandoned, locked, read_whole, writable_file, writable_folder, write_in_order, write_whole
from tests.support.crashes import every_death

needs_locks = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no flock")


@pytest.fixture
def umask():
    """Sets the umask; the one before comes back."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def permissions(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_write_whole_replaces(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_whole(path, b"old")
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(("mask", "expected"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_new_file_has_the_permissions_that_the_umask_leaves(tmp_path: Path, umask, mask: int, expected: int) -> None:
    umask(mask)
    write_whole(tmp_path / "new", b"x")
    assert permissions(tmp_path / "new") == expected


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444])
def test_a_replaced_file_keeps_its_permissions(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    path.chmod(mode)
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert permissions(path) == mode


def test_a_symbolic_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "share").mkdir()
    real, link = tmp_path / "share" / "real.onnx", tmp_path / "model.onnx"
    link.symlink_to(Path("share") / "real.onnx")
    for content in (b"of a link to nothing", b"of a link to a file"):
        write_whole(link, content)
        assert link.is_symlink()
        assert real.read_bytes() == content
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["model.onnx", "real.onnx", "share"]


def full(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
@pytest.mark.parametrize("size", [4097, 8192, 300_000])
def test_a_disk_that_is_full_when_the_file_is_closed(size: int, tmp_path: Path) -> None:
    """Small parts wait in memory: closing writes them once more, and its error hid the one that says what to do."""
    import resource

    write_whole(tmp_path / "a", b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OutputError, match=r"cannot write .*a: File too large; choose another path"):
            write_whole(tmp_path / "a", bytes(size))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("a", b"old")]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_whole(path, b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match=r"cannot write .*a\.json: No space left on device; free space on the disk"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x" * 300, "File name too long"),
        ("a\0b", r"a\\x00b: .*null.*; choose another name"),
        ("a\ud800", r"a\\ud800: .*; choose another name"),
        ("folder", "it is a folder; give the path of a file in it"),
        ("loop", "Too many levels of symbolic links"),
        ("file/inside", "File exists|Not a directory"),
    ],
    ids=["long", "nul", "surrogate", "folder", "loop", "below a file"],
)
def test_a_name_that_no_file_can_have_is_found_before_and_while_writing(
    tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    for check in (writable_file, lambda path: write_whole(path, b"x")):
        with pytest.raises(OutputError, match=message):
            check(tmp_path / name)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_folder_that_no_folder_can_be_called(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"cannot write to .*a\\x00b"):
        writable_folder(tmp_path / "a\0b")


def test_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OutputError, match="it is a device, a pipe or a socket"):
        write_whole(tmp_path / "pipe", b"x")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_the_longest_name_can_be_written(tmp_path: Path) -> None:
    write_whole(tmp_path / ("x" * 255), b"new")
    assert [len(p.name) for p in tmp_path.iterdir()] == [255]


DIES = """
import os, sys
from pathlib import Path
from fakequant import files
os.fsync = lambda _: os.kill(os.getpid(), 9)
files.write_whole(Path(sys.argv[1]), b"new")
"""


@needs_locks
def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_whole(path, b"old")
    kept = [tmp_path / name for name in (".fakequant-mine.tmp", ".a.z7nbwzm7", ".fakequant-0123456789abcdef.json")]
    for other in kept:
        other.write_text("")
    assert subprocess.run([sys.executable, "-c", DIES, path], check=False).returncode == -9
    assert path.read_bytes() == b"old"
    write_whole(tmp_path / "another", b"new")
    assert set(tmp_path.iterdir()) == {path, tmp_path / "another", *kept}


@needs_locks
def test_temporary_files_of_living_processes_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def write_another(handle: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        write_whole(tmp_path / "another", b"2")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", write_another)
    write_whole(tmp_path / "one", b"1")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"one": b"1", "another": b"2"}


@needs_locks
def test_one_process_at_a_time_has_the_lock(tmp_path: Path) -> None:
    with locked(tmp_path) as alone:
        assert alone
        (lock,) = tmp_path.iterdir()
        with abandoned(lock) as free:
            assert not free
        with pytest.raises(OutputError, match="another process writes to"), locked(tmp_path, wait=False):
            raise AssertionError("two have it")
        with locked(tmp_path, "another", wait=False) as alone:
            assert alone
    assert list(tmp_path.iterdir()) == []
    lock.write_text("")  # of a process that died
    with locked(tmp_path) as alone:
        assert alone
    assert list(tmp_path.iterdir()) == []


def test_without_locks_files_are_written_and_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / ".fakequant-0123456789abcdef.tmp"
    left.write_text("")
    monkeypatch.setattr("fakequant.files.fcntl", None)
    with locked(tmp_path) as alone:
        assert not alone
    write_whole(tmp_path / "a", b"new")
    assert set(tmp_path.iterdir()) == {left, tmp_path / "a"}


def test_of_several_files_the_last_is_never_newer_than_the_others(tmp_path: Path) -> None:
    first, last = tmp_path / "first", tmp_path / "last"
    met = set()

    def prepare() -> None:
        write_in_order({first: b"old", last: b"old"})

    def check() -> None:
        met.add((first.read_bytes(), last.read_bytes()))

    died = every_death(prepare, lambda: write_in_order({first: b"new", last: b"new"}), check)
    assert died >= 4
    assert met == {(b"old", b"old"), (b"new", b"old"), (b"new", b"new")}
    assert set(tmp_path.iterdir()) == {first, last}


def test_writable_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    folder = writable_folder(tmp_path / "a" / "b")
    assert folder.is_dir()
    assert list(folder.iterdir()) == []


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(OutputError, match=r"cannot write to .*a.*: .*; choose another folder"):
        writable_folder(tmp_path / "a" / "b")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pipes in folders")
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_file_is_not_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(OSError, match="it is not a regular file"):
        read_whole(path)
