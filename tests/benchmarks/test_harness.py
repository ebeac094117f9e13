"""The timing: what is compared first, what is timed beside what, and what a result says.

How long anything takes is not tested: functions that sleep or count stand for the calls.
"""

from __future__ import annotations

import time

import pytest
import torch

import fakequant as fq
from benchmarks.harness import (
    ATEN,
    COPY,
    MEASURED,
    Case,
    Effort,
    measure,
    pairs,
    square,
    time_pairs,
)
from benchmarks.harness import case as cases

NVFP4 = "float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn@per_tensor"
FORMATS = [
    ("int8", {}),
    ("int8 multiplier", {}),
    ("int8 per_channel(0)", {}),
    ("int8 per_token", {"dynamic": True}),
    ("float8_e4m3fn", {}),
    (NVFP4, {"dynamic": True}),
]
QUICK = Effort(0.0, least=2)


def case_of(spec, **options):
    return Case("a case", fq.QuantSpec.parse(spec), square(1 << 12), **options)


# Timing


def test_turns_alternate_and_no_call_reads_what_the_one_before_read():
    calls = []
    inputs = [torch.zeros(1) for _ in range(3)]
    place = {id(x): number for number, x in enumerate(inputs)}

    def named(name):
        def function(x):
            calls.append((name, place[id(x)]))
            time.sleep(3e-4)  # longer than a turn, so that there is one call in each

        return function

    found = time_pairs(named("ours"), named("theirs"), inputs, Effort(0.0, least=4))
    assert len(found) == 4
    assert [name for name, _ in calls[-8:]] == ["theirs", "ours", "ours", "theirs"] * 2
    read = [number for _, number in calls]
    assert read == [number % 3 for number in range(len(read))]


# Cases


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("spec", "options"), FORMATS, ids=lambda value: str(value))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_the_package_computes_is_compared_and_a_wrong_bit_is_counted(spec, options, dtype, backward, monkeypatch):
    case = case_of(spec, dtype=dtype, backward=backward, **options)
    assert case.differing() == 0
    right = cases.fake_quantize

    def wrong(x, spec, **options):
        y = right(x, spec, **options).clone()
        y.view(-1)[17] += 1.0
        return y

    monkeypatch.setattr(cases, "fake_quantize", wrong)
    # Once of the numbers that are timed, once of the hostile ones; there a NaN may be everywhere.
    assert case.differing() in (1, 2)


def test_a_wrong_gradient_of_x_or_of_the_scale_is_counted(monkeypatch):
    case = case_of("int8", backward=True, learned=True)
    assert case.differing() == 0
    right = cases.fake_quantize
    monkeypatch.setattr(cases, "fake_quantize", lambda x, spec, scale: right(x, spec, scale=scale.detach()) + 0 * scale)
    assert case.differing() == 2
    monkeypatch.setattr(cases, "fake_quantize", lambda x, spec, scale: right(x.detach(), spec, scale=scale) + 0 * x)
    assert case.differing() > case.elements


def test_hostile_numbers_are_compared():
    given, hostile = case_of("int8")._compared()
    assert (given != 0).all()
    assert given.isfinite().all()
    assert hostile[-1, -7:].tolist()[-3:-1] == [torch.inf, -torch.inf]
    assert hostile.isnan().sum() == 1
    ties = hostile.view(-1)[given.numel() // 2 : -7] / 0.02
    assert ((ties - ties.floor() - 0.5).abs() < 1e-4).all()


# Pairs


def test_every_other_is_timed_and_one_that_cannot_run_says_why():
    found = list(measure(case_of("int8"), (COPY, ATEN, "nobody"), QUICK))
    assert [result.outcome for result in found] == [MEASURED, MEASURED, "nobody has no call of this kind"]
    assert [result.ratio is not None for result in found] == [True, True, False]
    assert found[0].against == COPY
    assert (found[0].spec, found[0].elements, found[0].dtype) == ("int8 per_tensor", 1 << 12, "float32")


@pytest.mark.parametrize("spec", ["int8 reciprocal", "int8 per_channel(0) reciprocal"])
@pytest.mark.parametrize("backward", [False, True])
def test_aten_computes_the_same_as_the_case_that_it_is_timed_beside(spec, backward):
    prepared = case_of(spec, backward=backward).prepare(ATEN)
    ours, theirs = prepared.ours(prepared.inputs[0]), prepared.theirs(prepared.inputs[0])
    for mine, other in zip(*((y,) if isinstance(y, torch.Tensor) else y for y in (ours, theirs)), strict=True):
        assert torch.equal(mine, other)


def test_a_case_that_differs_has_no_time_and_is_not_run(monkeypatch):
    monkeypatch.setattr(Case, "differing", lambda case: 3)
    monkeypatch.setattr(pairs, "time_pairs", lambda *_: pytest.fail("timed"))
    (found,) = measure(case_of("int8"), (COPY,), QUICK)
    assert found.outcome == "differs from the reference in 3 elements"
    assert (found.differing, found.pairs, found.ratio) == (3, (), None)
