"""Bit by bit against the libraries whose arithmetic the package names: how many of many hostile elements differ.

Half of the numbers lie at the middle between two codes of the scale in use or one representable value beside it; the
others are spread over and beyond the range. The sign of a zero counts, but for one case: see `unequal`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import fakequant as fq
from fakequant.numerics import products as definition
from fakequant.ops import dispatch, products
from fakequant.ops import products as convolutions
from tests.support import oracle

ELEMENTS = 10_000_000
_CHUNK = 1_000_000
SCALES = (0.5, 0.1, 1 / 3, 0.0173, 7.7, 2.0**-9, 123.456, 1e-6)


BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def differing(actual: Tensor, expected: Tensor) -> int:
    """Elements whose bits differ; all of them where the dtype does."""
    if actual.dtype != expected.dtype:
        return expected.numel()
    bits = BITS[actual.element_size()]
    return int((actual.detach().view(bits) != expected.detach().view(bits)).sum())


def unequal(actual: Tensor, expected: Tensor) -> int:
    """Elements whose values differ; for ATen's gradients, which multiply by the mask and so keep dy's sign in zeros."""
    return int((actual != expected).sum())


@contextmanager
def by_int64() -> Iterator[None]:
    """A context in which products of codes are those of the definition; for layers that have not multiplied yet.

    They are found on the CPU: elsewhere torch multiplies no int64.
    """

    def on_cpu(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.cpu()

    def factor(given: definition.QuantizedOperand) -> definition.QuantizedOperand:
        return definition.QuantizedOperand(given.codes.cpu(), given.scale.cpu(), on_cpu(given.zero_point))

    def linear(x: definition.QuantizedOperand, weight: definition.QuantizedOperand, bias: Tensor | None) -> Tensor:
        return definition.linear(factor(x), factor(weight), on_cpu(bias)).to(x.codes.device)

    def convolution(
        x: definition.QuantizedOperand, packed: convolutions.PackedWeight, scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        weight = factor(definition.QuantizedOperand(packed.codes, scale))
        return definition.convolution(factor(x), weight, on_cpu(bias), packed.places).to(x.codes.device)

    by_definition = mock.patch.object(convolutions, "convolution", convolution)
    with mock.patch.object(products, "linear", linear), by_definition:
        yield


@contextmanager
def by_the_reference() -> Iterator[None]:
    with mock.patch.object(dispatch, "_backends", (dispatch.REFERENCE,)):
        yield


def chunks(
    elements: int, low: int, high: int, zero_point: int, *, multiplier: bool = False
) -> Iterator[tuple[Tensor, float]]:
    """Pieces of the input, each with its scale (codes per unit of x if `multiplier`, else its reciprocal)."""
    random = np.random.default_rng(0)
    for number, start in enumerate(range(0, elements, _CHUNK)):
        n = min(_CHUNK, elements - start)
        step = np.float32(SCALES[number % len(SCALES)])
        codes = random.integers(low - zero_point - 3, high - zero_point + 4, n // 2).astype(np.float32)
        middles = codes + np.float32(0.5)
        middles = middles / step if multiplier else middles * step
        beside = random.integers(-1, 2, n // 2)
        towards = np.where(beside < 0, np.float32(-np.inf), np.float32(np.inf))
        middles = np.where(beside == 0, middles, np.nextafter(middles, towards))
        width = (high - low) / step if multiplier else (high - low) * step
        spread = random.normal(0, width, n - n // 2).astype(np.float32)
        x = np.concatenate([middles, spread])
        x[:8] = [0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-38, 1e6, -1e6]
        yield torch.from_numpy(random.permutation(x)), float(step)


def backward(y: Tensor, x: Tensor, dy: Tensor) -> Tensor:
    return torch.autograd.grad(y, x, dy)[0]


def divide_against_onnxruntime(elements: int = ELEMENTS) -> int:
    """DIVIDE against QuantizeLinear and DequantizeLinear of ONNX Runtime, optimisations off; dx against its mask."""
    wrong = 0
    cases = (("int8", -128, 127, 0, True), ("uint8", 0, 255, 101, False))
    for name, low, high, zero_point, symmetric in cases:
        session = _session(np.int8 if low else np.uint8)
        spec = fq.QuantSpec(name, symmetric=symmetric)
        given = {} if symmetric else {"zero_point": zero_point}
        for x, step in chunks(elements // len(cases), low, high, zero_point):
            scale = np.float32(step)
            point = np.asarray(zero_point, np.int8 if low else np.uint8)
            (right,) = session.run(None, {"x": x.numpy(), "scale": np.asarray(scale), "zero_point": point})
            leaf, dy = x.requires_grad_(), torch.randn(x.shape)
            y = fq.fake_quantize(leaf, spec, scale=step, **given)
            wrong += differing(y, torch.from_numpy(right))
            unclamped = np.rint(x.detach().numpy() / scale) + np.float32(zero_point)
            mask = torch.from_numpy((unclamped >= low) & (unclamped <= high))
            wrong += differing(backward(y, leaf, dy), torch.where(mask, dy, 0.0))
    return wrong


def _session(code: type[np.generic]):
    import onnxruntime
    from onnx import TensorProto, helper

    element = TensorProto.INT8 if code is np.int8 else TensorProto.UINT8
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero_point"], ["codes"]),
        helper.make_node("DequantizeLinear", ["codes", "scale", "zero_point"], ["y"]),
    ]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [None]),
        helper.make_tensor_value_info("scale", TensorProto.FLOAT, []),
        helper.make_tensor_value_info("zero_point", element, []),
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None])]
    graph = helper.make_graph(nodes, "quantize", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def reciprocal_against_aten_per_tensor(elements: int = ELEMENTS) -> int:
    """RECIPROCAL against torch.fake_quantize_per_tensor_affine, forward and gradient."""
    wrong = 0
    cases = (("int8", -128, 127, -7), ("uint8", 0, 255, 101))
    for name, low, high, zero_point in cases:
        spec = fq.QuantSpec(name, symmetric=False, arithmetic=fq.Arithmetic.RECIPROCAL)
        for x, step in chunks(elements // len(cases), low, high, zero_point):
            ours, atens, dy = x.clone().requires_grad_(), x.clone().requires_grad_(), torch.randn(x.shape)
            # ATen takes the scale as a double; as float32 it is the same number on both sides.
            scale = float(np.float32(step))
            y = fq.fake_quantize(ours, spec, scale=scale, zero_point=zero_point)
            right = torch.fake_quantize_per_tensor_affine(atens, scale, zero_point, low, high)
            wrong += differing(y, right) + unequal(backward(y, ours, dy), backward(right, atens, dy))
    return wrong


def reciprocal_against_aten_per_channel(elements: int = ELEMENTS) -> int:
    """RECIPROCAL against torch.fake_quantize_per_channel_affine on two axes, forward and gradient."""
    wrong = 0
    low, high = -128, 127
    for axis in (0, 1):
        spec = fq.QuantSpec("int8", fq.PerChannel(axis), symmetric=False, arithmetic=fq.Arithmetic.RECIPROCAL)
        pieces = list(chunks(elements // 2, low, high, 3))
        rows = torch.stack([x for x, _ in pieces])
        scale = torch.tensor([step for _, step in pieces])
        zero_point = torch.full(scale.shape, 3, dtype=torch.int32)
        x = rows if axis == 0 else rows.t().contiguous()
        ours, atens, dy = x.clone().requires_grad_(), x.clone().requires_grad_(), torch.randn(x.shape)
        y = fq.fake_quantize(ours, spec, scale=scale, zero_point=zero_point)
        right = torch.fake_quantize_per_channel_affine(atens, scale, zero_point, axis, low, high)
        wrong += differing(y, right) + unequal(backward(y, ours, dy), backward(right, atens, dy))
    return wrong


def multiplier_against_its_formula(elements: int = ELEMENTS) -> int:
    """MULTIPLIER against clamp(rint(x * m)) / m in numpy, forward and gradient."""
    wrong = 0
    low, high = -127, 127
    spec = fq.QuantSpec("int8_narrow", arithmetic=fq.Arithmetic.MULTIPLIER)
    for x, step in chunks(elements, low, high, 0, multiplier=True):
        m = np.float32(step)
        code = np.rint(x.numpy() * m)
        right = torch.from_numpy(np.clip(code, np.float32(low), np.float32(high)) / m)
        mask = torch.from_numpy((code >= low) & (code <= high))
        leaf, dy = x.requires_grad_(), torch.randn(x.shape)
        y = fq.fake_quantize(leaf, spec, scale=step)
        wrong += differing(y, right) + differing(backward(y, leaf, dy), torch.where(mask, dy, 0.0))
    return wrong


def float8_against_decoded_codes() -> int:
    """Both 8-bit float formats over every float16 and bfloat16 pattern, against the oracle of the tests."""
    wrong = 0
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    for name in ("float8_e4m3fn", "float8_e5m2"):
        fmt = oracle.small_float(name)
        for dtype, storage in ((torch.float16, oracle.FLOAT16), (torch.bfloat16, oracle.BFLOAT16)):
            for scale in (1.0, 0.37):
                x = patterns.view(dtype)
                values = x.float().numpy()
                right = oracle.fake_quantize(values, np.full_like(values, scale), None, fmt, "divide").value
                y = fq.fake_quantize(x, name, scale=scale).float()
                expected = torch.from_numpy(oracle.round_to(right, storage))
                same = (y.view(torch.int32) == expected.view(torch.int32)) | (y.isnan() & expected.isnan())
                wrong += int((~same).sum())
    return wrong
