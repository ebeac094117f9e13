"""Simulated and integer layers beside ONNX Runtime: the files of the exporter, and models of integer operators.

The figures of docs/notes/execution.md are printed by `python -m pytest -rP tests/export/test_execution_runtime.py`.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

import fakequant as fq
from fakequant.nn import Quantizer
from fakequant.numerics.products import ConvParams, QuantizedOperand
from fakequant.ops import products
from tests.support.bits import assert_same_bits, bits_of
from tests.support.matrix import full, sweep
from tests.support.processor import needs_exact_sums

pytestmark = needs_exact_sums()
PAGE = Path(__file__).parents[2] / "docs" / "notes" / "execution.md"


class Case(NamedTuple):
    """A model that is exported, and what ONNX Runtime's optimisations are to make of it.

    Attributes:
        make: the model in float.
        shape: of the input.
        products: the operators that compute its products then, with their number.
        moved: the largest share of codes behind the model in which they differ from either of ours then.
        equal: whether they have the bits of products of codes, except where a code behind them is at a tie.
        coded: whether a quantizer follows the model.
        preset: how it is quantized.
        whole_biases: whether biases are multiples of the scale of their sum, to which the fused operators round them.
    """

    make: Callable[[], nn.Sequential]
    shape: tuple[int, ...]
    products: dict[str, int]
    moved: float = 1e-4
    equal: bool = False
    coded: bool = False
    preset: fq.Config = fq.presets.INT8
    whole_biases: bool = False

    @property
    def layers(self) -> int:
        return sum(self.products.values())


def cnn() -> nn.Sequential:
    convolutions = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, 2, padding=1), nn.Conv2d(64, 64, 3, padding=1)
    hidden = [module for convolution in convolutions for module in (convolution, nn.ReLU())]
    return nn.Sequential(*hidden, nn.Flatten(), nn.Linear(64 * 64, 10))


def linear(bias: bool = True) -> Callable[[], nn.Sequential]:
    return lambda: nn.Sequential(nn.Linear(384, 1536, bias=bias))


def convolution(bias: bool = True) -> Callable[[], nn.Sequential]:
    return lambda: nn.Sequential(nn.Conv2d(64, 64, 3, padding=1, bias=bias))


ROWS, TOKENS, IMAGES, PICTURES = (512, 384), (8, 64, 384), (32, 64, 16, 16), (128, 3, 16, 16)
Q_LINEAR_CNN = {"QLinearConv": 3, "QGemm": 1}
AFFINE = fq.presets.INT8_AFFINE
CASES = {
    "Linear": Case(linear(), ROWS, {"Gemm": 1}),
    "Linear without bias": Case(linear(False), TOKENS, {"MatMulIntegerToFloat": 1}, equal=True),
    "Conv2d": Case(convolution(), IMAGES, {"Conv": 1}),
    "CNN": Case(cnn, PICTURES, {"FusedConv": 3, "Gemm": 1}, 0.4),
    "Linear, quantized output": Case(linear(), ROWS, {"QGemm": 1}, 1e-3, coded=True),
    "the same, whole biases": Case(linear(), ROWS, {"QGemm": 1}, coded=True, whole_biases=True),
    "Linear without bias, quantized output": Case(linear(False), TOKENS, {"QLinearMatMul": 1}, equal=True, coded=True),
    "Conv2d, quantized output": Case(convolution(), IMAGES, {"QLinearConv": 1}, 1e-3, coded=True),
    "the same, whole bias": Case(convolution(), IMAGES, {"QLinearConv": 1}, coded=True, whole_biases=True),
    "Conv2d without bias, quantized output": Case(
        convolution(False), IMAGES, {"QLinearConv": 1}, equal=True, coded=True
    ),
    "CNN, affine, quantized output": Case(cnn, PICTURES, Q_LINEAR_CNN, 0.3, coded=True, preset=AFFINE),
    "the same, all biases whole numbers": Case(
        cnn, PICTURES, Q_LINEAR_CNN, 0.02, False, True, AFFINE, whole_biases=True
    ),
}
PRODUCTS = ("Conv", "FusedConv", "QLinearConv", "Gemm", "QGemm", "MatMul", "QLinearMatMul", "MatMulIntegerToFloat")


class Results(NamedTuple):
    """The outputs of one model, `scale` of a quantizer behind them, and the operators that compute its products."""

    scale: Tensor
    simulated: Tensor
    integer: Tensor
    plain: Tensor
    optimised: Tensor
    operators: dict[str, int]


class Difference(NamedTuple):
    """How far outputs are apart: `units` of the last place, `moved` codes of a quantizer behind, `steps` of codes."""

    share: float
    largest: float
    units: float
    moved: int
    steps: int
    elements: int


def computed(case: Case, folder: Path) -> Results:
    """The outputs of a case, for other inputs than it was calibrated on; files are left in the folder."""
    torch.manual_seed(0)
    model, behind = case.make(), Quantizer("int8")
    fq.prepare(model, case.preset).eval()
    if case.coded:
        model.append(behind)
    seen, x = torch.randn(case.shape), torch.randn(case.shape)
    fq.calibrate(model, [seen])
    if case.whole_biases:
        round_biases(model)
    with torch.no_grad():
        simulated, integer = model(x), fq.set_execution(copy.deepcopy(model), "auto")(x)
        scale = behind.scale if behind.scale is not None else model(seen).abs().max() / 127
    fq.export_onnx(model, x, folder / "model.onnx")
    data = (folder / "model.onnx").read_bytes()
    plain, optimised = run(data, x), run(data, x, saved=folder / "optimised.onnx")
    operators = Counter(node.op_type for node in onnx.load(folder / "optimised.onnx").graph.node)
    return Results(scale, simulated, integer, plain, optimised, {name: operators[name] for name in PRODUCTS})


def round_biases(model: nn.Module) -> None:
    """Make biases multiples of the scale of their sum."""
    for layer in model.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            quantizers = fq.nn.quantizers(layer)
            x_scale = quantizers["_input_quantizer"].qparams(layer.weight).scale
            unit = (x_scale * quantizers["_weight_quantizer"].qparams(layer.weight).scale).reshape(-1)
            assert layer.bias is not None
            layer.bias.data = (layer.bias.data / unit).round() * unit


def run(data: bytes, x: Tensor, *, saved: Path | None = None) -> Tensor:
    """The output of a model for its only input; with all optimisations if the optimised model is to be saved."""
    options, levels = onnxruntime.SessionOptions(), onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_DISABLE_ALL
    options.log_severity_level = 4  # it warns that an optimised model fits this processor only
    if saved is not None:
        options.graph_optimization_level = levels.ORT_ENABLE_ALL
        options.optimized_model_filepath = str(saved)
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


def difference(one: Tensor, other: Tensor, scale: Tensor) -> Difference:
    largest = (one.double() - other.double()).abs().max().item()
    unit = torch.finfo(torch.float32).eps * 2.0 ** one.abs().max().log2().floor().item()
    steps = ((one / scale).round().clamp(-128, 127) - (other / scale).round().clamp(-128, 127)).abs()
    share = (bits_of(one) != bits_of(other)).double().mean().item()
    return Difference(share, largest, largest / unit, int((steps > 0).sum()), int(steps.max()), one.numel())


def cell(case: Case, found: Results, apart: Difference) -> str:
    """A difference as the page tells it."""
    if not apart.share:
        return "0"
    if case.coded:
        return f"{apart.moved:,}"
    far = f"{apart.units:.1f} ulp" if case.layers == 1 else f"{apart.largest / found.scale.item():.2f} steps"
    return f"{apart.share:.0%}, {far}, {apart.moved:,}"


# Every operator that computes a product, and both ways to code a bias.
QUICK = ["Linear without bias", "Conv2d", "the same, whole biases", "Linear without bias, quantized output"]
QUICK += ["Conv2d, quantized output", "CNN, affine, quantized output"]


@sweep("name", full(CASES), full(QUICK))
def test_exported_models(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    found = computed(case, tmp_path)
    ours, plain = (found.simulated, found.integer), difference(found.simulated, found.integer, found.scale)
    in_float = [plain, *(difference(one, found.plain, found.scale) for one in ours)]
    fused = [difference(one, found.optimised, found.scale) for one in ours]
    operators = {operator: count for operator, count in found.operators.items() if count}
    named = ", ".join(operator if count == 1 else f"{count} {operator}" for operator, count in operators.items())
    cells = [cell(case, found, apart) for apart in (*in_float, *fused)]
    row = f"| {name} | {named} | {plain.elements:,} | {' | '.join(cells)} |"
    print(row)

    assert operators == case.products
    assert row.split(" | ")[:3] in [line.split(" | ")[:3] for line in PAGE.read_text().splitlines()]
    # On other processors float sums are rounded in another order, so these are bounds and not counts.
    for apart in in_float:
        assert apart.steps <= 1
        assert apart.moved <= apart.elements * (1e-4 if case.layers == 1 else 0.02)
        assert case.coded or case.layers > 1 or apart.units <= 16
    for apart in fused:
        assert apart.steps <= (1 if case.layers == 1 else 2)
        assert apart.moved <= apart.elements * case.moved
    if case.equal and case.coded:  # fused operators multiply by a quotient of scales, so that codes at a tie differ
        assert fused[1].moved <= 4e-6 * plain.elements
    elif case.equal:
        assert_same_bits(found.optimised, found.integer)


def codes_of(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Codes of the whole range, with both ends of it."""
    info = torch.iinfo(dtype)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(info.min, info.max + 1, shape, generator=generator).to(dtype)
    codes.view(-1)[:2] = torch.tensor([info.min, info.max])
    return codes


def model_of(nodes: list[Any], x: Tensor, output: int, **constants: Tensor | float) -> bytes:
    """A model of some nodes from x to y."""
    arrays = {
        name: np.asarray(value, None if isinstance(value, Tensor) else np.float32) for name, value in constants.items()
    }
    inputs = [helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(x.numpy().dtype), x.shape)]
    outputs = [helper.make_tensor_value_info("y", output, None)]
    given = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "products", inputs, outputs, given)
    opset = helper.make_opsetid("", 20)
    return helper.make_model(graph, opset_imports=[opset], ir_version=10).SerializeToString()


ONE = torch.ones(1)
INPUTS = [(torch.int8, 0), (torch.int8, -7), (torch.uint8, 0), (torch.uint8, 131)]
each_input = pytest.mark.parametrize(("dtype", "zero"), INPUTS)


@each_input
def test_integer_products_have_our_sums(dtype: torch.dtype, zero: int) -> None:
    x, weight = codes_of(dtype, 64, 384), codes_of(torch.int8, 48, 384, seed=1)
    zero_point = torch.tensor(zero, dtype=dtype)
    nodes = [helper.make_node("MatMulInteger", ["x", "w", "zero"], ["y"])]
    data = model_of(nodes, x, TensorProto.INT32, w=weight.t().contiguous(), zero=zero_point)
    # Sums of 384 products are below 2**24, so float32 holds them.
    ours = products.linear(QuantizedOperand(x, ONE, zero_point), QuantizedOperand(weight, ONE), None)
    assert_same_bits(run(data, x).float(), ours)
    x, weight = codes_of(dtype, 4, 16, 12, 10), codes_of(torch.int8, 24, 16, 3, 3, seed=1)
    nodes = [helper.make_node("ConvInteger", ["x", "w", "zero"], ["y"], pads=[1] * 4, strides=[2, 1])]
    data = model_of(nodes, x, TensorProto.INT32, w=weight, zero=zero_point)
    packed = products.PackedWeight(weight, ConvParams([2, 1], [1, 1], [1, 1], 1))
    ours = products.convolution(QuantizedOperand(x, ONE, zero_point), packed, torch.ones(24), None)
    assert_same_bits(run(data, x).float(), ours)


@pytest.mark.parametrize("preset", ["INT8", "INT8_AFFINE"])
def test_a_layer_is_matmul_integer_and_its_scales(preset: str) -> None:
    torch.manual_seed(0)
    model = fq.prepare(nn.Sequential(nn.Linear(384, 1536)), fq.presets.presets()[preset]).eval()
    x = torch.randn(512, 384)
    fq.calibrate(model, [x])
    fq.set_execution(model, "integer")
    layer: Any = model[0]
    quantizer, of_weight = layer._input_quantizer, layer._weight_quantizer
    weight, params = fq.quantize(layer.weight, of_weight.spec, scale=of_weight.qparams(layer.weight).scale)
    zero = torch.tensor(0, dtype=quantizer.spec.format.storage)
    zero = zero if quantizer.zero_point is None else quantizer.zero_point.reshape(()).to(zero.dtype)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["codes"]),
        helper.make_node("MatMulInteger", ["codes", "w", "zero"], ["sums"]),
        helper.make_node("Cast", ["sums"], ["float"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["float", "scales"], ["product"]),
        helper.make_node("Add", ["product", "bias"], ["y"]),
    ]
    scale = quantizer.scale.reshape(())
    scales, bias = scale * params.scale.reshape(-1), layer.bias.detach()
    w = weight.t().contiguous()
    data = model_of(nodes, x, TensorProto.FLOAT, w=w, zero=zero, scale=scale, scales=scales, bias=bias)
    with torch.no_grad():
        assert_same_bits(run(data, x), model(x))


def rounded(sums: Tensor, scale: Tensor, like: torch.dtype) -> Tensor:
    """The codes of QLinearMatMul and QLinearConv, zero point 5: one multiplication where ours multiply and divide."""
    info = torch.iinfo(like)
    return ((sums * scale).round() + 5).clamp(info.min, info.max).to(like)


@each_input
def test_qlinear_matmul_has_our_codes(dtype: torch.dtype, zero: int) -> None:
    x, weight = codes_of(dtype, 512, 384), codes_of(torch.int8, 384, 384, seed=1)
    zero_point, w_scale = torch.tensor(zero, dtype=dtype), torch.rand(384) * 0.01 + 0.001
    x_scale, y_scale, y_zero = torch.tensor(0.0123), torch.tensor(0.37), torch.tensor(5, dtype=dtype)
    nodes = [helper.make_node("QLinearMatMul", ["x", "xs", "xz", "w", "ws", "wz", "ys", "yz"], ["y"])]
    constants = {"xs": x_scale, "xz": zero_point, "w": weight.t().contiguous(), "ws": w_scale, "ys": y_scale}
    output = helper.np_dtype_to_tensor_dtype(x.numpy().dtype)
    data = model_of(nodes, x, output, **constants, wz=torch.zeros(384, dtype=torch.int8), yz=y_zero)
    theirs = run(data, x)
    sums = products.linear(QuantizedOperand(x, ONE, zero_point), QuantizedOperand(weight, ONE), None)
    assert_same_bits(theirs, rounded(sums, x_scale * w_scale / y_scale, dtype))
    y = products.linear(QuantizedOperand(x, x_scale, zero_point), QuantizedOperand(weight, w_scale), None)
    assert_few_ties(theirs, y, y_scale)


@each_input
def test_qlinear_conv_has_our_codes(dtype: torch.dtype, zero: int) -> None:
    x, weight = codes_of(dtype, 32, 16, 24, 24), codes_of(torch.int8, 24, 16, 3, 3, seed=1)
    zero_point, w_scale = torch.tensor(zero, dtype=dtype), torch.rand(24) * 0.01 + 0.001
    x_scale, y_scale, y_zero = torch.tensor(0.0123), torch.tensor(0.23), torch.tensor(5, dtype=dtype)
    bias = torch.randint(-30000, 30000, (24,), dtype=torch.int32)
    nodes = [helper.make_node("QLinearConv", ["x", "xs", "xz", "w", "ws", "wz", "ys", "yz", "b"], ["y"], pads=[1] * 4)]
    constants = {"xs": x_scale, "xz": zero_point, "w": weight, "ws": w_scale, "ys": y_scale, "b": bias}
    output = helper.np_dtype_to_tensor_dtype(x.numpy().dtype)
    theirs = run(model_of(nodes, x, output, **constants, wz=torch.zeros(24, dtype=torch.int8), yz=y_zero), x)
    packed = products.PackedWeight(weight, ConvParams([1, 1], [1, 1], [1, 1], 1))
    sums = products.convolution(QuantizedOperand(x, ONE, zero_point), packed, torch.ones(24), bias.float())
    assert_same_bits(theirs, rounded(sums, (x_scale * w_scale / y_scale).reshape(-1, 1, 1), dtype))
    y = products.convolution(QuantizedOperand(x, x_scale, zero_point), packed, w_scale, bias * (x_scale * w_scale))
    assert_few_ties(theirs, y, y_scale)


def assert_few_ties(theirs: Tensor, y: Tensor, scale: Tensor) -> None:
    """Codes that differ from those of y by one, and only where y is as near to a tie as it is rounded."""
    spec = "uint8 per_tensor asymmetric" if theirs.dtype == torch.uint8 else "int8 per_tensor asymmetric"
    ours, _ = fq.quantize(y, spec, scale=scale, zero_point=5)
    moved = ours != theirs
    print(f"{int(moved.sum())} of {moved.numel():,} codes")
    steps = (y[moved] / scale).double()
    assert ((ours.int() - theirs.int()).abs() <= 1).all()
    assert ((steps - steps.floor() - 0.5).abs() <= 2**-21 * steps.abs()).all()
    assert moved.double().mean() <= 1e-4
