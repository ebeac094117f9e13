"""The steps of GPTQ without an inverse give its codes, and losses of products in float32 are those of float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fakequant as fq
from fakequant.ops import library
from fakequant.ptq.solvers.problem import Problem, WeightGrid, gptq, gptq_and_loss
from fakequant.ptq.solvers.sums import Drift, InputSums

OUT, COLUMNS, DAMPING = 24, 300, 0.05


def inputs(columns: int = COLUMNS) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, columns, generator=generator)
    return x @ torch.randn(columns, columns, generator=generator) / columns**0.5


def by_the_inverse(weight: Tensor, moments: Tensor, grid: WeightGrid) -> Tensor:
    """GPTQ as its paper has it: the upper factor of the inverse says what an error adds to the columns after it."""
    order = moments.diagonal().argsort(descending=True, stable=True)
    damped = moments[order][:, order] + DAMPING * moments.diagonal().mean() * torch.eye(len(moments))
    factor = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    left, chosen = weight[:, order].double(), torch.empty_like(weight)
    for place, column in enumerate(order.tolist()):
        chosen[:, column] = grid.column(column, left[:, place].float())
        error = (left[:, place] - chosen[:, column]) / factor[place, place]
        left[:, place:] -= error[:, None] * factor[place, place:]
    return chosen


@pytest.mark.parametrize(
    "name", ["int4 per_block(-1:32,pad)", "int4 per_channel(0)", "int3 per_tensor", "uint4 per_block(0:8,1:100)"]
)
def test_values_are_those_by_the_inverse(name: str) -> None:
    x, spec = inputs(), fq.QuantSpec.parse(name)
    weight = torch.randn(OUT, COLUMNS, generator=torch.Generator().manual_seed(1))
    params = fq.choose_qparams(weight, spec)
    moments, grid = x.double().T @ x.double(), WeightGrid(spec, params, weight.shape)
    found, expected = gptq(weight, moments, grid, DAMPING), by_the_inverse(weight, moments, grid)
    # A value near the middle of two codes may become either, and columns after it follow: they are few.
    assert float((found != expected).float().mean()) < 0.01
    assert torch.equal(library.fake_quantize(found, params, spec), found)


def problem(weight: Tensor, x: Tensor, float_x: Tensor | None = None, damping: float | None = None) -> Problem:
    """The problem of a layer with inputs [rows, columns], and other ones in the float model."""
    sums = InputSums()
    sums.add(x[None])
    if float_x is not None:
        sums = sums.with_drift(Drift.of(weight[None]))
        assert sums.drift is not None
        sums.drift.add(x[None], float_x[None], weight[None])
    return Problem(weight, sums, damping)


@pytest.mark.parametrize("with_drift", [False, True])
def test_a_loss_is_that_of_the_outputs(with_drift: bool) -> None:
    columns = 2500  # several panels
    x, generator = inputs(columns), torch.Generator().manual_seed(2)
    weight = torch.randn(8, columns, generator=generator)
    chosen = weight + 0.05 * torch.randn(8, columns, generator=generator)
    float_x = x + 0.1 * torch.randn(x.shape, generator=generator) if with_drift else x
    own = problem(weight, x, float_x if with_drift else None)
    wanted = float_x.double() @ weight.double().T
    expected = (wanted - x.double() @ chosen.double().T).square().sum()
    torch.testing.assert_close(own.loss(chosen), float(expected), rtol=1e-5, atol=0)
    torch.testing.assert_close(own.energy(), float(wanted.square().sum()), rtol=1e-5, atol=0)


@pytest.mark.parametrize("with_drift", [False, True])
@pytest.mark.parametrize("kind", ["random", "dead columns", "few rows"])
@pytest.mark.parametrize("damping", [None, DAMPING])
def test_gptq_knows_what_its_values_lose(damping: float | None, kind: str, with_drift: bool) -> None:
    x, generator = inputs(), torch.Generator().manual_seed(2)
    x = x[:40] if kind == "few rows" else x
    if kind == "dead columns":
        x[:, ::3] = 0
    weight, spec = torch.randn(OUT, COLUMNS, generator=generator), fq.QuantSpec.parse("int4 per_channel(0)")
    float_x = x + 0.1 * torch.randn(x.shape, generator=generator) if with_drift else None
    own, grid = problem(weight, x, float_x, damping), WeightGrid(spec, fq.choose_qparams(weight, spec), weight.shape)
    values, loss = gptq_and_loss(weight, own.sums.moments[0], grid, DAMPING, own.pull(0))
    torch.testing.assert_close(own.loss_of(loss, values), own.loss(values), rtol=1e-4, atol=1e-6 * own.energy())
    if with_drift:  # it makes good less of it for few rows
        assert own.share == len(x) / (len(x) + COLUMNS)
        assert own.loss(values) < own.loss(gptq(weight, own.sums.moments[0], grid, DAMPING))
