"""The arithmetic of XNNPACK and of LiteRT's reference kernels: by integers of Python, and by the engines themselves."""

from __future__ import annotations

from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.engines import executorch, litert
from fakequant.nn.device import CodeGrid, GridCodes, Operands, Sums
from tests.support.mobile import Block, Cnn, FlatFork, Pooled, PooledFork

RATIOS = [1 / 1959.0397, 1 / 300, 1 / 20, 1 / 3, 0.9, 1.0, 2.7]
ONE = torch.tensor(1.0, dtype=torch.float64)
HALF = Fraction(1, 2)


def grid(scale: float, zero_point: int) -> CodeGrid:
    return CodeGrid(torch.tensor(np.float32(scale), dtype=torch.float64), zero_point, 0, 255)


def operands(*scales: float) -> Operands:
    """Two tensors of all codes from 0 to 255, crossed."""
    a = b = torch.arange(256, dtype=torch.uint8)
    return Operands((GridCodes(a[:, None], grid(scales[0], 13)), GridCodes(b[None], grid(scales[1], 200))))


def fixed_point(ratio: float) -> tuple[int, int]:
    """A ratio as an integer of 31 bits, and its exponent."""
    mantissa, exponent = np.frexp(ratio)
    return int(np.floor(mantissa * 2**31 + 0.5)), int(exponent)


def twice_rounded(x: int, ratio: float) -> int:
    """A doubled high half of a product with 31 bits, and a shift; both to the nearest, the shift away from 0."""
    multiplier, exponent = fixed_point(ratio)
    product = (x << max(exponent, 0)) * multiplier
    nudged = Fraction(product + (1 << 30 if product >= 0 else 1 - (1 << 30)), 1 << 31)
    rounded = int(nudged)  # toward 0, as C++ divides
    away = Fraction(abs(rounded), 1 << max(-exponent, 0)) + HALF
    return int(away) if rounded >= 0 else -int(away)


@pytest.mark.parametrize("ratio", RATIOS)
def test_sums_are_rounded_in_float_or_in_integers(ratio: float) -> None:
    generator = torch.Generator().manual_seed(0)
    sums = torch.randint(-(2**20), 2**20, (2048,), generator=generator).double()
    ratio, bias, zero_point = float(np.float32(ratio)), -413, 37
    to = grid(1.0, zero_point)
    parts = Sums(sums, ONE, ONE * ratio, torch.tensor(-412.6 * ratio, dtype=torch.float64))
    rules = executorch.product, litert.convolution, litert.linear
    in_float, twice, once = (rule(parts, to).sub(zero_point).tolist() for rule in rules)
    multiplier, exponent = fixed_point(ratio)
    for one, a, b, c in zip(sums.long().tolist(), in_float, twice, once, strict=True):
        assert np.rint(np.float32(one + bias) * np.float32(ratio)) == a
        assert twice_rounded(one + bias, ratio) == b
        assert Fraction((one + bias) * multiplier, 1 << 31 - exponent) + HALF - c in _Unit()


class _Unit:
    """From 0 up to 1."""

    def __contains__(self, x: Fraction) -> bool:
        return 0 <= x < 1


@pytest.mark.parametrize(("a", "b", "to"), [(0.0125, 0.04375, 0.03125), (0.02, 0.021, 0.04), (0.5, 0.001, 0.3)])
def test_tensors_are_added_and_multiplied_in_integers(a: float, b: float, to: float) -> None:
    parts, target = operands(a, b), grid(to, 90)
    x, y = (one.codes.long() for one in parts.tensors)
    of_x, of_y, of_result = (float(np.float32(one)) for one in (a, b, to))
    ratios = [float(np.float32(one) / np.float32(of_result)) for one in (of_x, of_y)]
    shift = 20 - int(np.floor(np.log2(max(ratios))))
    by_x, by_y = (int(np.rint(ratio * 2**shift)) for ratio in ratios)
    added = ((by_x * x + by_y * y + (1 << shift - 1)) >> shift) + 90
    assert torch.equal(executorch.add(parts, target).long(), added)
    added, multiplied, twice = litert.add(parts, target), litert.mul(parts, target), 2 * max(of_x, of_y)
    for i, j in ((0, 0), (255, 0), (17, 233), (13, 200), (100, 100), (3, 251)):
        p, q = int(x[i, 0]), int(y[0, j])
        assert twice_rounded(p * q, of_x * of_y / of_result) + 90 == multiplied[i, j]
        part = twice_rounded(p << 20, of_x / twice) + twice_rounded(q << 20, of_y / twice)
        assert twice_rounded(part, twice / (of_result * 2**20)) + 90 == added[i, j]


class Gate(nn.Module):
    """A product of two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.b(x)


def chain() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 16, 1))


NETWORKS: dict[str, Any] = {
    "convolution": (lambda: nn.Conv2d(8, 32, 3, padding=1), 2, 8, 24, 24),
    "strides": (lambda: nn.Sequential(nn.Conv2d(8, 32, 3, stride=2), nn.ReLU6()), 2, 8, 40, 40),
    "depthwise": (lambda: nn.Sequential(nn.Conv2d(16, 16, 3, groups=16), nn.ReLU()), 2, 16, 24, 24),
    "wide": (lambda: nn.Conv2d(256, 64, 3), 1, 256, 16, 16),
    "linear": (lambda: nn.Sequential(nn.Linear(300, 200)), 64, 300),
    "chain": (chain, 2, 3, 24, 24),
    "gate": (Gate, 2, 8, 24, 24),
    "blocks": (lambda: nn.Sequential(Block(), Block()), 2, 8, 24, 24),
    "cnn": (Cnn, 4, 3, 16, 16),
    "pooled": (Pooled, 2, 3, 16, 16),
    "pooled fork": (PooledFork, 2, 3, 16, 16),
    "flat fork": (FlatFork, 2, 3, 16, 16),
}


def _on_executorch(model: nn.Module, x: Tensor, path: Path) -> Tensor:
    runtime: Any = pytest.importorskip("executorch.runtime", reason="needs executorch: make engines")
    fq.export_executorch(model, x, path)
    return runtime.Runtime.get().load_program(str(path)).load_method("forward").execute([x])[0]


def _on_litert(model: nn.Module, x: Tensor, path: Path, *, reference: bool) -> Tensor:
    interpreter: Any = pytest.importorskip("ai_edge_litert.interpreter", reason="needs ai-edge-litert: make engines")
    fq.export_litert(model, x, path)
    resolver = {"experimental_op_resolver_type": interpreter.OpResolverType.BUILTIN_REF} if reference else {}
    loaded = interpreter.Interpreter(model_path=str(path), **resolver)
    loaded.allocate_tensors()
    (given,), (result,) = loaded.get_input_details(), loaded.get_output_details()
    scale, zero_point = given["quantization"]
    codes = np.clip(np.rint(x.numpy() / np.float32(scale)) + zero_point, -128, 127).astype(np.int8)
    loaded.set_tensor(given["index"], codes)
    loaded.invoke()
    scale, zero_point = result["quantization"]
    return torch.from_numpy((loaded.get_tensor(result["index"]).astype(np.float32) - zero_point) * np.float32(scale))


@pytest.mark.skipif(not (find_spec("executorch") or find_spec("ai_edge_litert")), reason="needs them: make engines")
@pytest.mark.parametrize("preset", ["INT8_AFFINE", "INT8"])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("engine", ["xnnpack", "litert", "litert_reference"])
def test_engines_compute_the_codes_of_their_arithmetic(engine: str, name: str, preset: str, tmp_path: Path) -> None:
    make, *shape = NETWORKS[name]
    torch.manual_seed(0)
    net, x = make().eval(), torch.randn(*shape)
    model = fq.prepare(net, preset, x, target=engine)
    fq.calibrate(model, [x, x / 2], progress=False)
    first = next(one for one in fq.nn.quantizers(model).values() if one.kind is fq.nn.Kind.INPUT)
    with torch.no_grad():
        x = first(x).clone()
        if engine == "xnnpack":
            values = _on_executorch(model, x, tmp_path / "m.pte")
        else:
            values = _on_litert(model, x, tmp_path / "m.tflite", reference=engine != "litert")
        stored: Any = fq.set_execution(model, engine)(x)
    # Engines turn codes into values by other roundings.
    codes = torch.round(values / stored.has.grid.scale.float())
    assert torch.equal(codes, stored.has.codes)
