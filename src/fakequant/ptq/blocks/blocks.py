"""Learn the blocks of a model one after the other, each by the inputs that the chosen ones before it give."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fakequant.data.batches import Batches, Forward, Inputs
from fakequant.data.progress import track
from fakequant.distributed import Together
from fakequant.errors import CalibrationError, ConfigError, nearest
from fakequant.model.modes import evaluating
from fakequant.model.run.outputs import float_tensors
from fakequant.model.weights import quantized_weights
from fakequant.nn.paths import layer_of
from fakequant.nn.products.product import Product
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.sites.sites import SITES
from fakequant.nn.wrappers import unwraps
from fakequant.ptq.blocks.reconstruction import Preset, preset_of, reconstruct_block
from fakequant.ptq.improving.effect import Effect, Split
from fakequant.ptq.inputs.beside import Beside
from fakequant.ptq.inputs.call import LayerCall
from fakequant.ptq.inputs.order import CallOrder, call_order
from fakequant.ptq.inputs.stream import Stage, check_side_by_side
from fakequant.ptq.results import MISSED, Improvement, LayerResult, remarks_of
from fakequant.ptq.solvers.sums import MOST_DRIFT
from fakequant.ptq.weights import calibrated_weights, fixed_parameters
from fakequant.restore import in_order, restore_on_error, state_of, structure_of
from fakequant.text import listed, module_name

_CONTAINERS = (nn.Sequential, nn.ModuleList)


@unwraps
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

    The wanted output of a block is that of the float model. Its inputs are those of the quantized model, whose earlier
    blocks have their learned values. The values stay in the weights with fixed scales. A block that a batch calls
    several times, and those after it, learn the output of the float block for their quantized inputs.

    Args:
        model: prepared, and calibrated if its inputs are quantized.
        batches: what a data loader gives; they are kept as a list and run side by side.
        blocks: names of modules; by default those of `find_blocks`.
        preset: "autoround", "omniquant", "brecq", "lsq", or a `Preset` of your own.
        iterations: for each block; one takes one batch.
        inputs, forward: as for `calibrate`.
        judge: batches that teach nothing and judge, as for `improve`.
        seed: of the order of batches.
        progress: whether to show a progress bar; by default on a terminal and in a notebook.

    Returns:
        The error of the model's output before and after, and those of the blocks. What was learned goes back where the
        error on the batches that judge does not fall, as by `improve`. Weights that something else reads too stay as
        they are; a line names them.

    Raises:
        ConfigError: an unknown preset or block, blocks inside of others, or a model without quantized weights.
        CalibrationError: no batches, inputs that are not calibrated, or an error that is not finite (names the block).

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
    split, preset = Split.of(data, judge), preset_of(preset)
    found = find_blocks(model) if blocks is None else _named(model, blocks)
    result, others, alone = Improvement(), list[str](), Together(None)
    before = {block: state_of([block]) for block in dict.fromkeys(found.values())}
    state = in_order(structure_of([model]), *before.values())
    with torch.inference_mode(mode=False), restore_on_error(state), evaluating(model), torch.no_grad():
        judging = split.judging(alone)
        recorded = call_order(model, found, split.all)
        check_side_by_side(model, found, split.all, recorded)
        fixed = fixed_parameters(model, recorded.first)
        learn = partial(reconstruct_block, preset=preset, iterations=iterations, seed=seed, fixed=frozenset(fixed))
        effect, (with_float, late) = Effect(model, judging, recorded, alone), recorded.parts(alone)
        with Beside(model, found, found, split.fit, recorded, with_float) as stages:
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
        undone = effect.keep_what_helps({found[row.layer]: before[found[row.layer]] for row in result.layers})
        reached = {row.layer for row in result.layers}
        result.take_back(name for name, block in found.items() if block in undone)
        effect.put_into(result, "reconstruct")
        result.layers += [LayerResult(name, note=MISSED) for name in found if name not in reached]
        result.notes += _notes(others, recorded, late) + _notes_of_fixed(weights, fixed)
    return result


def _notes(others: Sequence[str], recorded: CallOrder, late: Sequence[str]) -> list[str]:
    """Which blocks learn another target than what the float model gives."""
    notes = list[str]()
    if others:
        notes.append(
            f"{listed(others)}: learn what they give in float for their quantized inputs, because the float model "
            "calls other blocks there, or gives them other rows"
        )
    if late:
        notes.append(
            f"{len(late)} of {len(recorded.order)} blocks, from {module_name(late[0])} on, learn what they give in "
            "float for their quantized inputs: a batch calls it several times, and it learns before the last call"
        )
    return notes


def _notes_of_fixed(weights: Mapping[str, Product], fixed: Mapping[nn.Parameter, str]) -> list[str]:
    """Which weights keep their values, and why."""
    return remarks_of(
        LayerResult(layer_of(path), remarks=[f"its values stay: {fixed[weight.parameter]}"])
        for path, weight in weights.items()
        if weight.parameter is not None and weight.parameter in fixed
    )


def _learned(
    block: nn.Module, stage: Stage, targets: Sequence[Tensor], learn: Callable[..., LayerResult]
) -> LayerResult | None:
    """What a block learned at its first stage; None where all its inputs are empty."""
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
    """The items of lists and sequences of modules that hold quantized weights, and quantized layers outside of them.

    A sequence in a sequence is looked into; any other item is a block, whatever it holds.

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


def _named(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    modules = dict(model.named_modules())
    if isinstance(names, str) or not names:
        raise ConfigError(f"blocks={names!r}: give a list of names, such as {[*find_blocks(model)][:2]}")
    for name in names:
        if name not in modules:
            raise ConfigError(f"the model has no module {name!r} for blocks={nearest(str(name), [*modules])}")
        if not quantized_weights(modules[name]):
            raise ConfigError(f"the block {name!r} holds no quantized weights; leave it out")
    found = {name: modules[name] for name in names}
    for name, block in found.items():
        for other, inner in found.items():
            if name != other and inner in set(block.modules()):
                raise ConfigError(f"the block {other!r} is inside of {name!r}; leave one of them out")
    return found


def _targets(
    name: str, block: nn.Module, calls: Sequence[LayerCall], in_float: Callable[[Callable[[], list[Any]]], list[Any]]
) -> list[Tensor]:
    """What a block gives in float for calls."""
    outputs = in_float(lambda: [_called(block, call) for call in calls])
    if without := [output for output in outputs if not float_tensors(output)]:
        raise ConfigError(f"the block {name!r} returns a {type(without[0]).__name__} without a float tensor")
    return [float_tensors(output)[0] for output in outputs]


def _called(block: nn.Module, call: LayerCall) -> Any:
    """What a block gives for a copy of the arguments of a call, which it may write into."""
    args, kwargs = copy.deepcopy((call.args, call.kwargs))
    with call.surroundings():
        return block(*args, **kwargs)


def _is_alike(one: Stage, other: Stage) -> bool:
    """Whether a block gets inputs of the same shapes in two models, and not of unrelated rows."""
    gap = size = 0.0
    for own, seen in zip(one.all_calls, other.all_calls, strict=True):
        firsts, seconds = (float_tensors((call.args, call.kwargs)) for call in (own, seen))
        if [x.shape for x in firsts] != [x.shape for x in seconds]:
            return False
        for x, y in zip(firsts[:1], seconds[:1], strict=True):
            gap += float((x.double() - y.double()).square().sum())
            size += float((x.double() - x.double().mean()).square().sum())
    return gap <= MOST_DRIFT * size or not size
