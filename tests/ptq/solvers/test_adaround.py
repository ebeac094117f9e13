"""Rounding up or down that is learned for a whole matrix, and the values of a grid beside others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fakequant as fq
from fakequant.errors import CalibrationError, ConfigError
from fakequant.ops import library
from fakequant.ptq import adaround, descend, gptq
from fakequant.ptq.solvers.problem import WeightGrid
from tests.support.bits import assert_same_bits
from tests.support.weight_specs import WEIGHTS, spec_of_matrix

OUT, COLUMNS = 6, 20


def problem(name: str) -> tuple[Tensor, Tensor, WeightGrid, fq.QuantSpec, fq.QParams]:
    generator = torch.Generator().manual_seed(0)
    spec = spec_of_matrix(name)
    weight = torch.randn(OUT, COLUMNS, generator=generator)
    x = torch.randn(300, COLUMNS, generator=generator).double()
    x = x @ torch.randn(COLUMNS, COLUMNS, generator=generator).double()
    params = fq.choose_qparams(weight, spec)
    return weight, x.T @ x, WeightGrid(spec, params, weight.shape), spec, params


def losses(values: Tensor, target: Tensor, moments: Tensor) -> Tensor:
    error = (values - target).double()
    return ((error @ moments) * error).sum(1)


@pytest.mark.parametrize("name", WEIGHTS)
def test_no_row_is_worse_and_values_are_those_of_the_grid(name: str) -> None:
    weight, moments, grid, spec, params = problem(name)
    nearest = grid.nearest(weight)
    found = adaround(weight, moments, grid, nearest, 200)
    assert_same_bits(library.fake_quantize(found, params, spec), found)
    before, after = losses(nearest, weight, moments), losses(found, weight, moments)
    assert bool((after <= before).all())
    assert float(after.sum()) < 0.9 * float(before.sum())
    assert_same_bits(adaround(weight, moments, grid, nearest, 200), found)


def test_it_goes_on_from_other_solutions() -> None:
    weight, moments, grid, _, _ = problem("int4 channel")
    start = descend(weight, gptq(weight, moments, grid), moments, grid)
    low, high = grid.neighbours(weight)
    assert bool(((start < low) | (start > high)).any())  # values that are neither rounded up nor down
    found = adaround(weight, moments, grid, start)
    assert bool((losses(found, weight, moments) <= losses(start, weight, moments)).all())
    assert float(losses(found, weight, moments).sum()) < float(losses(start, weight, moments).sum())


@pytest.mark.parametrize("name", WEIGHTS)
def test_neighbours_are_the_values_on_both_sides(name: str) -> None:
    weight, _, grid, spec, params = problem(name)
    values = weight * torch.tensor([1.2, 1.2, 1.0, 1e-3, 0.0, 1.0])[:, None]
    values[0, :3] = torch.tensor([1e30, -1e30, 1e-40])
    values[-1] = grid.nearest(weight)[-1]  # which are their own neighbours
    low, high = grid.neighbours(values)
    # Every value of an element's grid, by the operator for a dense row of numbers.
    reach = torch.cat([torch.linspace(-4, 4, 40_001), torch.linspace(-0.04, 0.04, 40_001)])
    for row in range(OUT):
        for column in range(COLUMNS):
            one = grid.rows(slice(row, row + 1))
            one._columns = one._columns.columns(torch.full((len(reach),), column))
            every = one.nearest(reach[None])[0].unique()
            value = values[row, column]
            below, above = every[every <= value], every[every >= value]
            inside = len(below) and len(above)
            assert low[row, column] == (below[-1] if inside else every[0 if not len(below) else -1])
            assert high[row, column] == (above[0] if inside else every[0 if not len(below) else -1])
    assert_same_bits(library.fake_quantize(low, params, spec), low)
    assert_same_bits(library.fake_quantize(high, params, spec), high)


def test_a_row_that_nothing_excites_keeps_its_start() -> None:
    weight, _, grid, _, _ = problem("int4 channel")
    start = grid.nearest(weight)
    assert_same_bits(adaround(weight, torch.zeros(COLUMNS, COLUMNS, dtype=torch.float64), grid, start, 20), start)


def test_what_is_refused() -> None:
    weight, moments, grid, _, _ = problem("int4 channel")
    with pytest.raises(CalibrationError, match=r"the sum of x x\^T over the layer's inputs x is not finite"):
        adaround(weight, moments * torch.nan, grid, weight)
    with pytest.raises(ConfigError, match="iterations=0: adaround needs at least 1"):
        adaround(weight, moments, grid, weight, 0)
    assert adaround(weight, moments, grid, grid.nearest(weight), 1).shape == weight.shape
