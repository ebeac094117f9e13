"""Sparse, nested and quantized tensors, and those without values, are refused by errors of the package."""

import pytest
import torch

import fakequant as fq
from fakequant.calibration import calibrators, make_calibrator
from fakequant.errors import CalibrationError, DTypeError, QParamsError

ONE, FOUR = torch.tensor(0.1), torch.tensor([0.1, 0.2, 0.3, 0.4])
META = torch.ones((), device="meta")


def nested(layout):
    return torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=layout)


ODD = {
    "sparse": (lambda: FOUR.to_sparse(), r"to_dense\(\)"),
    "sparse_csr": (lambda: torch.eye(4).to_sparse_csr(), r"to_dense\(\)"),
    "mkldnn": (lambda: torch.randn(4, 8).to_mkldnn(), r"to_dense\(\)"),
    "nested": (lambda: nested(torch.strided), "to_padded_tensor"),
    "jagged": (lambda: nested(torch.jagged), "to_padded_tensor"),
    "quantized": (lambda: torch.quantize_per_tensor(FOUR, 1.0, 0, torch.qint8), r"dequantize\(\)"),
}
FUNCTIONS = [fq.fake_quantize, fq.fake_quantize_, fq.quantize]
each_odd = pytest.mark.parametrize("odd", ODD)
each_function = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor support")


@each_odd
@each_function
@pytest.mark.parametrize("given", [{}, {"scale": 0.1}, {"scale": ONE}, {"amax": 1.0}], ids=str)
def test_odd_inputs(function, given, odd):
    make, way = ODD[odd]
    with pytest.raises(DTypeError, match=f"x must be a dense .*{way}|cannot quantize a tensor of dtype torch.qint8"):
        function(make(), "int8", **given)


@each_odd
@each_function
@pytest.mark.parametrize("name", ["scale", "zero_point", "amax"])
def test_odd_parameters(function, name, odd):
    make, way = ODD[odd]
    given = {"scale": FOUR} if name == "zero_point" else {}
    spec = "uint8 per_channel(0)" if name == "zero_point" else "int8 per_channel(0)"
    with pytest.raises(DTypeError, match=f"{name} must be a dense .*{way}"):
        function(torch.randn(4, 8), spec, **given, **{name: make()})


@each_function
@pytest.mark.parametrize("name", ["scale", "zero_point", "amax", "seed"])
def test_parameters_without_values(function, name):
    given = {"scale": ONE} if name == "zero_point" else {}
    spec = {"zero_point": "uint8", "seed": "int8 per_tensor stochastic"}.get(name, "int8")
    value = META.to(torch.int64) if name == "seed" else META
    with pytest.raises(QParamsError, match=rf"{name} is on the device meta.* give a {name} with values"):
        function(torch.randn(4), spec, **given, **{name: value})


def test_shapes_alone_are_computed_without_values():
    x = torch.empty(4, 8, device="meta")
    assert fq.fake_quantize(x, "int8").shape == (4, 8)
    assert fq.fake_quantize(x, "int8", scale=META).is_meta
    assert fq.fake_quantize(x, "int8", scale=0.1).is_meta


@each_odd
@pytest.mark.parametrize("method", calibrators())
@pytest.mark.parametrize("after", [False, True], ids=["first", "later"])
def test_odd_batches(method, after, odd):
    make, way = ODD[odd]
    calibrator = make_calibrator(method, "int8")
    if after:
        calibrator.observe(torch.randn(4, 8))
    before = calibrator.state_dict()
    with pytest.raises(DTypeError, match=f"batch must be a dense .*{way}"):
        calibrator.observe(make())
    assert all(torch.equal(value, before[name]) for name, value in calibrator.state_dict().items())


@pytest.mark.parametrize("method", calibrators())
def test_batches_without_values(method):
    calibrator = make_calibrator(method, "int8")
    with pytest.raises(CalibrationError, match="device meta holds no values; move the model and the batches"):
        calibrator.observe(torch.empty(4, 8, device="meta"))
    assert not calibrator.observed


@pytest.mark.parametrize("of_model", [False, True], ids=["batch", "model"])
def test_calibrating_without_values(of_model):
    model = fq.prepare(torch.nn.Sequential(torch.nn.Linear(8, 4)), fq.presets.INT8)
    batch = torch.empty(4, 8, device="meta")
    with pytest.raises(fq.FakeQuantError, match="meta"):
        fq.calibrate(model.to("meta") if of_model else model, [batch])
