"""What `make bench` times, how results of several processes become lines, tables and a plot; no time is tested."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import cases, limits, processes, record
from benchmarks.calibration import WholeModel
from benchmarks.harness import ATEN, COPY, MEASURED, Case, Effort, Result
from benchmarks.processes import Plan
from benchmarks.training import BLOCK, CNN, LINEAR_BY_CODES, MODULE
from fakequant.ops import dispatch, products
from fakequant.ops.cpu.backend import CpuBackend

QUICK = Effort(0.0, least=1)
RESULT = Result("int8 per tensor", "forward", "int8 per_tensor", 4096, "float32", COPY, pairs=((2.0, 1.0),) * 3)


# The list


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


def test_whole_models_are_calibrated_to_the_same_ranges():
    pytest.importorskip("sklearn")
    case = WholeModel("max")
    assert case.differing() == 0
    assert case.elements > 10_000


# Results


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


def test_a_missed_limit_is_printed():
    limit = limits.Limit("what", (cases.kinds.INT8_TENSOR.case(4096),), COPY, 1.9)
    assert limits.missed(RESULT) == ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "LIMITS", (limit, replace(limit, most=3.0)))
        assert processes.as_text(RESULT).endswith("over x.clone(): 2 (2 to 2), 2e+03 ms MISSED: > 1.9")
        assert limits.missed(replace(RESULT, dtype="bfloat16")) == ""
        assert command.verdict([RESULT], 1.0) == 1
    assert command.verdict([RESULT], 1.0) == 0


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


def test_a_result_without_time_is_no_verdict_but_a_difference_is():
    refused = replace(RESULT, outcome="cannot", pairs=())
    assert refused.outcome != MEASURED
    assert command.verdict([refused], 1.0) == 0
    assert command.verdict([replace(refused, differing=1)], 1.0) == 1
