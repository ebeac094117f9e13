"""Transforms of inputs that keep the float function, chosen by the error of the layers' outputs."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fakequant.calibration.lattice import joined, rows_are_apart, search_params, searches
from fakequant.functional import choose_qparams as qparams_of_tensor
from fakequant.nn.products import MatrixProduct
from fakequant.nn.quantizer import Quantizer
from fakequant.nn.transforms import BlockHadamard, ChannelScale, InputTransform, ScaledHadamard
from fakequant.numerics.granularity import Granularity, PerBlock, Shape, block_axes, blocked
from fakequant.numerics.qparams import QParams, Range, choose_qparams
from fakequant.numerics.spec import QuantSpec
from fakequant.ops import library
from fakequant.ptq.judging import CLEARLY
from fakequant.ptq.solvers.problem import of_elements, structured_zeros
from fakequant.restore import state_of

_WIDEST = 4608
"""The most columns of a whole sum of x x^T; a 3 x 3 convolution of 512 channels has so many."""
_MOST = 2**22
"""The most values in all parts of the sum of x x^T of a wider convolution: 32 MB in float64."""

_MATRICES = 4
"""Matrices in memory at a time: the sum, the sum about means, two in float32 that count as one, part of another."""

_OF_HALVES = 4
"""Further matrices for two halves of the rows: their sums, and their sums about means."""
WIDEST_HALVED = 2048
"""Columns of the widest matrix whose sums are kept for two halves of the rows, too."""


class Parts:
    """Splits the weight [out, in, ...] of a convolution along input channels into parts [parts * out, in / parts, ...].

    Errors of two parts count as independent: sums of products of columns in different parts are not kept.

    Args:
        shares_scales: whether all inputs of an output channel have one scale.

    >>> parts = Parts(2, shares_scales=False)
    >>> weight = torch.arange(8.0).reshape(2, 4)
    >>> parts.split(weight).tolist()
    [[0.0, 1.0], [4.0, 5.0], [2.0, 3.0], [6.0, 7.0]]
    >>> torch.equal(parts.join(parts.split(weight)), weight)
    True
    """

    def __init__(self, count: int, *, shares_scales: bool) -> None:
        self.count, self._shares = count, shares_scales

    @classmethod
    def of(cls, product: MatrixProduct) -> Parts:
        """The parts of a product; a single part if its sums are small, or a split would cut a group of one scale."""
        shape, spec, columns = product.tensor.shape, product.quantizer.spec, product.columns
        if not product.takes_parts or product.groups > 1 or columns <= _WIDEST:
            return cls(1, shares_scales=True)
        groups = spec.granularity.group_shape(shape)
        shares = groups[1:] == (1,) * (len(shape) - 1)
        levels = [(spec.granularity, shape), *((own, groups) for own in spec.shared_granularities)]
        cuts = [n for n in range(1, shape[1] + 1) if shape[1] % n == 0]

        def keeps_groups(count: int, granularity: Granularity, shape: Shape) -> bool:
            """Whether a split cuts no group: all is one group, or each row has one scale, or parts get whole groups."""
            groups, rows = granularity.group_shape(shape), granularity.block_shape(shape)[0]
            whole = shares or (shape[1] % groups[1] == 0 and groups[1] % count == 0)
            return max(groups) == 1 or (rows == 1 and whole)

        counts = [n for n in cuts if n == 1 or all(keeps_groups(n, *level) for level in levels)]
        enough = [n for n in counts if columns * columns // n <= _MOST]
        return cls((enough or counts[-1:])[0], shares_scales=shares)

    def rows(self, rows: Tensor) -> Tensor:
        """Rows [1, rows, columns], split into the columns of each part [parts, rows, columns / parts]."""
        return rows if self.count == 1 else rows[0].unflatten(1, (self.count, -1)).transpose(0, 1)

    def split(self, values: Tensor) -> Tensor:
        """A weight [out, in, ...] as [parts * out, in / parts, ...]."""
        if self.count == 1:
            return values
        return values.unflatten(1, (self.count, -1)).transpose(0, 1).flatten(0, 1).contiguous()

    def join(self, values: Tensor) -> Tensor:
        """The inverse of `split`: the weight [out, in, ...]."""
        if self.count == 1:
            return values
        return values.unflatten(0, (self.count, -1)).transpose(0, 1).flatten(1, 2).contiguous()

    def split_params(self, params: QParams) -> QParams:
        """The scales and zero points of a weight as those of the weight that `split` returns."""
        return _each(params, lambda x: x.repeat(self.count, *[1] * (x.dim() - 1)) if self._shares else self.split(x))

    def join_params(self, params: QParams) -> QParams:
        """The inverse of `split_params`."""
        return _each(params, lambda x: x[: len(x) // self.count] if self._shares else self.join(x))

    def tied(self, values: Tensor, reduce: Any) -> Tensor:
        """Reduce values [parts * out, ...] over parts that share a scale, and repeat the result for each part."""
        if self.count == 1 or not self._shares or len(values) == 1:
            return values
        return reduce(values.unflatten(0, (self.count, -1)), 0).repeat(self.count, *[1] * (values.dim() - 1))


def memory(products: Iterable[MatrixProduct]) -> int:
    """The most bytes that the sums and the choice of a layer take, besides the inputs of the layer.

    A layer takes up to 4 float64 matrices with a row and a column for each column of its weight. With up to 2,048
    columns, 4 more matrices hold sums over halves of the rows: 0.27 GB for 2,048 columns.
    """
    most = 0
    for product in products:
        parts = Parts.of(product).count
        matrices = _MATRICES + (_OF_HALVES if product.columns <= WIDEST_HALVED else 0)
        most = max(most, 8 * matrices * product.groups * parts * (product.columns // parts) ** 2)
    return most


def _each(params: QParams, change: Any) -> QParams:
    found = [x if x is None or len(x) == 1 else change(x) for x in (params.scale, params.zero_point)]
    assert found[0] is not None
    return QParams(found[0], found[1])


T = TypeVar("T")
Inputs = Sequence[Sequence[Tensor]]
"""The unquantized inputs of layers: for each batch, the tensor of each call."""

_FACTORS = (*torch.linspace(1.0, 0.5, 26, device="cpu").tolist(), 1.25, 1.5)
"""Multiples of a group's largest weight that are tried as the end of its range. With 1.5 that weight becomes the value
4 of float4_e2m1fn in place of 6; the neighbours of 4 are nearer (arXiv 2512.02010)."""
_LIKELY = 8
"""How many multiples are judged by all moments of a run of columns: those with the smallest errors by the diagonal.
In groups of 128 with 4 bits the error is 0.1 % larger than by all 28, in half of the time. Whole channels of 3 bits in
networks of convolutions would have 1.3 to 1.6 times the error, so that all 28 judge there."""
_INPUT_FACTORS = tuple(torch.linspace(1.0, 0.1, 31, device="cpu").tolist())
_SAMPLED = 4
"""About how many batches judge the range of an input."""


def searched_params(weight: Tensor, spec: QuantSpec, moments: Tensor, parts: Parts, scale: Tensor) -> QParams:
    """For each group of a weight, the parameters with the smallest rounding error.

    A group's error is that of the layer's output if only this group is rounded: d H d^T, where d is the group's
    rounding error and H the moments of its columns. A scale of the whole tensor, above those of the groups, stays:
    layers that servers merge share it.

    Args:
        moments: the sum of x x^T over the layer's inputs, float64 [groups of the convolution, columns, columns].
    """
    apart = rows_are_apart(weight, spec)
    if searches(spec) and parts.count == 1 and (len(moments) == 1 or apart):
        rows = zip(weight.chunk(len(moments)), moments, strict=True)
        return joined([search_params(own, spec, inside) for own, inside in rows])
    inside = _inside_groups(weight, spec, moments)
    if not apart or parts.count > 1 or len(moments) > 1:
        return _searched(weight, spec, inside, parts, spec.scale.shared_by(scale, wider=True))
    size = max(library.at_once(weight) // max(weight[0].numel(), 1), 1)
    return joined([_searched(own, spec, inside, parts) for own in weight.split(size)])


def _searched(weight: Tensor, spec: QuantSpec, inside: Tensor, parts: Parts, shared: Tensor | None = None) -> QParams:
    whole = library.measure(weight, spec.granularity)
    whole = Range(parts.tied(whole.lo, torch.amin), parts.tied(whole.hi, torch.amax))
    factors, exact = torch.tensor(_FACTORS, device=weight.device), weight.float()

    def losses(multiples: Iterable[Tensor], inside: Tensor) -> Tensor:
        ranges = (Range(whole.lo * own, whole.hi * own) for own in multiples)
        params = (choose_qparams(own, spec, shared=shared) for own in ranges)
        errors = (library.fake_quantize(weight, own, spec).float().sub_(exact) for own in params)
        found = (_group_errors(error, spec, inside).reshape(whole.lo.shape) for error in errors)
        return torch.stack([parts.tied(own, torch.sum) for own in found]).nan_to_num(torch.inf)

    likely = factors.reshape(-1, *[1] * whole.lo.dim()).expand(-1, *whole.lo.shape)
    if inside.shape[1] > 1:
        plain = losses(factors, inside.diagonal(dim1=2, dim2=3)[:, :, None])
        likely = factors[plain.argsort(dim=0, stable=True)[:_LIKELY]]
    best = likely.gather(0, losses(likely, inside).argmin(0, keepdim=True))[0]
    return choose_qparams(Range(whole.lo * best, whole.hi * best), spec, shared=shared)


def _inside_groups(weight: Tensor, spec: QuantSpec, moments: Tensor) -> Tensor:
    """The moments of the columns that share a scale, float32 [groups of the convolution, runs, columns, columns].

    If columns that share a scale are consecutive, runs are blocks along the diagonal; else one run has all columns,
    with 0 at pairs of columns that have different scales.
    """
    shape, blocks = spec.granularity.group_shape(weight.shape), spec.granularity.block_shape(weight.shape)
    numbers = torch.arange(math.prod(shape[1:]), device=weight.device).reshape(1, *shape[1:])  # the first row tells
    columns = of_elements(numbers, torch.Size([1, *weight.shape[1:]]), (1, *blocks[1:])).flatten()
    count = len(columns.unique())
    if len(columns) % count or columns.unflatten(0, (count, -1)).diff(dim=1).any():
        return (moments * (columns[:, None] == columns[None, :])).float()[:, None]
    blocks = moments.unflatten(2, (count, -1)).unflatten(1, (count, -1)).diagonal(dim1=1, dim2=3)
    return blocks.permute(0, 3, 1, 2).float()


def _group_errors(error: Tensor, spec: QuantSpec, inside: Tensor) -> Tensor:
    """The errors d H d^T of groups, float64; `error` is d of a weight, `inside` H or its diagonal [..., 1, columns]."""
    rows = error.reshape(len(inside), -1, inside.shape[1], inside.shape[3]).transpose(1, 2)
    shares = (rows * inside if inside.shape[2] == 1 else rows @ inside).mul_(rows)
    groups = spec.granularity.group_shape(error.shape)
    if groups[0] == len(error) and math.prod(groups[1:]) == inside.shape[1]:  # a run of a row is a group
        return shares.sum(3, dtype=torch.float64).transpose(1, 2)
    blocks, values = spec.granularity.block_shape(error.shape), shares.double().transpose(1, 2).reshape(error.shape)
    axes = block_axes(error.shape, blocks)
    return blocked(values, blocks).sum(axes) if axes else values


def whole_range(inputs: Inputs, spec: QuantSpec) -> Range:
    """The smallest range that holds all inputs of a quantizer."""
    return joined_range([library.measure(x, spec.granularity) for calls in inputs for x in calls])


def parts_of(batch: Sequence[Tensor]) -> Inputs:
    """One batch as up to four batches: the input of every call is split along its first axis."""
    parts = [x.chunk(_SAMPLED) for x in batch]
    return [[own[place] for own in parts if place < len(own)] for place in range(max(map(len, parts)))]


def others_of(items: Sequence[T]) -> list[list[T]]:
    """For each item, the list of all other items. If `items` has one item, its list holds this item."""
    return [[*items[:place], *items[place + 1 :]] or [*items] for place in range(len(items))]


def sampled(count: int) -> range:
    """The indices of the few batches that judge the range of an input."""
    return range(0, count, max(1, count // _SAMPLED))


def searched_input(layers: Sequence[MatrixProduct], inputs: Inputs) -> tuple[QParams, float, float]:
    """The parameters of an input's quantizer with which the outputs of its layers have the smallest error.

    Multiples of the range are tried, and a few batches judge each. For a batch that judges, the range is that of all
    other batches, so that values beyond the range count, as they will for new data. The batch with the largest values
    also judges, by the range of all batches, because clipping costs most there. A multiple must win clearly, because
    layers err together: a range that is too small costs the model more than it costs the layer.

    Returns:
        The parameters, the error with the first layer's present parameters, and the error with the returned ones.
    """
    quantizer = layers[0].input_quantizer
    assert quantizer is not None
    spec = quantizer.spec
    seen = [whole_range([calls], spec) for calls in inputs]
    widths, others = [float((found.hi - found.lo).max()) for found in seen], others_of(seen)
    widest = widths.index(max(widths))
    judged = {place: others[place] for place in sampled(len(inputs))} | {widest: seen}
    given = quantizer.qparams(inputs[0][0])

    def loss(params: Callable[[Sequence[Range]], QParams]) -> float:
        total = 0.0
        for place, own in judged.items():
            for x in inputs[place]:
                error = library.fake_quantize(x, params(own), spec) - x
                for layer in layers:
                    total += float(layer.product(layer.tensor, error).double().square().sum())
        return total

    losses = [loss(lambda _: given)]
    losses += [loss(lambda own, f=f: _scaled(own, f, spec)) for f in _INPUT_FACTORS]
    best = min(range(len(losses)), key=losses.__getitem__)
    if losses[best] >= CLEARLY * losses[0]:
        return given, losses[0], losses[0]
    return _scaled(seen, _INPUT_FACTORS[best - 1], spec), losses[0], losses[best]


def joined_range(seen: Sequence[Range]) -> Range:
    """The smallest range that holds several ranges."""
    return Range(torch.stack([found.lo for found in seen]).amin(0), torch.stack([found.hi for found in seen]).amax(0))


def _scaled(seen: Sequence[Range], factor: float, spec: QuantSpec) -> QParams:
    whole = joined_range(seen)
    return choose_qparams(Range(whole.lo * factor, whole.hi * factor), spec)


_ALPHAS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Exponents of SmoothQuant, which move channels' sizes into weights. Best is often 1 for static inputs, else 0.5."""
ROWS_PER_CHANNEL = 2
"""The least rows per channel for "smooth". With 64 rows of 48 channels, 4 of 18 draws lost 1.4 to 2.3 times more on new
rows than before, and with 1 row 31 times."""
_BLOCK = 128
"""The longest block of a rotation, in features."""
_TOLERANCE = 1e-5


class Transformed(NamedTuple):
    """The result of `transform` for layers that read one input.

    Attributes:
        transform: the transform; None if no transform clearly lowers the error.
        before: the error of the layers' outputs with the range that the quantizer had.
        after: the same error with the transform and a new range.
        params: the new range; None if there is no transform, or the quantizer is dynamic.
        step: the last of the steps that make the transform; "" if there is no transform.
    """

    transform: InputTransform | None
    before: float
    after: float
    params: QParams | None = None
    step: str = ""


class _Candidate(NamedTuple):
    """A transform chosen on all batches, and a function that returns the transform chosen without a given batch."""

    whole: InputTransform
    without: Callable[[int], InputTransform]
    step: str


def take_transform(layers: Sequence[MatrixProduct]) -> bool:
    """Whether the input of layers can have a transform: all readers of the input are among the layers."""
    counts = Counter(layer.layer for layer in layers)
    return all(counts[layer.layer] == layer.readers for layer in layers)


@torch.no_grad()
def transform(layers: Sequence[MatrixProduct], inputs: Inputs, steps: Sequence[str]) -> Transformed:
    """Transform an input if that clearly lowers the error of its layers.

    A transform costs an operation at run time, unless a normalisation can hold it; a costlier transform must win more.

    Args:
        layers: the layers that get the input; they change if a transform is found.
        inputs: the inputs of each batch and call, [..., channels] or [n, channels, ...].
        steps: "smooth" divides channels by factors that the weights take over (SmoothQuant, arXiv 2211.10438), "rotate"
            multiplies blocks of features by a Hadamard matrix (QuaRot, arXiv 2404.00456). With both, the rotation after
            the division is tried, too.
    """
    judge, found = _Judge(layers, inputs), list[_Candidate]()
    plain = least = judge.loss(lambda _: None)
    for family in _families(layers, inputs, steps, found):
        losses = [judge.loss(own.without) for own in family]
        best = min(range(len(losses)), key=losses.__getitem__)
        if losses[best] < CLEARLY * least and judge.keeps_function(family[best].whole):
            least = losses[best]
            found.insert(0, family[best])
    if not found:
        return Transformed(None, plain, plain)
    before, quantizer = _loss_now(layers, inputs), _quantizer(layers)
    for candidate in found:  # the first candidate with less error by its searched range, on all batches
        restore, params = state_of(layer.layer for layer in layers), None
        put(layers, candidate.whole)
        if not quantizer.dynamic:
            own = [[candidate.whole(x) for x in calls] for calls in inputs]
            set_params(layers, choose_qparams(whole_range(own, quantizer.spec), quantizer.spec))
            params = searched_input(layers, own)[0]
            set_params(layers, params)
        after = _loss_now(layers, inputs)
        if after < CLEARLY * before:
            return Transformed(candidate.whole, before, after, params, candidate.step)
        restore()
    return Transformed(None, before, before)


def _families(
    layers: Sequence[MatrixProduct], inputs: Inputs, steps: Sequence[str], found: Sequence[_Candidate]
) -> Iterator[list[_Candidate]]:
    """Lists of candidates, one list per step, the cheapest at run time first; `found` has the best of each so far."""
    families = {step: made for step, make in TRANSFORMS.items() if step in steps and (made := make(layers, inputs))}
    yield from families.values()
    smoothing, rotations = families.get("smooth"), families.get("rotate")
    if not smoothing or not rotations:
        return
    size = next((own.whole.options()["block"] for own in found[:1] if own.step == "rotate"), 0)
    size = size or rotations[-1].whole.options()["block"]

    def after(scale: Any) -> InputTransform:
        turned = ScaledHadamard.of(layers[0].layer, block=size)
        turned.scale = scale.scale
        return turned

    yield [
        _Candidate(after(own.whole), lambda place, own=own: after(own.without(place)), "rotate")
        for own in smoothing[::2]
    ]


def _smoothings(layers: Sequence[MatrixProduct], inputs: Inputs) -> list[_Candidate]:
    """Candidates that divide channels, one for each alpha; [] with too few rows to know the channels' sizes."""
    axis = -(layers[0].tensor.dim() - 1)
    largest = [
        torch.stack([x.abs().movedim(axis, -1).flatten(0, -2).amax(0).float() for x in calls]).amax(0)
        for calls in inputs
    ]
    weights = [  # of each layer by group and input channel
        own.tensor.abs().reshape(own.groups, -1, own.tensor.shape[1], own.tensor[0, 0].numel()) for own in layers
    ]
    of_weights = torch.stack([own.amax((1, 3)).flatten().float() for own in weights]).amax(0)
    rows = sum(x.numel() for calls in inputs for x in calls) // len(of_weights)
    if rows < ROWS_PER_CHANNEL * len(of_weights):
        return []

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


def _rotations(layers: Sequence[MatrixProduct], _: Inputs) -> list[_Candidate]:
    """Candidates that rotate blocks of the quantizer's size, and blocks of the longest size."""
    if any(layer.tensor.dim() != 2 or structured_zeros(layer.tensor) is not None for layer in layers):
        return []
    granularity = _quantizer(layers).spec.granularity
    own = {size for _, size in granularity.sizes} if isinstance(granularity, PerBlock) else set()
    features = layers[0].tensor.shape[1]
    longest = min(features & -features, _BLOCK)
    sizes = sorted({size for size in (*own, longest) if features % size == 0 and size > 1 and not size & (size - 1)})
    found = [BlockHadamard.of(layers[0].layer, block=size) for size in sizes]
    return [_Candidate(own, lambda _, own=own: own, "rotate") for own in found]


TRANSFORMS: dict[str, Callable[[Sequence[MatrixProduct], Inputs], list[_Candidate]]] = {
    "smooth": _smoothings,
    "rotate": _rotations,
}
"""The steps that put a transform before inputs, the cheapest at run time first: each returns its candidates."""


@torch.no_grad()
def put(layers: Sequence[MatrixProduct], transform: InputTransform) -> None:
    """Give layers a transform of their input, and multiply its inverse into their weights, in place."""
    for layer in layers:
        layer.tensor.data.copy_(transform.into_weight(layer.layer, layer.tensor.data))
        layer.layer.input_transform = copy.deepcopy(transform)
        layer.quantizer.set_qparams(qparams_of_tensor(layer.tensor, layer.quantizer.spec))


def set_params(layers: Iterable[MatrixProduct], params: QParams) -> None:
    """Set the scales of the layers' input quantizers."""
    for layer in layers:
        _quantizer([layer]).set_qparams(params)


class _Judge:
    """Measures the error of the outputs of layers with a transform, on a few of the batches.

    Each batch is measured with the transform and the range that the other batches choose. So values beyond that
    range count, as they will for new data.
    """

    def __init__(self, layers: Sequence[MatrixProduct], inputs: Inputs) -> None:
        self._layers, self._inputs, self._others = layers, inputs, others_of(range(len(inputs)))
        self._places = sampled(len(inputs))
        self._wanted = {
            place: [[own.product(own.tensor, x) for own in layers] for x in inputs[place]] for place in self._places
        }
        spec = _quantizer(layers).spec
        by_tensor = all(set(spec.granularity.group_shape(x.shape)) == {1} for calls in inputs for x in calls)
        axis = -(layers[0].tensor.dim() - 1)
        self._ends = [[_ends(x, axis) for x in calls] for calls in inputs] if by_tensor else inputs
        """Tensors whose range is that of the inputs, also with channels scaled: the ends of channels, or all inputs."""

    def loss(self, transform: Callable[[int], InputTransform | None]) -> float:
        """The squared error of the outputs; `transform` returns the transform for a batch by its index, or None."""
        total, last, weights, ranges = 0.0, None, list[Tensor](), dict[int, Range]()
        quantizer = _quantizer(self._layers)
        spec = quantizer.spec
        for place in self._places:
            own = transform(place)
            if own is not last or not weights:
                weights, ranges, last = [_rounded_weight(layer, own) for layer in self._layers], {}, own
            params: QParams | None = None
            if not quantizer.dynamic:  # by the range of the inputs of the other batches
                inputs = self._ends if own is None or isinstance(own, ChannelScale) else self._inputs
                for other in self._others[place]:
                    if other not in ranges:
                        ranges[other] = whole_range([[_by(own, x) for x in inputs[other]]], spec)
                params = choose_qparams(joined_range([ranges[other] for other in self._others[place]]), spec)
            for x, outputs in zip(self._inputs[place], self._wanted[place], strict=True):
                moved = _by(own, x)
                if params is None:
                    rounded = library.fake_quantize_dynamic(moved, spec)
                else:
                    rounded = library.fake_quantize(moved, params, spec)
                for layer, weight, output in zip(self._layers, weights, outputs, strict=True):
                    total += float((layer.product(weight, rounded) - output).double().square().sum())
        return total

    def keeps_function(self, transform: InputTransform) -> bool:
        """Whether the outputs stay the same, up to rounding, with a transform and its inverse in the weights."""
        weights = [transform.into_weight(layer.layer, layer.tensor) for layer in self._layers]
        for place, wanted in self._wanted.items():
            for x, outputs in zip(self._inputs[place], wanted, strict=True):
                for layer, weight, output in zip(self._layers, weights, outputs, strict=True):
                    error = (layer.product(weight, transform(x)) - output).double().square().sum()
                    if not bool(error <= _TOLERANCE**2 * output.double().square().sum()):
                        return False
        return True


def _loss_now(layers: Sequence[MatrixProduct], inputs: Inputs) -> float:
    """The squared error of layers on all batches, with the present transforms and ranges, and with nearest weights.

    A few batches do not show whether a range that clips is better: the clipped values may be in the others.
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
    """The input quantizer of the first layer; the input quantizers of the other layers have the same settings."""
    quantizer = layers[0].input_quantizer
    assert quantizer is not None, "an input without a quantizer has no transform"
    return quantizer


def _by(transform: InputTransform | None, x: Tensor) -> Tensor:
    return x if transform is None else transform(x)


def _ends(x: Tensor, axis: int) -> Tensor:
    """The smallest and the largest value of each channel, in the form of an input with two positions."""
    ends = x.movedim(axis, -1).flatten(0, -2).aminmax(dim=0)
    return torch.stack(ends).reshape(2, -1, *[1] * (-axis - 1))
