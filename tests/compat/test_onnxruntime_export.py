"""Models with quantizers as files with FakeQuant nodes, run in the public wheel."""

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

import fakequant as fq
from fakequant.compat.onnxruntime import export_fake_quant
from fakequant.errors import ExportError, OutputError
from tests.support.bits import assert_same_bits
from tests.support.onnxruntime_models import run

CONFIG = fq.Config("per tensor", (fq.Rule("*", input=fq.TensorConfig("uint8"), weight=fq.TensorConfig("int8_narrow")),))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 4, 3), nn.Linear(4 * 36, 5)

    def forward(self, images):
        return self.linear(self.conv(images).relu().flatten(1))


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    model = fq.prepare(Network(), CONFIG)
    fq.calibrate(model, [torch.randn(8, 3, 8, 8) for _ in range(2)])
    return model.train()


def test_a_model_for_training(trained, tmp_path):
    before = {name: value.clone() for name, value in trained.state_dict().items()}
    x = torch.randn(2, 3, 8, 8)
    path = export_fake_quant(trained, x, tmp_path / "folder" / "model.onnx", dynamic_shapes=({0: "batch"},))
    model = onnx.load(path)
    found = [node for node in model.graph.node if node.op_type == "FakeQuant"]
    attributes = [{a.name: a.i for a in node.attribute} for node in found]
    narrow, unsigned = {"quant_min": -127, "quant_max": 127}, {"quant_min": 0, "quant_max": 255}
    assert sorted(a["quant_min"] for a in attributes) == [-127, -127, 0, 0]
    assert all(a in (narrow, unsigned) for a in attributes)
    initial = {tensor.name: tensor for tensor in model.graph.initializer}
    for name, parameter in Network().named_parameters():
        assert initial[name].data_type == TensorProto.FLOAT
        assert tuple(initial[name].dims) == parameter.shape
    assert not {node.domain for node in model.graph.node} - {"", "com.microsoft"}
    assert trained.training
    assert all(torch.equal(value, before[name]) for name, value in trained.state_dict().items())
    assert_quantized_alike(model, trained, torch.randn(5, 3, 8, 8))


def assert_quantized_alike(model, trained, x):
    """Every FakeQuant of the file, on the tensor that ONNX Runtime gives it, is the quantizer of the model."""
    quantizers = {name: module for name, module in trained.named_modules() if isinstance(module, fq.nn.Quantizer)}
    nodes = [node for node in model.graph.node if node.op_type == "FakeQuant"]
    for node in nodes:
        for name in (node.input[0], node.output[0]):
            model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    values = dict(zip([o.name for o in model.graph.output], run(model, x, level="as it is"), strict=True))
    for node in nodes:
        quantizer = quantizers[node.name.removesuffix("/FakeQuant")]
        with torch.no_grad():
            assert_same_bits(values[node.output[0]], quantizer(values[node.input[0]]), node.name)
    assert len(nodes) == len(quantizers)


@pytest.mark.parametrize("spec", ["uint8", "int8", "int8 per_tensor scale=float8_e8m0fnu:floor"])
def test_dynamic_ranges_in_half_precision_with_and_without_zero_points(spec, tmp_path):
    model = fq.nn.Quantizer(fq.QuantSpec.parse(spec), dynamic=True)
    path = export_fake_quant(model, torch.randn(3, 4).half(), tmp_path / "model.onnx", opset=21)
    x = (torch.randn(3, 4) * 3).half()
    exported = onnx.load(path)
    assert_same_bits(run(exported, x)[0], model(x))
    made_by = {name: node.op_type for node in exported.graph.node for name in node.output}
    (node,) = (node for node in exported.graph.node if node.op_type == "FakeQuant")
    # The kernel takes no scale of two axes, the function would.
    assert {made_by[name] for name in node.input[1:] if name in made_by} == {"Reshape"}


def test_quantizers_that_fake_quant_cannot_express_are_all_named(tmp_path):
    model = fq.prepare(Network(), fq.presets.INT8)
    fq.calibrate(model, [torch.randn(8, 3, 8, 8)])
    with pytest.raises(ExportError, match="per_channel") as error:
        export_fake_quant(model, torch.randn(2, 3, 8, 8), tmp_path / "model.onnx")
    assert "conv._weight_quantizer" in str(error.value)
    assert "linear._weight_quantizer" in str(error.value)
    assert "input_quantizer" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "spec",
    [
        fq.QuantSpec("float8_e4m3fn"),
        fq.QuantSpec("int8", arithmetic=fq.Arithmetic.RECIPROCAL),
        fq.QuantSpec("int8", gradient=fq.Gradient.INPUT_RANGE),
        fq.QuantSpec("int8", fq.PerToken()),
        fq.QuantSpec("int8", fq.PerBlock({-1: 2}), scale=fq.ScaleSpec("float8_e8m0fnu")),
    ],
    ids=str,
)
def test_specifications_that_fake_quant_cannot_express(spec, tmp_path):
    with pytest.raises(ExportError, match="FakeQuant has integers per tensor"):
        export_fake_quant(fq.nn.Quantizer(spec, dynamic=True), torch.randn(3, 4), tmp_path / "model.onnx")


def test_what_cannot_be_exported(tmp_path):
    x = torch.randn(2, 3, 8, 8)
    with pytest.raises(ExportError, match=r"2 quantizers are not calibrated: conv\._input_quantizer"):
        export_fake_quant(fq.prepare(Network(), CONFIG), x, tmp_path / "model.onnx")
    with pytest.raises(ExportError, match="nothing in the model quantizes"):
        export_fake_quant(Network(), x, tmp_path / "model.onnx")
    with pytest.raises(ExportError, match="opset=15"):
        export_fake_quant(Network(), x, tmp_path / "model.onnx", opset=15)
    with pytest.raises(OutputError):
        export_fake_quant(Network(), x, tmp_path)
    assert not list(tmp_path.iterdir())
