"""The comparison with other libraries, without them: what becomes of a call."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fakequant as fq
from benchmarks.harness import MEASURED, Effort
from benchmarks.harness import measure as timed
from benchmarks.kinds import SHOWN, Kind
from benchmarks.peers import CALLS, PEERS, call, measure
from benchmarks.peers.call import Call, Peer, Theirs

ROOT = Path(__file__).parents[2]
TORCH = Peer("Torch", "torch")
SPEC = "int8 per_block(-1:32)"
QUICK = Effort(0.0, least=1)


def case_of(build, why="because", backward=False, dynamic=True, spec=SPEC):
    made = Call(Kind("int8", spec, dynamic=dynamic), TORCH, "way", spec, build, why)
    return measure.PeerCase(made, 1 << 12, backward)


def result_of(case, against=None):
    (result,) = timed(case, (against or case.against,), QUICK)
    return result


def same(x):
    return fq.fake_quantize(x, SPEC)


@pytest.fixture(autouse=True)
def _nothing_is_compiled(monkeypatch):
    """A compilation takes seconds, and the compiler is not what is tested."""
    monkeypatch.setattr(torch, "compile", lambda function: function)


@pytest.mark.parametrize("backward", [False, True])
def test_a_call_with_our_bits_has_times_and_no_difference(backward):
    result = result_of(case_of(lambda x: Theirs(same), backward=backward))
    assert result.outcome == MEASURED
    assert result.facts == {"version": torch.__version__, "bits": 0, "values": 0, "why": ""}
    assert result.ratio is not None
    assert result.against == "Torch way"
    assert (result.case, result.spec) == ("int8", "int8 per_block(-1:32)")


def test_differing_bits_and_values_are_counted():
    def nudged(x):
        y = same(x)
        y[0, 3] += 1.0
        zeros = (y == 0).nonzero()
        assert len(zeros)
        y[tuple(zeros[0])] = -0.0
        return y

    facts = result_of(case_of(lambda x: Theirs(nudged))).facts
    assert (facts["bits"], facts["values"], facts["why"]) == (2, 1, "because")


def test_a_rule_of_its_own_for_scales_is_compared_with_these_scales_too():
    def build(x):
        scale = call.block_amax(x) / 127.5
        return Theirs(lambda x: fq.fake_quantize(x, SPEC, scale=scale), scale=scale)

    facts = result_of(case_of(build)).facts
    assert facts["values"] > 100
    assert (facts["bits_with_its_scales"], facts["values_with_its_scales"]) == (0, 0)


def test_ours_gets_the_scale_that_theirs_was_given():
    def build(x):
        scale = torch.full((64, 2), 0.25)
        return Theirs(lambda x: fq.fake_quantize(x, SPEC, scale=scale), scale)

    assert result_of(case_of(build, dynamic=False)).facts["bits"] == 0


def test_a_learned_scale_gets_its_gradient_on_both_sides():
    spec, scales = fq.QuantSpec.parse("int8 reciprocal"), []

    def build(x):
        scale = torch.tensor(0.02, requires_grad=True)
        scales.append(scale)
        return Theirs(lambda x: fq.fake_quantize(x, spec, scale=scale), given=scale, learned=scale)

    made = Call(Kind("LSQ", "int8", learned=True), TORCH, "way", "int8 reciprocal", build)
    case = measure.PeerCase(made, 1 << 12, backward=True)
    prepared = case.prepare(case.against)
    ours, theirs = prepared.ours(prepared.inputs[0]), prepared.theirs(prepared.inputs[0])
    assert len(ours) == len(theirs) == 2
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert result_of(case).facts["bits"] == 0
    assert scales[0].grad is None


def test_a_missing_library_is_a_result_with_the_reason():
    case = case_of(lambda x: pytest.fail("called"))
    missing = replace(case, call=replace(case.call, peer=Peer("None", "no-such-distribution")))
    result = result_of(missing)
    assert (result.outcome, result.facts, result.pairs) == (measure.NOT_INSTALLED, None, ())


@pytest.mark.parametrize("where", ["build", "run"])
def test_what_a_library_raises_is_a_result_with_its_first_line(where):
    def fails(x):
        raise RuntimeError("\nneeds a GPU\nsecond line")

    result = result_of(case_of(fails if where == "build" else lambda x: Theirs(fails)))
    assert (result.outcome, result.pairs) == ("raises RuntimeError: needs a GPU", ())


def test_a_call_without_a_gradient_is_a_result_with_the_reason():
    result = result_of(case_of(lambda x: Theirs(lambda x: same(x.detach())), backward=True))
    assert (result.outcome, result.pairs) == ("has no gradient", ())


def test_ours_is_compared_with_the_reference_first(monkeypatch):
    case = case_of(lambda x: pytest.fail("called"))
    monkeypatch.setattr("benchmarks.harness.case.fake_quantize", lambda x, spec, scale: x.clone())
    result = result_of(case)
    assert result.outcome.startswith("differs from the reference in ")
    assert result.pairs == ()


def test_what_cannot_be_compiled_is_said(monkeypatch):
    def fails(x):
        raise ValueError("no code for this")

    case = case_of(lambda x: Theirs(same))
    assert result_of(case, case.compiled).ratio is not None
    monkeypatch.setattr(torch, "compile", lambda function: fails)
    assert result_of(case, case.compiled).outcome == "fails: ValueError: no code for this"
    assert result_of(case).ratio is not None


def test_half_of_the_compared_rows_have_ties():
    x = torch.randn(8, 4096)
    bits = measure.with_ties(x).view(torch.int32) & 0xFFFF
    assert (bits[:4] == 0).all()
    assert (bits[4:] != 0).any()


@pytest.mark.parametrize("called", CALLS, ids=lambda c: f"{c.peer.name}-{c.kind.name}-{c.way}")
def test_every_call_names_a_specification_and_a_library_of_the_extra(called):
    fq.QuantSpec.parse(called.spec)
    extra = re.search(r"^bench = (\[.*\])$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert called.peer.distribution in {requirement.split(">=")[0] for requirement in json.loads(extra[1])}
    assert called.peer.distribution in pinned
    assert called.peer in PEERS


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
@pytest.mark.parametrize("kind", SHOWN, ids=lambda kind: kind.name)
def test_every_library_has_a_call_or_a_reason_for_what_the_tables_show(kind, peer):
    listed = any(called.kind == kind and called.peer is peer for called in CALLS)
    assert listed == (peer.why_not(kind.name) == call.NOT_TIMED)
