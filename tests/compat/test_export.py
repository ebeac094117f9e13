"""Models of the pytorch_quantization interface as ONNX: one QuantizeLinear and DequantizeLinear per quantizer."""

from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.compat import pytorch_quantization as pq
from fakequant.compat.pytorch_quantization import nn as quant_nn
from fakequant.compat.pytorch_quantization.tensor_quant import QuantDescriptor
from fakequant.errors import ExportError

X = torch.randn(3, 2, 6, 6, generator=torch.Generator().manual_seed(5))


def calibrated(model: nn.Module, *batches: torch.Tensor) -> nn.Module:
    found = [module for module in model.modules() if isinstance(module, quant_nn.TensorQuantizer)]
    for quantizer in found:
        quantizer.enable_calib()
        quantizer.disable_quant()
    for batch in batches:
        model(batch)
    for quantizer in found:
        quantizer.disable_calib()
        quantizer.enable_quant()
        if quantizer._calibrator.compute_amax() is not None:
            quantizer.load_calib_amax()
    return model.eval()


def network() -> nn.Module:
    torch.manual_seed(0)
    unsigned = QuantDescriptor(unsigned=True)
    return nn.Sequential(
        quant_nn.QuantConv2d(2, 4, 3),
        nn.ReLU(),
        quant_nn.QuantConvTranspose2d(4, 4, 2, stride=2, quant_desc_input=unsigned),
        nn.ReLU(),
        quant_nn.QuantMaxPool2d(2, quant_desc_input=unsigned),
        nn.Flatten(),
        quant_nn.QuantLinear(64, 3, quant_desc_input=unsigned),
    )


def run(path, x: torch.Tensor) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options)
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


def test_export_onnx_gives_a_file_that_verifies(tmp_path):
    model = calibrated(network(), X, 0.5 * X)
    path = tmp_path / "model.onnx"
    with pq.enable_onnx_export():
        report = fq.export_onnx(model, X, path, dynamic_shapes=({0: "batch"},))
        verified = fq.verify_onnx(path, model, [X, X[:2]])
    assert verified.exact
    forms = {row.quantizer: row.expressed for row in report.quantizers}
    assert forms["0._weight_quantizer"] == "INT8 codes and DequantizeLinear, axis 0"
    assert forms["2._weight_quantizer"] == "INT8 codes and DequantizeLinear, axis 1"
    assert forms["0._input_quantizer"] == "QuantizeLinear and DequantizeLinear, INT8, per tensor"
    assert forms["6._input_quantizer"] == "QuantizeLinear and DequantizeLinear, UINT8, per tensor"
    assert len(forms) == 7


@pytest.mark.parametrize("options", [{"dynamo": True}, {"dynamo": False, "opset_version": 13}], ids=str)
@pytest.mark.filterwarnings("ignore")
def test_torch_onnx_export_gives_the_same_nodes(tmp_path, options):
    model = calibrated(network(), X)
    path = tmp_path / "model.onnx"
    with torch.no_grad(), pq.enable_onnx_export():
        torch.onnx.export(model, (X,), str(path), verbose=False, **options)
        expected = model(X)
    kinds = Counter(node.op_type for node in onnx.load(path).graph.node)
    assert kinds["QuantizeLinear"] == kinds["DequantizeLinear"] == 7
    # Products are summed in another order.
    np.testing.assert_allclose(run(path, X), expected.numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "descriptor", [QuantDescriptor(axis=1), QuantDescriptor(), QuantDescriptor(num_bits=(4, 3))], ids=str
)
def test_codes_at_the_ends_and_zero_channels(tmp_path, descriptor):
    """The file has the full range, keeps zeros of a channel that is all zero, and equals torch in every bit."""
    quantizer = quant_nn.TensorQuantizer(descriptor)
    x = X.clone()
    x[:, 0] = 0.0
    model = calibrated(nn.Sequential(quantizer), x)
    path = tmp_path / "model.onnx"
    with pq.enable_onnx_export():
        fq.export_onnx(model, x, path)
        assert fq.verify_onnx(path, model, [x, 3 * x, torch.zeros_like(x)]).exact
        expected = model(3 * x)
    assert np.array_equal(run(path, 3 * x), expected.numpy())
    if isinstance(descriptor.num_bits, int):
        step = quantizer.amax / 127
        assert torch.equal((expected / step).nan_to_num(0.0).round().amin(), torch.tensor(-128.0))


def test_a_learned_range_and_blocks(tmp_path):
    learned = quant_nn.TensorQuantizer(QuantDescriptor(learn_amax=True, amax=0.7))
    blocks = quant_nn.TensorQuantizer(QuantDescriptor(num_bits=4, block_sizes={1: 2}))
    blocks.amax = torch.full((3, 1, 6, 6), 0.5)
    model = nn.Sequential(learned, blocks).eval()
    path = tmp_path / "model.onnx"
    with pq.enable_onnx_export():
        fq.export_onnx(model, X, path)
        assert fq.verify_onnx(path, model, [X]).exact


def test_results_while_exporting_are_within_a_unit_in_the_last_place():
    quantizer = quant_nn.TensorQuantizer(QuantDescriptor(amax=1.3, narrow_range=False))
    x = torch.randn(100_000)
    usual = quantizer(x)
    with pq.enable_onnx_export():
        exported = quantizer(x)
    scale = torch.tensor(1.3) / 127
    expected = torch.fake_quantize_per_tensor_affine(x.double(), scale.double().item(), 0, -128, 127)
    assert (exported - expected).abs().max() <= 2**-23
    same_code = (usual / scale).round() == (exported / scale).round()
    # At a tie x * (1 / s) and x / s may round to different codes.
    assert same_code.float().mean() > 0.9999
    assert ((usual - exported).abs()[same_code] <= 2**-23).all()


def test_the_switch_of_older_releases():
    quantizer = quant_nn.TensorQuantizer(QuantDescriptor(amax=1.3))
    with pq.enable_onnx_export():
        expected = quantizer(X)
    assert not torch.equal(quantizer(X), expected)
    quant_nn.TensorQuantizer.use_fb_fake_quant = True
    try:
        assert torch.equal(quantizer(X), expected)
    finally:
        quant_nn.TensorQuantizer.use_fb_fake_quant = False


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "calibrate"),
        ({"amax": 1.0, "num_bits": 4}, "num_bits=4"),
        ({"amax": 1.0, "narrow_range": True}, "narrow"),
        ({"amax": [[1.0, 2.0], [1.0, 2.0]]}, "one axis"),
        ({"amax": [1.0, 2.0], "num_bits": (4, 3)}, "per tensor"),
    ],
    ids=str,
)
def test_what_cannot_be_exported(options, words):
    quantizer = quant_nn.TensorQuantizer(QuantDescriptor(**options))
    x = torch.ones(2, 2)
    quantizer(x)
    with pq.enable_onnx_export():
        with pytest.raises(AssertionError, match=words):
            quantizer(x)
        quantizer.disable()
        assert quantizer(x) is x


def test_torch_has_no_operator_for_floats(monkeypatch):
    quantizer = quant_nn.TensorQuantizer(QuantDescriptor(amax=1.0, num_bits=(4, 3)))
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    with pq.enable_onnx_export(), pytest.raises(AssertionError, match=r"use fakequant\.export_onnx"):
        quantizer(torch.ones(2))


def test_outside_the_context_the_exporter_says_what_is_wrong(tmp_path):
    model = calibrated(network(), X)
    with pytest.raises(ExportError, match=r"0\._input_quantizer"):
        fq.export_onnx(model, X, tmp_path / "model.onnx")


def exported_by_torch(model: nn.Module, x: torch.Tensor, path, opset: int = 13) -> onnx.ModelProto:
    with torch.no_grad(), pq.enable_onnx_export():
        torch.onnx.export(model.eval(), (x,), str(path), dynamo=False, opset_version=opset, verbose=False)
    return onnx.load(path)


def operators(file: onnx.ModelProto) -> list[tuple[str, str]]:
    return [(node.domain, node.op_type) for node in file.graph.node if node.op_type != "Constant"]


def second_inputs(file: onnx.ModelProto, *names: str) -> list[np.ndarray]:
    """The constants that the operators of these names have as their second input."""
    values = {item.name: onnx.numpy_helper.to_array(item) for item in file.graph.initializer}
    for node in file.graph.node:
        if node.op_type == "Constant":
            values[node.output[0]] = onnx.numpy_helper.to_array(node.attribute[0].t)
    return [values[node.input[1]] for node in file.graph.node if node.op_type in names]


FP8_PAIR = [("trt", "TRT_FP8QuantizeLinear"), ("trt", "TRT_FP8DequantizeLinear")]


@pytest.mark.parametrize(
    ("dtype", "narrow"),
    [(torch.float32, None), (torch.float16, onnx.TensorProto.FLOAT16), (torch.bfloat16, onnx.TensorProto.BFLOAT16)],
    ids=str,
)
@pytest.mark.parametrize("form", ["quantizer", "function"])
@pytest.mark.filterwarnings("ignore")
def test_torchscript_export_of_fp8_writes_the_operators_of_tensorrt(tmp_path, form, dtype, narrow):
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return pq.tensor_quant.scaled_e4m3(x, torch.tensor(0.7))

    quantizer = quant_nn.TensorQuantizer(QuantDescriptor(num_bits=(4, 3), amax=0.7))
    model = nn.Sequential(quantizer if form == "quantizer" else Scaled())
    results = []
    model.register_forward_hook(lambda module, inputs, result: results.append(result.detach()))
    file = exported_by_torch(model, X.to(dtype), tmp_path / "model.onnx")
    with pq.enable_onnx_export():
        expected = quantizer(X.to(dtype))
    assert all(torch.equal(result, expected) for result in results)
    casts = [node.attribute[0].i for node in file.graph.node if node.op_type == "Cast"]
    if narrow is None:
        assert operators(file) == FP8_PAIR
    else:
        assert operators(file) == [("", "Cast"), *FP8_PAIR, ("", "Cast")]
        assert casts == [onnx.TensorProto.FLOAT, narrow]
    scales = second_inputs(file, "TRT_FP8QuantizeLinear", "TRT_FP8DequantizeLinear")
    assert len(scales) == 2
    for scale in scales:
        assert scale.dtype == np.float32
        assert scale.shape == ()
        assert scale == np.float32(0.7) / np.float32(448)
    assert file.graph.output[0].type.tensor_type.elem_type == (narrow or onnx.TensorProto.FLOAT)
    assert "trt" in {item.domain for item in file.opset_import}


@pytest.mark.filterwarnings("ignore")
def test_torchscript_export_of_fp8_takes_one_positive_scale(tmp_path):
    class Scaled(nn.Module):
        def __init__(self, amax: torch.Tensor | None) -> None:
            super().__init__()
            self.amax = amax

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return pq.tensor_quant.scaled_e4m3(x, self.amax)

    for amax in (None, torch.tensor([0.0])):
        file = exported_by_torch(Scaled(amax), X, tmp_path / "model.onnx")
        assert second_inputs(file, "TRT_FP8QuantizeLinear") == [1.0]
    with pytest.raises(AssertionError, match="per tensor"):
        exported_by_torch(Scaled(torch.ones(6)), X, tmp_path / "model.onnx")
    with pytest.raises(ValueError, match="Negative"):
        exported_by_torch(Scaled(torch.tensor(-1.0)), X, tmp_path / "model.onnx")


@pytest.mark.parametrize("opset", [13, 19])
@pytest.mark.parametrize(("dtype", "axis"), [(torch.float16, None), (torch.float16, 1), (torch.bfloat16, None)])
@pytest.mark.filterwarnings("ignore")
def test_torchscript_export_of_half_precision_casts_around_the_operators(tmp_path, dtype, axis, opset):
    """QuantizeLinear takes no float16 before opset 19, and no float16 beside a float32 scale later."""
    quantizer = quant_nn.TensorQuantizer(QuantDescriptor(axis=axis))
    x = X.to(dtype)
    model = calibrated(nn.Sequential(quantizer), x)
    path = tmp_path / "model.onnx"
    file = exported_by_torch(model, x, path, opset)
    onnx.checker.check_model(file, full_check=True)
    assert [kind for _, kind in operators(file)] == ["Cast", "QuantizeLinear", "DequantizeLinear", "Cast"]
    if dtype is torch.bfloat16:
        return  # numpy has no such array to run it with
    casts = [node.attribute[0].i for node in file.graph.node if node.op_type == "Cast"]
    assert casts == [onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16]
    with pq.enable_onnx_export():
        for inputs in (x, 3 * x):
            assert np.array_equal(run(path, inputs), model(inputs).numpy())


@pytest.mark.filterwarnings("ignore")
def test_torchscript_export_of_a_layer_in_half_precision_runs(tmp_path):
    torch.manual_seed(0)
    x = X.flatten(1).half()
    model = calibrated(quant_nn.QuantLinear(72, 3).half(), x)
    path = tmp_path / "model.onnx"
    onnx.checker.check_model(exported_by_torch(model, x, path), full_check=True)
    with pq.enable_onnx_export():
        # Products are summed in another order, in half precision.
        np.testing.assert_allclose(run(path, x), model(x).detach().numpy(), rtol=0, atol=2e-3)
