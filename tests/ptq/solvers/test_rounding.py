"""Codes and losses of GPTQ, sums of inputs, and the codes that the search for ranges reaches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.ops import library
from fakequant.ptq.solvers import sums as sums_module
from fakequant.ptq.solvers.problem import (
    Ordered,
    Problem,
    WeightGrid,
    descend,
    gptq,
    gptq_and_loss,
    mean_of_diagonal,
    ordered,
)
from fakequant.ptq.solvers.sums import Drift, InputSums
from tests.support.bits import assert_same_bits
from tests.support.weight_specs import WEIGHTS, spec_of_matrix

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


@pytest.mark.parametrize("drifts", [False, True])
@pytest.mark.parametrize("size", [0.1, 1.0, 10.0])  # of the inputs: the curvature is below and above 1
def test_descent_takes_the_best_value_of_each_column(size: float, drifts: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(5, 8, generator=generator), size * inputs(8).double() / 24
    spec = fq.QuantSpec.parse("int3 per_channel(0)")
    params, moments = fq.choose_qparams(weight, spec), x.T @ x
    pull = torch.randn(5, 8, dtype=torch.float64, generator=generator) * size**2 if drifts else None
    values = params.scale.view(-1, 1).double() * torch.arange(-4, 4)  # [out, codes]
    start = library.fake_quantize(weight, params, spec)
    expected = start.double()

    def losses(column: int) -> Tensor:  # [out, codes]
        tried = expected[:, None].repeat(1, values.shape[1], 1)
        tried[..., column] = values
        missed = tried - weight.double()[:, None]
        return ((missed @ moments) * missed).sum(-1) - (0 if pull is None else 2 * (pull[:, None] * tried).sum(-1))

    for column in range(8):
        expected[:, column] = values.gather(1, losses(column).argmin(1, keepdim=True)).flatten()
    found = descend(weight, start, moments, WeightGrid(spec, params, weight.shape), passes=1, pull=pull)
    assert torch.equal(found, expected.float())
    assert not torch.equal(found, start)


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
    values, loss = gptq_and_loss(weight, Ordered.of(own.sums.moments[0], DAMPING), grid, own.pull(0))
    torch.testing.assert_close(own.loss_of(loss, values), own.loss(values), rtol=1e-4, atol=1e-6 * own.energy())
    if with_drift:  # it makes good less of it for few rows
        assert own.share == len(x) / (len(x) + COLUMNS)
        assert own.loss(values) < own.loss(gptq(weight, own.sums.moments[0], grid, DAMPING))


def test_both_halves_of_the_moments_follow_rows_that_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums_module.library, "at_once", lambda _: 1)  # several panels
    sums, rows = InputSums(), torch.randint(-8, 8, (2, 30, 300)).float()
    sums.add(rows[:, :10])
    assert torch.equal(sums.moments, sums.moments.mT)
    shared = sums.with_drift(None)
    sums.add(rows[:, 10:])
    exact = rows.double().mT @ rows.double()
    assert torch.equal(sums.moments, exact)
    assert torch.equal(shared.moments, exact)  # not copied


def test_moments_in_order_have_the_upper_half_alone() -> None:
    moments = torch.randn(300, 300, dtype=torch.float64)
    moments = moments @ moments.T
    order, unit = torch.randperm(300), mean_of_diagonal(moments)
    assert torch.equal(ordered(moments, unit, order).triu(), (moments[order][:, order] / unit).float().triu())


def model_of(weight: Tensor, rule: str) -> nn.Sequential:
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight.data = weight
    return fq.prepare(nn.Sequential(layer), fq.Config("test", (fq.Rule(weight=fq.TensorConfig(rule)),)))


def rows_of(features: int) -> list[Tensor]:
    return [torch.randn(64, features, generator=torch.Generator().manual_seed(0))]


def codes(model: nn.Sequential) -> Tensor:
    """The weight in steps of its scales [out, groups, columns of a group]."""
    layer = model[0]
    scale = layer.weight_quantizer.qparams(layer.weight).scale
    return (layer.weight.detach().unflatten(1, (scale.shape[1], -1)) / scale[..., None]).round(decimals=4)


NVFP4 = "float4_e2m1fn per_block(-1:16,pad) scale=float8_e4m3fn@per_tensor"
FOUR = [10.0] + [7.5, -5.0, 3.75] * 5
"""Steps of 2.5 hold it: 4, 3, 2 and 1.5 of them. With 10 as the code 6, 7.5 lies between two codes."""
SIX = [6.0] + [4.0, -3.0, 2.0] * 5


def test_a_block_of_nvfp4_takes_4_or_6_as_its_largest_value() -> None:
    weight = torch.tensor([FOUR + SIX, SIX + FOUR])
    model = model_of(weight.clone(), NVFP4)
    assert codes_of_nearest(model) == [[6.0, 6.0], [6.0, 6.0]]
    found = fq.ptq.improve(model, rows_of(32), ["ranges"], progress=False)
    assert codes(model).abs().amax(-1).tolist() == [[4.0, 6.0], [6.0, 4.0]]
    assert found.layers[0].after < 0.1 * found.layers[0].before


def codes_of_nearest(model: nn.Sequential) -> list[list[float]]:
    layer = model[0]
    quantizer = layer.weight_quantizer
    scale = quantizer.qparams(layer.weight).scale
    values = quantizer(layer.weight).detach().unflatten(1, (scale.shape[1], -1))
    return (values / scale[..., None]).abs().amax(-1).round(decimals=4).tolist()


@pytest.mark.parametrize("steps", [["ranges"], ["ranges", "gptq"], "best"])
def test_int4_uses_the_code_minus_8(steps: str | list[str], tmp_path: Path) -> None:
    weight = torch.arange(-8.0, 8.0).repeat(4, 1)
    weight[1] *= 0.5
    model = model_of(weight.clone(), "int4 per_channel(0)")
    x = rows_of(16)
    found = fq.ptq.improve(model, x, steps, progress=False)
    assert codes(model).amin((1, 2)).tolist() == [-8.0] * 4
    assert found.layers[0].after < 0.2 * found.layers[0].before
    y = model(x[0])
    assert_same_bits(fq.load(nn.Sequential(nn.Linear(16, 4)), fq.save(model, tmp_path / "saved"))(x[0]), y)
    pytest.importorskip("onnxruntime")
    fq.export_onnx(model, x[0], tmp_path / "model.onnx")
    assert fq.verify_onnx(tmp_path / "model.onnx", model, x).exact


def test_int4_narrow_has_no_code_minus_8() -> None:
    model = model_of(torch.arange(-8.0, 8.0).repeat(4, 1), "int4_narrow per_channel(0)")
    fq.ptq.improve(model, rows_of(16), progress=False)
    assert codes(model).amin() >= -7.0


@pytest.mark.parametrize("name", WEIGHTS)
def test_columns_of_a_grid_are_those_of_the_operator(name: str) -> None:
    spec, weight = spec_of_matrix(name), torch.randn(6, 20, generator=torch.Generator().manual_seed(0))
    params = fq.choose_qparams(weight, spec)
    grid = WeightGrid(spec, params, weight.shape)
    found = torch.stack([grid.column(column, weight[:, column] * 1.3) for column in range(20)], 1)
    assert_same_bits(found, library.fake_quantize(weight * 1.3, params, spec))


@pytest.mark.parametrize("preset", ["Q4_K", "Q2_K", "Q6_K", "Q4_0", "IQ4_NL", "IQ4_XS", "Q8_0", "TQ2_0"])
def test_a_grid_has_the_values_of_the_operator_for_negative_and_zero_scales_and_offsets(preset: str) -> None:
    spec = fq.presets.presets()[f"GGUF_{preset}"].rules[0].weight.spec  # type: ignore[union-attr]
    weight = torch.randn(8, 512, generator=torch.Generator().manual_seed(0))
    weight[2, :256] = 0.0
    weight[3, 64:96] *= 1e-9
    params = fq.choose_qparams(weight, spec)
    assert not params.scale.all()
    grid, wanted = WeightGrid(spec, params, weight.shape), library.fake_quantize(weight, params, spec)
    assert torch.equal(grid.nearest(weight), wanted)
    assert torch.equal(torch.stack([grid.column(place, weight[:, place]) for place in range(512)], 1), wanted)
    assert torch.equal(grid.rows(slice(2, 4)).nearest(weight[2:4]), wanted[2:4])


@pytest.mark.parametrize("rows", [24, 640])  # few rows, so that halves of them judge; and many
@pytest.mark.parametrize("steps", ["fast", ["ranges", "gptq", "descend", "drift"]])
def test_a_wide_matrix_gets_the_same_values_in_parts(
    monkeypatch: pytest.MonkeyPatch, rows: int, steps: str | list[str]
) -> None:
    made, drift_of = list[int](), Drift.of
    monkeypatch.setattr(Drift, "of", lambda weight: made.append(weight.shape[1]) or drift_of(weight))

    def improved(least: int) -> tuple[nn.Module, fq.ptq.Improvement]:
        monkeypatch.setattr(sums_module, "_LEAST_PART", least)
        monkeypatch.setattr(sums_module, "_SQUARES", 0)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 600))
        batches = [torch.randn(rows, 32) for _ in range(3)]
        fq.calibrate(fq.prepare(model, "int4_group32"), batches)
        made.clear()
        return model, fq.ptq.improve(model, batches, steps)

    whole, expected = improved(2**20)
    assert max(made) == 600
    parted, found = improved(32 * 256)
    assert max(made) == 256
    for (name, one), other in zip(whole.state_dict().items(), parted.state_dict().values(), strict=True):
        assert_same_bits(one, other, name)
    assert (found.before, found.after) == (expected.before, expected.after)
    for one, other in zip(expected.layers, found.layers, strict=True):  # sums of parts are added in another order
        torch.testing.assert_close(one.after, other.after, rtol=1e-12, atol=0)
