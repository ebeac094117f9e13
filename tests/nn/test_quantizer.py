import copy
import math
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._tools.mod_tracker import ModTracker
from torch.testing._internal.logging_tensor import LoggingTensorMode
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

import fakequant as fq
from fakequant import PerChannel, PerToken, QParams, QuantSpec, Range, fake_quantize
from fakequant.calibration import make_calibrator
from fakequant.errors import CalibrationError, ShapeError
from fakequant.nn import Kind, Mode, Quantizer, cached_weights, quantizers

X = torch.tensor([[0.3, -1.0, 2.0], [0.0, 5.0, -0.2]])


def calibrated(spec: str = "int8 per_channel(0)") -> Quantizer:
    quantizer = Quantizer(spec)
    quantizer.name = "block._input_quantizer"
    quantizer.set_range(Range(torch.tensor([[-1.0], [-0.5]]), torch.tensor([[2.0], [5.0]])))
    return quantizer


@pytest.mark.parametrize("spec", ["int8 per_channel(0)", "uint8 per_channel(0)", "float8_e4m3fn per_channel(0)"])
def test_static_equals_function(spec: str) -> None:
    quantizer = calibrated(spec)
    assert torch.equal(quantizer(X), fake_quantize(X, spec, scale=quantizer.scale, zero_point=quantizer.zero_point))


def test_dynamic_takes_the_range_from_every_tensor() -> None:
    quantizer = Quantizer(QuantSpec("int8", PerToken()), dynamic=True)
    for x in (X, X * 100, X[:1]):
        assert torch.equal(quantizer(x), fake_quantize(x, quantizer.spec))
    assert not quantizer.needs_calibration


def test_weight_follows_until_frozen() -> None:
    quantizer = Quantizer("int8", kind=Kind.WEIGHT)
    before = quantizer(X * 10)
    assert torch.equal(before, fake_quantize(X * 10, "int8"))
    quantizer.freeze(X)
    assert torch.equal(quantizer(X * 10), fake_quantize(X * 10, "int8", amax=5.0))


def test_modes() -> None:
    quantizer = calibrated()
    quantizer.mode = Mode.OFF
    assert quantizer(X) is X
    quantizer.mode = Mode.OBSERVE
    quantizer.calibrator = make_calibrator("max", quantizer.spec)
    assert quantizer(X) is X
    assert torch.equal(quantizer.observed_range().hi, torch.tensor([[2.0], [5.0]]))


def test_uncalibrated_input_names_itself() -> None:
    quantizer = Quantizer("int8")
    quantizer.name = "layer1._input_quantizer"
    with pytest.raises(CalibrationError, match=r"layer1\._input_quantizer has not been calibrated; call fakequant"):
        quantizer(X)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_observing_bad_data_names_the_quantizer(bad: float) -> None:
    quantizer = calibrated()
    quantizer.calibrator = make_calibrator("max", quantizer.spec)
    with pytest.raises(CalibrationError, match=r"^block\._input_quantizer: "):
        quantizer.observe(torch.tensor([[1.0], [bad]]))


def test_observing_without_calibrator() -> None:
    quantizer = calibrated()
    with pytest.raises(CalibrationError, match="has no calibrator"):
        quantizer.observe(X)
    with pytest.raises(CalibrationError, match="nothing was observed"):
        quantizer.observed_range()


def test_shape_that_does_not_fit_the_scale() -> None:
    with pytest.raises(ShapeError, match=r"scale of shape \[2, 1\], which does not fit .* shape \[3, 2\]"):
        calibrated()(X.t())


@pytest.mark.parametrize("spec", ["int8", "uint8"])
def test_one_scale_fits_tensors_of_any_rank(spec: str) -> None:
    quantizer = Quantizer(spec)
    quantizer.set_range(Range(torch.tensor([[-1.0]]), torch.tensor([[5.0]])))
    for shape in ((6,), (1, 6), (1, 2, 3), ()):
        x = X.flatten()[: math.prod(shape)].reshape(shape)
        assert torch.equal(quantizer(x), quantizer(x.reshape(1, -1)).reshape(shape))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_scale_keeps_its_precision(dtype: torch.dtype) -> None:
    quantizer = calibrated("uint8 per_channel(0)")
    scale, zero_point = quantizer.scale.clone(), quantizer.zero_point.clone()
    assert torch.equal(quantizer.to(dtype).scale, scale)
    assert torch.equal(quantizer.zero_point, zero_point)
    assert quantizer(X.to(dtype)).dtype == dtype


def test_a_double_scale_becomes_float32_with_the_model() -> None:
    quantizer = calibrated().double()
    assert quantizer.scale.dtype == torch.float64
    assert quantizer.float().scale.dtype == torch.float32
    assert quantizer.double().half().scale.dtype == torch.float32


def test_state_dict_round_trip_into_a_fresh_quantizer() -> None:
    quantizer = calibrated("uint8 per_channel(0)")
    fresh = Quantizer(quantizer.spec)
    fresh.load_state_dict(quantizer.state_dict())
    assert torch.equal(fresh(X), quantizer(X))
    with pytest.raises(RuntimeError, match="Missing key"):
        fresh.load_state_dict({})


def test_state_dict_of_another_shape_replaces() -> None:
    quantizer = Quantizer("int8")
    quantizer.set_qparams(QParams(torch.tensor([0.5])))
    quantizer.load_state_dict({"scale": torch.tensor([[0.25]])})
    assert torch.equal(quantizer.scale, torch.tensor([[0.25]]))


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda q: pickle.loads(pickle.dumps(q))], ids=["copy", "pickle"])
def test_copies_are_independent(copier: object) -> None:
    quantizer = calibrated()
    twin = copier(quantizer)  # type: ignore[operator]
    assert torch.equal(twin(X), quantizer(X))
    twin.scale.mul_(2)
    assert not torch.equal(twin(X), quantizer(X))


def test_given_parameters_are_not_aliased() -> None:
    scale = torch.tensor([0.5])
    quantizer = Quantizer("int8")
    quantizer.set_qparams(QParams(scale))
    scale.fill_(9.0)
    assert quantizer.scale.item() == 0.5


def test_repr_says_what_matters() -> None:
    quantizer = calibrated()
    quantizer.learn("lsq")
    quantizer.mode = Mode.OFF
    assert repr(quantizer) == "Quantizer(int8 per_channel(0), input, off, scale 0.01575 to 0.03937 [2], learned by lsq)"
    assert repr(Quantizer("int8", dynamic=True)) == "Quantizer(int8 per_tensor, input, dynamic)"


def test_quantizers_by_path() -> None:
    model = nn.Sequential(Quantizer("int8"), nn.Sequential(Quantizer(QuantSpec("int4", PerChannel(0)))))
    assert list(quantizers(model)) == ["0", "1.0"]


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w, self.layer, self.cell = nn.Parameter(torch.randn(3, 3)), nn.Linear(3, 3), nn.GRUCell(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(self.layer(x @ self.w.T) + self.w[0])


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize(
    "watch",
    [ModuleTracker, lambda: FlopCounterMode(display=False), ModTracker, LoggingTensorMode, lambda: torch.device("cpu")],
    ids=["tracker", "flops", "distributed", "logging", "device"],
)
def test_trackers_of_torch_follow_a_prepared_model(watch: Callable[[], Any], grad: Callable[[], Any]) -> None:
    model = fq.prepare(Reads(), "int8_affine", X, target="onnxruntime")
    fq.calibrate(model, [X])
    for context in (nullcontext, lambda: cached_weights(model)):
        with grad(), context():
            expected = model(X)
            with watch():
                assert torch.equal(model(X), expected)


@pytest.mark.parametrize(("one", "other"), [("int8", "int4"), ("int8_affine", "int8"), ("int6 per_channel(0)", "int8")])
def test_the_state_of_another_preset_is_refused(one: str, other: str) -> None:
    """It was loaded with "All keys matched", and gave outputs of 0 dB."""
    first, second = (
        fq.prepare(nn.Sequential(nn.Linear(4, 4)), fq.Config("own", [fq.Rule("*", weight=c)]) if " " in c else c)
        for c in (one, other)
    )
    for model in (first, second):
        fq.calibrate(model, [torch.randn(8, 4)], progress=False)
    with pytest.raises(
        RuntimeError,
        match=r"0\._(weight|input)_quantizer is u?int.*, and its state is of u?int.*: prepare the model with",
    ):
        second.load_state_dict(first.state_dict())
    second.load_state_dict(second.state_dict())


def test_the_state_of_another_gradient_or_rounding_is_that_of_the_same_numbers() -> None:
    one, other = calibrated(), calibrated("int8 per_channel(0) stochastic")
    other.load_state_dict(one.state_dict())
    assert torch.equal(other.scale, one.scale)
