"""The weights that accuracy algorithms choose values for."""

from __future__ import annotations

from typing import Any

from fakequant.errors import CalibrationError, ConfigError
from fakequant.model.arguments import check_model
from fakequant.model.weights import quantized_weights
from fakequant.nn.operands import LayerWeight
from fakequant.nn.quantizer import Mode, quantizers


def prepared_weights(model: Any, caller: str) -> dict[str, LayerWeight]:
    """The quantized weights of a model, by the path of their quantizer.

    Args:
        caller: the function that works on them, for messages.

    Raises:
        ConfigError: it is no model, or has no quantized weights.
    """
    check_model(model, caller, f"{caller}(model, batches)")
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
