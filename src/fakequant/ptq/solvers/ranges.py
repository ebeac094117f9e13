"""Search for ranges by the error of the layer's output."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from fakequant.calibration.lattice import joined, rows_are_apart, search_params, searches
from fakequant.nn.products.product import MatrixProduct
from fakequant.numerics.blocks import block_axes, blocked
from fakequant.numerics.qparams import QParams, Range, choose_qparams
from fakequant.numerics.spec import QuantSpec
from fakequant.ops import library
from fakequant.ptq.solvers.grid import of_elements
from fakequant.ptq.solvers.parts import Parts

T = TypeVar("T")
Inputs = Sequence[Sequence[Tensor]]
"""What layers get, before their quantizer: for each batch, the input of each call."""

_FACTORS = (*torch.linspace(1.0, 0.5, 26).tolist(), 1.25, 1.5)
"""Multiples of a group's largest weight that are tried as the end of its range. With 1.5 that weight becomes the value
4 of float4_e2m1fn in place of 6; the neighbours of 4 are nearer (arXiv 2512.02010)."""
_LIKELY = 8
"""The multiples of a run of columns that are judged by all its moments: those with the smallest errors by the diagonal.
In groups of 128 with 4 bits the error is 0.1 % larger than by all 28, in half of the time. Whole channels of 3 bits in
networks of convolutions would have 1.3 to 1.6 times the error, so that all 28 judge there."""
_INPUT_FACTORS = tuple(torch.linspace(1.0, 0.1, 31).tolist())
_ELEMENTS = 2**18
"""The most elements that are searched at once: what is computed of them stays in a cache."""
GAIN = 0.9
"""A transform or another range of an input must lower the error to this share. A transform costs an operation at run
time where nothing can hold it, and small wins on a few batches are often none on others."""
_SAMPLED = 4
"""Batches by which the range of an input is chosen."""


def searched_params(weight: Tensor, spec: QuantSpec, moments: Tensor, parts: Parts, scale: Tensor) -> QParams:
    """For each group of a weight, the parameters with the smallest rounding error.

    A group's error is that of the layer's output if only this group is rounded: d H d^T with the group's part of H.
    A scale of the tensor above those of the groups stays, because layers that servers merge have it in common.

    Args:
        weight: [out, ...].
        spec: of its quantizer.
        moments: of the layer's inputs, float64 [groups of the convolution, columns, columns].
        parts: the parts that the weight is searched in.
        scale: of the weight as it is.
    """
    apart = rows_are_apart(weight, spec)
    if searches(spec) and parts.count == 1 and (len(moments) == 1 or apart):
        rows = zip(weight.chunk(len(moments)), moments, strict=True)
        return joined([search_params(own, spec, inside) for own, inside in rows])
    inside = _inside_groups(weight, spec, moments)
    if not apart or parts.count > 1 or len(moments) > 1:
        return _searched(weight, spec, inside, parts, spec.scale.shared_by(scale, wider=True))
    size = max(_ELEMENTS // max(weight[0].numel(), 1), 1)
    return joined([_searched(own, spec, inside, parts) for own in weight.split(size)])


def _searched(weight: Tensor, spec: QuantSpec, inside: Tensor, parts: Parts, shared: Tensor | None = None) -> QParams:
    whole = library.measure(weight, spec.granularity)
    whole = Range(parts.tied(whole.lo, torch.amin), parts.tied(whole.hi, torch.amax))
    factors, exact = torch.tensor(_FACTORS, device=weight.device), weight.float()

    def losses(multiples: Iterable[Tensor], inside: Tensor) -> Tensor:
        ranges = (Range(whole.lo * own, whole.hi * own) for own in multiples)
        params = (choose_qparams(own, spec, shared=shared) for own in ranges)
        errors = (library.fake_quantize(weight, own, spec).float() - exact for own in params)
        found = (_of_groups(error, spec, inside).reshape(whole.lo.shape) for error in errors)
        return torch.stack([parts.tied(own, torch.sum) for own in found]).nan_to_num(torch.inf)

    likely = factors.reshape(-1, *[1] * whole.lo.dim()).expand(-1, *whole.lo.shape)
    if inside.shape[1] > 1:
        plain = losses(factors, inside.diagonal(dim1=2, dim2=3)[:, :, None])
        likely = factors[plain.argsort(dim=0, stable=True)[:_LIKELY]]
    best = likely.gather(0, losses(likely, inside).argmin(0, keepdim=True))[0]
    return choose_qparams(Range(whole.lo * best, whole.hi * best), spec, shared=shared)


def _inside_groups(weight: Tensor, spec: QuantSpec, moments: Tensor) -> Tensor:
    """The moments of the columns that share a scale, float32 [groups of the convolution, runs, columns, columns].

    Where scales are of runs of columns, these are the blocks along the diagonal; else one run has all columns, with 0
    at pairs that have different scales.
    """
    shape = spec.granularity.group_shape(weight.shape)
    numbers = torch.arange(moments.new_zeros(shape).numel(), device=weight.device).reshape(shape)
    columns = of_elements(numbers, weight.shape, spec.granularity.block_shape(weight.shape))[0].flatten()
    count = len(columns.unique())
    if len(columns) % count or columns.unflatten(0, (count, -1)).diff(dim=1).any():
        return (moments * (columns[:, None] == columns[None, :])).float()[:, None]
    blocks = moments.unflatten(2, (count, -1)).unflatten(1, (count, -1)).diagonal(dim1=1, dim2=3)
    return blocks.permute(0, 3, 1, 2).float()


def _of_groups(error: Tensor, spec: QuantSpec, inside: Tensor) -> Tensor:
    """The errors d H d^T of groups, float64, for those of a weight; `inside`: H, or its diagonals [..., 1, columns]."""
    rows = error.reshape(len(inside), -1, inside.shape[1], inside.shape[3]).transpose(1, 2)
    shares = (rows * inside if inside.shape[2] == 1 else rows @ inside).mul_(rows)
    groups = spec.granularity.group_shape(error.shape)
    if groups[0] == len(error) and math.prod(groups[1:]) == inside.shape[1]:  # a run of a row is a group
        return shares.sum(3, dtype=torch.float64).transpose(1, 2)
    return _per_group(shares.double().transpose(1, 2).reshape(error.shape), spec)


def _per_group(values: Tensor, spec: QuantSpec) -> Tensor:
    blocks = spec.granularity.block_shape(values.shape)
    axes = block_axes(values.shape, blocks)
    return blocked(values, blocks).sum(axes) if axes else values


def whole_range(inputs: Inputs, spec: QuantSpec) -> Range:
    """The smallest range that holds all inputs of a quantizer."""
    return joined_range([library.measure(x, spec.granularity) for calls in inputs for x in calls])


def parts_of(batch: Sequence[Tensor]) -> Inputs:
    """The inputs of a single batch in up to four parts along their first axis, each with all calls."""
    parts = [x.chunk(_SAMPLED) for x in batch]
    return [[own[place] for own in parts if place < len(own)] for place in range(max(map(len, parts)))]


def others_of(items: Sequence[T]) -> list[list[T]]:
    """For each item, the list of all others; for a single item, that item."""
    return [[*items[:place], *items[place + 1 :]] or [*items] for place in range(len(items))]


def sampled(count: int) -> range:
    """The indices of the few batches that judge an input's range."""
    return range(0, count, max(1, count // _SAMPLED))


def searched_input(layers: Sequence[MatrixProduct], inputs: Inputs) -> tuple[QParams, float, float]:
    """The parameters of an input's quantizer with which the outputs of its layers have the smallest error.

    A few batches judge each multiple of the range, and none of them made the range that it is judged by. So values
    beyond the range of the others count, as they will for new data. The batch with the largest values judges too, by
    the range of all batches, because clipping costs most there. A multiple must win as much as a transform, because
    layers err together: a range that is too small costs the model more than it costs the layer.

    Args:
        layers: the products that get the inputs; their quantizers are alike.
        inputs: of each batch and call.

    Returns:
        The found parameters, the error with the first layer's present ones, and the error with the found ones.
    """
    quantizer = layers[0].input_quantizer
    assert quantizer is not None
    spec = quantizer.spec
    seen = [whole_range([calls], spec) for calls in inputs]
    others, widest = others_of(seen), max(range(len(seen)), key=lambda place: _width(seen[place]))
    judged = {place: others[place] for place in sampled(len(inputs))} | {widest: seen}
    given = quantizer.qparams(inputs[0][0])

    def loss(params: Callable[[Sequence[Range]], QParams]) -> float:
        tried = [(layer, params(own), x) for place, own in judged.items() for x in inputs[place] for layer in layers]
        return sum(_output_error(layer, spec, own, x) for layer, own, x in tried)

    losses = [loss(lambda _: given)]
    losses += [loss(lambda own, f=f: _scaled(own, f, spec)) for f in _INPUT_FACTORS]
    best = min(range(len(losses)), key=losses.__getitem__)
    if losses[best] >= GAIN * losses[0]:
        return given, losses[0], losses[0]
    return _scaled(seen, _INPUT_FACTORS[best - 1], spec), losses[0], losses[best]


def _width(found: Range) -> float:
    return float((found.hi - found.lo).max())


def joined_range(seen: Sequence[Range]) -> Range:
    """The smallest range that holds those of several."""
    return Range(torch.stack([found.lo for found in seen]).amin(0), torch.stack([found.hi for found in seen]).amax(0))


def _scaled(seen: Sequence[Range], factor: float, spec: QuantSpec) -> QParams:
    whole = joined_range(seen)
    return choose_qparams(Range(whole.lo * factor, whole.hi * factor), spec)


def _output_error(layer: MatrixProduct, spec: QuantSpec, params: QParams, x: Tensor) -> float:
    """The squared error of the output after quantizing the input."""
    error = library.fake_quantize(x, params, spec) - x
    return float(layer.product(layer.tensor, error).double().square().sum())
