"""A format for each layer under a budget: what each choice costs in the output, and the best mix for every size."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from fakequant.data.arguments import Metric, check_float_model
from fakequant.data.batches import Batches, Forward, Inputs, KeptBatches
from fakequant.errors import ConfigError
from fakequant.model.calibration.calibrate import calibrate
from fakequant.model.config import Config, Rule
from fakequant.model.modes import evaluating
from fakequant.model.prepare import prepare
from fakequant.model.presets import find_preset
from fakequant.model.run.outputs import OutputDistance
from fakequant.model.run.queries import read_together, weight_readers
from fakequant.model.run.recorded import Recording
from fakequant.model.run.recording import record
from fakequant.model.sizes import spec_bits
from fakequant.nn.products.product import MatrixProduct
from fakequant.nn.products.windows import WindowProduct
from fakequant.nn.quantized.forms import product_class
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.ptq.formats.losses import arriving_errors, divergence, losses_alone
from fakequant.ptq.formats.mixes import Allocation, Score, Scores
from fakequant.text import module_name


def scores(
    model: nn.Module,
    batches: Iterable[Any],
    choices: Sequence[str] | str = ("INT8", "INT4_GROUP32"),
    *,
    measure: Metric | str | tuple[str, int] | None = None,
    inputs: Inputs | None = None,
    forward: Forward | None = None,
    progress: bool | None = None,
) -> Scores:
    """Measure what every choice costs every layer, each alone, in the output of the model.

    The error that a choice makes in a layer's output is multiplied with the gradient of random directions of the
    model's output: the mean of squares estimates the squared error that arrives there (Hutchinson's estimator), as a
    share of the output's energy; of several outputs it is the mean share.
    With `measure` the model runs with each layer and choice alone instead, and the losses of a mix add up.

    Args:
        model: in float; it stays as it is.
        batches: what a data loader gives; a few are enough.
        choices: names of presets.
        measure: "kl", the divergence from the float model's logits [..., classes]; ("kl", 1) where axis 1 has the
            classes, as in maps [N, classes, H, W]; or called as measure(model), smaller is better, such as 1 less an
            accuracy. Losses of `Scores` and `Allocation` are then what is added to it.
        inputs, forward, progress: as for `calibrate`.

    Raises:
        ConfigError: an unknown preset or measure, no preset, or a model without linear layers and convolutions.
        CalibrationError: no batches, or an output with NaN (numbers the batch).

    >>> torch.manual_seed(0).initial_seed()
    0
    >>> model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    >>> found = scores(model, [torch.randn(16, 32)], ["INT8_WEIGHT_ONLY", "INT4_GROUP32"])
    >>> found.allocate(bits=6).choices
    {'0': 'INT4_GROUP32', '2': 'INT8_WEIGHT_ONLY'}
    """
    check_float_model(model, "scores", "scores(model, batches)", "score the layers of")
    given = Batches(batches, "scores", inputs=inputs, forward=forward, progress=progress).kept()
    choices = [choices] if isinstance(choices, str) else [*choices]
    if not choices:
        raise ConfigError('choices is empty; give names of presets, such as ["INT8", "INT4_GROUP32"]')
    layers: dict[str, Any] = {name: layer for name, layer in model.named_modules() if _is_scored(layer)}
    if not layers:
        raise ConfigError("the model has no linear layers and no convolutions to choose formats for")
    quantized = {name: quantized_copy(model, find_preset(name), given) for name in choices}
    with evaluating(model):
        ran = record(model, lambda: given.run_first(model))
        siblings = read_together(ran, layers)
        reached = [layer for layer in layers if layer in siblings]
        if measure is None:
            arriving = arriving_errors(model, layers, quantized, given)
        else:
            name, axis = measure if isinstance(measure, tuple) and len(measure) == 2 else (measure, None)
            chosen = divergence(model, given, axis) if name == "kl" else measure
            if not callable(chosen):
                raise ConfigError(f'expected measure="kl", ("kl", axis) or a function of the model, got {measure!r}')
            arriving = losses_alone(model, quantized, reached, chosen, progress)
    products = {layer: ran.multiplications[layer] for layer in layers}
    weights, found = _weights(layers, reached), dict[str, dict[str, Score]]()
    for layer in reached:
        twins = {name: twin.get_submodule(layer) for name, twin in quantized.items()}
        found[layer] = {
            name: _score(own, float(arriving[layer, name].square().mean()), products[layer], weights[layer])
            for name, own in twins.items()
            if isinstance(own, QuantizedLayer) and own.weight_quantizer is not None
        }
    return Scores(
        found,
        weights,
        _ties(layers, siblings),
        arriving,
        products,
        _left(model, reached, ran),
        _bytes_in_float(model, [layers[layer] for layer in reached]),
        frozenset(layer for layer in reached if _parameter(layers[layer]) is None),
    )


def _parameter(layer: nn.Module) -> nn.Parameter | None:
    """The weight of a layer; None where it is computed."""
    return layer._parameters.get("weight")


def _weights(layers: Mapping[str, Any], reached: Sequence[str]) -> dict[str, int]:
    """How many weights each layer has; 0 where an earlier one holds the same parameter."""
    found, seen = dict[str, int](), set[nn.Parameter]()
    for name in reached:
        parameter = _parameter(layers[name])
        found[name] = 0 if parameter in seen else layers[name].weight.numel()
        seen |= set() if parameter is None else {parameter}
    return found


def _ties(layers: Mapping[str, Any], siblings: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """The groups of layers that get one choice: they read the same tensor, or hold the same parameter."""
    holders: dict[nn.Parameter, list[str]] = {}
    for name in siblings:
        if (parameter := _parameter(layers[name])) is not None:
            holders.setdefault(parameter, []).append(name)
    found = {name: [name] for name in siblings}
    for group in (*siblings.values(), *holders.values()):
        joined = list(dict.fromkeys(other for name in group for other in found[name]))
        found |= dict.fromkeys(joined, joined)
    return [list(group) for group in dict.fromkeys(map(tuple, found.values()))]


def _bytes_in_float(model: nn.Module, scored: Sequence[nn.Module]) -> dict[str, int]:
    """The bytes of all other parameters than the weights of layers with scores, by the module that holds them."""
    found, seen = dict[str, int](), {_parameter(layer) for layer in scored}
    for path, module in model.named_modules():
        own = set(module.parameters(recurse=False)) - seen
        seen |= own
        if own:
            found[path] = sum(p.numel() * p.element_size() for p in own)
    return found


def _left(model: nn.Module, reached: Sequence[str], recording: Recording) -> dict[str, str]:
    """Why layers with weights of two axes or more have no scores.

    Args:
        recording: of the first batch.
    """
    matrices = {
        name: module
        for name, module in model.named_modules()
        if any(p is not None and p.dim() > 1 for p in module._parameters.values()) and name not in reached
    }
    uncalled = [module for module in matrices.values() if _is_scored(module)]
    readers = weight_readers(model, recording, uncalled)

    def why(module: nn.Module) -> str:
        if module in readers:
            return f"{module_name(readers[module])} uses its weight in float"
        return "the first batch does not reach it" if _is_scored(module) else f"a {type(module).__name__} has no score"

    return {name: why(module) for name, module in matrices.items()}


def _score(layer: Any, loss: float, products: int, weights: int) -> Score:
    """The score of a quantized layer.

    Args:
        layer: quantized.
        loss: of the model's output.
        products: how many multiply-accumulates it has for the first batch.
        weights: how many weights it has; 0 where an earlier layer holds them.
    """
    weight, x = layer.weight_quantizer.spec, layer.input_quantizer
    bits = spec_bits(weight, tuple(layer.weight.shape))
    each = weight.format.bits * (32 if x is None else x.spec.format.bits)
    return Score(loss, bits.codes + bits.scales if weights else 0, products * each)


def quantized_copy(model: nn.Module, config: Config, batches: KeptBatches) -> nn.Module:
    """A quantized copy of a model, calibrated and in eval mode; what has no scores stays in float."""
    twin = prepare(copy.deepcopy(model), config.with_rule(*_left_in_float(model)))
    calibrate(twin, batches, forward=batches.run, progress=False, unseen="float")
    return twin.eval()


def _is_scored(module: nn.Module) -> bool:
    return product_class(module) in (MatrixProduct, WindowProduct)


def _left_in_float(model: nn.Module) -> list[Rule]:
    """Leave in float what the scores do not speak of, purposely, so that nothing warns of it."""
    kinds = {type(module).__name__ for module in model.modules() if not _is_scored(module)}
    return [Rule("*", layers=tuple(sorted(kinds)), optional=True)] if kinds else []


def verify(
    model: nn.Module,
    batches: Iterable[Any],
    allocations: Iterable[Allocation],
    *,
    inputs: Inputs | None = None,
    forward: Forward | None = None,
) -> list[Allocation]:
    """The allocations with the measured error of the output of a model with their choices.

    Args:
        model: in float; it stays as it is.
        batches: to calibrate and to measure on.
        allocations: such as points of `Scores.curve`.
        inputs, forward: as for `calibrate`.
    """
    given, found = Batches(batches, "verify", inputs=inputs, forward=forward).kept(), []
    outputs = OutputDistance(model, given)
    outputs.check()
    for allocation in allocations:
        twin = quantized_copy(model, allocation.config(), given)
        found.append(replace(allocation, measured=outputs.of(twin).mean))
    return found
