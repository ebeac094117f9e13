"""Progress: a bar of tqdm on a terminal and in a notebook, counts where a caller asks, else nothing."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.data import batches as tracking
from tests.support.language_models import language_model

tqdm = pytest.importorskip("tqdm")


class Stream(io.StringIO):
    """An error stream that is a terminal, or is none."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture
def stream(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Stream:
    monkeypatch.setattr(tracking, "BAR_AFTER", 0.0)
    return Stream(getattr(request, "param", True))


def tracked(stream: Stream, *given: Any, **named: Any) -> list[Any]:
    """The items, tracked with an error stream."""
    with redirect_stderr(stream):
        return [*tracking.track(*given, **named)]


def shown(stream: Stream) -> list[str]:
    return [line.strip() for line in stream.getvalue().split("\r") if line.strip()]


@pytest.mark.parametrize(
    ("stream", "asked", "bar"),
    [(True, None, True), (False, None, False), (False, True, True), (True, False, False)],
    indirect=["stream"],
    ids=["terminal", "no terminal", "asked for", "not wanted"],
)
def test_a_bar_is_there_on_a_terminal_or_where_it_is_asked_for(stream: Stream, asked: Any, bar: bool) -> None:
    assert tracked(stream, "abcd", "calibrating, in up to 0.1 GB", 4, asked) == [*"abcd"]
    assert bool(stream.getvalue()) == bar
    assert all(line.startswith("calibrating, in up to 0.1 GB: ") and "/4" in line for line in shown(stream))
    assert "\n" not in stream.getvalue()
    assert stream.getvalue()[-1:] == ("\r" if bar else ""), "the line is wiped"


@pytest.mark.parametrize("total", [None, 1])
def test_another_number_of_items_than_said(stream: Stream, total: int | None) -> None:
    class Endless(list[str]):
        def __len__(self) -> int:
            raise NotImplementedError

    assert tracked(stream, Endless("abc"), "measuring", total) == [*"abc"]
    assert shown(stream)[0].startswith("measuring: ")


def test_short_work_leaves_no_line(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "BAR_AFTER", 100.0)
    assert tracked(stream, "abcd", "calibrating", 4) == [*"abcd"]
    assert not shown(stream)


def test_false_shows_nothing_and_a_caller_that_counts_gets_lines(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "COUNT_EVERY", 0.0)
    told: list[str] = []
    with tracking.counting(told.append, bars=False):
        assert tracked(stream, "abc", "measuring", 3) == [*"abc"]
    assert tracked(stream, "abc", "measuring", 3, shown=False) == [*"abc"]
    assert told == ["measuring: 1 of 3", "measuring: 2 of 3"]
    assert stream.getvalue() == ""
    with tracking.counting(told.append):
        assert tracked(stream, "abc", "measuring", 3) == [*"abc"]
    assert len(told) == 2
    assert shown(stream)


def test_an_error_ends_the_line(stream: Stream) -> None:
    def broken() -> Any:
        yield from "ab"
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        tracked(stream, broken(), "calibrating", 4)
    assert stream.getvalue().endswith("\r")


def test_without_tqdm_a_bar_that_is_asked_for_is_one_line(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    assert tracked(stream, "abc", "measuring", 3) == [*"abc"]
    with pytest.warns(UserWarning, match=r"a progress bar needs tqdm: pip install fakequant\[progress\]"):
        assert tracked(stream, "abc", "measuring", 3, shown=True) == [*"abc"]
    assert stream.getvalue() == ""


def test_tqdm_is_imported_when_a_bar_is_drawn() -> None:  # torch imports a part of it
    code = "import sys, fakequant.model.calibrate; assert 'tqdm.auto' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_kernel_shows_the_bar() -> None:
    """A cell that a real kernel runs, where one is installed."""
    pytest.importorskip("ipykernel", reason="no Jupyter kernel is installed")
    nbclient = pytest.importorskip("nbclient", reason="nothing runs notebooks")
    nbformat = pytest.importorskip("nbformat", reason="nothing makes notebooks")
    code = "import time\nfrom fakequant.data.batches import track\n"
    code += "for _ in track(range(3), 'calibrating', 3): time.sleep(0.6)"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    assert "calibrating" in str(notebook.cells[0].outputs)


def batches() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(4, 32) for _ in range(4)]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))


def ready() -> nn.Module:
    model = fq.prepare(net(), "int8")
    fq.calibrate(model, batches(), progress=False)
    return model


def delivered(folder: Path, **how: Any) -> None:
    model = fq.prepare(language_model("llama"), "INT4_GROUP32")
    tokens = [{"input_ids": torch.arange(4 * n, 4 * n + 8)[None]} for n in range(4)]
    fq.verify_delivery(fq.deliver(model, folder / "delivered", "compressed-tensors"), model, tokens, **how)


def written(format: str) -> Callable[..., Any]:
    preset = "GGUF_Q8_0" if format == "gguf" else "INT4_GROUP32"
    return lambda folder, **how: fq.deliver(fq.prepare(language_model("llama"), preset), folder, format, **how)


def mix() -> fq.ptq.Allocation:
    return fq.ptq.search(net(), batches(), bits=6, progress=False)


def exported(folder: Path, **how: Any) -> None:
    model = ready()
    fq.export_onnx(model, batches()[0], folder / "m.onnx")
    fq.verify_onnx(folder / "m.onnx", model, batches(), **how)


CALLS: dict[str, tuple[Callable[..., Any], str]] = {
    "search": (lambda _, **how: fq.ptq.search(net(), batches(), bits=6, **how), "scoring layers: "),
    "verify": (lambda _, **how: fq.ptq.verify(net(), batches(), [mix()], **how), "measuring mixes: "),
    "compare": (lambda _, **how: fq.ptq.compare(net(), batches(), "INT8", **how), "comparing: "),
    "improve": (lambda _, **how: fq.ptq.improve(ready(), batches(), "fast", **how), "choosing weights"),
    "advise": (lambda _, **how: fq.advise(net(), batches(), presets=["INT8"], **how), "trying "),
    "report": (lambda folder, **how: fq.report(ready(), batches(), folder / "page.html", **how), "measuring layers: "),
    "verify_onnx": (exported, "verifying: "),
    "verify_delivery": (delivered, "running transformers "),
    "verify_delivery, the weights": (delivered, "comparing weights: "),
    "deliver": (written("compressed-tensors"), "writing tensors: "),
    "deliver, a file": (written("gguf"), "writing tensors: "),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore")
def test_calls_that_take_long_show_bars_where_they_are_asked_for(name: str, stream: Stream, tmp_path: Path) -> None:
    call, text = CALLS[name]
    for asked in (False, True):
        folder = tmp_path / str(asked)
        folder.mkdir()
        with redirect_stderr(stream):
            call(folder, progress=asked)
        assert (text in stream.getvalue()) == asked
