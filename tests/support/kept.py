"""Batches in a list, as functions of the package pass them on, and what work on a model leaves of its error on them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

import fakequant as fq
from fakequant.data.batches import Batches, Forward, KeptBatches
from fakequant.model.run.outputs import OutputDistance


def kept(batches: Iterable[Any], forward: Forward | None = None) -> KeptBatches:
    return Batches(batches, "the test", forward=forward).kept()


def error_left(
    net: nn.Module,
    config: Any,
    given: list[Any],
    work: Callable[[nn.Module], Any],
    new: list[Any] | None = None,
) -> float:
    """The share of a calibrated model's error that is left after work on it, on new batches or the given ones."""
    error = OutputDistance(net, kept(given if new is None else new))
    model = fq.prepare(copy.deepcopy(net), config)
    fq.calibrate(model, given, progress=False)
    before = error.of(model).mean
    work(model)
    return error.of(model).mean / before
