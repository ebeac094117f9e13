"""Checks of the first arguments of functions on models: a model, and a metric."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from fakequant.data.again import unchanged
from fakequant.distributed import refuse_sharded
from fakequant.errors import ConfigError, FakeQuantError, shown
from fakequant.nn.quantizer import quantizers
from fakequant.nn.stored import StoredWeight

Metric = Callable[[nn.Module], float]
"""A function of a model; larger is better."""


@dataclass(frozen=True)
class NamedMetric:
    """A metric with the name and the sign by which results show it.

    Attributes:
        function: the function, called as function(model); larger is better.
        name: the name, one word.
        negated: whether the metric is the negative of a figure, such as a perplexity, for which smaller is better.
    """

    function: Metric
    name: str
    negated: bool = False

    def __call__(self, model: nn.Module) -> float:
        return self.function(model)

    def shown(self, value: float) -> float:
        """A value of the metric with the sign that results show. A second call restores the metric's own sign."""
        return -value if self.negated else value


def named(metric: Metric) -> NamedMetric:
    """A metric with its name; a lambda gets the name "metric".

    >>> named(max).name, named(lambda model: 1.0).name
    ('max', 'metric')
    """
    if isinstance(metric, NamedMetric):
        return metric
    name = getattr(metric, "__name__", "<none>")
    return NamedMetric(metric, "metric" if name.startswith("<") else name)


def check_model(model: Any, caller: str, example: str, error: type[FakeQuantError] = ConfigError) -> None:
    """Raise `error`, with the caller and a right call, if `model` is no module, for example with swapped arguments."""
    if not isinstance(model, nn.Module):
        raise error(f"{caller} takes a model, got {shown(model)}; write {example}")


def check_float_model(model: Any, caller: str, example: str, action: str) -> None:
    """Raise ConfigError if `model` is not a module, has quantizers, or is sharded; `action` is the message's verb."""
    check_model(model, caller, example)
    refuse_prepared(model, caller)
    refuse_sharded(model, action)


def refuse_prepared(model: nn.Module, function: str) -> None:
    """Raise ConfigError that names the function if a model has quantizers."""
    if quantizers(model):
        raise ConfigError(f"{function} takes a float model; call it before fakequant.prepare, or on a copy made before")


def refuse_unprepared(model: nn.Module, error: type[FakeQuantError] = ConfigError, otherwise: str = "") -> None:
    """Raise an error if a model has no quantizers; the message ends with `otherwise`."""
    if not quantizers(model):
        raise error(f"the model has no quantizers; call fakequant.prepare(model, config) first{otherwise}")


def refuse_stored(model: nn.Module, action: str) -> None:
    """Raise ConfigError if weights are stored as codes (`fakequant.store_codes`); `action` is the message's verb."""
    stored = [name for name, own in model.named_parameters() if type(own) is StoredWeight]
    if stored:
        raise ConfigError(
            f"{len(stored)} weights are stored as codes, the first is {stored[0]}; call fakequant.store_floats(model) "
            f"before you {action} the model"
        )


def check_metric(metric: Any, caller: str) -> None:
    """Raise ConfigError if a metric is neither None nor a function."""
    if metric is not None and not callable(metric):
        raise ConfigError(
            f"{caller} takes a function as metric, called as metric(model), got {shown(metric)}; write metric=evaluate"
        )


def measured(metric: Metric, model: nn.Module) -> float:
    """The value of a metric for a model; the model stays unchanged. Raises ConfigError if the value is no number.

    >>> measured(lambda model: None, nn.Identity())
    Traceback (most recent call last):
    fakequant.errors.ConfigError: metric(model) returned None, not a number; return a number, larger is better
    """
    with unchanged(model):
        value = metric(model)
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"metric(model) returned {shown(value)}, not a number; return a number, larger is better"
        ) from error
