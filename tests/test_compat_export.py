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
