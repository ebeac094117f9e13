"""Transforms of inputs that keep the float function, chosen by the error of the layers' outputs."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fakequant.functional import choose_qparams as qparams_of_tensor
from fakequant.nn.products.product import MatrixProduct
from fakequant.nn.quantizer import Quantizer
from fakequant.nn.transforms import BlockHadamard, ChannelScale, InputTransform, ScaledHadamard
from fakequant.numerics.granularity import PerBlock
from fakequant.numerics.qparams import QParams, Range, choose_qparams
from fakequant.ops import library
from fakequant.ptq.solvers.grid import structured_zeros
from fakequant.ptq.solvers.ranges import GAIN, Inputs, joined_range, others_of, sampled, searched_input, whole_range
from fakequant.restore import state_of

_ALPHAS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""How much of a channel's size the weight takes over. 1 is often best for static inputs, 0.5 for dynamic ones."""
_BLOCK = 128
"""Features of the longest blocks that a rotation has."""
_TOLERANCE = 1e-5


class Transformed(NamedTuple):
    """What a transform did to the layers that get one input.

    Attributes:
        transform: None where none was found.
        before: the error of their outputs with the range that the quantizer had.
        after: the same with the transform and a range for it.
        params: this range; None where there is no transform, or the quantizer is dynamic.
        step: the last of the steps that make the transform; "" where there is none.
    """

    transform: InputTransform | None
    before: float
    after: float
    params: QParams | None = None
    step: str = ""


class _Candidate(NamedTuple):
    """A transform of all batches, and a function that gives the transform of all batches but one."""

    whole: InputTransform
    without: Callable[[int], InputTransform]
    step: str


def take_transform(layers: Sequence[MatrixProduct]) -> bool:
    """Whether a transform can stand before the input of layers, and all its readers are among them."""
    counts = Counter(layer.layer for layer in layers)
    return all(counts[layer.layer] == layer.readers for layer in layers)


@torch.no_grad()
def transform(layers: Sequence[MatrixProduct], inputs: Inputs, steps: Sequence[str]) -> Transformed:
    """Transform an input, if that lowers the error of its layers; what costs more at run time must win more.

    Args:
        layers: those that get the input; changed where a transform is found.
        inputs: of each batch and call, [..., channels] or [n, channels, ...].
        steps: "smooth" divides channels by factors that the weights take over (SmoothQuant, arXiv 2211.10438), "rotate"
            multiplies blocks of features by a Hadamard matrix (QuaRot, arXiv 2404.00456). Of both, there is also the
            rotation after the division.
    """
    judge, found = _Judge(layers, inputs), list[_Candidate]()
    plain = least = judge.loss(lambda _: None)
    for family in _families(layers, inputs, steps, found):
        losses = [judge.loss(own.without) for own in family]
        best = min(range(len(losses)), key=losses.__getitem__)
        if losses[best] < GAIN * least and judge.keeps_function(family[best].whole):
            least = losses[best]
            found.insert(0, family[best])
    if not found:
        return Transformed(None, plain, plain)
    return _best(layers, inputs, found)


def _families(
    layers: Sequence[MatrixProduct], inputs: Inputs, steps: Sequence[str], found: Sequence[_Candidate]
) -> Iterator[list[_Candidate]]:
    """Candidates of a kind, what costs less at run time first; `found`: those that won so far, the last one first."""
    smoothing = _smoothings(layers, inputs) if "smooth" in steps else []
    if smoothing:
        yield smoothing
    rotations = _rotations(layers) if "rotate" in steps else []
    if not rotations:
        return
    yield rotations
    if smoothing:
        size = next((own.whole.options()["block"] for own in found[:1] if own.step == "rotate"), 0)
        yield [_rotated(layers, own, size or rotations[-1].whole.options()["block"]) for own in smoothing[::2]]


def _rotated(layers: Sequence[MatrixProduct], smoothing: _Candidate, size: int) -> _Candidate:
    """A smoothing, and a rotation of blocks of some size after it."""

    def after(scale: Any) -> InputTransform:
        found = ScaledHadamard.of(layers[0].layer, block=size)
        found.scale = scale.scale
        return found

    return _Candidate(after(smoothing.whole), lambda place: after(smoothing.without(place)), "rotate")


def _smoothings(layers: Sequence[MatrixProduct], inputs: Inputs) -> list[_Candidate]:
    """Divisions of channels by factors, with alphas for each input."""
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
    return [
        _Candidate(scale(alpha, largest), lambda place, alpha=alpha: scale(alpha, others[place]), "smooth")
        for alpha in _ALPHAS
    ]


def _rotations(layers: Sequence[MatrixProduct]) -> list[_Candidate]:
    """Rotations of blocks as long as those of the quantizer, and of the longest ones."""
    if any(layer.tensor.dim() != 2 or structured_zeros(layer.tensor) is not None for layer in layers):
        return []
    granularity = _quantizer(layers).spec.granularity
    own = {size for _, size in granularity.sizes} if isinstance(granularity, PerBlock) else set()
    features = layers[0].tensor.shape[1]
    longest = min(features & -features, _BLOCK)
    sizes = sorted({size for size in (*own, longest) if features % size == 0 and size > 1 and not size & (size - 1)})
    found = [BlockHadamard.of(layers[0].layer, block=size) for size in sizes]
    return [_Candidate(own, lambda _, own=own: own, "rotate") for own in found]


def _best(layers: Sequence[MatrixProduct], inputs: Inputs, candidates: Iterable[_Candidate]) -> Transformed:
    """The first candidate that loses less by its searched range than the own one on all batches."""
    before, quantizer = _loss_now(layers, inputs), _quantizer(layers)
    for candidate in candidates:
        restore, params = state_of(layer.layer for layer in layers), None
        put(layers, candidate.whole)
        if not quantizer.dynamic:
            own = [[candidate.whole(x) for x in calls] for calls in inputs]
            set_params(layers, choose_qparams(whole_range(own, quantizer.spec), quantizer.spec))
            params = searched_input(layers, own)[0]
            set_params(layers, params)
        after = _loss_now(layers, inputs)
        if after < GAIN * before:
            return Transformed(candidate.whole, before, after, params, candidate.step)
        restore()
    return Transformed(None, before, before)


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
        self._layers, self._inputs, self._others = layers, inputs, others_of(range(len(inputs)))
        self._places = sampled(len(inputs))
        self._wanted = {place: [self._products(x) for x in inputs[place]] for place in self._places}
        spec = _quantizer(layers).spec
        by_tensor = all(set(spec.granularity.group_shape(x.shape)) == {1} for calls in inputs for x in calls)
        axis = -(layers[0].tensor.dim() - 1)
        self._ends = [[_ends(x, axis) for x in calls] for calls in inputs] if by_tensor else inputs
        """What has the range of the inputs by one scale for each channel."""

    def _products(self, x: Tensor) -> list[Tensor]:
        return [layer.product(layer.tensor, x) for layer in self._layers]

    def loss(self, transform: Callable[[int], InputTransform | None]) -> float:
        """The squared error by the transforms for the batches that judge."""
        total, last, weights, ranges = 0.0, None, list[Tensor](), dict[int, Range]()
        for place in self._places:
            own = transform(place)
            if own is not last or not weights:
                weights, ranges, last = [_rounded_weight(layer, own) for layer in self._layers], {}, own
            rounding = self._rounding(place, own, ranges)
            for x, outputs in zip(self._inputs[place], self._wanted[place], strict=True):
                rounded = rounding(_by(own, x))
                for layer, weight, output in zip(self._layers, weights, outputs, strict=True):
                    total += float((layer.product(weight, rounded) - output).double().square().sum())
        return total

    def _rounding(
        self, place: int, transform: InputTransform | None, ranges: dict[int, Range]
    ) -> Callable[[Tensor], Tensor]:
        """What the quantizer does to the inputs of a batch, by the range of those of the others; `ranges`: of each."""
        spec = _quantizer(self._layers).spec
        if _quantizer(self._layers).dynamic:
            return lambda x: library.fake_quantize_dynamic(x, spec)
        inputs = self._ends if transform is None or isinstance(transform, ChannelScale) else self._inputs
        for other in self._others[place]:
            if other not in ranges:
                ranges[other] = whole_range([[_by(transform, x) for x in inputs[other]]], spec)
        params = choose_qparams(joined_range([ranges[other] for other in self._others[place]]), spec)
        return lambda x: library.fake_quantize(x, params, spec)

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


def _ends(x: Tensor, axis: int) -> Tensor:
    """The smallest and the largest value of each channel, as an input of two positions."""
    ends = x.movedim(axis, -1).flatten(0, -2).aminmax(dim=0)
    return torch.stack(ends).reshape(2, -1, *[1] * (-axis - 1))


def _largest(x: Tensor, axis: int) -> Tensor:
    return x.abs().movedim(axis, -1).flatten(0, -2).amax(0).float()


def _largest_of_weight(layer: MatrixProduct) -> Tensor:
    """The largest magnitude of the weights of each input channel."""
    groups = layer.groups
    parts = layer.tensor.abs().reshape(groups, -1, layer.tensor.shape[1], layer.tensor[0, 0].numel())
    return parts.amax((1, 3)).flatten().float()
