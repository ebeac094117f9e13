"""From a float model to a quantized one and on: prepare, calibrate, fold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar, cast

import torch
from torch import nn

from fakequant.calibration import Calibrator, make_calibrator
from fakequant.errors import CalibrationError, ConfigError, ShapeError
from fakequant.model.batches import Forward, refuse_tensor, run_batch
from fakequant.model.config import Config, Rule, TensorConfig
from fakequant.model.presets import find_preset
from fakequant.model.progress import track
from fakequant.nn.fast_paths import leave_fast_paths
from fakequant.nn.integer import Execution
from fakequant.nn.layers import QuantizedLayer, layers
from fakequant.nn.quantizer import Kind, Mode, Quantizer, observed_ranges, quantizers
from fakequant.nn.sequential import join_relus

Model = TypeVar("Model", bound=nn.Module)


def prepare(model: Model, config: Config | str) -> Model:
    """Turn the layers of a model into quantized layers, in place.

    Layers change their class to a subclass (`nn.Linear` to `QuantLinear`): parameters, hooks, `state_dict` keys and
    `isinstance` stay. Only exact float layers are taken; subclasses of them, which may compute anything, stay float.
    Likewise `nn.Sequential` becomes `QuantSequential`, which computes the same with ReLUs in fewer passes over memory.

    Args:
        model: any module; it is changed and returned.
        config: a preset such as `presets.INT8`, its name, or your own rules.

    Raises:
        ConfigError: a rule matches nothing, the model is already prepared, or a layer cannot be quantized as its rule
            says (names the layer); the model is unchanged then.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), presets.INT8)
    >>> model[0]
    QuantLinear(
      in_features=4, out_features=4, bias=True
      (_input_quantizer): Quantizer(int8 per_tensor, input, not calibrated)
      (_weight_quantizer): Quantizer(int8 per_channel(0), weight, follows the weight)
    )
    """
    if found := quantizers(model):
        raise ConfigError(
            f"the model is already prepared: it has {len(found)} quantizers, the first is {next(iter(found))}"
        )
    if isinstance(config, str):
        config = find_preset(config)
    held = config.resolve(model)
    modules = dict(model.named_modules())
    for name, rule in held.items():
        _check_layer(modules[name], rule, name)
    for name, rule in held.items():
        quantize_layer(modules[name], rule, name)
    join_relus(model)
    leave_fast_paths(model)
    return model


def quantize_layer(layer: nn.Module, rule: Rule, name: str) -> None:
    """Turn one float layer into its quantized form as a rule says; nothing happens if the rule leaves it in float."""
    attach(layer, _configs(layers()[type(layer)], rule), name)
    if isinstance(layer, QuantizedLayer):
        layer.execution = rule.execution


def _configs(quantized: type[QuantizedLayer], rule: Rule) -> dict[str, TensorConfig]:
    """The configurations of a layer's quantizers by attribute, with a rule's axes where the layer has them."""
    # Fewer inputs than axes: a layer that overrides `inputs` with none.
    axes = zip(quantized.inputs, quantized.input_reductions, strict=False)
    configs = {attribute: _placed(rule.input, {-1: axis}) for attribute, axis in axes}
    if quantized.output_channels is not None:
        axes_of_weight = {0: quantized.output_channels, -1: quantized.weight_reduction}
        configs["_weight_quantizer"] = _placed(rule.weight, axes_of_weight)
    return {attribute: config for attribute, config in configs.items() if config is not None}


def _check_layer(layer: nn.Module, rule: Rule, name: str) -> None:
    quantized = layers()[type(layer)]
    configs = _configs(quantized, rule)
    if not configs:
        return
    try:
        if "forward" in vars(layer):
            raise ConfigError(
                "a forward of its own (a hook's, as of accelerate) would bypass the quantizers; "
                "remove the hook, or leave the layer in float by a rule"
            )
        quantized.check(layer)
        if weight := configs.get("_weight_quantizer"):
            weight.spec.granularity.group_shape(cast("QuantizedLayer", layer).weight.shape)
        if rule.execution is Execution.INTEGER:
            _check_integer(layer, quantized, configs)
    except (ConfigError, ShapeError) as error:
        raise ConfigError(f"{name or 'the model'}: {error}") from error


def _check_integer(layer: nn.Module, quantized: type[QuantizedLayer], configs: dict[str, TensorConfig]) -> None:
    if quantized.product is None:
        reason: str | None = f"there is no integer product for {quantized.float_class.__name__}"
    else:
        specs = (configs[n].spec if n in configs else None for n in quantized.product.quantizers)
        reason = quantized.product.cannot(layer, *specs, exact=False)
    if reason is not None:
        raise ConfigError(f'execution="integer" is not possible: {reason}; use "auto", which simulates such layers')


def attach(layer: nn.Module, configs: dict[str, TensorConfig], name: str) -> None:
    """Change a float layer's class to its quantized form, with quantizers at the given attributes."""
    if not configs:
        return
    quantized = layers()[type(layer)]
    layer.__class__ = quantized
    for attribute in quantized.quantizer_names():
        quantizer = None
        if attribute in configs:
            kind = Kind.WEIGHT if attribute == "_weight_quantizer" else Kind.INPUT
            quantizer = Quantizer(configs[attribute].spec, kind=kind, dynamic=configs[attribute].dynamic)
            quantizer.name = f"{name}.{attribute}" if name else attribute
            quantizer.train(layer.training)
        setattr(layer, attribute, quantizer)


def _placed(config: TensorConfig | None, axes: dict[int, int]) -> TensorConfig | None:
    """A rule's configuration with the axes that it names by their role moved to where the layer has them."""
    if config is None:
        return None
    spec = config.spec.replace(granularity=config.spec.granularity.moved(axes))
    if spec.scale.granularity is not None:  # that of the tensor of scales, which has the axes of the tensor
        spec = spec.replace(scale=replace(spec.scale, granularity=spec.scale.granularity.moved(axes)))
    return TensorConfig(spec, config.dynamic)


def calibrate(  # noqa: PLR0913  all but the first three by name
    model: nn.Module,
    batches: Iterable[Any] = (),
    method: str = "max",
    *,
    weight_method: str = "max",
    weight_options: dict[str, Any] | None = None,
    pattern: str = "*",
    forward: Forward | None = None,
    progress: bool | None = None,
    **options: Any,
) -> dict[str, Calibrator]:
    """Find the ranges of all static quantizers: of inputs by running batches, of weights from the weights.

    The model runs in float and in eval mode; nothing is changed if anything fails. With a pattern, layers that do not
    match run quantized where they have ranges, and by codes where they are told to (`set_execution`): so later layers
    are calibrated on what they will get from earlier ones.

    Args:
        model: a prepared model.
        batches: tensors, tuples of arguments, or dicts of keyword arguments. A tuple's items beyond the parameters of
            the model's `forward`, such as a data loader's labels, are left out; a tuple whose last item would be passed
            as an optional parameter is refused, because it may be labels. May be empty if no input needs calibration.
        method: "max", "percentile", "entropy" or "mse", for inputs.
        weight_method: the same, for weights.
        weight_options: for the calibrators of the weights, for example {"percentile": 99.9}.
        pattern: of the paths of the layers to calibrate; `*` matches any characters (fnmatch).
        forward: called as forward(model, batch) instead of the model, for other kinds of batches.
        progress: whether to show a progress bar; by default on a terminal.
        options: for the calibrators of the inputs, for example percentile=99.9.

    Returns:
        The calibrators of all static quantizers by name, with the histograms they collected.

    Raises:
        CalibrationError: a batch with NaN or inf (names the quantizer), quantizers that saw no data (names them all),
            or a model without quantizers.
        ConfigError: an unknown method or option, a pattern that matches no layer with a static quantizer, or a tuple
            whose last item may be labels or an optional argument.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4)), presets.INT8)
    >>> used = calibrate(model, [torch.ones(2, 4), torch.full((2, 4), 2.54)], method="max")
    >>> model[0]._input_quantizer
    Quantizer(int8 per_tensor, input, scale 0.02)
    """
    refuse_tensor(batches, "calibrate")
    found = {
        name: quantizer
        for name, quantizer in quantizers(model).items()
        if not quantizer.dynamic and fnmatchcase(name.rpartition(".")[0], pattern)
    }
    if not quantizers(model):
        raise CalibrationError("the model has no quantizers; call fakequant.prepare(model, config) first")
    if not found and pattern != "*":
        raise ConfigError(f"no layer with a static quantizer matches {pattern!r}; correct the pattern")
    inputs = {name: quantizer for name, quantizer in found.items() if quantizer.kind is Kind.INPUT}
    try:
        for name, quantizer in found.items():
            chosen, chosen_options = (method, options) if name in inputs else (weight_method, weight_options or {})
            quantizer.calibrator = make_calibrator(chosen, quantizer.spec, **chosen_options)
        _observe_weights(model)
        if inputs:
            others = {quantizer for quantizer in quantizers(model).values() if quantizer not in found.values()}
            with _observing(model, inputs, others if pattern != "*" else set()):
                _observe_inputs(model, inputs, batches, forward, progress)
        ranges = observed_ranges(found)
        calibrators = {name: quantizer.calibrator for name, quantizer in found.items() if quantizer.calibrator}
    finally:
        for quantizer in found.values():
            quantizer.calibrator = None
    for name, quantizer in found.items():
        quantizer.set_range(ranges[name])
    return calibrators


def recalibrate(
    model: nn.Module, calibrators: Mapping[str, Calibrator], method: str, **options: Any
) -> dict[str, Calibrator]:
    """Find the ranges of inputs by another method, from what `calibrate` collected: the batches need not run again.

    Percentile, entropy and mse collect the same counts, and max needs less: one pass over the batches serves all four.

    Args:
        model: a calibrated model; its weights keep their ranges.
        calibrators: as `calibrate` returned them; they stay as they are.
        method: as for `calibrate`.
        options: of that method.

    Returns:
        The calibrators of the input quantizers by name.

    Raises:
        ConfigError: the calibrators collected less than the method needs, or are not those of the model; nothing is
            changed.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4)), presets.INT8)
    >>> used = calibrate(model, [torch.full((2, 4), 2.54)], "entropy")
    >>> used = recalibrate(model, used, "max")
    >>> model[0]._input_quantizer
    Quantizer(int8 per_tensor, input, scale 0.02)
    """
    found = quantizers(model)
    if unknown := sorted(set(calibrators) - set(found)):
        raise ConfigError(f"the model has no quantizers {', '.join(unknown)}; give what calibrate returned for it")
    adopted: dict[str, Calibrator] = {}
    for name, used in calibrators.items():
        if found[name].kind is Kind.INPUT:
            adopted[name] = make_calibrator(method, found[name].spec, **options)
            try:
                adopted[name].adopt(used)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from error
    ranges = {name: calibrator.compute_range() for name, calibrator in adopted.items()}
    for name, range in ranges.items():
        found[name].set_range(range)
    return adopted


def _observe_weights(model: nn.Module) -> None:
    for layer in model.modules():
        quantizer = getattr(layer, "_weight_quantizer", None)
        if isinstance(layer, QuantizedLayer) and quantizer is not None and quantizer.calibrator is not None:
            quantizer.observe(layer.weight)


def _observe_inputs(
    model: nn.Module,
    inputs: dict[str, Quantizer],
    batches: Iterable[Any],
    forward: Forward | None,
    progress: bool | None,
) -> None:
    run = forward or run_batch
    total = len(batches) if isinstance(batches, Sized) else None
    with evaluating(model), torch.no_grad():
        for batch in track(batches, "calibrating", total, progress):
            run(model, batch)
    unseen = [
        name for name, quantizer in inputs.items() if not (quantizer.calibrator and quantizer.calibrator.observed)
    ]
    if unseen:
        raise CalibrationError(
            f"{len(unseen)} of {len(inputs)} input quantizers saw no data: {', '.join(unseen)}. "
            "Give batches that reach these layers, or leave the layers in float by a rule"
        )


@contextmanager
def modes(model: nn.Module, choose: Callable[[str, Quantizer], Mode]) -> Iterator[None]:
    """Set the mode of every quantizer by its name for a while."""
    before = {quantizer: quantizer.mode for quantizer in quantizers(model).values()}
    try:
        for name, quantizer in quantizers(model).items():
            quantizer.mode = choose(name, quantizer)
        yield
    finally:
        for quantizer, mode in before.items():
            quantizer.mode = mode


def _observing(model: nn.Module, observing: dict[str, Quantizer], quantizing: set[Quantizer]) -> Any:
    """A context in which some quantizers observe, some quantize that do and have ranges, and all others are off."""

    def mode(name: str, quantizer: Quantizer) -> Mode:
        if name in observing:
            return Mode.OBSERVE
        ready = quantizer in quantizing and (quantizer.dynamic or quantizer.calibrated)
        return quantizer.mode if ready else Mode.OFF

    return modes(model, mode)


def disabled(model: nn.Module) -> Any:
    """A context in which all quantizers are off: the model computes in float.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4)), presets.INT8)
    >>> with disabled(model):
    ...     y = model(torch.ones(1, 4))
    """
    return modes(model, lambda *_: Mode.OFF)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context in which every module is in eval mode; each module's own mode comes back."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode


def fold(model: Model) -> Model:
    """Replace every quantized weight by its quantized values, in place, and take its quantizer away.

    The model computes the same as before, without quantizing weights again in every pass.

    Raises:
        ConfigError: a weight whose quantizer is off, that another layer uses too (names both), or that is computed from
            other tensors; nothing is changed.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4)), presets.INT8_WEIGHT_ONLY)
    >>> before = model(torch.ones(1, 4))
    >>> torch.equal(fold(model)(torch.ones(1, 4)), before)
    True
    """
    held = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, QuantizedLayer) and getattr(layer, "_weight_quantizer", None) is not None
    }
    for name, layer in held.items():
        quantizer = layer._weight_quantizer
        if quantizer is not None and quantizer.mode is not Mode.QUANTIZE:
            raise ConfigError(f"{name}: its weight quantizer is {quantizer.mode.value}; set its mode to QUANTIZE first")
        if "weight" not in layer._parameters and "weight" not in layer._buffers:
            raise ConfigError(
                f"{name}: its weight is computed (weight_norm, pruning, a parametrization) and cannot be folded; "
                "make it permanent first, as by prune.remove or remove_parametrizations"
            )
        users = [
            other
            for other, module in model.named_modules()
            if any(parameter is layer.weight for parameter in module.parameters(recurse=False))
        ]
        if len(users) > 1:
            raise ConfigError(
                f"the layers {' and '.join(users)} share one weight, and folding it would change the others; "
                "give each its own: layer.weight = nn.Parameter(layer.weight.detach().clone())"
            )
    for layer in held.values():
        with torch.no_grad():
            layer.weight.copy_(layer.quantized_weight())
        layer._weight_quantizer = None
    return model
