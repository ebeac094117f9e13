"""The comparison with other libraries, without them: what becomes of a call, and what the page and the bar say."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import fakequant as fq
from benchmarks import bars, kernels
from benchmarks.peers import call, measure, report
from benchmarks.peers.call import Call, Peer, Theirs
from benchmarks.peers.measure import Difference, Row

ROOT = Path(__file__).parents[1]
TORCH = Peer("Torch", "torch")
SPEC = "int8 per_block(-1:32)"
RATIO = kernels.Ratio(2.0, 1.0, 3.0, 0.1, 0.2)
ROW = Row("int8", "Torch", "way", SPEC, "1.0", measure.MEASURED, RATIO, RATIO, 1.5, Difference(0, 0))


def call_of(build, why="because"):
    return Call("int8", TORCH, "way", SPEC, build, why)


def same(x):
    return fq.fake_quantize(x, SPEC)


@pytest.fixture(autouse=True)
def _nothing_is_compiled(monkeypatch):
    """A compilation takes seconds, and the compiler is not what is tested."""
    monkeypatch.setattr(torch, "compile", lambda function: function)


@pytest.fixture
def buffers():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(16, 64, generator=generator) for _ in range(4)]


def test_a_call_with_our_bits_has_times_and_no_difference(buffers):
    row = measure.measure(call_of(lambda x: Theirs(same)), buffers)
    assert (row.outcome, row.version, row.why) == (measure.MEASURED, torch.__version__, "")
    assert row.difference == Difference(0, 0)
    assert row.difference_with_its_scales is None
    assert row.over_copy.median > 0
    assert row.over_ours.median > 0
    assert isinstance(row.compiled_over_ours, float)


def test_differing_bits_and_values_are_counted(buffers):
    def nudged(x):
        y = same(x)
        y[0, 3] += 1.0
        zeros = (y == 0).nonzero()
        assert len(zeros)
        y[tuple(zeros[0])] = -0.0
        return y

    row = measure.measure(call_of(lambda x: Theirs(nudged)), buffers)
    assert row.difference == Difference(bits=2, values=1)
    assert row.why == "because"


def test_a_rule_of_its_own_for_scales_is_compared_with_these_scales_too(buffers):
    def build(x):
        scale = call.block_amax(x) / 127.5
        return Theirs(lambda x: fq.fake_quantize(x, SPEC, scale=scale), scale=scale)

    row = measure.measure(call_of(build), buffers)
    assert row.difference.values > 100
    assert row.difference_with_its_scales == Difference(0, 0)


def test_ours_gets_the_scale_that_theirs_was_given(buffers):
    scale = torch.full((16, 2), 0.25)
    row = measure.measure(call_of(lambda x: Theirs(lambda x: fq.fake_quantize(x, SPEC, scale=scale), scale)), buffers)
    assert row.difference == Difference(0, 0)


def test_a_missing_library_is_a_row():
    missing = replace(call_of(lambda x: pytest.fail("called")), peer=Peer("None", "no-such-distribution"))
    row = measure.measure(missing, [torch.ones(2, 2)])
    assert (row.outcome, row.version, row.over_ours) == (measure.NOT_INSTALLED, None, None)


@pytest.mark.parametrize("where", ["build", "run"])
def test_what_a_library_raises_is_a_row_with_its_first_line(where, buffers):
    def fails(x):
        raise RuntimeError("\nneeds a GPU\nsecond line")

    row = measure.measure(call_of(fails if where == "build" else lambda x: Theirs(fails)), buffers)
    assert row.outcome == "raises RuntimeError: needs a GPU"
    assert row.over_ours is None


def test_an_error_without_words_is_its_type():
    assert measure.first_line(AssertionError()) == "AssertionError"


def test_what_cannot_be_compiled_is_said_and_the_rest_is_measured(buffers, monkeypatch):
    def fails(x):
        raise ValueError("no code for this")

    monkeypatch.setattr(torch, "compile", lambda function: fails)
    row = measure.measure(call_of(lambda x: Theirs(same)), buffers)
    assert row.compiled_over_ours == "ValueError: no code for this"
    assert row.over_ours.median > 0


def test_half_of_the_compared_rows_have_ties():
    x = torch.randn(8, 4096)
    bits = measure.with_ties(x).view(torch.int32) & 0xFFFF
    assert (bits[:4] == 0).all()
    assert (bits[4:] != 0).any()


def table(*rows):
    return report.table(json.loads(json.dumps(report.results(rows)))).splitlines()[2:]


def test_lines_of_the_table():
    lines = table(
        ROW,
        replace(ROW, case="other", difference=Difference(1234, 0), why="it is odd", compiled_over_ours="E: long"),
        replace(ROW, difference=Difference(9, 8), difference_with_its_scales=Difference(0, 0)),
        Row("int8", "Absent", "way", SPEC, None, measure.NOT_INSTALLED),
    )
    assert lines[0] == "| int8 | Torch `way` | 2.00 | 2.0 | 1.5 | 0 |"
    assert lines[1] == "| int8 | Torch `way` | 2.00 | 2.0 | 1.5 | 9 (given its scales: 0) |"
    assert lines[2] == "| int8 | Absent `way` | | not installed | | |"
    assert lines[3] == "| other | Torch `way` | 2.00 | 2.0 | fails (E) | 1,234 signs of zeros: it is odd |"
    assert lines[4] == ""
    assert "Torch 1.0, Absent not installed" in lines[5]
    assert f"{torch.get_num_threads()} threads" in lines[5]


def run_main(monkeypatch, tmp_path, row, *arguments):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    monkeypatch.setattr(report.sys, "argv", ["peers", *arguments])
    monkeypatch.setattr(report, "CALLS", [call_of(None)])
    monkeypatch.setattr(report, "inputs", list)
    monkeypatch.setattr(report, "measure", lambda called, buffers: row)
    return report.main(tmp_path / "peers.json", page), page.read_text()


def test_main_writes_the_file_and_the_page_and_pages_only_the_page(monkeypatch, tmp_path):
    code, text = run_main(monkeypatch, tmp_path, ROW)
    assert code == 0
    assert text.startswith(f"before\n{report.BEGIN}\n| case | library |")
    assert "old" not in text
    assert json.loads((tmp_path / "peers.json").read_text())["rows"] == [asdict(ROW)]
    assert run_main(monkeypatch, tmp_path, None, "--pages") == (0, text)


def test_a_faster_library_is_a_failure(monkeypatch, tmp_path):
    faster = replace(ROW, over_ours=replace(RATIO, median=0.9))
    assert run_main(monkeypatch, tmp_path, faster)[0] == 1
    assert run_main(monkeypatch, tmp_path, Row("int8", "A", "way", SPEC, None, measure.NOT_INSTALLED))[0] == 0


def bar_of(tmp_path, *rows):
    path = tmp_path / "peers.json"
    path.write_text(json.dumps(report.results(rows)))
    (bar,) = bars.peer_bars(path)
    return bar


def test_the_bar_is_the_nearest_library(tmp_path):
    absent = Row("int8", "Absent", "way", SPEC, None, measure.NOT_INSTALLED)
    assert bars.peer_bars(tmp_path / "missing.json") == []
    bar = bar_of(tmp_path, ROW, replace(ROW, peer="Near", over_ours=replace(RATIO, median=1.2)), absent)
    assert bar == bars.Bar("2 calls of Near, Torch: time over ours, nearest (Near int8)", "> 1", "1.2", True)
    assert not bar_of(tmp_path, replace(ROW, over_ours=replace(RATIO, median=1.0))).ok
    assert not bar_of(tmp_path, absent).ok


@pytest.mark.parametrize("called", report.CALLS, ids=lambda c: f"{c.peer.name}-{c.case}-{c.way}")
def test_every_call_names_a_specification_and_a_library_of_the_extra(called):
    fq.QuantSpec.parse(called.spec)
    extra = re.search(r"^bench = (\[.*\])$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert called.peer.distribution in {requirement.split(">=")[0] for requirement in json.loads(extra[1])}
    assert called.peer.distribution in pinned


def test_no_call_is_listed_twice():
    names = [(c.case, c.peer.name, c.way) for c in report.CALLS]
    assert len(set(names)) == len(names)
