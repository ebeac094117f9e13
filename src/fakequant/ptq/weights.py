"""The weights that accuracy algorithms choose values for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from fakequant.data.arguments import check_model, refuse_stored
from fakequant.distributed import is_sharded, refuse_sharded
from fakequant.errors import CalibrationError, ConfigError
from fakequant.model.run.recorded import Recording, weight_readers
from fakequant.model.weights import quantized_weights
from fakequant.nn.paths import layer_of
from fakequant.nn.products import MatrixProduct, Product
from fakequant.nn.quantizer import Kind, Mode, quantizers
from fakequant.text import listed, module_name

COMPUTED = "forward computes the weight, several functions read it, or it is not a parameter"
"""The reason why the weight of a function is not among `prepared_weights`."""


def prepared_weights(model: Any, caller: str) -> dict[str, Product]:
    """For the path of each weight's quantizer in a model: the weight. Raises ConfigError if there are none."""
    check_model(model, caller, f"{caller}(model, batches)")
    refuse_sharded(model, f"call {caller} on")
    refuse_stored(model, f"call {caller} on")
    weights = quantized_weights(model)
    if not weights and (paths := [layer_of(path) for path in computed_weights(model, weights)]):
        raise ConfigError(f"{caller} can change none of the model's quantized weights ({listed(paths)}): {COMPUTED}")
    if not weights:
        raise ConfigError("the model has no quantized weights; call fakequant.prepare(model, config) first")
    return weights


def calibrated_weights(model: Any, caller: str) -> dict[str, Product]:
    """Like `prepared_weights`, but raises CalibrationError if an input has no range, or a weight holds NaN or inf."""
    weights = prepared_weights(model, caller)
    active = {name: own for name, own in quantizers(model).items() if own.mode is not Mode.OFF}
    if missing := [name for name, quantizer in active.items() if quantizer.needs_calibration]:
        raise CalibrationError(
            f"{len(missing)} input quantizers are not calibrated, the first is {missing[0]}; call "
            "fakequant.calibrate(model, batches) first"
        )
    for path, weight in weights.items():
        if weight.parameter is not None and not bool(weight.parameter.isfinite().all()):
            raise CalibrationError(f"{module_name(layer_of(path))}: its weight holds NaN or inf; load finite weights")
    return weights


def computed_weights(model: nn.Module, weights: Container[str]) -> list[str]:
    """The paths of weights' quantizers that are not in `weights`, because of a reason in `COMPUTED`."""
    return [path for path, own in quantizers(model).items() if own.kind is Kind.WEIGHT and path not in weights]


def fixed_parameters(model: nn.Module, recording: Recording) -> dict[nn.Parameter, str]:
    """The parameters that no algorithm may change, because more than one layer reads them, each with the reason.

    Args:
        recording: the recording of a run, which shows other readers of weights.

    >>> from fakequant.model.run.outputs import record
    >>> model = fq.prepare(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "INT8_WEIGHT_ONLY")
    >>> recording = record(model, lambda: model(torch.ones(1, 4)) / model[0].weight.norm())
    >>> found = fixed_parameters(model, recording)
    >>> found[model[0].weight], len(found)
    ('the model reads its weight outside of the layer', 1)
    """
    shared = shared_parameters(model)
    found = {own: f"layers share its {'weight' if own.dim() > 1 else 'bias'}" for own in shared}
    readers, paths = weight_readers(model, recording), {module: path for path, module in model.named_modules()}
    own_biases = {  # that a layer adds at every step, with its path
        bias: paths[own.layer]
        for own in quantized_weights(model).values()
        if isinstance(own, MatrixProduct) and own.has_steps and (bias := own.bias[0]) is not None
    }
    for weight in quantized_weights(model).values():
        if weight.layer in readers and weight.parameter is not None:
            reader = readers[weight.layer] or "the model"
            found.setdefault(weight.parameter, f"{reader} reads its weight outside of the layer")
    for parameter, number in recording.numbers(model).items():
        readers_of_vector = recording.consumers.get(number, ()) if parameter.dim() == 1 else ()
        others = (own for own in readers_of_vector if number in own.read and own.owner != own_biases.get(parameter))
        if len({own.site for own in others}) > 1:
            found.setdefault(parameter, "several functions read it")
    return found


def shared_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Parameters with several names in a model, and parameters whose memory overlaps."""
    held = Counter(p for module in model.modules() for p in module._parameters.values() if p is not None)
    found, end, last = {parameter for parameter, count in held.items() if count > 1}, 0, None
    spans = list[tuple[int, int, nn.Parameter]]()  # from the first byte to that after the last one
    for own in held:
        if not (is_lazy(own) or own.is_meta or is_sharded(own)) and own.numel():
            last_value = sum((size - 1) * stride for size, stride in zip(own.shape, own.stride(), strict=True))
            spans.append((own.data_ptr(), own.data_ptr() + (last_value + 1) * own.element_size(), own))
    for start, stop, own in sorted(spans, key=lambda span: span[:2]):  # memory overlaps after `one.data = other.data`
        if last is not None and start < end:
            found |= {last, own}
        if stop > end:
            end, last = stop, own
    return found
