"""What `make bench` times, how results of several processes become lines, tables and a plot; no time is tested."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import cases, limits, pages, processes, record
from benchmarks.calibration import LOOPS, METHODS, Search, WholeModel
from benchmarks.harness import ATEN, COMPILED, COPY, DOUBLED, MEASURED, Case, Effort, Result
from benchmarks.kinds import SHOWN
from benchmarks.peers import CALLS, PEERS
from benchmarks.peers.measure import PeerCase
from benchmarks.processes import Plan, together
from benchmarks.torch_ao import ROUTED
from benchmarks.training import BLOCK, CNN, LINEAR_BY_CODES, MODULE
from fakequant.ops import dispatch, products
from fakequant.ops.cpu.backend import CpuBackend

COMPARED_SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24)
QUICK = Effort(0.0, least=1)
RESULT = Result("int8 per tensor", "forward", "int8 per_tensor", 4096, "float32", COPY, pairs=((2.0, 1.0),) * 3)
FIELDS = {
    *("commit", "machine", "torch", "threads", "load", "case", "direction", "spec", "elements", "dtype", "against"),
    *("outcome", "differing", "p20", "p50", "p80", "seconds", "other_seconds", "pairs"),
}


def entries():
    of_tensors = [entry for entry in cases.everything() if type(entry.case) is Case]
    return {(e.case.name, e.case.direction, e.case.elements, e.case.dtype_name): e for e in of_tensors}


# The list


def test_all_formats_sizes_and_dtypes_are_in_the_list():
    found = entries()
    for elements in (64, 1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24, 1 << 26):
        for name in ("int8 per tensor", "float8_e4m3fn per tensor", "MXFP4", "NVFP4"):
            assert COPY in found[name, "forward", elements, "float32"].often
            assert DOUBLED in found[name, "forward and backward", elements, "float32"].often
        assert ATEN in found["int8 per tensor", "forward", elements, "float32"].of_process(0)
    for name in ("int8 per channel", "int8 per token", "int8 in groups of 32", "NVFP4", "MXFP4"):
        for dtype in ("float32", "bfloat16", "float16"):
            assert COPY in found[name, "forward", 1 << 22, dtype].often
            assert DOUBLED in found[name, "forward and backward", 1 << 22, dtype].often
    both = "forward and backward"
    for case in (*((kind.name, "forward") for kind in SHOWN[:-1]), *((kind.name, both) for kind in SHOWN)):
        for elements in COMPARED_SIZES:
            assert {ATEN, COMPILED} <= set(found[(*case, elements, "float32")].of_process(0))


def test_every_call_of_a_library_is_timed_at_all_sizes_from_4K_on():
    timed = [e.case for e in cases.everything() if type(e.case) is PeerCase and e.case.against in e.once]
    found = {(case.call, case.backward, case.elements) for case in timed}
    assert found == {(call, b, n) for call in CALLS for b in call.kind.directions for n in COMPARED_SIZES}


def test_everything_that_is_promised_is_timed_and_nothing_twice():
    every, promised = cases.everything(), cases.promised()
    assert len({entry.case for entry in every}) == len(every)
    by_case = {entry.case: entry for entry in every}
    for entry in promised:
        assert set(entry.of_process(0)) <= set(by_case[entry.case].of_process(0))
    assert {(case, limit.against) for limit in limits.LIMITS for case in limit.cases} == {
        (entry.case, name) for entry in promised for name in entry.of_process(0)
    }


SMALL = [entry.case for entry in cases.everything() if type(entry.case) is Case and entry.case.elements <= 1 << 12]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: f"{case.name}-{case.elements}-{case.direction}")
def test_small_cases_have_the_bits_of_the_reference(case):
    assert case.differing() == 0


# Cases of models


@pytest.mark.parametrize(
    "case", [MODULE, replace(CNN, shape=(2, 3, 8, 8)), replace(BLOCK, shape=(4, 384))], ids=lambda case: case.name
)
def test_training_is_compared_with_the_reference_and_a_wrong_gradient_is_counted(case, monkeypatch):
    assert case.differing() == 0
    right = CpuBackend.plan

    def wrong(self, kind):
        plan = right(self, kind)
        return plan._replace(grad_input=lambda dy, mask: 2.0 * plan.grad_input(dy, mask))

    monkeypatch.setattr(CpuBackend, "plan", wrong)
    monkeypatch.setattr(dispatch, "_known", {})
    assert case.differing() > 0


def test_products_of_codes_are_compared_with_int64_and_wrong_ones_are_counted(monkeypatch):
    case = replace(LINEAR_BY_CODES, shape=(2, 384))
    assert case.differing() == 0
    right = products.scaled

    monkeypatch.setattr(products, "scaled", lambda *given, **options: 2.0 * right(*given, **options))
    assert case.differing() > 0


@pytest.mark.parametrize("case", [MODULE, replace(CNN, shape=(2, 3, 8, 8)), *ROUTED[1:]], ids=lambda case: case.name)
def test_training_is_timed_beside_what_is_promised(case):
    case = replace(case, shape=(1, *case.shape[1:2], 8, 8)) if case is not MODULE else case
    same = (type(case), case.name)
    names = {limit.against for limit in limits.LIMITS for one in limit.cases if (type(one), one.name) == same}
    assert names
    for name in names:
        prepared = case.prepare(name)
        assert prepared.ours is not prepared.theirs
        prepared.ours(prepared.inputs[0])
        prepared.theirs(prepared.inputs[0])


def test_a_tensor_at_once_is_timed_beside_its_pieces(monkeypatch):
    monkeypatch.setattr(limits, "M", 1 << 10)
    case = limits.AtOnce("at once", cases.kinds.INT8_TENSOR.case(64).spec, (64, 64))
    prepared = case.prepare(limits.PIECES)
    whole, pieces = prepared.ours(prepared.inputs[0]), prepared.theirs(prepared.inputs[0])
    assert len(pieces) == 4
    assert torch.equal(torch.cat(pieces), whole)
    assert case.prepare(COPY).theirs is torch.clone


@pytest.mark.parametrize("method", METHODS)
def test_searches_find_the_threshold_of_the_original_and_another_is_counted(method, monkeypatch):
    from benchmarks import calibration

    monkeypatch.setattr(calibration, "BINS", 256)
    case = Search(method, 512)
    assert case.differing() == 0
    for name in (LOOPS, "256 bins"):
        prepared = case.prepare(name)
        assert float(prepared.ours(torch.empty(0))) > 0
        assert float(prepared.theirs(torch.empty(0))) > 0
    monkeypatch.setattr(calibration, "_search_of_the_original", lambda *_: lambda: 0.5)
    assert case.differing() == 1


def test_whole_models_are_calibrated_to_the_same_ranges():
    pytest.importorskip("sklearn")
    case = WholeModel("max")
    assert case.differing() == 0
    assert case.elements > 10_000


# Results


def test_pairs_of_all_processes_count_alike():
    other = replace(RESULT, against=ATEN, outcome="cannot", pairs=())
    (one, two) = together([[RESULT, other], [replace(RESULT, pairs=((5.0, 1.0),))]])
    assert one.pairs == ((2.0, 1.0),) * 3 + ((5.0, 1.0),)
    assert two == other


@pytest.mark.parametrize("number", [0, 1])
def test_a_case_that_differs_in_one_process_has_no_time(number):
    runs = [[RESULT], [RESULT]]
    runs[number] = [replace(RESULT, outcome="differs", differing=3, pairs=())]
    (found,) = together(runs)
    assert (found.outcome, found.differing, found.ratio) == ("differs", 3, None)


def test_a_red_case_prints_no_time_and_other_processes_give_it_none(monkeypatch, capsys):
    monkeypatch.setattr(Case, "differing", lambda case: 3 * (case.name == "NVFP4"))
    plan = Plan("everything", ("forward, float32, 64, x",), 2, QUICK)
    found = {result.case: result for result in processes.run(plan, processes.measured_here)}
    assert (found["NVFP4"].differing, found["NVFP4"].pairs) == (3, ())
    assert len(found["MXFP4"].pairs) == 2
    printed = [line for line in capsys.readouterr().out.splitlines() if "NVFP4" in line]
    assert len(printed) == 2
    assert all(line.endswith("over x.clone(): differs from the reference in 3 elements") for line in printed)
    assert command.verdict(list(found.values()), 1.0) == 1


def test_only_calls_of_libraries_share_what_they_are_compared_by():
    ours = (entry.case for entry in cases.everything() if type(entry.case) is not PeerCase)
    keys = [(c.name, c.direction, c.text, c.elements, c.dtype_name) for c in ours]
    assert len(set(keys)) == len(keys)


def test_what_the_first_process_found_red_has_no_time_in_one_of_its_own():
    key = "NVFP4", "forward", cases.kinds.NVFP4.case(64).text, 64, "float32"
    plan = Plan("everything", ("NVFP4, forward, float32, 64, x",), 2, QUICK, ((key, 5),))
    (found,) = processes._in_a_process(plan, 1)
    assert (found.differing, found.ratio) == (5, None)


def test_a_missed_limit_is_printed():
    limit = limits.Limit("what", (cases.kinds.INT8_TENSOR.case(4096),), COPY, 1.9)
    assert limits.missed(RESULT) == ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "LIMITS", (limit, replace(limit, most=3.0)))
        assert processes.as_text(RESULT).endswith("over x.clone(): 2 (2 to 2), 2e+03 ms MISSED: > 1.9")
        assert limits.missed(replace(RESULT, dtype="bfloat16")) == ""
        assert command.verdict([RESULT], 1.0) == 1
    assert command.verdict([RESULT], 1.0) == 0


def test_every_peer_is_to_be_slower():
    assert limits.missed(replace(RESULT, against="torchao MXTensor")) == "MISSED: > 1"
    assert limits.missed(replace(RESULT, against="torchao MXTensor", pairs=((0.5, 1.0),))) == ""
    for against in (ATEN, COMPILED):
        assert limits.missed(replace(RESULT, against=against)) == "MISSED: > 1"
        assert limits.missed(replace(RESULT, against=against, elements=64)) == ""
        assert limits.missed(replace(RESULT, against=against, case="a plain copy")) == ""


def test_a_line_has_all_fields():
    timed, refused = record.lines_of([RESULT, replace(RESULT, outcome="cannot", pairs=(), facts={"version": "1"})])
    assert set(timed) == FIELDS
    assert set(refused) == FIELDS | {"version"}
    assert (timed["p50"], timed["seconds"], timed["other_seconds"], timed["pairs"]) == (2.0, 2.0, 1.0, 3)
    assert (refused["p50"], refused["seconds"], refused["pairs"]) == (None, None, 0)
    assert timed["threads"] == 1


def test_lines_are_written_whole_and_new_ones_replace_old_ones(tmp_path, monkeypatch):
    path = tmp_path / "bench.jsonl"
    assert record.read_lines(path) == []
    one, two = record.lines_of([RESULT, replace(RESULT, against=ATEN)])
    record.write_lines(path, [one, two])
    assert record.read_lines(path) == [one, two]
    newer = one | {"commit": "newer"}
    third = one | {"elements": 64}
    assert record.updated([one, two], [newer, third]) == [newer, two, third]
    with pytest.raises(TypeError):
        record.write_lines(path, [one, {"not for JSON": torch}])
    assert record.read_lines(path) == [one, two]
    assert list(tmp_path.iterdir()) == [path]


# Pages


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Two pages and the plot in a folder, to be written by `pages.write`."""
    for name, begin, end in (
        ("performance.md", pages.BEGIN, pages.END),
        ("peers.md", pages.PEERS_BEGIN, pages.PEERS_END),
    ):
        (tmp_path / name).write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    write = pages.write
    places = tmp_path / "performance.md", tmp_path / "peers.md", tmp_path / "cost.svg"
    monkeypatch.setattr(pages, "write", lambda lines: write(lines, *places))
    return tmp_path


def lines():
    big = replace(RESULT, elements=1 << 22, pairs=((1.0, 1.0), (1.0, 0.8), (1.0, 0.5)))
    both = replace(big, direction="forward and backward", against=DOUBLED)
    facts = {"version": "1.2", "bits": 1234, "values": 0, "why": "it is odd"}
    peer = replace(big, against="ModelOpt TensorQuantizer", pairs=((0.1, 1.0),), facts=facts)
    with_its_scales = {"bits": 9, "values": 8, "bits_with_its_scales": 0, "values_with_its_scales": 0, "why": ""}
    results = [
        *(RESULT, big, both, replace(big, dtype="float16")),
        replace(big, against=ATEN, pairs=((0.05, 1.0),)),
        replace(big, against=ATEN, elements=1 << 16, pairs=((0.1, 1.0),)),
        replace(big, against=ATEN, elements=64, pairs=((0.9, 1.0),)),
        peer,
        replace(peer, against="ModelOpt TensorQuantizer, compiled", pairs=((0.4, 1.0),)),
        replace(peer, against="ModelOpt TensorQuantizer", direction="forward and backward", pairs=((0.5, 1.0),)),
        replace(peer, against="ModelOpt Other", pairs=((0.2, 1.0),), facts={"version": "1.2", **with_its_scales}),
        replace(peer, against="torchao Tensor", outcome="raises E: no | GPU", pairs=(), facts=None),
        replace(peer, case="LSQ, int8 per tensor", direction="forward and backward", against="Brevitas Scale"),
    ]
    return record.lines_of(results)


def test_tables_and_plot_are_written_from_the_lines(written):
    pages.write(lines())
    performance = (written / "performance.md").read_text().splitlines()
    assert (performance[0], performance[1], performance[-1]) == ("before", pages.BEGIN, "after")
    assert "| time over a copy |  | 64 | 4K | 64K | 1M | 4M | 16M | 64M | 4M bfloat16 | 4M float16 |" in performance
    no = " not timed |"
    assert f"| int8 per tensor | forward |{no} 2.00 |{no * 2} 1.25 |{no * 3} 1.25 |" in performance
    assert f"| int8 per tensor | forward and backward |{no * 4} 1.25 |{no * 4}" in performance
    assert f"| int8 per tensor | forward | 10 at 64K |{no} 5.00 at 4M | raises E: no / GPU |{no}" in performance
    learned = "| LSQ, int8 per tensor | forward and backward |"
    assert f"{learned}{no * 2} learns scales of blocks only |{no} 10 at 4M |" in performance
    assert any("1 threads" in line and "ModelOpt 1.2" in line for line in performance)
    assert PEERS[1].why_not("float8_e4m3fn per tensor") == "takes its scales from the input"
    page = (written / "peers.md").read_text().splitlines()
    name = "| int8 per tensor | ModelOpt"
    odd = "1,234 signs of zeros: it is odd |"
    assert f"{name} `TensorQuantizer` |{no * 3} 10 |{no * 4} 2.00 |{no} 2.50 | {odd}" in page
    assert f"{name} `Other` |{no * 3} 5.00 |{no * 7} 9 (given its scales: 0) |" in page
    assert f"| int8 per tensor | torchao `Tensor` |{' cannot run |' * 11} raises E: no / GPU |" in page
    learned = " is learned with backward |"
    assert f"| LSQ, int8 per tensor | Brevitas `Scale` |{learned * 8} 10 |{learned * 2} {odd}" in page
    assert not any("|  |" in line for line in page)
    plot = (written / "cost.svg").read_bytes()
    assert plot.startswith(b"<?xml")
    pages.write(lines())
    assert (written / "cost.svg").read_bytes() == plot


def test_a_result_without_time_is_no_verdict_but_a_difference_is():
    refused = replace(RESULT, outcome="cannot", pairs=())
    assert refused.outcome != MEASURED
    assert command.verdict([refused], 1.0) == 0
    assert command.verdict([replace(refused, differing=1)], 1.0) == 1
