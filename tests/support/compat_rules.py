"""The rules of pytorch-quantization 2.2.1 as plain formulas in numpy and slow loops, and hostile numbers for them.

The rules use nothing of `compat`; what it gives is yielded beside what they give, for tests and bars to compare.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fakequant.compat.pytorch_quantization import tensor_quant
from fakequant.compat.pytorch_quantization.calib import HistogramCalibrator

Array = NDArray[Any]
Pairs = Iterator[tuple[Tensor, Tensor]]
"""What was computed, and what the rules give."""

EPSILON = np.float32(2.0**-24)
SHAPE = (32, 16, 2048)
INTEGERS = {
    "int8_narrow": (8, False, True),
    "int8": (8, False, False),
    "uint8": (8, True, True),
    "int4_narrow": (4, False, True),
    "int2": (2, False, False),
    "uint16": (16, True, False),
}
AMAX_SHAPES = [(), (1, 1, 1), (32, 1, 1), (16, 1), (2048,), (32, 1, 2048), (32, 16, 1), SHAPE]


def codes_of(x: Array, amax: Array, num_bits: int, unsigned: bool, narrow: bool) -> tuple[Array, Array]:
    """Codes and the scale to divide them by; a scale of 0 while rounding makes tiny groups 0."""
    bound = np.float32(2 ** (num_bits - 1 + unsigned) - 1)
    lowest = np.float32(0) if unsigned else -bound if narrow else -bound - 1
    tiny = amax <= EPSILON
    with np.errstate(all="ignore"):
        scale = bound / amax
        code = np.rint(x * np.where(tiny, np.float32(0), scale))
    code = np.where(code < lowest, lowest, np.where(code > bound, bound, code))
    return code, np.where(tiny, np.float32(1), scale)


def e4m3_of(x: Array, amax: Array | None) -> Array:
    """In torch a number divided by a tensor is the number times the reciprocal."""
    with np.errstate(all="ignore"):
        scale = np.float32(1) if amax is None else np.float32(448) * (np.float32(1) / amax)
        scaled = x * scale
        limited = np.where(scaled > 448, np.float32(448), np.where(scaled < -448, np.float32(-448), scaled))
        code = torch.from_numpy(limited).to(torch.float8_e4m3fn).float().numpy()
        value = code / scale
    return np.where(np.abs(x) < EPSILON, np.float32(0), value)


def amaxes(shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    """Amax of all sizes, the tiny ones among them; the first of several is the largest number there is."""
    values = generator.uniform(0.01, 4, shape).astype(np.float32)
    flat = values.reshape(-1)
    special = [3.4e38, 0.0, 2.0**-24, np.nextafter(EPSILON, np.float32(1)), 1e-30, 1e-40, 3.0, 448.0]
    if flat.size > 1:
        flat[: len(special)] = special
    return values


def hostile(shape: tuple[int, ...], amax: Array, bound: int, generator: np.random.Generator) -> Array:
    """Ties and their neighbours, values at amax, next to it and beyond it, and special numbers."""
    full = np.broadcast_to(amax, shape).astype(np.float64)
    step = np.where(full > 0, full, 1) / bound
    halves = generator.integers(-2 * bound - 6, 2 * bound + 7, shape) / 2
    with np.errstate(over="ignore"):
        x = np.where(generator.random(shape) < 0.5, halves * step, generator.normal(size=shape) * full)
        x = np.where(generator.random(shape) < 0.05, np.where(halves < 0, -full, full), x).astype(np.float32)
    direction = np.float32([-np.inf, 0, np.inf])[generator.integers(0, 3, shape)]
    x = np.where(direction == 0, x, np.nextafter(x, direction, dtype=np.float32))
    values = np.float32([0.0, -0.0, 1e-45, -1e-40, 5e-8, 7e-8, -5.9e-8, 1e30, -3.4e38, np.nan])
    special = values[generator.integers(0, len(values), shape)]
    return np.where(generator.random(shape) < 0.02, special, x).astype(np.float32)


def integer_pairs(num_bits: int, unsigned: bool, narrow: bool, amax_shape: tuple[int, ...]) -> Pairs:
    """Values, gradients, codes and scales of `fake_tensor_quant`, its legacy form and `tensor_quant`."""
    generator = np.random.default_rng(7)
    amax = amaxes(amax_shape, generator)
    x = hostile(SHAPE, amax, 2 ** (num_bits - 1 + unsigned) - 1, generator)
    x = np.abs(x) if unsigned else x
    code, scale = codes_of(x, amax, num_bits, unsigned, narrow)
    with np.errstate(all="ignore"):
        value, inside = code / scale, np.abs(x) <= amax
    arguments = torch.from_numpy(amax), num_bits, unsigned, narrow
    for function in (tensor_quant.fake_tensor_quant, tensor_quant.legacy_fake_tensor_quant):
        yield from _with_gradient(lambda leaf, function=function: function(leaf, *arguments), x, value, inside)
    yield from _with_gradient(lambda leaf: tensor_quant.tensor_quant(leaf, *arguments)[0], x, code, inside)
    yield tensor_quant.tensor_quant(torch.from_numpy(x), *arguments)[1], torch.from_numpy(scale.reshape(amax_shape))


def e4m3_pairs(amax_shape: tuple[int, ...] | None) -> Pairs:
    """Values and gradients of `scaled_e4m3`."""
    generator = np.random.default_rng(7)
    amax = None if amax_shape is None else amaxes(amax_shape, generator)
    limit = np.array(448, np.float32) if amax is None else amax
    x = hostile(SHAPE, limit, 448 * 8, generator)
    given = None if amax is None else torch.from_numpy(amax)
    yield from _with_gradient(
        lambda leaf: tensor_quant.scaled_e4m3(leaf, given), x, e4m3_of(x, amax), np.abs(x) <= limit
    )


def affine_pairs(num_bits: int, low: float, high: float) -> Pairs:
    """Values and gradients of `fake_affine_tensor_quant`, its range given as tensors and as numbers."""
    lo, hi = np.float32(low), np.float32(high)
    steps = np.float32(2**num_bits - 1)
    x = hostile((1 << 20,), np.array(max(-lo, hi)), 2**num_bits - 1, np.random.default_rng(7))
    lowest, highest = np.float32(-(2 ** (num_bits - 1))), np.float32(2 ** (num_bits - 1) - 1)
    with np.errstate(all="ignore"):
        step = (hi - lo) / steps
        zero = np.rint(lo / step) - lowest
        code = np.rint(x / step) - zero
        code = np.where(code < lowest, lowest, np.where(code > highest, highest, code))
        value = (code + zero) * step
    for ranges in ((torch.tensor(lo), torch.tensor(hi)), (float(lo), float(hi))):
        yield from _with_gradient(
            lambda leaf, ranges=ranges: tensor_quant.fake_affine_tensor_quant(leaf, *ranges, num_bits),
            x,
            value,
            (x <= hi) & (x >= lo),
        )


def _with_gradient(function: Callable[[Tensor], Tensor], x: Array, value: Array, inside: Array) -> Pairs:
    dy = np.random.default_rng(8).normal(size=x.shape).astype(np.float32)
    leaf = torch.from_numpy(x).requires_grad_()
    y = function(leaf)
    y.backward(torch.from_numpy(dy))
    assert leaf.grad is not None
    yield y.detach(), torch.from_numpy(np.ascontiguousarray(value))
    yield leaf.grad, torch.from_numpy(np.where(inside, dy, np.float32(0)))


def streams() -> dict[str, list[Tensor]]:
    """Batches for a calibrator: growing ones, sparse ones, half precision."""
    torch.manual_seed(3)
    normal = [torch.randn(4000) for _ in range(3)]
    return {
        "normal": normal,
        "growing": [torch.randn(4000) * scale for scale in (1.0, 1.5, 0.1, 3.7, 3.0)],
        "relu": [x.relu() for x in normal],
        "heavy": [torch.randn(4000) ** 3, 1.5 * torch.randn(4000) ** 3],
        "sparse": [torch.tensor([0.5, 3.0, 9.0]), torch.tensor([1.0, 40.0])],
        "uniform": [torch.rand(500), torch.rand(500) * 2],
        "half": [x.half() for x in normal],
        "one value": [torch.full((100,), 2.5)],
    }


def histogram_by_rules(tensors: list[Tensor], bins: int, skip_zeros: bool = False) -> tuple[Array, Array]:
    """The first batch gives bins from 0 to its largest magnitude; later ones append bins of that width."""
    counts = edges = None
    for x in tensors:
        x = x.abs().float()
        x = x[x != 0] if skip_zeros else x
        largest = x.max()
        if counts is None:
            edges, counts = torch.linspace(0, largest, bins + 1), torch.histc(x, bins, 0, largest.item())
            continue
        if largest > edges[-1]:
            width = edges[1] - edges[0]
            bins = int((largest / width).ceil())
            edges = torch.arange(0, largest + width, width)
        found = torch.histc(x, bins, 0, edges[-1].item())
        found[: len(counts)] += counts
        counts = found
    return counts.numpy().astype(np.int64), edges.numpy()


def mse_by_loops(
    counts: Array, edges: Array, num_bits: int, unsigned: bool, stride: int = 1, start_bin: int = 128
) -> float:
    """The middle of a bin with the least error, the first of several."""
    weights, ends = torch.from_numpy(counts).float(), torch.from_numpy(edges)
    centers = (ends[1:] + ends[:-1]) / 2
    bound = torch.tensor(2.0 ** (num_bits - 1 + unsigned) - 1)
    errors = []
    for amax in centers[start_bin::stride]:
        scale = bound / amax
        quantized = torch.clamp((centers * scale).round(), 0 if unsigned else -bound, bound) / scale
        errors.append(((quantized - centers) ** 2 * weights).mean().item())
    return centers[start_bin + stride * int(np.argmin(errors))].item()


def percentile_by_rules(counts: Array, edges: Array, percentile: float) -> float:
    """The left edge of the bin that reaches the share."""
    below = 0
    for i, count in enumerate(counts):
        below += count / counts.sum()
        if below >= percentile / 100:
            return float(edges[i])
    return float(edges[len(counts)])


def entropy_by_loops(
    counts: Array, edges: Array, num_bits: int, unsigned: bool, stride: int = 1, start_bin: int = 128
) -> float:
    """The edge with the least divergence, the last of several, one bin at a time in Python."""
    from scipy.stats import entropy

    counts = counts.astype(np.int64)
    counts[0] = counts[1]
    cells = 1 << (num_bits - 1 + int(unsigned))
    divergences = []
    for kept in range(start_bin, len(counts) + 1, stride):
        cell_of = np.digitize(range(kept), np.linspace(0, kept, cells + 1)) - 1
        cell_of[counts[:kept] == 0] = -1
        mass = np.zeros(cells)
        for position, cell in enumerate(cell_of):
            if cell != -1:
                mass[cell] += counts[position]
        for cell, bins in Counter(cell_of).items():
            if cell != -1:
                mass[cell] /= bins
        candidate = np.zeros(kept)
        for position, cell in enumerate(cell_of):
            if cell != -1:
                candidate[position] = mass[cell]
        reference = np.array(counts[:kept])
        reference[-1] += counts[kept:].sum()
        # The divergence of a candidate without any counts is NaN, which argmin would take.
        divergences.append(entropy(reference, candidate) if candidate.any() else np.inf)
    last = len(divergences) - 1 - int(np.argmin(divergences[::-1]))
    return float(edges[last * stride + start_bin])


def search_pairs(
    calibrator: HistogramCalibrator, num_bits: int, unsigned: bool, stride: int = 1, start_bin: int = 128
) -> Iterator[tuple[str, float, float]]:
    """What entropy and mse find in a calibrator's histogram, and what the loops find: the method, ours, theirs."""
    counts, edges = histogram_of(calibrator)
    for method, search in (("entropy", entropy_by_loops), ("mse", mse_by_loops)):
        found = calibrator.compute_amax(method, stride=stride, start_bin=start_bin)
        yield method, found.item(), search(counts, edges, num_bits, unsigned, stride, start_bin)


def histogram_of(calibrator: HistogramCalibrator) -> tuple[Array, Array]:
    kept = calibrator._calib_hist, calibrator._calib_bin_edges
    counts, edges = (torch.as_tensor(each).numpy() for each in kept)
    return counts, edges


def collected(tensors: list[Tensor], num_bits: int = 8, unsigned: bool = False, **options: Any) -> HistogramCalibrator:
    calibrator = HistogramCalibrator(num_bits, None, unsigned, **options)
    for x in tensors:
        calibrator.collect(x)
    return calibrator
