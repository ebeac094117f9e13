"""Ranges and codes of weights by the error of the layers' outputs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CalibrationError, ConfigError
from fakequant.nn.products import MatrixProduct
from fakequant.nn.quantized.forms import product_class
from fakequant.ptq import InputSums, gptq
from fakequant.ptq.solvers.problem import WeightGrid
from tests.support.bits import assert_same_bits, assert_same_state, unchanged
from tests.support.functional_models import Calls
from tests.support.matrix import full, in_turn, sweep
from tests.support.weight_specs import WEIGHTS


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, 2, groups=2, bias=False),
        ),
        *(nn.ReLU(), nn.Flatten(), nn.Linear(72, 24), nn.ReLU(), nn.Linear(24, 5)),
    )


def batches(count: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    scale = torch.tensor([0.2, 1.0, 3.0])[None, :, None, None]
    return [torch.randn(8, 3, 8, 8, generator=generator).relu() * scale for _ in range(count)]


def prepared(weight: Any, **fields: Any) -> nn.Sequential:
    model = fq.prepare(net(), fq.Config("test", (fq.Rule(weight=weight, **fields),)))
    fq.calibrate(model, batches(), progress=False)
    return model


def error(model: nn.Module) -> float:
    x = torch.cat(batches(6)[4:])
    with torch.no_grad():
        return float((model(x) - net()(x)).square().mean())


@sweep("weight, steps", full(WEIGHTS, ["best", "fast"]), in_turn(WEIGHTS, ["fast", "best"]), weight=WEIGHTS)
def test_every_format_and_granularity_loses_less_and_keeps_its_codes(weight: Any, steps: str, tmp_path: Path) -> None:
    model = prepared(weight)
    nearest = error(model)
    found = fq.ptq.improve(model, batches(), steps, progress=False)
    assert [layer.layer for layer in found.layers] == ["0", "2", "5", "7"]
    assert all(layer.after <= layer.before for layer in found.layers)
    assert error(model) < nearest
    x = batches()[0]
    for place in (0, 2, 5, 7):
        assert_same_bits(model[place].weight_quantizer(model[place].weight), model[place].weight)
    y = model(x)
    assert_same_bits(copy.deepcopy(model)(x), y)
    loaded = fq.load(net(), fq.save(model, tmp_path / "saved"))
    assert_same_bits(loaded(x), y)


def test_four_bits_lose_a_quarter_of_what_nearest_loses() -> None:
    model = prepared("int4 per_block(1:8,pad)")
    nearest = error(model)
    without_drift = [step for step in fq.ptq.STEPS if step != "drift"]
    assert fq.ptq.improve(model, batches(), without_drift, judge=[], progress=False).remaining_error_of_layers < 0.25
    assert error(model) < 0.5 * nearest


@pytest.mark.parametrize("step", [step for step in fq.ptq.STEPS if step not in ("smooth", "rotate", "input")])
def test_every_step_for_weights_loses_less(step: str) -> None:
    steps = ["gptq", step] if step in ("damping", "drift") else [step]
    model = prepared("int3 per_channel(0)")
    nearest = error(model)
    found = fq.ptq.improve(model, batches(), steps, judge=[], progress=False)
    assert error(model) < nearest
    assert found.remaining_error_of_layers < 0.99


@pytest.mark.parametrize("step", ["smooth", "input"])  # rotations: tests/ptq/solvers/test_transforms.py
def test_every_step_for_inputs_loses_less(step: str) -> None:
    model = prepared("int8 per_channel(0)", input="int4")
    found = fq.ptq.improve(model, batches(), [step], judge=[], progress=False)
    shares = [layer.steps[step] for layer in found.layers]
    assert all(share <= 1 for share in shares)
    assert min(shares) < 0.9


def test_the_result_shows_the_error_of_a_layer_after_each_step() -> None:
    model = prepared("int3 per_channel(0)", input="int4")
    found = fq.ptq.improve(model, batches(32), judge=[], progress=False)
    steps = ["input", "smooth", "rotate", "bias", "ranges", "gptq", "descend"]
    for row in found.layers:
        assert [*row.steps] == [step for step in steps if row.layer != "2" or step != "bias"]  # 2 has none
        chosen = [row.before, *(row.steps[step] for step in steps[3:] if step in row.steps)]
        assert row.after in chosen  # with what the damping adds for new rows; in error alone the last may lose more
        assert row.after <= min(1.01 * min(chosen), row.before)
        assert row.steps.get("bias", row.before) <= row.before  # the nearest values with a better bias
    for shown in (str(found), found._repr_html_()):
        for row in found.layers:
            assert all(f"{number:.2e}" in shown for number in (row.before, *row.steps.values(), row.after))
    headline, header, *_ = str(found).splitlines()
    assert headline == (
        "error of the model's output on 4 batches that also chose, so that new data may lose more: "
        f"{found.before:.2e} -> {found.after:.2e}"
    )
    assert header.split()[:10] == ["layer", "nearest", *steps, "chosen"]


def test_adaround_goes_on_from_the_steps_before_it() -> None:
    model = prepared("int3 per_channel(0)")
    # What a solver lowers includes what new rows add. The error on these rows alone may rise in one layer, so: the sum.
    found = fq.ptq.improve(model, batches(16), ["gptq", "descend", "adaround"], judge=[], progress=False)
    for before, after in (("gptq", "descend"), ("descend", "adaround")):
        lost, left = (sum(row.steps[step] for row in found.layers) for step in (before, after))
        assert left <= lost
    assert any(row.steps["adaround"] < row.steps["descend"] for row in found.layers)


def test_the_bias_makes_good_the_mean_of_the_output() -> None:
    def means(steps: list[str]) -> tuple[Tensor, Tensor]:
        model = prepared("int3 per_channel(0)", input="int4")
        fq.ptq.improve(model, batches(), steps, judge=[], progress=False)
        x = torch.cat(batches())
        with torch.no_grad():
            return model(x).mean(0), net()(x).mean(0)

    mean, wanted = means(["gptq", "drift", "bias"])
    torch.testing.assert_close(mean, wanted, rtol=1e-4, atol=1e-5)  # with all that earlier layers changed
    mean, wanted = means(["gptq", "bias"])
    assert (mean - wanted).abs().max() > 1e-3  # what the layer's own weight changed


LAYERS = {
    "linear": (nn.Linear(6, 4), (2, 3, 6)),
    "conv1d": (nn.Conv1d(4, 6, 3, 2, padding="valid", dilation=2), (2, 4, 9)),
    "depthwise 1d": (nn.Conv1d(4, 8, 5, stride=3, groups=4), (2, 4, 20)),
    "no examples": (nn.Conv2d(4, 4, 3), (0, 4, 5, 5)),
    "reflect": (nn.Conv2d(4, 6, 3, 2, padding=1, dilation=2, padding_mode="reflect"), (2, 4, 9, 9)),
    "conv2d groups": (nn.Conv2d(4, 6, (3, 2), padding=(1, 0), groups=2), (2, 4, 5, 6)),
    "depthwise circular": (nn.Conv2d(4, 4, 3, padding=1, groups=4, padding_mode="circular"), (2, 4, 5, 6)),
    "conv2d same": (nn.Conv2d(3, 2, 3, padding="same"), (2, 3, 5, 6)),
    "conv3d unbatched": (nn.Conv3d(2, 3, 2), (2, 3, 4, 3)),
    "transposed 1d": (nn.ConvTranspose1d(4, 6, 3, 2, padding=1, output_padding=1), (2, 4, 5)),
    "transposed 2d": (nn.ConvTranspose2d(4, 3, (3, 2), dilation=(1, 2)), (2, 4, 3, 5)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_rows_times_the_weight_matrix_are_the_output(name: str) -> None:
    layer, shape = LAYERS[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).double()
    layer = copy.deepcopy(layer).double()
    with torch.no_grad():
        product = product_class(layer).of(layer, "_weight_quantizer", "weight")
        assert isinstance(product, MatrixProduct)
        rows = product.rows(x)
        matrix = product.matrix(layer.weight).reshape(len(rows), -1, rows.shape[-1])
        products = torch.einsum("grk,gok->rgo", rows, matrix).flatten(1) + layer.bias
        y = layer(x)
        right = y if isinstance(layer, nn.Linear) else (y[None] if name == "conv3d unbatched" else y).movedim(1, -1)
    torch.testing.assert_close(products, right.reshape(products.shape))


@pytest.mark.parametrize("moments", [[[torch.nan] * 2] * 2, [[1.0, 1e9], [1e9, 1.0]]])
def test_moments_that_are_none_are_refused(moments: list[list[float]]) -> None:
    weight, spec = torch.randn(5, 2), fq.QuantSpec("int3", fq.PerChannel(0))
    grid = WeightGrid(spec, fq.choose_qparams(weight, spec), weight.shape)
    with pytest.raises(CalibrationError, match=r"not (finite|positive semidefinite)"):
        gptq(weight, torch.tensor(moments, dtype=torch.float64), grid)


def test_sums_do_not_depend_on_batches() -> None:
    rows = torch.randint(-8, 9, (2, 40_000, 5)).float()
    whole, parts = InputSums(), InputSums()
    whole.add(rows)
    parts.add(rows[:, :7])
    parts.add(rows[:, 7:])
    assert parts.count == whole.count == 40_000
    assert_same_bits(parts.moments, whole.moments)  # sums of integers are exact
    assert_same_bits(whole.moments, rows.double().transpose(1, 2) @ rows.double())
    centred = rows.double() - rows.double().mean(1, keepdim=True)
    torch.testing.assert_close(whole.about_mean().moments, centred.transpose(1, 2) @ centred)


def test_results_are_those_of_any_number_of_threads() -> None:
    found, before = list[nn.Module](), torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            model = prepared(WEIGHTS["nvfp4"])
            fq.ptq.improve(model, batches(), progress=False)
            found.append(model)
    finally:
        torch.set_num_threads(before)
    assert_same_state(*found)


def tied() -> Any:
    parts = {"table": nn.Embedding(7, 4), "head": nn.Linear(4, 7, bias=False), "idle": nn.Linear(4, 4)}
    parts |= {"up": nn.ConvTranspose1d(4, 4, 2, groups=2)}
    parts["head"].weight = parts["table"].weight
    return Calls(lambda m, x: m.head(m.up(m.table(x).transpose(1, 2)).transpose(1, 2)), **parts)


def test_what_is_left_at_nearest_is_listed_with_the_reason() -> None:
    model = fq.prepare(tied(), "INT4_WEIGHT_ONLY")
    found = fq.ptq.improve(model, [torch.tensor([[1, 2, 3]])], judge=[], progress=False)
    assert {layer.layer: layer.note for layer in found.layers} == {
        "table": "nearest: improve has no steps for a QuantEmbedding",
        "up": "nearest: improve has no steps for a QuantConvTranspose1d with groups",
        "head": "nearest: layers share its weight",
        "idle": "no batch that chooses weights reaches it",
    }
    reasons = (f"{layer.layer} ({layer.note})" for layer in found.layers)
    assert f"; nothing was chosen for 4 of 4: {'; '.join(reasons)}" in str(found)


def test_a_weight_that_a_float_layer_shares_stays() -> None:
    config = fq.Config("test", (fq.Rule("head", weight="int4 per_channel(0)"),))
    model = fq.prepare(tied(), config)
    before = model.table.weight.detach().clone()
    found = fq.ptq.improve(model, [torch.tensor([[1, 2, 3]])], progress=False)
    assert [layer.note for layer in found.layers] == ["nearest: layers share its weight"]
    assert_same_bits(model.table.weight, before)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda given: given.update(steps="bets"), ConfigError, "unknown steps 'bets'; did you mean best"),
        (lambda given: given.update(steps=["gptqq"]), ConfigError, "unknown step 'gptqq'; did you mean gptq"),
        (lambda given: given.update(steps=["drift"]), ConfigError, 'the step "drift" changes the target'),
        (lambda given: given.update(batches=[]), CalibrationError, "improve needs batches"),
        (lambda given: given.update(batches=torch.ones(3, 4)), ConfigError, r"give a list: \[tensor\]"),
        (lambda given: given.update(model=net()), ConfigError, "call fakequant.prepare"),
        (lambda given: given.update(model=fq.prepare(net(), "int8")), CalibrationError, "call fakequant.calibrate"),
        (
            lambda given: given["batches"][2].view(-1)[:1].fill_(torch.nan),
            CalibrationError,
            "^0, batch 3: an input holds NaN",
        ),
    ],
)
def test_what_is_refused(change: Any, kind: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"model": prepared("int4"), "batches": batches(), "steps": "fast"}
    change(given)
    with unchanged(given["model"]), pytest.raises(kind, match=message):
        fq.ptq.improve(**given, progress=False)
