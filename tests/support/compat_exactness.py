"""Compares `fakequant.compat` bit by bit with the libraries whose interfaces it has; inputs as in `exactness`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fakequant.compat import aten
from fakequant.compat.onnxruntime import attach_functions, fake_quant, fake_quant_grad
from tests.support.exactness import BITS, ELEMENTS, SCALES, backward, chunks, differing, unequal

# Rows of scales, each of 3 times 4 places.
_TILE = len(SCALES) * 12
VECTORS = Path(__file__).parents[1] / "vectors" / "fake_quant.npz"


@dataclass(frozen=True)
class AtenCase:
    """One way to call torch's functions."""

    dtype: torch.dtype
    low: int
    high: int
    axis: int | None
    zero_point: torch.dtype | None

    def arguments(self, elements: int, seed: int) -> tuple[Tensor, tuple[Tensor | float, ...]]:
        """The input, and everything after it but the range; `elements` is a multiple of `_TILE`."""
        random = np.random.default_rng(seed)
        rows = 1 if self.axis is None else len(SCALES)
        scale = torch.tensor(np.roll(np.float32(SCALES), seed)[:rows])
        zero_point = torch.from_numpy(random.integers(self.low, self.high + 1, rows))
        if self.axis is not None and self.zero_point is not None and self.zero_point.is_floating_point:
            zero_point = (zero_point + torch.from_numpy(random.choice([0.0, 0.5, 0.3], rows))).to(self.zero_point)
        given = zip(scale.tolist(), zero_point.double().tolist(), strict=True)
        x = torch.stack([self._row(random, elements // rows, *pair) for pair in given])
        if self.axis is None:
            if self.zero_point is None:
                return x[0], (scale.item(), int(zero_point.item()))
            return x[0], (scale, zero_point.to(self.zero_point))
        x = x.reshape(rows, 3, 4, -1).movedim(0, self.axis)
        return (x.contiguous() if seed % 2 else x), (scale, zero_point.to(self.zero_point), self.axis)

    def _row(self, random: np.random.Generator, n: int, step: float, zero_point: float) -> Tensor:
        """Middles between codes and their nearest neighbours, others, and extremes that are finite in every dtype."""
        middles = torch.from_numpy((random.integers(self.low - 3, self.high + 4, n // 2) + 0.5 - zero_point) * step)
        middles = middles.to(self.dtype)
        beside = torch.from_numpy(random.integers(-1, 2, n // 2))
        beside = torch.where((middles == 0) | ~middles.isfinite(), 0, beside)
        middles = (middles.view(BITS[middles.element_size()]) + beside).to(BITS[middles.element_size()])
        spread = torch.from_numpy(random.normal(0, (self.high - self.low) * step, n - n // 2)).to(self.dtype)
        largest = min(torch.finfo(self.dtype).max, 1e6)
        x = torch.cat([middles.view(self.dtype), spread]).clamp(-largest, largest)
        x[:8] = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-38, largest, -largest], dtype=torch.float64)
        return x[torch.from_numpy(random.permutation(n))]


def _share(elements: int, cases: int) -> int:
    """Elements of each case, so that together they are no fewer."""
    return -(-elements // (cases * _TILE)) * _TILE


def aten_cases() -> list[AtenCase]:
    """Every dtype, range, axis, and dtype of a zero point that torch takes."""
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    ranges = ((-128, 127), (0, 255), (-127, 127), (-8, 7), (0, 1), (5, 250), (-9, -2), (-32768, 32767))
    per_tensor = (None, torch.int32, torch.int64, torch.float32, torch.float16)
    per_channel = (torch.int32, torch.float32, torch.float16)
    ways = [(None, kind) for kind in per_tensor] + list(itertools.product((0, 1, 2, 3), per_channel))
    return [AtenCase(dtype, *ends, *way) for dtype in dtypes for ends in ranges for way in ways]


def against_aten(elements: int = ELEMENTS) -> int:
    """The functions of `fakequant.compat.aten` against torch's: values, mask, gradient."""
    wrong = 0
    cases = aten_cases()
    for number, case in enumerate(cases):
        x, given = case.arguments(_share(elements, len(cases)), number)
        name = f"fake_quantize_per_{'tensor' if case.axis is None else 'channel'}_affine"
        leaf, atens, dy = x.requires_grad_(), x.detach().clone().requires_grad_(), torch.randn_like(x)
        y, mask = getattr(aten, f"{name}_cachemask")(leaf, *given, case.low, case.high)
        right = getattr(torch, name)(atens, *given, case.low, case.high)
        wrong += differing(getattr(aten, name)(leaf, *given, case.low, case.high), right) + differing(y, right)
        wrong += unequal(backward(y, leaf, dy), backward(right, atens, dy))
        wrong += differing(mask, _aten_mask(name, atens, given, case))
    return wrong


def learnable_against_aten(elements: int = ELEMENTS) -> int:
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
    share = _share(elements, 2 * len(cases))
    return sum(_learnable_hostile(case, share, seed) + _learnable_exact(case, share) for seed, case in enumerate(cases))


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
    return wrong + differing(backward(y, x, dy), torch.where(mask, dy, 0.0))


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


@dataclass(frozen=True)
class Recorded:
    """A call of ONNX Runtime's FakeQuant and FakeQuantGrad kernels, and what they gave."""

    scale: float
    zero_point: float
    attributes: dict[str, int]
    x: Tensor
    dy: Tensor
    y: Tensor
    mask: Tensor
    dx: Tensor


def recorded_kernels() -> tuple[dict[str, Any], list[Recorded]]:
    """What tests/vectors/record_fake_quant.py wrote: its notes, and every call, the last one that of the edges."""
    tensors = ("x", "dy", "y", "mask", "dx")
    with np.load(VECTORS) as arrays:
        notes = json.loads(str(arrays["notes"]))
        return notes, [
            Recorded(**case, **{name: torch.from_numpy(arrays[f"{number}/{name}"]) for name in tensors})
            for number, case in enumerate(notes["cases"])
        ]


def against_recorded_kernels() -> int:
    """`fake_quant` and `fake_quant_grad` against the kernels of onnxruntime-training: y, mask and dx."""
    wrong = 0
    for call in recorded_kernels()[1][:-1]:
        y, mask = fake_quant(call.x, call.scale, call.zero_point, **call.attributes)
        wrong += differing(y, call.y) + differing(mask, call.mask)
        wrong += unequal(fake_quant_grad(call.dy, mask), call.dx)  # the kernel multiplies by the mask
    return wrong


def against_onnxruntime(elements: int = ELEMENTS) -> int:
    """`fake_quant` and `fake_quant_grad` against their functions in ONNX Runtime, opsets 15 to 21: y, mask and dx."""
    wrong = 0
    cases = ((-128, 127, 0), (0, 255, 101))
    for low, high, zero_point in cases:
        sessions = [_fake_quant_session(low, high, opset) for opset in range(15, 22)]
        for x, step in chunks(elements // len(cases), low, high, zero_point):
            dy = torch.randn(x.shape)
            y, mask = fake_quant(x, step, zero_point, low, high)
            right = y, mask, fake_quant_grad(dy, mask)
            given = {"x": x, "dy": dy, "scale": np.float32(step), "zero_point": np.float32(zero_point)}
            feeds = {name: np.asarray(value) for name, value in given.items()}
            for session in sessions:
                found = session.run(None, feeds)
                wrong += sum(differing(torch.from_numpy(v), r) for v, r in zip(found, right, strict=True))
    return wrong


def _fake_quant_session(low: int, high: int, opset: int):
    """A step with FakeQuant and FakeQuantGrad in ONNX Runtime with its default optimisations."""
    import onnxruntime
    from onnx import parser

    model = parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : {opset}, "com.microsoft" : 1]>
        step (float[n] x, float scale, float zero_point, float[n] dy) => (float[n] y, bool[n] mask, float[n] dx) {{
            y, mask = com.microsoft.FakeQuant <quant_min = {low}, quant_max = {high}> (x, scale, zero_point)
            dx = com.microsoft.FakeQuantGrad (dy, mask)
        }}""")
    data = attach_functions(model).SerializeToString()
    return onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
