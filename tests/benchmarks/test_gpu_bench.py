"""`make bench-gpu` on the CPU as the device: what is red has no time, lines are written whole, bars are seen missed."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import kinds, record
from benchmarks.cases import Entry
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import cases, limits, machine, pages, runner
from benchmarks.gpu.observation import Observation
from benchmarks.harness import ATEN, COMPILED, COPY, Case, Result
from benchmarks.peers.measure import PeerCase

ROOT = Path(__file__).parents[2]
HERE = ["--device", "cpu", "--largest", "8192", "--seconds", "0"]
SMALL = [
    replace(kind.case(4096, backward=backward), device="cpu")
    for kind in (kinds.INT8_TENSOR, kinds.NVFP4)
    for backward in (False, True)
]


@pytest.fixture
def written(tmp_path, monkeypatch):
    """The file of results and the page in a folder, a few quick cases, and no compiler."""
    (tmp_path / "gpu.md").write_text(f"before\n{pages.BEGIN}\nold\n{pages.END}\nafter\n")
    run, write = runner.run, pages.write
    monkeypatch.setattr(runner, "run", lambda asked: run(asked, tmp_path / "gpu.jsonl"))
    monkeypatch.setattr(pages, "write", lambda lines: write(lines, tmp_path / "gpu.md"))
    monkeypatch.setattr(runner, "entries", lambda device, largest: [Entry(case, (COPY, ATEN)) for case in SMALL])
    monkeypatch.setattr(torch, "compile", lambda function: function)
    return tmp_path


def line_of(case, against=COPY, p50=2.0):
    result = Result(
        case.name, case.direction, case.text, case.elements, case.dtype_name, against, pairs=((p50, 1.0),) * 3
    )
    (line,) = record.lines_of([result])
    return line | {"share": limits.share(case, p50) if against == COPY else None}


# The list


def test_every_case_of_tensors_has_the_bits_of_the_reference():
    for entry in cases.entries("cpu", 8192):
        if isinstance(entry.case, (Case, PeerCase, Observation)):
            assert entry.case.differing() == 0, entry.case


# The clock


# Bytes and bars


def test_bars():
    large = kinds.INT8_TENSOR.case(cases.LARGEST)
    assert [limits.verdict(line_of(large, p50=p50)) for p50 in (1.11, 1.12)] == ["ok", "MISSED"]
    both = replace(large, backward=True)
    assert [limits.verdict(line_of(both, p50=p50)) for p50 in (2.38, 2.40)] == ["ok", "MISSED"]
    for against in (ATEN, COMPILED, "ModelOpt TensorQuantizer", "torchao MXTensor"):
        assert [limits.verdict(line_of(SMALL[0], against, p50)) for p50 in (1.0, 1.01)] == ["ok", "MISSED"]
    assert limits.verdict(line_of(SMALL[0])) == ""
    assert limits.verdict(line_of(kinds.INT8_TOKEN.case(cases.LARGEST), p50=9.0)) == ""
    assert limits.verdict(line_of(large) | {"p50": None}) == ""


# The command


def test_times_are_printed_and_written_whole_with_where_they_come_from(written, capsys):
    assert command.main([*HERE, "--commit", "abc"]) in (0, 1)
    lines = record.read_lines(written / "gpu.jsonl")
    assert [(line["case"], line["direction"], line["against"]) for line in lines] == [
        (case.name, case.direction, name) for case in SMALL for name in (COPY, ATEN)
    ]
    assert {line["commit"] for line in lines} == {"abc"}
    assert {line["machine"] for line in lines} == {machine.device_name("cpu")}
    timed = lines[0]
    assert timed["p20"] <= timed["p50"] <= timed["p80"]
    assert timed["share"] == pytest.approx(1 / timed["p50"])
    assert (lines[-1]["p50"], lines[-1]["outcome"]) == (None, "has no float4_e2m1fn")
    printed = capsys.readouterr().out
    assert "1/4 ok   int8 per tensor, forward, 4,096 float32, int8 per_tensor" in printed
    assert "beside" in printed
    assert "6 of 8 pairs timed in" in printed
    page = (written / "gpu.md").read_text()
    assert page.startswith(f"before\n{pages.BEGIN}\n| case |")
    assert "| NVFP4 | forward | 4K float32 | ATen |  | has no float4_e2m1fn |" in page
    assert "8 lines of `benchmarks/results/gpu.jsonl`" in page
    assert page.endswith("after\n")


@pytest.mark.parametrize("broken", [lambda case: 3 * (case.name == "NVFP4"), lambda case: [0][case.name == "NVFP4"]])
def test_one_red_case_stops_every_time_and_nothing_is_written(written, monkeypatch, capsys, broken):
    assert command.main(HERE) in (0, 1)
    before = (written / "gpu.jsonl").read_bytes(), (written / "gpu.md").read_bytes()
    capsys.readouterr()
    monkeypatch.setattr(Case, "differing", broken)
    monkeypatch.setattr(runner, "measure", None)
    assert command.main(HERE) == 1
    printed = capsys.readouterr().out
    assert "2/4 ok   int8 per tensor" in printed
    assert "3/4 RED  NVFP4, forward, 4,096 float32" in printed
    assert "no times, because 2 of 4 cases differ from the reference" in printed
    assert " ms" not in printed
    assert ((written / "gpu.jsonl").read_bytes(), (written / "gpu.md").read_bytes()) == before


# Without


def test_without_a_gpu_it_says_so_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([]) == 0
    (printed,) = capsys.readouterr().out.splitlines()
    assert "finds no GPU here; nothing was run" in printed


OPTIONAL = "matplotlib onnx onnx_ir onnxruntime onnxscript rich safetensors sklearn triton typer yaml pytest"
WITHOUT = f"""
import sys
sys.modules.update(dict.fromkeys({OPTIONAL.split()!r}))  # as if they were not installed
from benchmarks.gpu.__main__ import main
raise SystemExit(main({[*HERE, "NVFP4, forward, float32, 8192, x"]!r}))
"""


@pytest.mark.exhaustive
def test_torch_and_numpy_are_all_that_it_needs():
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / place) for place in ("src", "."))}
    done = subprocess.run([sys.executable, "-c", WITHOUT], env=given, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 pairs timed" in done.stdout
