"""Progress in notebooks: a line that is drawn over itself, where a kernel shows the error stream."""

from __future__ import annotations

import builtins
import io
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from fakequant.model import progress


class Stream(io.StringIO):
    """A stand-in for the error stream of a kernel, `ipykernel.iostream.OutStream`."""


Stream.__module__ = "ipykernel.iostream"


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    made = Stream()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=made))  # pytest sets its own before the test's body
    monkeypatch.setattr(progress, "REDRAW_EVERY", 0.0)
    return made


def test_a_line_is_drawn_over_itself(stream: Stream) -> None:
    assert list(progress.track("abcd", "calibrating", 4)) == [*"abcd"]
    empty, *drawn = stream.getvalue().split("\r")
    assert empty == ""
    assert [line.split(",")[0] for line in drawn] == [
        "calibrating: [######..................] 1 of 4",
        "calibrating: [############............] 2 of 4",
        "calibrating: [##################......] 3 of 4",
        "calibrating: [########################] 4 of 4",
    ]
    assert "about 0 s left" in drawn[0]
    assert drawn[-1].rstrip() == "calibrating: [########################] 4 of 4, 0 s"
    assert len(drawn[-1].rstrip("\n")) == len(drawn[-2])
    assert stream.getvalue().endswith("\n")


@pytest.mark.parametrize("total", [None, 1, 0])
def test_without_a_total_it_counts(stream: Stream, total: int | None) -> None:
    assert list(progress.track("abc", "measuring", total)) == [*"abc"]
    assert stream.getvalue().split("\r")[-1].strip() == "measuring: 3, 0 s"


def test_short_work_leaves_no_line(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "REDRAW_EVERY", 100.0)
    assert list(progress.track("abcd", "calibrating", 4, shown=True)) == [*"abcd"]
    assert stream.getvalue() == ""


def test_false_shows_nothing_and_a_caller_that_counts_gets_lines(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "COUNT_EVERY", 0.0)
    told: list[str] = []
    with progress.counting(told.append):
        assert list(progress.track("abc", "measuring", 3)) == [*"abc"]
    assert list(progress.track("abc", "measuring", 3, shown=False)) == [*"abc"]
    assert told == ["measuring: 1 of 3", "measuring: 2 of 3"]
    assert stream.getvalue() == ""


def test_an_error_ends_the_line(stream: Stream) -> None:
    def broken() -> Any:
        yield from "ab"
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        list(progress.track(broken(), "calibrating", 4))
    assert stream.getvalue().endswith("left\n")


@pytest.mark.parametrize(
    ("shell", "expected"), [(SimpleNamespace(kernel=1), True), (SimpleNamespace(), False), (None, False)]
)
def test_a_kernel_behind_another_stream_is_found(monkeypatch: pytest.MonkeyPatch, shell: Any, expected: bool) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    assert progress.in_notebook() is expected


def test_without_ipython_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert not progress.in_notebook()
    assert "IPython" not in vars(progress)


def test_a_kernel_shows_the_line() -> None:
    """A cell that a real kernel runs, where one is installed."""
    pytest.importorskip("ipykernel", reason="no Jupyter kernel is installed")
    nbclient = pytest.importorskip("nbclient", reason="nothing runs notebooks")
    nbformat = pytest.importorskip("nbformat", reason="nothing makes notebooks")
    code = "import time\nfrom fakequant.model.progress import track\n"
    code += "for _ in track(range(3), 'calibrating', 3): time.sleep(0.6)"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    shown = "".join(output.get("text", "") for output in notebook.cells[0].outputs)
    assert "calibrating: [########################] 3 of 3" in shown
