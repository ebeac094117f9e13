"""Scales and batch statistics while a model trains with quantizers: when they move, and how."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from functools import partial
from typing import Any

from torch import nn

from fakequant.data.arguments import check_model, refuse_stored, refuse_unprepared
from fakequant.distributed import is_data_parallel, parallel_group, refuse_sharded, whole
from fakequant.errors import ConfigError, shown
from fakequant.model.ties import share_learned
from fakequant.model.weights import (
    fresh_weight,
    give_range,
    note_weight,
    quantized_weights,
    warn_of_zeros,
    warn_vanished,
)
from fakequant.nn.quantizer import Kind, Quantizer, quantizers
from fakequant.ops import library
from fakequant.restore import restore_on_error, state_of_parts, structure_of


class Scales(Enum):
    """When scales may move during fine-tuning."""

    FIXED = "fixed"
    """Never: those found by calibration stay, as NVIDIA advises; what was learned is fixed."""
    EPOCH = "epoch"
    """Those of weights are taken from the weights anew at the start of every epoch. The first one starts with the codes
    that `fakequant.ptq` chose."""
    LEARNED = "learned"
    """At every step, by gradient: LSQ or another method, see `Quantizer.learn`. The gradient of a scale is what
    rounding changes: a frozen weight that has the codes of `fakequant.ptq` already gives it none."""
    ONLY = "only"
    """As LEARNED, while the codes of weights stay as they are, which `fakequant.ptq.reconstruct` chose for example: the
    gradient of a scale is the codes'. `finetune` and `Training` train nothing else, and end with fixed scales."""


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """The batch normalisations of a model."""
    return [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


def freeze_batch_norm(model: nn.Module) -> None:
    """Put batch normalisations in eval mode for good: `model.train()` leaves them there, and their statistics stay.

    `del norm.train` ends it for a normalisation.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    >>> freeze_batch_norm(model)
    >>> model.train()[1].training
    False
    """
    check_model(model, "freeze_batch_norm", "freeze_batch_norm(model)")
    found = batch_norms(model)
    with restore_on_error(structure_of(found)):
        for module in found:
            module.eval()
            vars(module)["train"] = partial(_stay, module)


def _stay(norm: nn.Module, mode: bool = True) -> nn.Module:
    """What takes the place of `train` of a frozen normalisation: modules inside it follow the mode."""
    for module in norm.children():
        module.train(mode)
    return norm


def set_scales(model: nn.Module, scales: Scales, method: str = "lsq", **options: Any) -> None:
    """Bring the quantizers of a model to a policy for their scales; static weight ranges are fixed from the weights.

    Args:
        scales: when scales may move.
        method: how, with LEARNED; see `Quantizer.learn`. Dynamic quantizers learn nothing.
        options: of the method.

    Raises:
        ConfigError: the model has no quantizers; or LEARNED or ONLY for one that has no range yet, or by a method that
            cannot serve its specification; then nothing is changed. LEARNED for a model that is wrapped in
            DistributedDataParallel or sharded by fully_shard already.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4)), presets.INT8_WEIGHT_ONLY)
    >>> set_scales(model, Scales.LEARNED, "lsq")
    >>> model[0]._weight_quantizer.learned.method
    'lsq'
    """
    check_model(model, "set_scales", "set_scales(model, Scales.LEARNED)")
    if not isinstance(scales, Scales):
        raise ConfigError(f"set_scales takes a policy, such as Scales.LEARNED, got {shown(scales)}")
    refuse_unprepared(model)
    warn_vanished(model)
    coded = quantized_weights(model).values() if scales is Scales.ONLY else ()
    parameters = (weight.parameter for weight in coded)
    touched = [*quantizers(model).values(), *(parameter for parameter in parameters if parameter is not None)]
    with restore_on_error(state_of_parts(model, touched)):
        _set_scales(model, scales, method, options)
        share_learned(model)


def _set_scales(model: nn.Module, scales: Scales, method: str, options: Mapping[str, Any]) -> None:
    static = [q for q in quantizers(model).values() if not (q.dynamic or q.pinned)]
    learn = scales in (Scales.LEARNED, Scales.ONLY)
    if learn and not all(quantizer.learned for quantizer in static):
        _refuse_new_parameters(model)
    for quantizer in quantizers(model).values():
        if not learn or quantizer.keeps_codes is not (scales is Scales.ONLY and quantizer.kind is Kind.WEIGHT):
            quantizer.stop_learning()
    _fix_weight_ranges(model, anew=scales is Scales.EPOCH)
    if not learn:
        return
    coded = _fix_codes(model) if scales is Scales.ONLY else []
    for quantizer in static:
        if quantizer.calibrated or quantizer.kind is Kind.INPUT:  # others are weights that are zero
            quantizer.learn(method, **options)
    for quantizer in coded:
        quantizer.keep_codes()
    warn_of_zeros(model, quantizers(model))
    if scales is Scales.ONLY and not static:
        raise ConfigError(
            "Scales.ONLY has nothing to train: all ranges are dynamic or given by an engine; prepare weights with "
            "static ranges"
        )


def _fix_codes(model: nn.Module) -> list[Quantizer]:
    """Fix the codes of all static weights as they are now, and return their quantizers."""
    found = []
    for name, weight in quantized_weights(model).items():
        quantizer = weight.quantizer
        if quantizer.dynamic or quantizer.pinned or not quantizer.calibrated:
            continue
        tensor = fresh_weight(weight, name)
        if not weight.has_fixed_codes:
            encoded = quantizer.encoded(tensor)
            if encoded is None:
                raise ConfigError(f"the weight of {name} holds NaN, which has no code")
            weight.fix_codes(encoded[0])
        found.append(quantizer)
    return found


def _fix_weight_ranges(model: nn.Module, *, anew: bool) -> None:
    """Take static ranges of weights that have none yet, or all of them anew, from the weights as they are now."""
    for name, weight in quantized_weights(model).items():
        quantizer = weight.quantizer
        if quantizer.dynamic or quantizer.follows:
            continue
        quantizer.holds(weight.tensor)  # a weight whose codes stayed until now gets their values
        if anew and not weight.has_fixed_codes:  # codes that were chosen are where training starts
            quantizer.reset()
        if not quantizer.calibrated:
            give_range(weight, library.measure(whole(fresh_weight(weight, name)), quantizer.spec.granularity))
            note_weight(weight)


def _refuse_new_parameters(model: nn.Module) -> None:
    """Raise where gradients of new parameters would not be summed over the processes that train the model."""
    if parallel_group(model) is None:  # layers that are shared out sum the gradients of what is whole in each process
        refuse_sharded(model, "call set_scales(LEARNED) on")
    refuse_stored(model, "call set_scales(LEARNED) on")
    if is_data_parallel(model):
        raise ConfigError(
            "learned scales are parameters, and DistributedDataParallel knows only those that the model had when it "
            "was wrapped; call set_scales(LEARNED) before, on the model that is wrapped"
        )
