"""Learn the blocks of a model one after the other, each by the inputs that the chosen ones before it give."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fakequant.errors import CalibrationError, ConfigError, nearest
from fakequant.model.batches import Forward, Inputs, refuse_tensor, runner
from fakequant.model.failures import naming
from fakequant.model.modes import disabled, evaluating
from fakequant.model.outputs import float_tensors
from fakequant.model.progress import track
from fakequant.model.ties import tied_weights
from fakequant.model.weights import quantized_weights
from fakequant.nn.quantizer import quantizers
from fakequant.ptq.reconstruction import Arguments, Preset, preset_of, reconstruct_block
from fakequant.ptq.results import Improvement, LayerResult
from fakequant.ptq.stream import Stage, Stream, record
from fakequant.restore import restore_on_error, state_of

_CONTAINERS = (nn.Sequential, nn.ModuleList)


def reconstruct(  # noqa: PLR0913  all but the first four by name
    model: nn.Module,
    batches: Iterable[Any],
    blocks: Sequence[str] | None = None,
    preset: str | Preset = "autoround",
    *,
    iterations: int = 200,
    inputs: Inputs | None = None,
    forward: Forward | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Improvement:
    """Learn rounding, ranges or input scales block after block, by the error of each block's output.

    The wanted output of a block is that of the float model. Its inputs are those of the quantized model, whose earlier
    blocks have their learned values. The values stay in the weights with fixed scales.

    Args:
        model: prepared, and calibrated if its inputs are quantized.
        batches: what a data loader gives; they are kept as a list and run side by side.
        blocks: names of modules; by default those of `find_blocks`.
        preset: "autoround", "omniquant", "brecq", "lsq", or a `Preset` of your own.
        iterations: for each block; one takes one batch.
        inputs: which part of a batch the model gets, as for `calibrate`.
        forward: called as forward(model, batch) instead of the model.
        seed: of the order of batches.
        progress: whether to show a progress bar; by default on a terminal and in a notebook.

    Returns:
        The errors of the blocks before and after. Weights that layers share stay as they are.

    Raises:
        ConfigError: an unknown preset or block, blocks inside of others, or a model without quantized weights.
        CalibrationError: no batches, inputs that are not calibrated, or an error that is not finite (names the block).

    The model is unchanged after any error or interrupt.

    >>> torch.manual_seed(0).initial_seed()
    0
    >>> net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> model = prepare(nn.Sequential(net, nn.Linear(4, 4)), "INT4_WEIGHT_ONLY")
    >>> found = fq.ptq.reconstruct(model, [torch.randn(32, 16) for _ in range(4)], ["0", "1"])
    >>> [block.layer for block in found.layers], found.left < 0.8
    (['0', '1'], True)
    """
    refuse_tensor(batches, "reconstruct")
    given, preset = list(batches), preset_of(preset)
    _check(model, given)
    found = find_blocks(model) if blocks is None else _named(model, blocks)
    tied = [weight.parameter for tie in tied_weights(model) for weight in tie.values()]
    shared = frozenset(parameter for parameter in tied if parameter is not None)
    run, result = naming(runner(inputs, forward), given), Improvement()
    with restore_on_error(state_of([model])), evaluating(model), torch.no_grad():
        recorded = record(model, found, run, given)
        with Stream(model, found, run, given, recorded) as own, Stream(model, found, run, given, recorded) as floats:
            done: set[str] = set()
            float_model = _FloatModel(model, floats)
            for stage in track(own, "learning blocks", len(recorded.order), progress):
                arguments, targets = _arguments(stage), float_model.targets(found[stage.name], stage)
                if stage.name in done:  # batches with other orders of calls come to a block that has its values
                    continue
                done.add(stage.name)
                try:
                    learned = reconstruct_block(
                        found[stage.name], arguments, targets, preset, iterations=iterations, seed=seed, shared=shared
                    )
                except CalibrationError as error:
                    raise CalibrationError(f"{stage.name or 'the model'}: {error}") from error
                result.layers.append(replace(learned, layer=stage.name))
    missed = [name for name in found if name not in recorded.order]
    result.layers += [LayerResult(name, note="no batch reaches it") for name in missed]
    return result


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The items of lists and sequences of modules that hold quantized weights, and quantized layers outside of them.

    A sequence in a sequence is looked into; any other item is a block, whatever it holds.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.TransformerEncoderLayer(2, 1, 4)))
    >>> list(find_blocks(prepare(net, "INT4_WEIGHT_ONLY")))
    ['0', '1.0', '1.1']
    """
    holders = {weight.layer for weight in quantized_weights(model).values()}
    found: dict[str, nn.Module] = {}

    def look(name: str, module: nn.Module, *, is_item: bool) -> None:
        is_container = type(module) in _CONTAINERS
        if module in holders or (is_item and not is_container):
            if module not in found.values() and not holders.isdisjoint(module.modules()):
                found[name] = module
            return
        for key, child in module.named_children():
            look(f"{name}.{key}" if name else key, child, is_item=is_container)

    look("", model, is_item=False)
    return found


def _named(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    modules = dict(model.named_modules())
    if isinstance(names, str):
        raise ConfigError(f"blocks={names!r}: give a list of names, such as [{names!r}]")
    for name in names:
        if name not in modules:
            raise ConfigError(f"the model has no module {name!r} for blocks={nearest(name, [*modules])}")
        if not quantized_weights(modules[name]):
            raise ConfigError(f"the block {name!r} holds no quantized weights; leave it out")
    found = {name: modules[name] for name in names}
    for name, block in found.items():
        for other, inner in found.items():
            if name != other and inner in set(block.modules()):
                raise ConfigError(f"the block {other!r} is inside of {name!r}; leave one of them out")
    return found


def _check(model: nn.Module, given: list[Any]) -> None:
    if not given:
        raise CalibrationError("reconstruct needs batches, and got none")
    if not quantized_weights(model):
        raise ConfigError("the model has no quantized weights; call fakequant.prepare(model, config) first")
    if missing := [name for name, quantizer in quantizers(model).items() if quantizer.needs_calibration]:
        raise CalibrationError(
            f"{len(missing)} input quantizers are not calibrated, the first is {missing[0]}; call "
            "fakequant.calibrate(model, batches) first"
        )


class _FloatModel:
    """The blocks of the float model: it runs past each block before the block's weights change."""

    def __init__(self, model: nn.Module, stream: Stream) -> None:
        self._model, self._stream = model, stream
        self._next: Stage | None = None
        self._started = False

    def targets(self, block: nn.Module, stage: Stage) -> list[Tensor]:
        """What a block gives in the float model for the calls of a stage."""
        with disabled(self._model):
            own = self._next if self._started else self._stream.advance()
            self._started = True
            if own is None or _counts(own) != _counts(stage):
                raise CalibrationError(
                    f"the float model calls other blocks than the quantized one, at {stage.name}; give blocks "
                    "that every batch reaches in one order"
                )
            outputs = [block(*args, **kwargs) for args, kwargs in copy.deepcopy(_arguments(own))]
            self._next = self._stream.advance()
        if without := [output for output in outputs if not float_tensors(output)]:
            raise ConfigError(f"the block {stage.name!r} returns a {type(without[0]).__name__} without a float tensor")
        return [float_tensors(output)[0] for output in outputs]


def _arguments(stage: Stage) -> list[Arguments]:
    return [(call.args, call.kwargs) for calls in stage.calls.values() for call in calls]


def _counts(stage: Stage) -> tuple[str, dict[int, int]]:
    return stage.name, {number: len(calls) for number, calls in stage.calls.items()}
