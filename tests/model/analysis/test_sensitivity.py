import copy
import html
import math
import re
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import ConfigError
from fakequant.model import presets
from fakequant.model.calibrate import calibrate
from fakequant.model.config import Rule, TensorConfig
from fakequant.model.engine import set_execution
from fakequant.model.prepare import prepare
from fakequant.model.sensitivity import Sensitivities, Sensitivity, layer_sqnr, sensitivity
from fakequant.nn import Execution, Mode, QuantizedLayer, quantizers
from tests.support.models import images, small_net

ROWS = torch.linspace(-1, 1, 8).view(2, 4)
WORST = presets.INT8.with_rule(Rule("branch", input=TensorConfig("int2"), weight=TensorConfig("int2 per_channel(0)")))


def calibrated(config: object = presets.INT8) -> nn.Module:
    model = prepare(small_net(), config)  # type: ignore[arg-type]
    calibrate(model, [images()])
    return model


def test_sqnr_is_the_ratio_of_powers() -> None:
    model = calibrated()
    found = layer_sqnr(model, [images(), images(seed=5)])
    assert set(found) == set(quantizers(model))
    quantizer = model.stem._input_quantizer
    x = torch.cat([images(), images(seed=5)]).double()
    noise = torch.cat([quantizer(images()), quantizer(images(seed=5))]).double() - x
    expected = 10 * math.log10(x.square().sum() / noise.square().sum())
    assert found["stem._input_quantizer"] == pytest.approx(expected, rel=1e-12)


def test_more_bits_give_a_higher_ratio() -> None:
    coarse, fine = layer_sqnr(calibrated(presets.INT4), [images()]), layer_sqnr(calibrated(), [images()])
    assert all(fine[name] > coarse[name] for name in fine)


def test_an_exact_quantizer_has_no_noise() -> None:
    model = prepare(nn.Sequential(nn.Linear(2, 2)), presets.INT8)
    batch = [torch.tensor([[127.0, -3.0]])]
    calibrate(model, batch)
    assert layer_sqnr(model, batch)["0._input_quantizer"] == math.inf


def test_the_worst_layer_comes_first() -> None:
    found = sensitivity(calibrated(WORST), [images()])
    assert found[0].layer == "branch"
    assert len(found) == 7
    assert [s.value for s in found] == sorted(s.value for s in found)


def test_a_metric_of_ones_own() -> None:
    model = calibrated(WORST)
    exact = small_net()(images()).argmax(1)

    def agreement(m: nn.Module) -> float:
        return (m(images()).argmax(1) == exact).float().mean().item()

    found = sensitivity(model, [], agreement)
    assert all(s.change == s.value - 1.0 for s in found)


def test_each_quantizer_alone() -> None:
    torch.manual_seed(0)
    model = fq.prepare(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), "int8")
    x = torch.randn(16, 4)
    fq.calibrate(model, [x])
    found = fq.sensitivity(model, [x], each="quantizer")
    assert {s.layer for s in found} == set(quantizers(model))
    assert found.header[0] == "quantizer"
    with fq.disabled(model):
        exact = model(x)
        for one in found:
            quantizer = model.get_submodule(one.layer)
            quantizer.mode = Mode.QUANTIZE
            noise = (model(x) - exact).square().sum()
            quantizer.mode = Mode.OFF
            assert one.value == pytest.approx(10 * (exact.square().sum() / noise).log10().item(), rel=1e-4)
    with pytest.raises(ConfigError, match='each= must be "layer" or "quantizer", got \'quantizers\''):
        fq.sensitivity(model, [x], each="quantizers")


def test_each_quantizer_of_a_recurrent_layer_alone() -> None:
    torch.manual_seed(0)
    model = fq.prepare(nn.LSTM(4, 4, num_layers=2, bidirectional=True), "int8")
    x = torch.randn(3, 5, 4)
    fq.calibrate(model, [x])
    assert len(fq.sensitivity(model, [x], each="quantizer")) == 16 == len(quantizers(model))


def test_modes_and_hooks_are_left_as_they_were() -> None:
    model = calibrated()
    model.train()
    model.stem._input_quantizer.mode = Mode.OFF
    sensitivity(model, [images()])
    layer_sqnr(model, [images()])
    assert model.training
    assert model.stem._input_quantizer.mode is Mode.OFF
    assert all(not q._forward_hooks for q in quantizers(model).values())


def test_batches_are_passed_over_once() -> None:
    model, batches = calibrated(WORST), [images(), images(seed=5)]
    assert sensitivity(model, iter(batches)) == sensitivity(model, batches)


def test_ratios_of_quantizers_are_those_of_the_simulated_model() -> None:
    model = calibrated()
    wanted = layer_sqnr(model, [images()])
    assert layer_sqnr(set_execution(model, "auto"), [images()]) == wanted
    assert all(layer.execution is Execution.AUTO for layer in model.modules() if isinstance(layer, QuantizedLayer))


@dataclass
class Found:
    logits: torch.Tensor
    labels: torch.Tensor


def returning(wrap: Callable[[torch.Tensor], Any]) -> nn.Module:
    """A calibrated model with one layer, whose outputs are wrapped."""

    class Wrapped(nn.Linear):
        def forward(self, input: torch.Tensor) -> Any:
            return wrap(model(input))

    torch.manual_seed(0)
    model = prepare(nn.Sequential(nn.Linear(4, 3)), presets.INT8)
    calibrate(model, [ROWS])
    wrapped = Wrapped(4, 3)
    wrapped.inner = model
    return wrapped


@pytest.mark.parametrize(
    "wrap",
    [lambda y: UserDict(y=y), lambda y: Found(y, y.argmax(1)), lambda y: [Found(y, y), {"y": y.long()}]],
    ids=["mapping", "dataclass", "nested"],
)
def test_tensors_in_mappings_and_dataclasses_are_measured(wrap: Callable[[torch.Tensor], Any]) -> None:
    (found,) = sensitivity(returning(wrap), [ROWS])
    (plain,) = sensitivity(returning(lambda y: y), [ROWS])
    assert math.isfinite(plain.value)
    assert found.value == pytest.approx(plain.value)


@pytest.mark.parametrize(
    ("wrap", "name"), [(lambda y: y.argmax(1), "Tensor"), (lambda y: {y}, "set"), (lambda _: Found, "type")]
)
def test_outputs_without_a_float_tensor_are_refused(wrap: Callable[[torch.Tensor], Any], name: str) -> None:
    model = returning(wrap)
    with pytest.raises(ConfigError, match=f"output of type {name} holds no float tensor; pass metric="):
        sensitivity(model, [ROWS])
    assert all(quantizer.mode is Mode.QUANTIZE for quantizer in quantizers(model).values())


@pytest.mark.parametrize("measure", [sensitivity, layer_sqnr])
def test_nothing_is_said_where_nothing_was_measured(measure: Callable[..., Any]) -> None:
    model, batches = calibrated(), iter([images()])
    assert measure(model, batches)
    for empty in (batches, []):
        with pytest.raises(ConfigError, match="held no examples; give a list or a loader that can be iterated again"):
            measure(model, empty)
    with pytest.raises(ConfigError, match=f"{measure.__name__} takes batches, .* row by row; give a list"):
        measure(model, images())


def test_batches_without_rows_measure_nothing() -> None:
    with pytest.raises(ConfigError, match="float outputs are empty: the batches hold no rows"):
        sensitivity(returning(lambda y: y), [ROWS[:0]])


def test_a_model_that_finds_nothing_measures_nothing() -> None:
    with pytest.raises(ConfigError, match="found nothing in them"):
        sensitivity(returning(lambda y: y[:0]), [ROWS])


class Power(nn.Module):
    """The logarithm of a power: its sum has few codes for what is small."""

    def __init__(self) -> None:
        super().__init__()
        self.real, self.imaginary = (nn.Conv1d(1, 8, 9, padding=4) for _ in range(2))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        power = self.real(x) ** 2 + self.imaginary(x) ** 2
        return self.head(torch.log(power + 1e-6).transpose(1, 2))


def test_the_call_that_costs_most_is_named_with_what_leaves_it_in_float() -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(Power(), nn.Linear(1, 1)).eval()
    x = torch.randn(4, 1, 64) * 10 ** torch.linspace(-2, 1, 4).view(4, 1, 1)

    def measured(skip: list[str], each: str = "layer") -> Sensitivities:
        model = fq.prepare(copy.deepcopy(inner), "int8_affine", (x,), target="onnxruntime", skip=skip)
        fq.calibrate(model, [x])
        return fq.sensitivity(model, [x], each=each)

    found = measured([])
    times = re.sub(r"[\d.e+]+ times", "n times", found.line)
    assert times == (
        "0._sites.add_0 alone adds n times the error of all other layers together; fakequant.prepare(..., "
        "skip=['0._sites.add_0']) leaves 0._sites.add_0 in float, in the engine, too"
    )
    assert repr(found).endswith(f"\n{found.line}")
    assert f"<p>{html.escape(found.line)}</p>" in found._repr_html_()
    each = measured([], "quantizer")
    assert each.line.startswith("0._sites.add_0.")
    assert "skip=['0._sites.add_0']" in each.line
    for pattern in ("0._sites.add_0", "*._sites.add_*", "0._sites.*"):
        assert "0._sites.add_0" not in [one.layer for one in measured([pattern])]
    better = measured(["0._sites.add_0"])
    assert better[0].value > found[0].value + 20


def test_no_line_where_little_is_lost_or_nothing_stands_out() -> None:
    def of(*values: float) -> Sensitivities:
        return Sensitivities(Sensitivity(str(number), value, value) for number, value in enumerate(values))

    assert of(10.0, 30.0, 30.0).line.startswith("0 alone adds 50 times")
    assert of(20.0, 40.0, 40.0).line == ""  # 1 % of the output's energy
    assert of(10.0, 12.0, 13.0).line == ""
    assert of(10.0, 30.0).line == ""
    assert of(10.0, math.inf, math.inf).line.startswith("0 alone adds over 1,000 times")
    by_metric = of(10.0, 30.0, 30.0)
    by_metric.in_decibels = False
    assert by_metric.line == ""


def test_skip_names_calls_that_are_there(tmp_path: Path) -> None:
    x = torch.randn(4, 1, 64)
    with pytest.raises(ConfigError, match=r"'_sites\.add_7' with ops add matches no call of the example's run"):
        fq.prepare(Power(), "int8", (x,), target="onnxruntime", skip=["_sites.add_7"])
    with pytest.raises(ConfigError, match="no function 'ad' can be quantized"):
        fq.prepare(Power(), "int8", (x,), target="onnxruntime", skip=["_sites.ad_0"])
    with pytest.raises(ConfigError, match=r"rules name functions \(add\), .* pass prepare an example="):
        fq.prepare(Power(), "int8", skip=["_sites.add_0"])
    model = fq.prepare(Power().eval(), "int8", (x,), target="onnxruntime", skip=["_sites.add_0"])
    fq.calibrate(model, [x])
    fq.export_onnx(model, x, tmp_path / "m.onnx")
    assert fq.verify_onnx(tmp_path / "m.onnx", model).exact


@pytest.mark.parametrize("value", [float("nan"), 0.0])
def test_outputs_that_are_nan_or_0_have_no_errors_to_measure(value: float) -> None:
    model = fq.prepare(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)), "int8")
    fq.calibrate(model, [torch.randn(4, 8)], progress=False)
    with pytest.raises(ConfigError, match="all values of the model's float outputs are NaN or 0; pass other batches"):
        fq.sensitivity(model, [torch.full((4, 8), value)], progress=False)
