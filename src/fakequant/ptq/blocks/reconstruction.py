"""Learn the rounding, the ranges and the input scales of one block by the error of its output.

One engine serves the published methods; a preset says what is learned, and how. Only the values of the block's
quantized weights and the scales change: biases and normalisations stay.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fakequant.errors import CalibrationError, ConfigError, nearest
from fakequant.model.modes import in_eval_mode
from fakequant.model.run.outputs import float_tensors
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.quantizer import Kind, Mode, Quantizer, quantizers
from fakequant.nn.sites.sites import Site
from fakequant.ptq.blocks.learned_weight import LearnedWeight, learnable_weights
from fakequant.ptq.results import LayerResult
from fakequant.ptq.solvers.layer import Choice, write
from fakequant.restore import attributes_of, in_order, restore_after, restore_on_error, state_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_CHECKS = 20
"""How often the loss over all inputs is measured with the values that a weight would get."""
_REGULARIZER = 10.0  # its weight, where the first loss counts as 1 for every value, as in `adaround`


@dataclass(frozen=True)
class Preset:
    """What a block learns.

    Learning rates are given by how far a value can go if all steps have one direction. Those of steps by sign fall to 0
    along a line; those of Adam stay.

    Args:
        rounding: "offset": each weight moves by up to half of a step before it is rounded (AutoRound); "relaxed": each
            goes up or down, by a share that a regularizer drives to 0 or 1 (AdaRound); None: nearest.
        ranges: how far the factor of a group's range goes; 0.0 keeps ranges.
        inputs: the same of the scale of a static input quantizer, as a share of it.
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
            raise ConfigError('a preset with rounding="relaxed" goes up or down on a fixed grid; leave ranges at 0.0')


PRESETS = {
    # arXiv 2309.05516, where ranges reach 0.5: too far for few data.
    "autoround": Preset("offset", ranges=0.2, sign=True),
    "omniquant": Preset(None, ranges=0.5),  # its learned clipping, arXiv 2308.13137
    "brecq": Preset("relaxed", inputs=0.1, reach=12.0),  # arXiv 2102.05426
    "lsq": Preset(None, inputs=0.2),  # arXiv 1902.08153, on fixed weights
}
"""What is learned, by the names of the methods."""


def preset_of(given: str | Preset) -> Preset:
    """The preset of a name.

    Raises:
        ConfigError: an unknown name.
    """
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
    """Learn what the quantizers of a block do to its weights, so that its output comes close to targets.

    Each iteration takes one of the inputs, in an order drawn by the seed. The best values of several checks over all
    inputs stay, and those from before where nothing is better. The loss is the mean squared error.

    Args:
        block: a prepared module, calibrated if its inputs are quantized.
        inputs: positional and keyword arguments of its calls.
        targets: for each call the first float tensor of the output that is wanted.
        preset: one of `PRESETS`, or one of your own.
        iterations: how many steps.
        seed: of the order.
        fixed: parameters that must stay as they are.

    Returns:
        The loss before and after, as shares of the mean square of the targets.

    Raises:
        ConfigError: an unknown preset, or numbers of inputs and targets that differ.
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
            "input, and at least one of all"
        )
    weights = learnable_weights(block, fixed) if chosen.rounding or chosen.ranges else {}
    steps = _learnable_inputs(block) if chosen.inputs else []
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


def _learnable_inputs(block: nn.Module) -> list[Quantizer]:
    """The quantizers of activations with a scale that can be learned."""
    return [
        quantizer
        for quantizer in quantizers(block).values()
        if quantizer.kind is Kind.INPUT and quantizer.mode is Mode.QUANTIZE and quantizer.scale is not None
        if quantizer.spec.is_plain and not (quantizer.dynamic or quantizer.pinned)
    ]


class _AtOneRate(NamedTuple):
    """Tensors that are learned at one rate."""

    tensors: list[Tensor]
    rate: float
    lowest: float = -math.inf
    highest: float = math.inf


class _Learning:
    """The tensors that a block learns, and its loss as a function of them."""

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
        """A context in which weights are computed here, and input scales are parameters; gradients are in float."""
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
        """The loss over all inputs, with the values that the weights would get."""
        with torch.no_grad():
            values = {name: learned.hard() for name, learned in self._learned.items()}
            losses = [float(self._error(values, *example)) for example in self._examples]
        if not all(map(math.isfinite, losses)):
            raise CalibrationError("the error of its output is not finite; leave out the batch that makes it")
        return sum(losses) / len(losses)

    def _error(self, values: dict[str, Tensor], arguments: Arguments, target: Tensor) -> Tensor:
        # A copy, because a block may write into its arguments: an activation in place, a cache of keys.
        args, kwargs = copy.deepcopy(arguments)
        output = float_tensors(functional_call(self._block, values, args, kwargs))[0]
        return F.mse_loss(output.float(), target.float())

    def run(self, iterations: int, seed: int) -> tuple[float, float]:
        """Learn, and go back to the best values; the loss before and after."""
        groups = self._groups()
        tensors = [tensor for group in groups for tensor in group.tensors]
        before = best = self.loss()
        kept = [tensor.detach().clone() for tensor in tensors]
        order = _drawn(len(self._examples), iterations, seed)
        options = [{"params": group.tensors, "lr": 0.0} for group in groups]
        optimizer = torch.optim.SGD(options, lr=1.0) if self._preset.sign else torch.optim.Adam(options)
        unit = self._count() / max(before, 1e-30)
        for step, number in enumerate(order):
            self._step(tensors, self._examples[number], unit, step / iterations)
            for group, options_of in zip(groups, optimizer.param_groups, strict=True):
                options_of["lr"] = group.rate / iterations * (2 - 2 * step / iterations if self._preset.sign else 1)
            optimizer.step()
            for group in groups:
                for tensor in group.tensors:
                    tensor.data.clamp_(group.lowest, group.highest)
            is_checked = (step + 1) % max(1, iterations // _CHECKS) == 0 or step + 1 == iterations
            if is_checked and (loss := self.loss()) < best:
                best, kept = loss, [tensor.detach().clone() for tensor in tensors]
        for tensor, value in zip(tensors, kept, strict=True):
            tensor.data.copy_(value)
            tensor.grad = None
        return before, best

    def _step(self, tensors: list[Tensor], example: tuple[Arguments, Tensor], unit: float, progress: float) -> None:
        """Set the gradients of one input's loss."""
        with torch.enable_grad():
            values = {name: learned.soft() for name, learned in self._learned.items()}
            loss = self._error(values, *example) * unit
            if self._preset.rounding == "relaxed":
                loss = loss + _REGULARIZER * sum(learned.undecided(progress) for learned in self._learned.values())
            # Not backward(), which would leave gradients in the block's biases.
            found = torch.autograd.grad(loss, tensors, allow_unused=True)
        for tensor, gradient in zip(tensors, found, strict=True):
            gradient = torch.zeros_like(tensor) if gradient is None else gradient
            tensor.grad = gradient.sign() if self._preset.sign else gradient

    def _groups(self) -> list[_AtOneRate]:
        preset, groups = self._preset, []
        if preset.rounding:
            ends = (-0.5, 0.5) if preset.rounding == "offset" else (-math.inf, math.inf)
            groups.append(_AtOneRate([learned.rounding for learned in self._learned.values()], preset.reach, *ends))
        if preset.ranges:
            groups.append(_AtOneRate([learned.factor for learned in self._learned.values()], preset.ranges, 0.2, 1.2))
        for quantizer in self._steps:
            step: Any = quantizer.learned.step  # type: ignore[union-attr]
            size = float(step.detach().abs().mean())
            groups.append(_AtOneRate([step], preset.inputs * size, float(step.detach().min()) * 0.2))
        return [group for group in groups if group.tensors]

    def _count(self) -> int:
        return max(1, sum(learned.rounding.numel() for learned in self._learned.values()))

    def write(self) -> None:
        """Put the values into the weights."""
        for name, weight in self._weights.items():
            with torch.no_grad():
                params, values = self._learned[name].params(), self._learned[name].hard()
            write(name.rpartition(".")[0], weight, Choice(params, values, None, LayerResult(name)))


def _drawn(count: int, iterations: int, seed: int) -> list[int]:
    """Numbers of inputs: all of them in a drawn order, again and again."""
    generator = torch.Generator().manual_seed(seed)
    rounds = [torch.randperm(count, generator=generator) for _ in range(math.ceil(iterations / count))]
    return torch.cat(rounds)[:iterations].tolist()
