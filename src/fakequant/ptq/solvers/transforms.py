"""Transforms of inputs that keep the float function, chosen by the error of the layers' outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fakequant.functional import choose_qparams as qparams_of_tensor
from fakequant.nn.products.product import MatrixProduct
from fakequant.nn.quantizer import Quantizer
from fakequant.nn.transforms import BlockHadamard, ChannelScale, InputTransform
from fakequant.numerics.granularity import PerBlock
from fakequant.numerics.qparams import QParams, choose_qparams
from fakequant.ops import library
from fakequant.ptq.solvers.ranges import GAIN, Inputs, others_of, sampled, searched_input, whole_range
from fakequant.restore import state_of

_ALPHAS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""How much of a channel's size the weight takes over. 1 is often best for static inputs, 0.5 for dynamic ones."""
_TOLERANCE = 1e-5


class Transformed(NamedTuple):
    """What a transform did to the layers that get one input.

    Attributes:
        transform: None where none was found.
        before: the error of their outputs with the range that the quantizer had.
        after: the same with the transform and a range for it.
        params: this range; None where there is no transform, or the quantizer is dynamic.
    """

    transform: InputTransform | None
    before: float
    after: float
    params: QParams | None = None


class _Candidate(NamedTuple):
    """A transform of all batches, and a function that gives the transform of all batches but one."""

    whole: InputTransform
    without: Callable[[int], InputTransform]


@torch.no_grad()
def smooth(layers: Sequence[MatrixProduct], inputs: Inputs) -> Transformed:
    """Divide the channels of an input by factors that the weights take over, if that lowers the error.

    SmoothQuant (arXiv 2211.10438), with its alpha chosen by the output's error for each input, none included.

    Args:
        layers: those that get the input; changed where a transform is found.
        inputs: of each batch and call, [..., channels] or [n, channels, ...].
    """
    if not all(layer.takes_transform for layer in layers):
        return Transformed(None, 0.0, 0.0)
    axis = -(layers[0].tensor.dim() - 1)
    largest = [torch.stack([_largest(x, axis) for x in calls]).amax(0) for calls in inputs]
    of_weights = torch.stack([_largest_of_weight(layer) for layer in layers]).amax(0)

    def scale(alpha: float, seen: Sequence[Tensor]) -> ChannelScale:
        of_inputs = torch.stack([*seen]).amax(0)
        factors = of_inputs**alpha / of_weights ** (1 - alpha)
        found = ChannelScale.of(layers[0].layer)
        # A channel that is always 0, in the input or in the weights, stays as it is.
        found.scale = torch.where((of_inputs > 1e-9) & (of_weights > 1e-9), 1 / factors, 1.0).clamp(1e-4, 1e4)
        return found

    others = others_of(largest)
    candidates = [
        _Candidate(scale(alpha, largest), lambda place, alpha=alpha: scale(alpha, others[place])) for alpha in _ALPHAS
    ]
    return _best(layers, inputs, candidates)


@torch.no_grad()
def rotate(layers: Sequence[MatrixProduct], inputs: Inputs) -> Transformed:
    """Rotate blocks of the features of an input by a Hadamard matrix, if that lowers the error.

    Blocks are as long as those of the quantizer, and 128, 64, 32, 16 features long.

    Args:
        layers: those that get the input; changed where a transform is found.
        inputs: of each batch and call, [..., features].
    """
    if any(layer.tensor.dim() != 2 or not layer.takes_transform for layer in layers):
        return Transformed(None, 0.0, 0.0)
    granularity = _quantizer(layers).spec.granularity
    own = {size for _, size in granularity.sizes} if isinstance(granularity, PerBlock) else set()
    features = layers[0].tensor.shape[1]
    sizes = sorted({size for size in (*own, 128, 64, 32, 16) if features % size == 0 and not size & (size - 1)})
    found = [BlockHadamard.of(layers[0].layer, block=size) for size in sizes if size > 1]
    return _best(layers, inputs, [_Candidate(own, lambda _, own=own: own) for own in found])


def _best(layers: Sequence[MatrixProduct], inputs: Inputs, candidates: list[_Candidate]) -> Transformed:
    """The best candidate by the ranges of all values, if it also loses less with a searched range than the own one."""
    judge, quantizer = _Judge(layers, inputs), _quantizer(layers)
    plain = judge.loss(lambda _: None)
    losses = [judge.loss(candidate.without) for candidate in candidates]
    best = min(range(len(losses)), key=losses.__getitem__, default=None)
    if best is None or losses[best] >= GAIN * plain or not judge.keeps_function(candidates[best].whole):
        return Transformed(None, plain, plain)
    before = _loss_now(layers, inputs)
    restore, transform, params = state_of(layer.layer for layer in layers), candidates[best].whole, None
    put(layers, transform)
    if not quantizer.dynamic:
        own = [[transform(x) for x in calls] for calls in inputs]
        set_params(layers, choose_qparams(whole_range(own, quantizer.spec), quantizer.spec))
        params = searched_input(layers, own)[0]
        set_params(layers, params)
    after = _loss_now(layers, inputs)
    if after >= GAIN * before:
        restore()
        return Transformed(None, before, before)
    return Transformed(transform, before, after, params)


@torch.no_grad()
def put(layers: Sequence[MatrixProduct], transform: InputTransform) -> None:
    """Give layers a transform of their input, and their weights what undoes it."""
    for layer in layers:
        layer.tensor.data = transform.into_weight(layer.layer, layer.tensor.data)
        layer.layer.input_transform = copy.deepcopy(transform)
        layer.quantizer.set_qparams(qparams_of_tensor(layer.tensor, layer.quantizer.spec))


def set_params(layers: Iterable[MatrixProduct], params: QParams) -> None:
    """Give the quantizers of the layers' input a range."""
    for layer in layers:
        _quantizer([layer]).set_qparams(params)


class _Judge:
    """The error of the outputs of layers by a transform, on a few of the batches.

    Each batch is judged by what the others make: their transform, and the range of their transformed values. So what
    a batch has beyond them counts, as it will for new data.
    """

    def __init__(self, layers: Sequence[MatrixProduct], inputs: Inputs) -> None:
        self._layers, self._inputs, self._others = layers, inputs, others_of(inputs)
        self._places = sampled(len(inputs))
        self._wanted = {place: [self._products(x) for x in inputs[place]] for place in self._places}

    def _products(self, x: Tensor) -> list[Tensor]:
        return [layer.product(layer.tensor, x) for layer in self._layers]

    def loss(self, transform: Callable[[int], InputTransform | None]) -> float:
        """The squared error with quantized inputs and weights, by a transform for each place of a batch."""
        return sum(self._loss(place, transform(place)) for place in self._places)

    def _loss(self, place: int, transform: InputTransform | None) -> float:
        weights = [_rounded_weight(layer, transform) for layer in self._layers]
        rounded, total = self._rounding(place, transform), 0.0
        for x, outputs in zip(self._inputs[place], self._wanted[place], strict=True):
            own = rounded(_by(transform, x))
            for layer, weight, output in zip(self._layers, weights, outputs, strict=True):
                total += float((layer.product(weight, own) - output).double().square().sum())
        return total

    def _rounding(self, place: int, transform: InputTransform | None) -> Callable[[Tensor], Tensor]:
        """What the quantizer does to the inputs of a batch, by the range of those of the others."""
        quantizer = _quantizer(self._layers)
        if quantizer.dynamic:
            return lambda x: library.fake_quantize_dynamic(x, quantizer.spec)
        others = [[_by(transform, x) for x in calls] for calls in self._others[place]]
        params = choose_qparams(whole_range(others, quantizer.spec), quantizer.spec)
        return lambda x: library.fake_quantize(x, params, quantizer.spec)

    def keeps_function(self, transform: InputTransform) -> bool:
        """Whether a transform and its inverse in the weights give the outputs as before, up to rounding."""
        weights = [transform.into_weight(layer.layer, layer.tensor) for layer in self._layers]
        for place, wanted in self._wanted.items():
            for x, outputs in zip(self._inputs[place], wanted, strict=True):
                for layer, weight, output in zip(self._layers, weights, outputs, strict=True):
                    error = (layer.product(weight, transform(x)) - output).double().square().sum()
                    if not bool(error <= _TOLERANCE**2 * output.double().square().sum()):
                        return False
        return True


def _loss_now(layers: Sequence[MatrixProduct], inputs: Inputs) -> float:
    """The squared error of layers with their transforms and ranges, and with weights rounded to nearest; all batches.

    A few do not tell whether a wide range is better than one that clips: what is clipped may be in the others.
    """
    weights, total = [_rounded_weight(layer, None) for layer in layers], 0.0
    for x in (x for calls in inputs for x in calls):
        exact, rounded = _by(layers[0].input_transform, x), layers[0].quantized_inputs((x,))[0]
        for layer, weight in zip(layers, weights, strict=True):
            error = layer.product(weight, rounded) - layer.product(layer.tensor, exact)
            total += float(error.double().square().sum())
    return total


def _rounded_weight(layer: MatrixProduct, transform: InputTransform | None) -> Tensor:
    weight, spec = layer.tensor, layer.quantizer.spec
    weight = weight if transform is None else transform.into_weight(layer.layer, weight)
    return library.fake_quantize(weight, qparams_of_tensor(weight, spec), spec)


def _quantizer(layers: Sequence[MatrixProduct]) -> Quantizer:
    """The quantizer of the input of layers, which is like those of the others."""
    quantizer = layers[0].input_quantizer
    assert quantizer is not None, "an input without a quantizer has no transform"
    return quantizer


def _by(transform: InputTransform | None, x: Tensor) -> Tensor:
    return x if transform is None else transform(x)


def _largest(x: Tensor, axis: int) -> Tensor:
    return x.abs().movedim(axis, -1).flatten(0, -2).amax(0).float()


def _largest_of_weight(layer: MatrixProduct) -> Tensor:
    """The largest magnitude of the weights of each input channel."""
    groups = layer.groups
    parts = layer.tensor.abs().reshape(groups, -1, layer.tensor.shape[1], layer.tensor[0, 0].numel())
    return parts.amax((1, 3)).flatten().float()
