"""Torch's default dtype and device change no result: every tensor that the package makes names its own."""

import ast
import contextlib
from pathlib import Path

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.nn import MatMul
from fakequant.ops import dispatch, kernel_params, products
from fakequant.ops.cpu import backend
from tests.support.bits import assert_same_bits
from tests.support.matrix import full, sweep

PRESETS = ("INT8", "INT8_AFFINE", "INT8_PER_TOKEN", "FP8", "MXFP4", "NVFP4", "INT4_GROUP32", "NF4_WEIGHT_ONLY")
# Meta stands for any other device than that of the model: what is made there by mistake has no values.
DEFAULTS = (torch.float64, torch.bfloat16, torch.float16, "meta")


class Network(nn.Module):
    """One layer for each way to multiply: matrices, the convolution kernel, oneDNN's by groups, two inputs."""

    def __init__(self):
        super().__init__()
        self.up, self.product = nn.Linear(16, 32), MatMul()
        self.convolution, self.grouped = nn.Conv1d(4, 8, 3, padding=1), nn.Conv1d(8, 8, 3, groups=2)

    def forward(self, x):
        x = self.grouped(self.convolution(torch.relu(self.up(x)).view(-1, 4, 8)))
        return self.product(x, x.transpose(1, 2))


@contextlib.contextmanager
def default(value):
    try:
        torch.set_default_device(value) if isinstance(value, str) else torch.set_default_dtype(value)
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def forget():
    """Empty the caches that hold tensors, and the trials, which would otherwise come from before."""
    cached = products.convolution_unavailable, products._ones_and_zeros, products.linear_unavailable
    made = backend._nowhere, kernel_params.scale_rule
    dispatch._known.clear()
    for function in (*cached, *made):
        function.cache_clear()


def results(model, x, method):
    """What calibration, training, evaluation and analysis give, simulated and in integers."""
    fq.calibrate(model, [x], method=method, progress=False)
    found = [q.scale for q in fq.nn.quantizers(model).values() if q.scale is not None]
    for execution in ("simulate", "auto"):
        fq.set_execution(model, execution)
        model.zero_grad()
        y = model(x)
        y.sum().backward()
        with torch.no_grad():
            found += [y.detach(), model(x), *(p.grad for p in model.parameters())]
    return [*found, *(one.value for one in fq.sensitivity(model, [x]))]


@pytest.mark.parametrize("method", ["max", "percentile", "mse", "entropy"])
@pytest.mark.parametrize("preset", PRESETS)
def test_results_do_not_depend_on_the_defaults_of_torch(preset, method):
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))

    def model():
        torch.manual_seed(0)
        return fq.prepare(Network(), preset)

    expected = results(model(), x, method)
    for value in DEFAULTS:
        made = model()
        forget()
        with default(value):
            found = results(made, x, method)
        assert len(found) == len(expected)
        for one, right in zip(found, expected, strict=True):
            if isinstance(right, float):
                assert one == right, value
            else:
                assert_same_bits(one, right, str(value))
    forget()


# Those whose files are made in different ways, under the two defaults that differ most from what is meant.
@sweep("preset", full(["INT8", "NF4_WEIGHT_ONLY"]), full(["NF4_WEIGHT_ONLY"]))
def test_exported_files_do_not_depend_on_the_defaults_of_torch(preset, tmp_path):
    pytest.importorskip("onnxruntime")
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    model = fq.prepare(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)), preset)
    fq.calibrate(model, [x], progress=False)
    fq.export_onnx(model, x, tmp_path / "expected.onnx")
    for value in (torch.bfloat16, "meta"):
        with default(value):
            fq.export_onnx(model, x, tmp_path / "found.onnx")
            assert fq.verify_onnx(tmp_path / "found.onnx", model, [x]).exact, value
        assert (tmp_path / "found.onnx").read_bytes() == (tmp_path / "expected.onnx").read_bytes(), value


@pytest.mark.parametrize("value", DEFAULTS, ids=str)
def test_trials_pass_whatever_the_defaults_of_torch(value):
    forget()
    expected = [
        products.linear_unavailable("cpu"),
        products.convolution_unavailable("cpu"),
    ]
    forget()
    with default(value):
        assert expected == [
            products.linear_unavailable("cpu"),
            products.convolution_unavailable("cpu"),
        ]
    forget()


@pytest.mark.skipif(products.load_kernels() is not None, reason="the kernels are not built")
def test_kernels_refuse_results_of_another_dtype():
    sums, one = torch.ones(4, 8, dtype=torch.int32), torch.ones(1)
    for y in (torch.empty(4, 8, dtype=torch.bfloat16), torch.empty(8, 4).t()):
        with pytest.raises(RuntimeError, match="the result is float32, and both are contiguous"):
            torch.ops.fakequant_cpu.scale_sums(sums, one, one.expand(8).contiguous(), None, y, 1, False)


MAKERS = {
    *("torch.zeros", "torch.ones", "torch.tensor", "torch.empty", "torch.full", "torch.eye", "torch.arange"),
    *("torch.linspace", "torch.logspace", "torch.randperm", "torch.randn", "torch.rand", "torch.randint"),
    "torch.empty_strided",
}


def test_every_tensor_that_the_package_makes_names_its_device():
    """Modules of transforms are made where torch makes modules, and moved to their layer."""
    root = Path(fq.__file__).parent
    found = [
        f"{path.relative_to(root)}:{node.lineno}"
        for path in sorted(root.rglob("*.py"))
        if path != root / "nn" / "transforms.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in MAKERS
        and not {"device", None} & {keyword.arg for keyword in node.keywords}
    ]
    assert found == []
