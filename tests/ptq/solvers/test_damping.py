"""Dampings that halves of the rows choose: small where the halves are alike, large where one misleads the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import ConfigError
from fakequant.ptq import collector
from fakequant.ptq.solvers import layer as solver
from fakequant.ptq.solvers.problem import DAMPING
from fakequant.ptq.solvers.sums import InputSums
from tests.support.bits import assert_same_bits

COLUMNS = 48


def rows(count: int, seed: int, *, flips: bool = False) -> Tensor:
    """Rows whose second columns follow the first ones; `flips`: with the other sign in the second half of the rows."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(count, COLUMNS // 2, generator=generator)
    noise = 0.3 * torch.randn(count, COLUMNS // 2, generator=generator)
    signs = torch.ones(count, 1)
    signs[count // 2 :] = -1 if flips else 1
    return torch.cat([first, signs * first + noise], 1)


def improved(batches: list[Tensor], steps: list[str]) -> Any:
    torch.manual_seed(0)
    model = fq.prepare(nn.Sequential(nn.Linear(COLUMNS, 32)), "int4_weight_only", skip=[])
    return model, fq.ptq.improve(model, batches, steps, judge=[], progress=False)


@pytest.fixture(autouse=True)
def _enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows as decide the damping alone."""
    for place in (solver, collector):
        monkeypatch.setattr(place, "ENOUGH_ROWS", 0)


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        ([rows(2000, seed) for seed in range(4)], 0.01),
        ([rows(100, seed, flips=True) for seed in range(4)], 0.8),
        ([rows(400, 0, flips=True)], 0.8),
        ([torch.zeros(8, COLUMNS)], 3.05),
    ],
    ids=["alike", "unlike", "unlike, one batch", "nothing to tell"],
)
def test_the_damping_follows_the_rows(batches: list[Tensor], expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, found = solver._HeldOut.best, list[float | None]()

    def kept(*arguments: Any, **options: Any) -> Any:
        how = plain(*arguments, **options)
        found.append(how.damping)
        return how

    monkeypatch.setattr(solver._HeldOut, "best", kept)
    improved(batches, ["gptq", "damping"])
    assert found == [expected]
    monkeypatch.setattr(solver._HeldOut, "best", lambda *_, **__: solver._How(with_bias=False))
    fixed = improved(batches, ["gptq"])[0][0].weight
    assert_same_bits(fixed, improved(batches, ["gptq", "damping"])[0][0].weight)


@pytest.mark.parametrize("drift", [False, True])
@pytest.mark.parametrize("count", [2, 3, 1])
def test_halves_make_the_sums(count: int, drift: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[InputSums]()
    plain = solver._chosen

    def kept(name: str, product: Any, matrix: Any, sums: InputSums, steps: Any) -> Any:
        seen.append(sums)
        return plain(name, product, matrix, sums, steps)

    monkeypatch.setattr(solver, "_chosen", kept)
    batches = [
        torch.randint(-8, 8, (count, 3, 4, 4), generator=torch.Generator().manual_seed(seed)).float()
        for seed in range(3)
    ]
    for steps in (["gptq", "damping"], ["gptq"]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(1), nn.Linear(32, 4)).eval()
        fq.prepare(model, "int4_weight_only", skip=[])
        fq.ptq.improve(model, batches, [*steps, *(["drift"] if drift else [])], judge=[], progress=False)
    for halved, whole in zip(seen[:1], seen[2:3], strict=True):  # of the first layer, whose inputs are the same
        assert not whole.halves
        assert [half.count for half in halved.halves] == [6 * count, 6 * count]
        assert halved.count == whole.count == sum(half.count for half in halved.halves)
        assert_same_bits(halved.moments, whole.moments)  # of integers, whose sums are exact
        assert_same_bits(halved.total, whole.total)
        assert (halved.drift is None) == (not drift) == (whole.drift is None)


def test_single_rows_and_inputs_of_their_own_have_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, seen = solver._HeldOut.best, list[int]()

    def kept(own: Any, *rest: Any, **options: Any) -> Any:
        seen.append(min(half.count for half in own._halves))
        return plain(own, *rest, **options)

    monkeypatch.setattr(solver._HeldOut, "best", kept)
    improved(list(rows(60, 0).split(1)), ["gptq", "damping"])
    assert seen.pop() > 15
    layer = fq.prepare(nn.MultiheadAttention(16, 2, batch_first=True).eval(), "int4_weight_only", skip=[])
    given = tuple(torch.randn(4, 5, 16) for _ in range(3))
    call = {"forward": lambda model, batch: model(*batch), "judge": []}
    fq.ptq.improve(layer, [given], ["gptq", "damping"], progress=False, **call)
    assert seen == [10, 10]  # of in_proj, whose thirds have inputs of their own, and of out_proj


def test_wide_layers_keep_no_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "WIDEST_HALVED", COLUMNS - 1)
    monkeypatch.setattr(solver._HeldOut, "best", lambda *_, **__: pytest.fail("it has no halves"))
    found = improved([rows(100, 0)], ["gptq", "damping"])[1]
    assert '0: "damping" was left out: it has more than 2,048 columns' in str(found)


def test_damping_is_that_of_a_solver() -> None:
    with pytest.raises(ConfigError, match='the step "damping" sets the damping of a solver; add one of gptq'):
        improved([rows(100, 0)], ["ranges", "damping"])


def test_a_half_gets_twice_the_damping_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, seen = solver.Problem, list[float]()

    def kept(weight: Tensor, sums: InputSums, damping: float | None = None, share: float | None = None) -> Any:
        if damping is not None:
            seen.append(damping)
        return plain(weight, sums, damping, share)

    monkeypatch.setattr(solver, "Problem", kept)
    improved([rows(2000, seed) for seed in range(4)], ["gptq", "damping"])
    *of_halves, chosen = seen
    assert of_halves[2:] == [0.4, 0.4, 0.02, 0.02]
    assert of_halves[:2] == pytest.approx([2 * DAMPING] * 2, rel=1e-6)  # 8,000 rows for 48 columns add next to nothing
    assert chosen == 0.01
