"""The methods by which `calibrate` found a model's ranges, read off its scales, to do the same on other batches."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fakequant.calibration import Calibrator, make_calibrator
from fakequant.errors import CalibrationError, ConfigError
from fakequant.model.calibration.choice import METHODS
from fakequant.model.weights import fresh_weight, is_searched, nearest_params, quantized_weights
from fakequant.nn.quantizer import Kind, Mode, Quantizer, quantizers
from fakequant.numerics.qparams import choose_qparams as qparams_of_range
from fakequant.numerics.qparams import lend
from fakequant.numerics.spec import QuantSpec

_MOST = 0.5
"""The share of the scales of weights that a method must give: some are raised afterwards, so that biases fit."""


def static_inputs(model: nn.Module) -> dict[str, Quantizer]:
    """The quantizers of inputs whose ranges come from calibration, by path; those that are off are in float."""
    return {
        name: one
        for name, one in quantizers(model).items()
        if one.kind is Kind.INPUT and not (one.dynamic or one.pinned) and one.mode is not Mode.OFF
    }


def methods_of(held: Iterable[Quantizer]) -> list[str]:
    """The methods with default options that give all ranges, from what the quantizers keep, the likely one first.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4)), presets.INT8)
    >>> used = calibrate(model, [torch.randn(64, 4)], "entropy")
    >>> methods_of(static_inputs(model).values())
    ['entropy']
    """
    held = list(held)
    last = [one.collected.method for one in held[:1] if one.collected is not None]
    names = sorted(METHODS, key=lambda method: method not in last)
    return [method for method in names if all(_gives(one, method) for one in held)]


def weight_methods_of(model: nn.Module) -> list[str | None]:
    """The first method that gives the weights the scales that they have, None for the default; empty after training."""
    held = {path: one for path, one in quantized_weights(model).items() if one.quantizer.scale is not None}
    try:
        tensors = {path: fresh_weight(one, path).detach() for path, one in held.items()}
    except CalibrationError:  # the weight of a function that no call has shown
        return []
    for method in dict.fromkeys([None, "max", *METHODS]):
        same = total = 0
        for path, one in held.items():
            found = _scale_of(tensors[path], one.quantizer.spec, method)
            same, total = same + int((found == one.quantizer.scale).sum()), total + found.numel()
        if same >= _MOST * total:
            return [method]
    return []


def _scale_of(weight: Tensor, spec: QuantSpec, method: str | None) -> Tensor:
    if is_searched(spec, method):
        return nearest_params(weight, spec).scale
    calibrator = make_calibrator(method or "max", spec)
    calibrator.observe(weight)
    return _scale(calibrator)


def keeps_enough(quantizer: Quantizer, method: str) -> bool:
    """Whether what a quantizer keeps of its calibration gives the range by a method."""
    return _calibrator(quantizer, method) is not None


def _calibrator(quantizer: Quantizer, method: str) -> Calibrator | None:
    if quantizer.collected is None:
        return None
    calibrator = make_calibrator(method, quantizer.spec)
    try:
        calibrator.load_from(quantizer.collected)
    except ConfigError:  # it collected less
        return None
    return calibrator


def _gives(quantizer: Quantizer, method: str) -> bool:
    calibrator, scale = _calibrator(quantizer, method), quantizer.scale
    return calibrator is not None and scale is not None and torch.equal(_scale(calibrator).to(scale.device), scale)


def _scale(calibrator: Calibrator) -> Tensor:
    return qparams_of_range(lend(calibrator.compute_range(), calibrator.spec), calibrator.spec).scale
