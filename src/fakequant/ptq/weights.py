"""The weights that accuracy algorithms choose values for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fakequant.distributed import refuse_sharded
from fakequant.errors import CalibrationError, ConfigError
from fakequant.model.arguments import check_model
from fakequant.model.calls import weight_readers
from fakequant.model.modes import disabled, evaluating
from fakequant.model.weights import quantized_weights
from fakequant.nn.operands import LayerWeight
from fakequant.nn.quantizer import Mode, quantizers
from fakequant.ptq.neighbors import shared_parameters


def prepared_weights(model: Any, caller: str) -> dict[str, LayerWeight]:
    """The quantized weights of a model, by the path of their quantizer.

    Args:
        caller: the function that works on them, for messages.

    Raises:
        ConfigError: it is no model, or has no quantized weights.
    """
    check_model(model, caller, f"{caller}(model, batches)")
    refuse_sharded(model, f"call {caller} on")
    weights = quantized_weights(model)
    if not weights:
        raise ConfigError("the model has no quantized weights; call fakequant.prepare(model, config) first")
    return weights


def calibrated_weights(model: Any, caller: str) -> dict[str, LayerWeight]:
    """The same of a model whose inputs have ranges.

    Raises:
        ConfigError: it is no model, or has no quantized weights.
        CalibrationError: an input that is quantized is not calibrated, or a weight holds NaN or inf (names the layer).
    """
    weights = prepared_weights(model, caller)
    active = {name: own for name, own in quantizers(model).items() if own.mode is not Mode.OFF}
    if missing := [name for name, quantizer in active.items() if quantizer.needs_calibration]:
        raise CalibrationError(
            f"{len(missing)} input quantizers are not calibrated, the first is {missing[0]}; call "
            "fakequant.calibrate(model, batches) first"
        )
    for path, weight in weights.items():
        if weight.parameter is not None and not bool(weight.parameter.isfinite().all()):
            raise CalibrationError(f"{path.rpartition('.')[0] or 'the model'}: its weight holds NaN or inf")
    return weights


def fixed_parameters(model: nn.Module, run: Callable[[], object]) -> dict[nn.Parameter, str]:
    """The parameters that no algorithm may change, because more than one layer reads them, and why.

    Args:
        run: runs the model; what reads a weight outside of its layer is found by it.

    >>> model = fq.prepare(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "INT8_WEIGHT_ONLY")
    >>> found = fixed_parameters(model, lambda: model(torch.ones(1, 4)) / model[0].weight.norm())
    >>> found[model[0].weight], len(found)
    ('the model reads its weight outside of the layer', 1)
    """
    found = dict.fromkeys(shared_parameters(model), "layers share its weight")
    with evaluating(model), disabled(model), torch.no_grad():
        readers = weight_readers(model, run)
    for weight in quantized_weights(model).values():
        if weight.layer in readers and weight.parameter is not None:
            reader = readers[weight.layer] or "the model"
            found.setdefault(weight.parameter, f"{reader} reads its weight outside of the layer")
    return found
