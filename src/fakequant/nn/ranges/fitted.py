"""Whether the parameters of a quantizer still fit the weight for which they were set."""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fakequant.distributed import is_sharded
from fakequant.errors import StaleScaleWarning, warn_user
from fakequant.numerics.spec import QuantSpec
from fakequant.ops import library

_TOLERATED = 0.1
"""Relative change of a group's largest magnitude. Fine-tuning at 1 % of the learning rate moves less."""


class _Fitted(Protocol):
    """The part of a `Quantizer` that is read here."""

    spec: QuantSpec
    fitted_to: Tensor | None
    seen: Any
    training: bool

    @property
    def learned(self) -> object | None: ...


def look(quantizer: _Fitted, weight: Tensor) -> None:
    """Note the weight of a call, or warn in eval mode, once after each change, that its scales do not fit.

    An unchanged parameter costs 1 us. A computed weight is another tensor in every call: it is looked at in the first
    call after those in training mode. Sharded weights are not looked at: that takes all processes.
    """
    if torch.compiler.is_compiling():
        return
    if quantizer.training and quantizer.fitted_to is not None:
        quantizer.seen = None
        return
    if (seen := mark(weight)) == quantizer.seen:
        return
    if is_sharded(weight) or library.needs_tracing(weight):
        return
    quantizer.seen = seen
    if quantizer.fitted_to is None:
        quantizer.fitted_to = magnitudes(quantizer.spec, weight)
    elif is_stale(quantizer, weight):
        warn_user(  # without the name of the layer: it is one line for all layers of a model
            "weights changed by more than 10 % since the scales of their quantizers were set, and are clipped or "
            "quantized too coarsely now; fakequant.summary(model) names them and what sets the scales anew",
            StaleScaleWarning,
        )


def is_stale(quantizer: _Fitted, weight: Tensor) -> bool:
    """Whether a group's largest magnitude is not nearly the one for which the parameters were set.

    A learned scale and the weight that trains with it always fit. A frozen weight changes by other means alone.
    """
    before = quantizer.fitted_to
    if before is None or (quantizer.learned is not None and weight.requires_grad):
        return False
    if quantizer.spec.granularity.group_shape(weight.shape) != before.shape:
        return True
    now, before = magnitudes(quantizer.spec, weight).double(), before.to(weight.device).double()
    return bool(((now - before).abs() > _TOLERATED * before).any())


def magnitudes(spec: QuantSpec, weight: Tensor) -> Tensor:
    """The largest magnitude of every group, in the dtype of the weight, whose values they are: no more memory."""
    with torch.inference_mode(mode=False), torch.no_grad():
        return library.measure(weight.detach(), spec.granularity).amax.to(weight.dtype)


def mark(weight: Tensor) -> Any:
    """A value that differs after nearly every change of a parameter: torch counts those that do not go through `data`.

    peft merges adapters through `data`, so that the first element is looked at, too, where that waits for no device.
    """
    if type(weight) is not nn.Parameter or weight.is_inference():
        return type(weight)
    place = weight.data_ptr()  # 0 of an empty or a meta tensor
    first = ctypes.string_at(place, weight.element_size()) if place and weight.is_cpu else b""
    return weight._version, place, first
