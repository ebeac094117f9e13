"""Transforms of inputs that keep the float function, chosen by the error of the layers' outputs."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fakequant.functional import choose_qparams as qparams_of_tensor
from fakequant.nn.quantizer import Quantizer
from fakequant.nn.transforms import BlockHadamard, ChannelScale, InputTransform
from fakequant.numerics.granularity import PerBlock
from fakequant.numerics.qparams import choose_qparams
from fakequant.ops import library
from fakequant.ptq.ranges import whole_range
from fakequant.ptq.sums import product_of

_ALPHAS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""How much of a channel's size the weight takes over. 1 is often best for static inputs, 0.5 for dynamic ones."""
_GAIN = 0.9
"""A transform must lower the error to this share: it costs an operation at run time where nothing can hold it."""
_TOLERANCE = 1e-5
_SAMPLED = 4  # batches


class Transformed(NamedTuple):
    """What a transform did to the layers that get one input: the error of their outputs with it and without."""

    transform: InputTransform | None
    before: float
    after: float


@torch.no_grad()
def smooth(layers: Sequence[Any], inputs: Sequence[Tensor]) -> Transformed:
    """Divide the channels of an input by factors that the weights take over, if that lowers the error.

    SmoothQuant (arXiv 2211.10438), with its alpha chosen by the output's error for each input, none included.

    Args:
        layers: those that get the input; changed where a transform is found.
        inputs: the tensors [..., channels] or [n, channels, ...] before the quantizer.
    """
    axis = -(layers[0].weight.dim() - 1)
    of_inputs = torch.stack([_largest(x, axis) for x in inputs]).amax(0)
    of_weights = torch.stack([_largest_of_weight(layer) for layer in layers]).amax(0)
    candidates = []
    for alpha in _ALPHAS:
        factors = of_inputs**alpha / of_weights ** (1 - alpha)
        scale = ChannelScale.of(layers[0])
        # A channel that is always 0, in the input or in the weights, stays as it is.
        scale.scale = torch.where((of_inputs > 1e-9) & (of_weights > 1e-9), 1 / factors, 1.0).clamp(1e-4, 1e4)
        candidates.append(scale)
    return _best(layers, inputs, candidates)


@torch.no_grad()
def rotate(layers: Sequence[Any], inputs: Sequence[Tensor]) -> Transformed:
    """Rotate blocks of the features of an input by a Hadamard matrix, if that lowers the error.

    Blocks are as long as those of the quantizer, and 128, 64, 32, 16 features long.

    Args:
        layers: those that get the input; changed where a transform is found.
        inputs: the tensors [..., features] before the quantizer.
    """
    if any(layer.weight.dim() != 2 for layer in layers):
        return Transformed(None, 0.0, 0.0)
    granularity = layers[0].input_quantizer.spec.granularity
    own = {size for _, size in granularity.sizes} if isinstance(granularity, PerBlock) else set()
    features = layers[0].weight.shape[1]
    sizes = sorted({size for size in (*own, 128, 64, 32, 16) if features % size == 0 and not size & (size - 1)})
    return _best(layers, inputs, [BlockHadamard.of(layers[0], block=size) for size in sizes if size > 1])


def _best(layers: Sequence[Any], inputs: Sequence[Tensor], candidates: list[Any]) -> Transformed:
    inputs = inputs[:: max(1, len(inputs) // _SAMPLED)]
    wanted = [[product_of(layer, layer.weight, x) for x in inputs] for layer in layers]
    losses = [_loss(layers, inputs, wanted, transform) for transform in (None, *candidates)]
    best = min(range(len(losses)), key=losses.__getitem__)
    if losses[best] >= _GAIN * losses[0] or not _keeps_function(layers, inputs, wanted, candidates[best - 1]):
        return Transformed(None, losses[0], losses[0])
    put(layers, candidates[best - 1])
    return Transformed(candidates[best - 1], losses[0], losses[best])


@torch.no_grad()
def put(layers: Sequence[Any], transform: InputTransform) -> None:
    """Give layers a transform of their input, and their weights what undoes it."""
    for layer in layers:
        layer.weight.data = transform.into_weight(layer, layer.weight.data)
        layer.input_transform = copy.deepcopy(transform)
        layer.weight_quantizer.set_qparams(qparams_of_tensor(layer.weight, layer.weight_quantizer.spec))


def _loss(layers: Sequence[Any], inputs: Sequence[Tensor], wanted: Any, transform: InputTransform | None) -> float:
    """The squared error of the layers' outputs with quantized inputs and weights, their ranges taken anew."""
    transformed = [x if transform is None else transform(x) for x in inputs]
    rounded = list(_rounded(layers[0].input_quantizer, transformed))
    total = 0.0
    for layer, outputs in zip(layers, wanted, strict=True):
        weight = layer.weight if transform is None else transform.into_weight(layer, layer.weight)
        quantizer = layer.weight_quantizer
        weight = library.fake_quantize(weight, qparams_of_tensor(weight, quantizer.spec), quantizer.spec)
        for x, output in zip(rounded, outputs, strict=True):
            total += float((product_of(layer, weight, x) - output).double().square().sum())
    return total


def _rounded(quantizer: Quantizer, inputs: list[Tensor]) -> Iterator[Tensor]:
    if quantizer.dynamic:
        yield from (library.fake_quantize_dynamic(x, quantizer.spec) for x in inputs)
        return
    params = choose_qparams(whole_range(inputs, quantizer), quantizer.spec)
    yield from (library.fake_quantize(x, params, quantizer.spec) for x in inputs)


def _keeps_function(layers: Sequence[Any], inputs: Sequence[Tensor], wanted: Any, transform: InputTransform) -> bool:
    """Whether the transform and its inverse in the weights give the outputs as before, up to rounding."""
    for layer, outputs in zip(layers, wanted, strict=True):
        weight = transform.into_weight(layer, layer.weight)
        for x, output in zip(inputs, outputs, strict=True):
            error = (product_of(layer, weight, transform(x)) - output).double().square().sum()
            if not bool(error <= _TOLERANCE**2 * output.double().square().sum()):
                return False
    return True


def _largest(x: Tensor, axis: int) -> Tensor:
    return x.abs().movedim(axis, -1).flatten(0, -2).amax(0).float()


def _largest_of_weight(layer: Any) -> Tensor:
    """The largest magnitude of the weights of each input channel."""
    groups = getattr(layer, "groups", 1)
    parts = layer.weight.abs().reshape(groups, -1, layer.weight.shape[1], layer.weight[0, 0].numel())
    return parts.amax((1, 3)).flatten().float()
