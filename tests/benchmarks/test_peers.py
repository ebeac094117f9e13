"""The comparison with other libraries, without them: what becomes of a call."""

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


@pytest.mark.parametrize("where", ["build", "run"])
def test_what_a_library_raises_is_a_result_with_its_first_line(where):
    def fails(x):
        raise RuntimeError("\nneeds a GPU\nsecond line")

    result = result_of(case_of(fails if where == "build" else lambda x: Theirs(fails)))
    assert (result.outcome, result.pairs) == ("raises RuntimeError: needs a GPU", ())


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
@pytest.mark.parametrize("kind", SHOWN, ids=lambda kind: kind.name)
def test_every_library_has_a_call_or_a_reason_for_what_the_tables_show(kind, peer):
    listed = any(called.kind == kind and called.peer is peer for called in CALLS)
    assert listed == (peer.why_not(kind.name) == call.NOT_TIMED)
