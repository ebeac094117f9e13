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
from benchmarks.gpu import cases, limits, machine, observation, pages, runner
from benchmarks.gpu.observation import Observation
from benchmarks.harness import ATEN, COMPILED, COPY, Case, Effort, Result, measure, timing
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


def test_a_batch_is_observed_beside_a_copy_and_wrong_counts_are_counted(monkeypatch):
    case = next(e.case for e in cases.entries("cpu", 8192) if isinstance(e.case, Observation) and e.case.channels > 1)
    (result,) = measure(case, (COPY,), Effort(0.0), lambda case: 0)
    assert result.pairs
    assert limits.share(case, 2.0) is None
    right = observation.observe
    monkeypatch.setattr(observation, "observe", lambda *given: right(*given)._replace(counts=right(*given).counts + 1))
    assert case.differing() == 256 * 2 * 4096


# The clock


def test_each_kind_of_device_has_its_clock(monkeypatch):
    class Event:
        recorded = 0

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            Event.recorded += 1
            self.time = Event.recorded * 7.0

        def synchronize(self):
            assert Event.recorded == 2

        def elapsed_time(self, other):
            return other.time - self.time

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert timing.seconds(lambda: None, "cuda") == 7e-3
    assert 0 < timing.seconds(lambda: None) < 7e-3


def test_short_calls_are_repeated_until_a_turn_is_long():
    calls = []
    timing.time_pairs(calls.append, lambda x: None, [torch.ones(1)], Effort(0.0, least=1, turn=0.0))
    few = len(calls)
    timing.time_pairs(calls.append, lambda x: None, [torch.ones(1)], Effort(0.0, least=1, turn=1e-3))
    assert len(calls) - few > 10 * few


# Bytes and bars


@pytest.mark.parametrize(
    ("kind", "backward", "bytes_per_element"),
    [
        (kinds.INT8_TENSOR, False, 8),
        (kinds.INT8_TENSOR, True, 16.25),
        (kinds.INT8_TOKEN, False, 8),
        (kinds.MXFP4, True, 16.25),
        (kinds.NVFP4, False, 12),
        (kinds.NVFP4, True, 20.25),
        (kinds.FP8_TENSOR_TAKEN, False, 12),
        (kinds.LSQ, True, 20),
    ],
    ids=str,
)
def test_fewest_bytes(kind, backward, bytes_per_element):
    case = kind.case(4096, backward=backward)
    assert limits.fewest_bytes(case) == 4096 * bytes_per_element
    assert limits.share(case, 2.0) == bytes_per_element / 16


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


def test_a_gradient_that_differs_on_the_device_is_counted(monkeypatch):
    case = SMALL[1]
    assert case.differing() == 0
    right = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *call: tuple(-grad for grad in right(*call)))
    assert case.differing() > 0


def test_a_missed_bar_is_the_exit_code(written, monkeypatch, capsys):
    monkeypatch.setattr(limits, "verdict", lambda line: "MISSED" if line["against"] == ATEN and line["p50"] else "")
    monkeypatch.setattr(runner, "verdict", limits.verdict)
    assert command.main(HERE) == 1
    assert "0 bars kept, 2 missed" in capsys.readouterr().out


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
