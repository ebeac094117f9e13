"""Bit by bit against the libraries whose arithmetic the package names: elements that differ, of many hostile ones.

Half of the numbers lie at the middle between two codes of the scale in use or one representable value beside it; the
others are spread over and beyond the range. The sign of a zero counts, but for one case: see `unequal`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import fakequant as fq
from fakequant.compat import aten

ELEMENTS = 10_000_000
_CHUNK = 1_000_000
_SCALES = (0.5, 0.1, 1 / 3, 0.0173, 7.7, 2.0**-9, 123.456, 1e-6)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def differing(actual: Tensor, expected: Tensor) -> int:
    """Elements whose bits differ; all of them where the dtype does."""
    if actual.dtype != expected.dtype:
        return expected.numel()
    bits = _BITS[actual.element_size()]
    return int((actual.detach().view(bits) != expected.detach().view(bits)).sum())


def unequal(actual: Tensor, expected: Tensor) -> int:
    """Elements whose values differ; for ATen's gradients, which multiply by the mask and so keep dy's sign in zeros."""
    return int((actual != expected).sum())


def chunks(
    elements: int, low: int, high: int, zero_point: int, *, multiplier: bool = False
) -> Iterator[tuple[Tensor, float]]:
    """Pieces of the input, each with its scale (codes per unit of x if `multiplier`, else its reciprocal)."""
    random = np.random.default_rng(0)
    for number, start in enumerate(range(0, elements, _CHUNK)):
        n = min(_CHUNK, elements - start)
        step = np.float32(_SCALES[number % len(_SCALES)])
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


def _backward(y: Tensor, x: Tensor, dy: Tensor) -> Tensor:
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
            wrong += differing(_backward(y, leaf, dy), torch.where(mask, dy, 0.0))
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
            wrong += differing(y, right) + unequal(_backward(y, ours, dy), _backward(right, atens, dy))
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
        wrong += differing(y, right) + unequal(_backward(y, ours, dy), _backward(right, atens, dy))
    return wrong


@dataclass(frozen=True)
class AtenCase:
    """One way to call torch's functions.

    Attributes:
        channels: the axis per channel; None per tensor.
        zero_point: its dtype; None for plain numbers per tensor. Floats per channel have fractions.
    """

    dtype: torch.dtype
    low: int
    high: int
    axis: int | None
    zero_point: torch.dtype | None

    def arguments(self, elements: int, seed: int) -> tuple[Tensor, tuple[Tensor | float, ...]]:
        """The input, and everything after it but the range."""
        random = np.random.default_rng(seed)
        rows = 1 if self.axis is None else len(_SCALES)
        scale = torch.tensor(np.roll(np.float32(_SCALES), seed)[:rows])
        zero_point = torch.from_numpy(random.integers(self.low, self.high + 1, rows))
        if self.axis is not None and self.zero_point is not None and self.zero_point.is_floating_point:
            zero_point = (zero_point + torch.from_numpy(random.choice([0.0, 0.5, 0.3], rows))).to(self.zero_point)
        given = zip(scale.tolist(), zero_point.double().tolist(), strict=True)
        x = torch.stack([self._row(random, elements // rows, *pair) for pair in given])
        if self.axis is None:
            if self.zero_point is None:
                return x[0], (scale.item(), int(zero_point.item()))
            return x[0], (scale, zero_point.to(self.zero_point))
        x = x[:, : x.shape[1] // 12 * 12].reshape(rows, 3, 4, -1).movedim(0, self.axis)
        return (x.contiguous() if seed % 2 else x), (scale, zero_point.to(self.zero_point), self.axis)

    def _row(self, random: np.random.Generator, n: int, step: float, zero_point: float) -> Tensor:
        """Middles between codes and the numbers beside them, others, and extremes that are finite in every dtype."""
        middles = torch.from_numpy((random.integers(self.low - 3, self.high + 4, n // 2) + 0.5 - zero_point) * step)
        middles = middles.to(self.dtype)
        beside = torch.from_numpy(random.integers(-1, 2, n // 2))
        beside = torch.where((middles == 0) | ~middles.isfinite(), 0, beside)
        middles = (middles.view(_BITS[middles.element_size()]) + beside).to(_BITS[middles.element_size()])
        spread = torch.from_numpy(random.normal(0, (self.high - self.low) * step, n - n // 2)).to(self.dtype)
        largest = min(torch.finfo(self.dtype).max, 1e6)
        x = torch.cat([middles.view(self.dtype), spread]).clamp(-largest, largest)
        x[:8] = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-38, largest, -largest], dtype=torch.float64)
        return x[torch.from_numpy(random.permutation(n))]


def aten_cases() -> list[AtenCase]:
    """Every dtype, range, axis, and dtype of a zero point that torch takes."""
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    ranges = ((-128, 127), (0, 255), (-127, 127), (-8, 7), (0, 1), (5, 250), (-9, -2), (-32768, 32767))
    per_tensor = (None, torch.int32, torch.int64, torch.float32, torch.float16)
    per_channel = (torch.int32, torch.float32, torch.float16)
    ways = [(None, kind) for kind in per_tensor] + list(itertools.product((0, 1, 2, 3), per_channel))
    return [AtenCase(dtype, *ends, *way) for dtype in dtypes for ends in ranges for way in ways]


def compat_against_aten(elements: int = ELEMENTS) -> int:
    """The functions of `fakequant.compat.aten` against torch's: values, mask, gradient."""
    wrong = 0
    cases = aten_cases()
    for number, case in enumerate(cases):
        x, given = case.arguments(-(-elements // len(cases)), number)
        name = f"fake_quantize_per_{'tensor' if case.axis is None else 'channel'}_affine"
        leaf, atens, dy = x.requires_grad_(), x.detach().clone().requires_grad_(), torch.randn_like(x)
        y, mask = getattr(aten, f"{name}_cachemask")(leaf, *given, case.low, case.high)
        right = getattr(torch, name)(atens, *given, case.low, case.high)
        wrong += differing(getattr(aten, name)(leaf, *given, case.low, case.high), right) + differing(y, right)
        wrong += unequal(_backward(y, leaf, dy), _backward(right, atens, dy))
        wrong += differing(mask, _aten_mask(name, atens, given, case))
    return wrong


def compat_learnable_against_aten(elements: int = ELEMENTS) -> int:
    """The learnable functions of `fakequant.compat.aten` against torch's: values, mask and the gradients of all three.

    torch sums float32, in an order that depends on the number of threads: the gradients of scale and zero point are
    compared on numbers whose sums are exact. Its backward rounds again, after adding the zero point, which moves ties
    beside an odd one: hostile inputs are compared with the mask that its forward has, and zero points here are even.
    """
    cases = [
        AtenCase(dtype, low, high, axis, torch.float32)
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        for low, high in ((-128, 127), (0, 255), (-8, 7))
        for axis in (None, 0, 1)
    ]
    return sum(
        _learnable_hostile(case, elements // len(cases) // 2, seed)
        + _learnable_exact(case, elements // len(cases) // 2)
        for seed, case in enumerate(cases)
    )


def _learnable(library: object, case: AtenCase) -> Callable[..., Tensor]:
    name = f"_fake_quantize_learnable_per_{'tensor' if case.axis is None else 'channel'}_affine"
    axis = () if case.axis is None else (case.axis,)
    return lambda x, scale, zero_point: getattr(library, name)(x, scale, zero_point, *axis, case.low, case.high, 0.25)


def _learnable_hostile(case: AtenCase, elements: int, seed: int) -> int:
    x, (scale, zero_point, *_) = case.arguments(elements, seed)
    x, dy = x.requires_grad_(), torch.randn_like(x)
    y = _learnable(aten, case)(x, scale, zero_point)
    wrong = differing(y, _learnable(torch, case)(x, scale, zero_point))
    codes = zero_point.round().clamp(case.low, case.high).int()
    axis = () if case.axis is None else (case.axis,)
    name = f"fake_quantize_per_{'tensor' if case.axis is None else 'channel'}_affine"
    given = (scale, codes, *axis) if axis else (scale.item(), int(codes))
    mask = getattr(torch.ops.aten, f"{name}_cachemask")(x, *given, case.low, case.high)[1]
    return wrong + differing(_backward(y, x, dy), torch.where(mask, dy, 0.0))


def _learnable_exact(case: AtenCase, elements: int, run: int = 8192) -> int:
    """Eighths of scales that are powers of two, gradients that are quarters: every product and sum is exact."""
    wrong = 0
    random = torch.Generator().manual_seed(0)
    for start in range(0, elements, run * 8):
        exponents = torch.arange(1 if case.axis is None else 8) - 4 - start // (run * 8) % 3
        scale = torch.ldexp(torch.ones(len(exponents)), exponents)
        zero_point = torch.tensor([0.0, 2.0, 2.25, 0.0, 3.75, 4.0, 2.0, 0.25])[: len(exponents)].roll(start)
        steps = torch.randint(8 * case.low - 40, 8 * case.high + 41, (8, 4, run // 4), generator=random) / 8
        x = steps * (scale if case.axis is None else scale[:, None, None])
        x = x if case.axis is None else x.movedim(0, case.axis)
        dy = torch.randint(-8, 9, x.shape, generator=random) / 4
        gradients = []
        for library in (aten, torch):
            leaves = [t.clone().requires_grad_() for t in (x, scale, zero_point)]
            gradients.append(torch.autograd.grad(_learnable(library, case)(*leaves), leaves, dy))
        wrong += sum(unequal(ours, right) for ours, right in zip(*gradients, strict=True))
    return wrong


def _aten_mask(name: str, x: Tensor, given: tuple[Tensor | float, ...], case: AtenCase) -> Tensor:
    if case.axis is None and case.zero_point is not None:
        on = torch.ones(1)
        return torch._fake_quantize_per_tensor_affine_cachemask_tensor_qparams(x, *given, on, case.low, case.high)[1]
    return getattr(torch.ops.aten, f"{name}_cachemask")(x, *given, case.low, case.high)[1]


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
        wrong += differing(y, right) + differing(_backward(y, leaf, dy), torch.where(mask, dy, 0.0))
    return wrong


def float8_against_decoded_codes() -> int:
    """Both 8-bit float formats over every float16 and bfloat16 pattern, against the oracle of the tests."""
    from tests import oracle

    wrong = 0
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    for name, fmt in (("float8_e4m3fn", oracle.E4M3FN), ("float8_e5m2", oracle.E5M2)):
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
