"""Learn the rounding, the ranges and the input scales of one block by the error of its output.

One engine serves the published methods; a preset says what is learned, and how. Only the values of the block's
quantized weights and the scales change: biases and normalisations stay.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fakequant.data.batches import Batches, Forward, HeldOut, Inputs, track
from fakequant.distributed import Ranks
from fakequant.errors import CalibrationError, ConfigError, nearest
from fakequant.model.run.outputs import float_tensors
from fakequant.model.weights import evaluating, in_eval_mode, quantized_weights
from fakequant.nn.paths import layer_of
from fakequant.nn.products import Product
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.quantizer import Kind, Mode, Quantizer, quantizers
from fakequant.nn.sites import SITES, Site
from fakequant.nn.wrappers import accepts_wrapped_model
from fakequant.numerics.qparams import QParams, Range, choose_qparams
from fakequant.ops import library
from fakequant.ptq.improvement import judge_of
from fakequant.ptq.judging import EVERY_OF_CHOICES, MISSED, Improvement, LayerResult, remarks_of
from fakequant.ptq.solvers.layer import Choice, write
from fakequant.ptq.solvers.problem import WeightGrid, of_elements
from fakequant.ptq.solvers.sums import MOST_DRIFT
from fakequant.ptq.stream import FloatTwin, LayerCall, Stage, call_order, check_side_by_side
from fakequant.ptq.weights import calibrated_weights, fixed_parameters
from fakequant.restore import attributes_of, in_order, restore_after, restore_on_error, state_of, structure_of
from fakequant.text import listed, module_name

_LOW, _HIGH = -0.1, 1.1  # the ends of AdaRound's stretched sigmoid
_MOST = torch.finfo(torch.float32).max


def learnable_weights(block: nn.Module, fixed: frozenset[nn.Parameter] = frozenset()) -> dict[str, Product]:
    """For the name of each parameter of a block whose values can be learned: the weight."""
    names = {parameter: name for name, parameter in block.named_parameters()}
    weights = list(quantized_weights(block).values())
    used = Counter(weight.parameter for weight in weights)
    return {
        names[parameter]: weight
        for weight in weights
        if (parameter := weight.parameter) is not None and weight.tensor is parameter and used[parameter] == 1
        if parameter not in fixed
        if not (weight.quantizer.dynamic or weight.quantizer.pinned or weight.quantizer.learned is not None)
    }


class LearnedWeight:
    """A weight with learned rounding and learned factors of ranges; `mode` is the kind of rounding (None: nearest)."""

    def __init__(self, weight: Product, mode: Literal["offset", "relaxed"] | None) -> None:
        parameter = weight.parameter
        assert parameter is not None
        with torch.no_grad():
            self._mode, self._dtype, self.spec = mode, parameter.dtype, weight.quantizer.spec
            self._weight = parameter.detach().float().clone()
            self._params = weight.quantizer.qparams(parameter.detach())
            matrix = self._weight.reshape(len(self._weight), -1)
            sides = WeightGrid(self.spec, self._params, self._weight.shape).neighbours(matrix)
            self._low, high = (side.reshape(self._weight.shape) for side in sides)
            self._gap = high - self._low
            # The range is that of the largest values that the operator gives.
            hi, lo = (
                library.measure(self._rounded(torch.full_like(self._weight, end), self._params), self.spec.granularity)
                for end in (_MOST, -_MOST)
            )
            amax = torch.where(hi.hi > 0, hi.hi, -lo.lo)
            self._range = Range(-amax, amax) if self.spec.symmetric else Range(lo.lo, hi.hi)
        self.factor = torch.ones_like(self._range.hi, requires_grad=True)
        """The factor of each group's range."""
        self.rounding = torch.zeros_like(self._weight)
        """The learned rounding: offsets in steps, or relaxed shares before their sigmoid."""
        if mode == "relaxed":
            share = torch.where(self._gap > 0, (self._weight - self._low) / self._gap, 0.0).clamp(0, 1)
            self.rounding = ((share - _LOW) / (_HIGH - share)).log()
        self.rounding.requires_grad_()

    def _rounded(self, x: Tensor, params: QParams) -> Tensor:
        return library.fake_quantize(x, params, self.spec)

    def params(self) -> QParams:
        """Scale and zero point of the range times the learned factors; if all factors are 1, those of the quantizer."""
        factor = self.factor.detach()
        if bool((factor == 1).all()):
            return self._params
        return choose_qparams(Range(self._range.lo * factor, self._range.hi * factor), self.spec)

    def hard(self) -> Tensor:
        """The values that the present `rounding` and `factor` give, rounded, in the dtype of the weight."""
        with torch.no_grad():
            if self._mode == "relaxed":
                return torch.where(self.rounding >= 0, self._low + self._gap, self._low).to(self._dtype)
            return self._rounded(self._weight + self.rounding * self._gap, self.params()).to(self._dtype)

    def soft(self) -> Tensor:
        """The values for training: `hard` with straight-through gradients, or, if relaxed, values between two codes."""
        if self._mode == "relaxed":
            return (self._low + self._share() * self._gap).to(self._dtype)
        x, params = self._weight + self.rounding * self._gap, self.params()
        with torch.no_grad():
            values = self._rounded(x, params)
            ends = [self._rounded(torch.full_like(x, end), params) for end in (-_MOST, _MOST)]
            inside = ((x >= ends[0]) & (x <= ends[1])).float()
            by_factor = values - x * inside
        blocks = self.spec.granularity.block_shape(x.shape)
        factor = of_elements(self.factor, x.shape, blocks).reshape(x.shape)
        # The value itself; its gradient by x is 1 inside, and by a factor f that of a step which grows with f.
        moved = (x - x.detach()) * inside + (factor / factor.detach() - 1) * by_factor
        return (values + moved).to(self._dtype)

    def _share(self) -> Tensor:
        return (self.rounding.sigmoid() * (_HIGH - _LOW) + _LOW).clamp(0, 1)

    def undecided(self, progress: float) -> Tensor:
        """AdaRound's regularizer: it counts values between two codes, more sharply as the power falls from 20 to 2."""
        if progress < 0.2:
            return self.rounding.new_zeros(())
        power = 2 + 18 * (1 - (progress - 0.2) / 0.8)
        return (1 - (2 * self._share() - 1).abs() ** power).sum()


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_CHECKS = 20
"""How often the loss over all inputs is measured with rounded weights."""
_REGULARIZER = 10.0  # its weight, where the first loss counts as 1 for every value, as in `adaround`


@dataclass(frozen=True)
class Preset:
    """A preset of `reconstruct`: the values that a block learns, and how.

    A learning rate is given as the distance that a value covers if all steps go in the same direction. Rates of steps
    by sign fall linearly to 0; rates of Adam are constant.

    Args:
        rounding: "offset": each weight moves by up to half of a step before it is rounded (AutoRound); "relaxed": each
            weight goes up or down, by a share that a regularizer drives to 0 or 1 (AdaRound); None: nearest.
        ranges: how far the factor of a group's range goes; 0.0 keeps ranges.
        inputs: how far the scale of a static input quantizer goes, as a share of the scale.
        reach: how far rounding goes: offsets in steps, relaxed shares before their sigmoid.
        sign: whether steps have the sign of the gradient and one length; else Adam.
    """

    rounding: Literal["offset", "relaxed"] | None
    ranges: float = 0.0
    inputs: float = 0.0
    reach: float = 0.5
    sign: bool = False

    def __post_init__(self) -> None:
        if self.rounding == "relaxed" and self.ranges:
            raise ConfigError('a preset with rounding="relaxed" rounds up or down by fixed scales; leave ranges at 0.0')


PRESETS = {
    # arXiv 2309.05516, where ranges reach 0.5: too far for few data.
    "autoround": Preset("offset", ranges=0.2, sign=True),
    "omniquant": Preset(None, ranges=0.5),  # its learned clipping, arXiv 2308.13137
    "brecq": Preset("relaxed", inputs=0.1, reach=12.0),  # arXiv 2102.05426
    "lsq": Preset(None, inputs=0.2),  # arXiv 1902.08153, on fixed weights
}
"""What is learned, by the names of the methods."""


def preset_of(given: str | Preset) -> Preset:
    """The preset called `given`; raises ConfigError if the name is unknown."""
    if isinstance(given, Preset):
        return given
    if given not in PRESETS:
        raise ConfigError(f"unknown preset {given!r}{nearest(str(given), [*PRESETS])}")
    return PRESETS[given]


def reconstruct_block(
    block: nn.Module,
    inputs: Sequence[Arguments],
    targets: Sequence[Tensor],
    preset: str | Preset = "autoround",
    *,
    iterations: int = 200,
    seed: int = 0,
    fixed: frozenset[nn.Parameter] = frozenset(),
) -> LayerResult:
    """Learn the rounding, ranges or input scales of a block, so that its output comes close to targets.

    Each iteration takes one of the inputs, in an order drawn by the seed. The best values of several checks over all
    inputs are kept, or the old values if none is better. The loss is the mean squared error.

    Args:
        block: a prepared module, calibrated if its inputs are quantized.
        inputs: for each call of the block, its positional and keyword arguments.
        targets: for each call, the tensor that the first float tensor of the output should be.
        preset: a name in `PRESETS`, or a `Preset`.
        iterations: how many steps.
        seed: the seed of the order.
        fixed: parameters that must stay as they are.

    Returns:
        The loss before and after, as shares of the mean square of the targets.

    Raises:
        ConfigError: an unknown preset, or different numbers of inputs and targets.
        CalibrationError: the loss is not finite.

    The block is unchanged after any error or interrupt.

    >>> torch.manual_seed(0).initial_seed()
    0
    >>> block = prepare(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), "INT4_WEIGHT_ONLY")
    >>> x = torch.randn(64, 16)
    >>> with fq.disabled(block):
    ...     wanted = block(x)
    >>> found = reconstruct_block(block, [((x,), {})], [wanted.detach()])
    >>> found.after < 0.8 * found.before
    True
    """
    chosen = preset_of(preset)
    if not inputs or len(inputs) != len(targets) or iterations < 1:
        raise ConfigError(
            f"{len(inputs)} inputs, {len(targets)} targets and {iterations} iterations: give one target for each "
            "input, at least one input and at least one iteration"
        )
    weights = learnable_weights(block, fixed) if chosen.rounding or chosen.ranges else {}
    steps = [  # the quantizers of activations with a scale that can be learned
        quantizer
        for quantizer in (quantizers(block).values() if chosen.inputs else ())
        if quantizer.kind is Kind.INPUT and quantizer.mode is Mode.QUANTIZE and quantizer.scale is not None
        if quantizer.spec.is_plain and not (quantizer.dynamic or quantizer.pinned)
    ]
    saved = state_of([block])
    with restore_on_error(saved), in_eval_mode(block):
        found = _Learning(block, list(zip(inputs, targets, strict=True)), chosen, weights, steps)
        if not weights and not steps:
            before = found.loss() / found.energy
            return LayerResult("", before, before, note="nothing of it can be learned by this preset")
        with found.learning():
            before, after = found.run(iterations, seed)
        if after < before:
            found.write()
        else:
            saved()
    return LayerResult("", before / found.energy, after / found.energy)


class _AtOneRate(NamedTuple):
    """Tensors that are learned at the same rate, between the same limits."""

    tensors: list[Tensor]
    rate: float
    lowest: float = -math.inf
    highest: float = math.inf


class _Learning:
    """The tensors that a block learns, and the loss that they give."""

    def __init__(
        self,
        block: nn.Module,
        examples: list[tuple[Arguments, Tensor]],
        preset: Preset,
        weights: dict[str, Any],
        steps: list[Quantizer],
    ) -> None:
        self._block, self._examples, self._preset, self._steps = block, examples, preset, steps
        self._weights = weights
        self._learned = {name: LearnedWeight(weight, preset.rounding) for name, weight in weights.items()}
        self.energy = max(sum(float(y.float().square().mean()) for _, y in examples) / len(examples), 1e-30)

    @contextmanager
    def learning(self) -> Iterator[None]:
        """A context in which weight quantizers are off, input scales are parameters, and gradients are in float."""
        own = [weight.quantizer for weight in self._weights.values()]
        layers = [layer for layer in self._block.modules() if isinstance(layer, (QuantizedLayer, Site))]
        with restore_after(in_order(attributes_of(own, "mode"), attributes_of(layers, "gradient"))):
            for quantizer in own:
                quantizer.mode = Mode.OFF
            for layer in layers:
                layer.gradient = None
            for quantizer in self._steps:
                quantizer.learn("lsq", gradient_factor=False)
            yield
            for quantizer in self._steps:
                quantizer.stop_learning()

    def loss(self) -> float:
        """The mean loss over all inputs with rounded weights; raises CalibrationError if it is not finite."""
        with torch.no_grad():
            values = {name: learned.hard() for name, learned in self._learned.items()}
            losses = [float(self._error(values, *example)) for example in self._examples]
        if not all(map(math.isfinite, losses)):
            raise CalibrationError("the error of the block's output is not finite; leave out the batch that causes it")
        return sum(losses) / len(losses)

    def _error(self, values: dict[str, Tensor], arguments: Arguments, target: Tensor) -> Tensor:
        # A copy, because a block may write into its arguments: an activation in place, a cache of keys.
        args, kwargs = copy.deepcopy(arguments)
        output = float_tensors(functional_call(self._block, values, args, kwargs))[0]
        return F.mse_loss(output.float(), target.float())

    def run(self, iterations: int, seed: int) -> tuple[float, float]:
        """Learn, and keep the best values of the checks; returns the loss before and after."""
        preset, groups = self._preset, list[_AtOneRate]()
        if preset.rounding:
            ends = (-0.5, 0.5) if preset.rounding == "offset" else (-math.inf, math.inf)
            groups.append(_AtOneRate([learned.rounding for learned in self._learned.values()], preset.reach, *ends))
        if preset.ranges:
            groups.append(_AtOneRate([learned.factor for learned in self._learned.values()], preset.ranges, 0.2, 1.2))
        for quantizer in self._steps:
            scale: Any = quantizer.learned.step  # type: ignore[union-attr]
            size = float(scale.detach().abs().mean())
            groups.append(_AtOneRate([scale], preset.inputs * size, float(scale.detach().min()) * 0.2))
        groups = [group for group in groups if group.tensors]
        tensors = [tensor for group in groups for tensor in group.tensors]
        before = best = self.loss()
        kept = [tensor.detach().clone() for tensor in tensors]
        generator, count = torch.Generator().manual_seed(seed), len(self._examples)
        rounds = [
            torch.randperm(count, generator=generator, device="cpu") for _ in range(math.ceil(iterations / count))
        ]
        order = torch.cat(rounds)[:iterations].tolist()  # all inputs in a drawn order, again and again
        options = [{"params": group.tensors, "lr": 0.0} for group in groups]
        optimizer = torch.optim.SGD(options, lr=1.0) if preset.sign else torch.optim.Adam(options)
        unit = max(1, sum(learned.rounding.numel() for learned in self._learned.values())) / max(before, 1e-30)
        for step, number in enumerate(order):
            with torch.enable_grad():
                values = {name: learned.soft() for name, learned in self._learned.items()}
                loss = self._error(values, *self._examples[number]) * unit
                if preset.rounding == "relaxed":
                    undecided = sum(learned.undecided(step / iterations) for learned in self._learned.values())
                    loss = loss + _REGULARIZER * undecided
                # Not backward(), which would leave gradients in the block's biases.
                found = torch.autograd.grad(loss, tensors, allow_unused=True)
            for tensor, gradient in zip(tensors, found, strict=True):
                gradient = torch.zeros_like(tensor) if gradient is None else gradient
                tensor.grad = gradient.sign() if preset.sign else gradient
            for group, options_of in zip(groups, optimizer.param_groups, strict=True):
                options_of["lr"] = group.rate / iterations * (2 - 2 * step / iterations if preset.sign else 1)
            optimizer.step()
            for group in groups:
                for tensor in group.tensors:
                    tensor.data.clamp_(group.lowest, group.highest)
            is_checked = (step + 1) % max(1, iterations // _CHECKS) == 0 or step + 1 == iterations
            if is_checked and (now := self.loss()) < best:
                best, kept = now, [tensor.detach().clone() for tensor in tensors]
        for tensor, value in zip(tensors, kept, strict=True):
            tensor.data.copy_(value)
            tensor.grad = None
        return before, best

    def write(self) -> None:
        """Write the learned values into the weights, with fixed codes."""
        for name, weight in self._weights.items():
            with torch.no_grad():
                params, values = self._learned[name].params(), self._learned[name].hard()
            write(name.rpartition(".")[0], weight, Choice(params, values, None, LayerResult(name)))


_CONTAINERS = (nn.Sequential, nn.ModuleList)


@accepts_wrapped_model
def reconstruct(  # noqa: PLR0913  all but the first four by name
    model: nn.Module,
    batches: Iterable[Any],
    blocks: Sequence[str] | None = None,
    preset: str | Preset = "autoround",
    *,
    iterations: int = 200,
    inputs: Inputs | None = None,
    forward: Forward | None = None,
    judge: Iterable[Any] | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Improvement:
    """Learn rounding, ranges or input scales block after block, by the error of each block's output.

    A block learns the output that the float model's block gives. Its inputs are those of the quantized model, in which
    earlier blocks have their learned values. The values stay in the weights with fixed scales. If a batch calls a block
    several times, this block and all later ones learn the output of the float block for quantized inputs.

    Args:
        model: a prepared model; calibrated, if its inputs are quantized.
        batches: as from a data loader; they are stored in a list and run side by side.
        blocks: names of modules; by default those of `find_blocks`.
        preset: "autoround", "omniquant", "brecq", "lsq", or a `Preset` of your own.
        iterations: the number of steps for each block; a step takes one batch.
        inputs, forward: as for `calibrate`.
        judge: batches that only judge the result, as for `improve`.
        seed: the seed of the order of batches.
        progress: whether to show a progress bar; by default on a terminal and in a notebook.

    Returns:
        The error of the model's output before and after, and the errors of the blocks. Learned values are undone if the
        error on the batches that judge does not fall, as by `improve`. Weights with other readers stay as they are; a
        line names them.

    Raises:
        ConfigError: an unknown preset or block, blocks inside of others, or a model without quantized weights.
        CalibrationError: no batches, inputs without calibration, or an error that is not finite (the block is named).

    The model is unchanged after any error or interrupt.

    >>> torch.manual_seed(0).initial_seed()
    0
    >>> net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> model = prepare(nn.Sequential(net, nn.Linear(4, 4)), "INT4_WEIGHT_ONLY")
    >>> found = fq.ptq.reconstruct(model, [torch.randn(32, 16) for _ in range(4)], ["0", "1"])
    >>> [block.layer for block in found.layers], found.remaining_error < 0.8
    (['0', '1'], True)
    """
    weights = calibrated_weights(model, "reconstruct")
    data = Batches(batches, "reconstruct", inputs=inputs, forward=forward, progress=progress)
    held_out, preset = HeldOut.of(data.kept(), EVERY_OF_CHOICES, judge), preset_of(preset)
    found, modules = find_blocks(model), dict(model.named_modules())
    if blocks is not None:
        if isinstance(blocks, str) or not blocks:
            raise ConfigError(f"blocks={blocks!r}: give a list of names, such as {[*found][:2]}")
        for name in blocks:
            if name not in modules:
                raise ConfigError(f"the model has no module {name!r} for blocks={nearest(str(name), [*modules])}")
            if not quantized_weights(modules[name]):
                raise ConfigError(f"the block {name!r} holds no quantized weights; leave it out")
        found = {name: modules[name] for name in blocks}
        for name, block in found.items():
            if inner := [other for other in blocks if other != name and found[other] in {*block.modules()}]:
                raise ConfigError(f"the block {inner[0]!r} is inside of {name!r}; leave one of them out")
    result, others, alone = Improvement(), list[str](), Ranks(None)
    before = {block: state_of([block]) for block in dict.fromkeys(found.values())}
    state = in_order(structure_of([model]), *before.values())
    with torch.inference_mode(mode=False), restore_on_error(state), evaluating(model), torch.no_grad():
        recorded = call_order(model, found, held_out.all)
        check_side_by_side(model, found, held_out.all, recorded)
        fixed = fixed_parameters(model, recorded.first)
        learn = partial(reconstruct_block, preset=preset, iterations=iterations, seed=seed, fixed=frozenset(fixed))
        judged, (with_float, late) = judge_of(model, held_out, recorded, alone), recorded.parts(alone)
        with FloatTwin(model, found, found, held_out.made, recorded, with_float) as stages:
            for stage, wanted in track(stages, "learning blocks", len(recorded.order), progress):
                block = found[stage.name]
                if wanted is not None and not _is_alike(wanted, stage):
                    wanted = None
                if wanted is None and stage.name not in late:
                    others.append(stage.name)
                targets = _targets(stage.name, block, (wanted or stage).all_calls, stages.in_float)
                stages.keep(stage.name, [weight.parameter for weight in quantized_weights(block).values()])
                if (learned := _learned(block, stage, targets, learn)) is not None:
                    result.layers.append(learned)
        undone = judged.keep_what_helps({found[row.layer]: before[found[row.layer]] for row in result.layers})
        reached = {row.layer for row in result.layers}
        judged.put_into(result, "reconstruct")
        result.take_back(name for name, block in found.items() if block in undone)
        result.layers += [LayerResult(name, note=MISSED) for name in found if name not in reached]
    if others:
        result.notes.append(
            f"{listed(others)}: learn the output of the float block for quantized inputs, because the float model "
            "calls other blocks there, or gives them other rows"
        )
    if late:
        result.notes.append(
            f"{len(late)} of {len(recorded.order)} blocks, from {module_name(late[0])} on, learn the output of the "
            f"float block for quantized inputs: a batch calls {module_name(late[0])} several times, and it learns "
            "before the last call"
        )
    result.notes += remarks_of(
        LayerResult(layer_of(path), remarks=[f"its values stay: {fixed[weight.parameter]}"])
        for path, weight in weights.items()
        if weight.parameter is not None and weight.parameter in fixed
    )
    return result


def _learned(
    block: nn.Module, stage: Stage, targets: Sequence[Tensor], learn: Callable[..., LayerResult]
) -> LayerResult | None:
    """Learn a block from the calls of a stage; returns the block's result, or None if no call has rows."""
    # An expert that gets no rows of a batch learns nothing from it.
    examples = [(call, y) for call, y in zip(stage.all_calls, targets, strict=True) if y.numel()]
    if not examples:
        return None
    try:
        with examples[0][0].surroundings():
            learned = learn(block, [(call.args, call.kwargs) for call, _ in examples], [y for _, y in examples])
    except CalibrationError as error:
        raise CalibrationError(f"{module_name(stage.name)}: {error}") from error
    return replace(learned, layer=stage.name)


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The path and module of each block: items of lists and sequences with quantized weights, and layers elsewhere.

    A sequence inside of a sequence is no block, but is searched, too; any other item is a block, whatever it holds.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.TransformerEncoderLayer(2, 1, 4)))
    >>> list(find_blocks(prepare(net, "INT4_WEIGHT_ONLY")))
    ['0', '1.0', '1.1']
    """
    holders = {weight.layer for weight in quantized_weights(model).values()}
    layers = {layer for layer in holders if isinstance(layer, QuantizedLayer)}
    found: dict[str, nn.Module] = {}

    def look(name: str, module: nn.Module, *, is_item: bool) -> None:
        is_container = type(module) in _CONTAINERS
        if module in layers or (is_item and not is_container):
            if module not in found.values() and not holders.isdisjoint(module.modules()):
                found[name] = module
            return
        for key, child in module.named_children():
            if key != SITES:
                look(f"{name}.{key}" if name else key, child, is_item=is_container)

    look("", model, is_item=False)
    return found


def _targets(
    name: str, block: nn.Module, calls: Sequence[LayerCall], in_float: Callable[[Callable[[], list[Any]]], list[Any]]
) -> list[Tensor]:
    """The first float tensor that a block in float returns for each call."""

    def called(call: LayerCall) -> Any:
        args, kwargs = copy.deepcopy((call.args, call.kwargs))  # the block may write into its arguments
        with call.surroundings():
            return block(*args, **kwargs)

    outputs = in_float(lambda: [called(call) for call in calls])
    if without := [output for output in outputs if not float_tensors(output)]:
        what = f"returns a {type(without[0]).__name__} without a float tensor"
        raise ConfigError(f"the block {name!r} {what}; leave it out of blocks=")
    return [float_tensors(output)[0] for output in outputs]


def _is_alike(one: Stage, other: Stage) -> bool:
    """Whether the inputs of a block in two models have the same shapes and differ little."""
    gap = size = 0.0
    for own, seen in zip(one.all_calls, other.all_calls, strict=True):
        firsts, seconds = (float_tensors((call.args, call.kwargs)) for call in (own, seen))
        if [x.shape for x in firsts] != [x.shape for x in seconds]:
            return False
        for x, y in zip(firsts[:1], seconds[:1], strict=True):
            gap += float((x.double() - y.double()).square().sum())
            size += float((x.double() - x.double().mean()).square().sum())
    return gap <= MOST_DRIFT * size or not size
