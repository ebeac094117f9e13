"""A float model that is quantized in several ways, on some batches, and measured on the same or on others."""

from __future__ import annotations

import copy
import math
import time
import warnings
from typing import Any, NamedTuple

import torch
from torch import nn

from fakequant.data.arguments import Metric
from fakequant.data.batches import Inputs, KeptBatches
from fakequant.data.token_mask import Mask
from fakequant.errors import FakeQuantError, FusionWarning
from fakequant.model.calibration.calibrate import calibrate
from fakequant.model.execution import set_execution
from fakequant.model.modes import evaluating, score_of
from fakequant.model.prepare import prepare
from fakequant.model.presets import find_preset
from fakequant.model.run.outputs import OutputDistance
from fakequant.model.sizes import bits_of_all, weight_bits
from fakequant.model.training.fuse import fuse_batch_norm
from fakequant.model.weights import quantized_weights
from fakequant.nn import cached_weights
from fakequant.ptq.formats.comparison import Compared, Way
from fakequant.ptq.improving.improve import improve


class Preparation(NamedTuple):
    """What `prepare` gets besides the preset.

    Attributes:
        example: one input of the model; None for none.
        inputs: which part of the example the model gets.
        target: the engine that places quantizers where inputs get ranges by calibration.
        folds: whether batch normalisations go into the layers before them first.
    """

    example: Any = None
    inputs: Inputs | None = None
    target: str | None = None
    folds: bool = False


def has_static_inputs(preset: str) -> bool:
    """Whether a preset gives inputs ranges that calibration finds."""
    return any(rule.input is not None and not rule.input.dynamic for rule in find_preset(preset).rules)


def quantizes_inputs(preset: str) -> bool:
    """Whether a preset quantizes inputs."""
    return any(rule.input is not None for rule in find_preset(preset).rules)


LAYERS_ALONE = Preparation()
"""Without an example: layers get quantizers, and functions have none."""


class Task:
    """A float model, the batches that make its quantized copies, and those that measure them.

    Args:
        model: in float; it stays as it is.
        batches: to calibrate and improve on.
        judged: to measure on.
        metric: called as metric(model); None for none.
        preparation: of each copy.
        mask: which tokens count.
        times: whether a forward pass is timed, too.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: KeptBatches,
        judged: KeptBatches,
        metric: Metric | None = None,
        preparation: Preparation = LAYERS_ALONE,
        mask: Mask | None = None,
        *,
        times: bool = True,
    ) -> None:
        self.model, self.batches, self.judged, self.metric = model, batches, judged, metric
        self.preparation, self._mask, self._times = preparation, mask, times
        self.outputs = OutputDistance(model, judged)
        self.outputs.check(has_metric=metric is not None)

    def prepared(self, preset: str) -> nn.Module:
        """A copy of the model with the quantizers of a preset, without ranges."""
        own = self.preparation
        twin = copy.deepcopy(self.model).eval()
        if own.folds:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FusionWarning)  # the engine keeps the others, too
                twin = fuse_batch_norm(twin, own.example, inputs=own.inputs)
        target = own.target if has_static_inputs(preset) else None
        return prepare(twin, find_preset(preset), own.example, inputs=own.inputs, target=target)

    def quantized(self, way: Way, **how: Any) -> nn.Module:
        """A copy of the model, quantized; `how` goes to `improve`."""
        twin = self.prepared(way.preset)
        given: dict[str, Any] = {"forward": self.batches.run, "mask": self._mask, "progress": False}
        calibrate(twin, self.batches, way.method, unseen="float", **given)
        if way.steps:
            improve(twin, self.batches, way.steps, **given, **how)
        return twin

    def measured(self, way: Way, **how: Any) -> Compared:
        """Measure one way; an error of this package becomes the reason in its row."""
        started = time.perf_counter()
        try:
            twin = self.quantized(way, **how)
            seconds = time.perf_counter() - started
            distance = self.outputs.of(twin)
            error = distance.mean if self.outputs.has_outputs else math.nan
            found = self.score(twin)
        except FakeQuantError as reason:
            return Compared(*way, failed=f"{type(reason).__name__}: {reason}")
        if found is not None and math.isnan(found):
            return Compared(*way, failed="the metric is NaN")
        total = bits_of_all(filter(None, map(weight_bits, quantized_weights(twin).values())))
        size = (total.codes + total.scales) / 8
        speed = self.milliseconds(set_execution(twin, "auto")) if self._times else 0.0
        figures = (error, found, total.per_weight, size, speed, round(seconds, 2))
        return Compared(*way, *figures, worst=distance.shown_worst)

    def score(self, model: nn.Module) -> float | None:
        """The metric of a model; None without one."""
        return None if self.metric is None else score_of(self.metric, model)

    def milliseconds(self, model: nn.Module) -> float:
        """The time of a forward pass of the first batch: the shortest of up to five, or of those that fit in 0.2 s."""
        times: list[float] = []
        with evaluating(model), cached_weights(model), torch.no_grad():
            self.judged.run_first(model)
            while len(times) < 5 and sum(times) < 0.2:
                started = time.perf_counter()
                self.judged.run_first(model)
                times.append(time.perf_counter() - started)
        return round(1e3 * min(times), 4)
