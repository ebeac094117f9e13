"""The files of a run take the place of those before: whenever a run dies, a mix of two never reads as one."""

import errno
import os
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import fakequant as fq
from fakequant.cli import results
from fakequant.cli.commands import app
from fakequant.cli.job import Job, run
from fakequant.cli.results import GRAPH, ONNX, PARTS, REPORT, results_folder
from fakequant.errors import ExportError, OutputError
from tests.support.crashes import Killed, every_death, killed_after
from tests.support.generations import FILES, is_whole, make_run, model_of, values_in
from tests.support.recipes import EVALUATE, RECIPE


def names_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def assert_plain(out: Path, *others: str) -> None:
    """Check that a folder holds the plain files of one run, and others, and nothing else."""
    names = names_in(out)
    assert len([name for name in names if name.startswith("checkpoint/model-")]) == 1
    assert {name for name in names if not name.startswith("checkpoint/model-")} == {*PARTS, *others}
    assert not any((out / part).is_symlink() for part in PARTS)


def test_runs_follow_each_other_and_other_files_stay(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    for value in (1.0, 2.0, 2.0, 3.0):
        make_run(tmp_path, value)
        assert values_in(tmp_path) == {value}
        assert_plain(tmp_path, "notes/mine.txt")
        assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", "notes", *FILES}


def test_a_file_that_the_new_run_lacks_goes_and_comes_back(tmp_path: Path) -> None:
    make_run(tmp_path, 1.0)
    make_run(tmp_path, 2.0, without=ONNX)
    assert values_in(tmp_path) == {2.0, None}
    make_run(tmp_path, 3.0)
    assert values_in(tmp_path) == {3.0}


def test_a_file_that_no_run_wrote_is_not_removed(tmp_path: Path) -> None:
    """Neither the user's own model, nor an empty folder of the user, nor what has a name like that of a run."""
    (tmp_path / ONNX).write_text("mine")
    (tmp_path / "results.json").write_text("mine")
    (tmp_path / ".fakequant-run-notes").mkdir()
    (tmp_path / "checkpoint").mkdir()
    make_run(tmp_path, 1.0, without=ONNX)
    assert (tmp_path / ONNX).read_text() == "mine"
    assert (tmp_path / ".fakequant-run-notes").is_dir()


@pytest.mark.parametrize("first", [True, False], ids=["the first run", "a later run"])
def test_a_run_that_dies_anywhere_leaves_one_run_or_says_that_it_does_not(tmp_path: Path, first: bool) -> None:
    """The next run makes it whole, also one without a file that the dead one had."""
    numbers, met = iter(range(1, 10_000)), set[str]()
    before, now = None, 0.0
    out = tmp_path / "out0"

    def prepare() -> None:
        nonlocal out, before, now
        out, before, now = tmp_path / f"out{next(numbers)}", None, float(next(numbers))
        if not first:
            make_run(out, before := float(next(numbers)))

    def check() -> None:
        if is_whole(out):
            (found,) = values_in(out)
            assert found in (before, now)
            met.add("old" if found == before else "new")
        else:
            met.add("neither")
            page = (out / REPORT).read_text() if (out / REPORT).exists() else ""
            assert page in ("", results.NOT_WHOLE.decode()) or len(values_in(out, (ONNX, GRAPH, REPORT))) == 1
        make_run(out, 0.5, without=ONNX)
        assert values_in(out) == {0.5, None}
        make_run(out, 0.5)
        assert_plain(out)
        assert {path.name for path in out.iterdir()} == {"checkpoint", *FILES}

    assert every_death(prepare, lambda: make_run(out, now), check) > 30
    assert met == ({"neither", "new"} if first else {"old", "neither", "new"})


@pytest.mark.parametrize("operations", range(20, 60, 4))
def test_two_deaths_in_a_row_leave_no_mix(tmp_path: Path, operations: int) -> None:
    for second in range(0, 24, 5):
        make_run(tmp_path, 1.0)
        for done, value in ((operations, 2.0), (second, 3.0)):
            with suppress(Killed), killed_after(done):
                make_run(tmp_path, value)
            assert not is_whole(tmp_path) or len(values_in(tmp_path)) == 1


def test_a_full_disk_leaves_the_run_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    make_run(tmp_path, 1.0)
    fsync = os.fsync
    for fitting in range(4):  # of the checkpoint's two files, and of the two that say that no run is whole
        calls = count()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda handle: (fsync if next(calls) < fitting else full)(handle))  # noqa: B023
            with pytest.raises(OutputError, match="free space on the disk"):
                make_run(tmp_path, 2.0)
        assert values_in(tmp_path) == {1.0}
    make_run(tmp_path, 3.0)
    assert_plain(tmp_path)


def test_one_process_at_a_time_writes_to_a_folder(tmp_path: Path) -> None:
    make_run(tmp_path, 1.0)
    with results_folder(tmp_path):
        with pytest.raises(OutputError, match=r"another process writes to .*; wait until it has ended"):
            make_run(tmp_path, 2.0)
        fq.save(model_of(1.0), tmp_path / "checkpoint")  # as a recipe may do
    assert values_in(tmp_path) == {1.0}
    make_run(tmp_path, 3.0)
    assert values_in(tmp_path) == {3.0}


def test_links_to_other_places_are_written_through(tmp_path: Path) -> None:
    out, share = tmp_path / "out", tmp_path / "share"
    out.mkdir()
    (share / "checkpoint").mkdir(parents=True)
    (out / ONNX).symlink_to(share / "real.onnx")
    (out / "checkpoint").symlink_to(share / "checkpoint")
    for value in (1.0, 2.0):
        make_run(out, value)
        assert values_in(out) == {value}
        assert (share / "real.onnx").read_text() == str(value)
        assert (out / ONNX).is_symlink()


def test_permissions_of_the_files_before_stay(tmp_path: Path) -> None:
    make_run(tmp_path, 1.0)
    (tmp_path / ONNX).chmod(0o600)
    make_run(tmp_path, 2.0)
    assert (tmp_path / ONNX).stat().st_mode & 0o777 == 0o600


def test_a_link_to_another_file_system_is_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, real, replace = tmp_path / "out", tmp_path / "real.onnx", os.replace
    out.mkdir()
    (out / ONNX).symlink_to(real)

    def elsewhere(source: Path, target: Path) -> None:
        if Path(source).parent != Path(target).parent and Path(target) == real:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        replace(source, target)

    monkeypatch.setattr(os, "replace", elsewhere)
    for value in (1.0, 2.0):
        make_run(out, value)
        assert values_in(out) == {value}
        assert real.read_text() == str(value)


def test_the_folder_of_a_job_that_fails_is_not_left(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), results_folder(tmp_path / "a" / "b"):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [ONNX, "checkpoint/fakequant.json"])
def test_a_folder_where_a_file_belongs_is_found_before_the_work(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir(parents=True)
    with pytest.raises(OutputError, match="it is a folder"), results_folder(tmp_path):
        raise AssertionError("the work began")


def test_an_interrupted_job_says_that_nothing_was_written(recipe, tmp_path: Path) -> None:
    path = recipe(RECIPE + EVALUATE.replace("    assert", "    raise KeyboardInterrupt\n    assert"))
    out = tmp_path / "out"
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["quantize", str(path), "--out", str(out)])
    assert result.exit_code == 130
    assert result.stderr.strip() == f"interrupted: nothing was written; the files in {out} are unchanged"
    assert not out.exists()


def test_a_job_that_fails_late_leaves_the_files_of_the_one_before(
    recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    job = Job(recipe(RECIPE), "int8", "max", out)
    run(job, Console(quiet=True))
    before = {name: (out / name).read_bytes() for name in names_in(out)}
    changed = Job(
        recipe(RECIPE.replace("manual_seed(0)", "manual_seed(5)"), "other.py"), "int8", "max", out, overwrite=True
    )

    def fail(*_: object) -> None:
        raise OutputError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("fakequant.cli.job.write_report", fail)
        with pytest.raises(OutputError):
            run(changed, Console(quiet=True))
    assert {name: (out / name).read_bytes() for name in before} == before
    others = {name for name in names_in(out) if not name.startswith("unfinished/")}
    assert others == set(before)

    def refuse(*_: object, **__: object) -> None:
        raise ExportError("cannot be said")

    monkeypatch.setattr("fakequant.cli.job.export_onnx", refuse)
    with pytest.raises(ExportError):
        run(changed, Console(quiet=True))
    assert not (out / ONNX).exists(), "it was of the job before"
    assert (out / GRAPH).read_bytes() != before[GRAPH]
