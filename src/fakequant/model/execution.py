"""Whether the layers of a model are simulated or run in integers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import nn

from fakequant.data.arguments import refuse_unprepared
from fakequant.errors import ConfigError
from fakequant.nn.integer import Execution, as_execution
from fakequant.nn.paths import matches
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.wrappers import accepts_wrapped_model
from fakequant.restore import attributes_of, restore_after, restore_on_error
from fakequant.text import listed, module_name

Model = TypeVar("Model", bound=nn.Module)


@accepts_wrapped_model
def set_execution(model: Model, execution: Execution | str, pattern: str = "*") -> Model:
    """Set how the layers of a prepared model compute their products, in place; the model is returned.

    Args:
        model: a prepared model.
        execution: "simulate", "auto" or "integer", see `fakequant.nn.Execution`.
        pattern: of the layers' paths in the model; `*` matches any characters (fnmatch).

    Raises:
        ConfigError: no quantized layer matches, or under "integer" some can never run in integers (names them all, with
            the reasons); nothing is changed then.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), presets.INT8)
    >>> print(summary(set_execution(model, "auto")))
    layer  type    input            weight               execution  state
    -----  ------  ---------------  -------------------  ---------  --------------
    0      Linear  int8 per_tensor  int8 per_channel(0)  integer    not calibrated
    weights: 80 bytes in float, 48 quantized (16 bits per weight)
    """
    execution = as_execution(execution)
    refuse_unprepared(model)
    found = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, QuantizedLayer) and matches(name, pattern)
    }
    if not found:
        raise ConfigError(f"no quantized layer matches {pattern!r}; correct the pattern")
    if execution is Execution.INTEGER:
        reasons = dict[str, list[str]]()
        for name, layer in found.items():
            if (reason := layer.why_simulated(execution)) is not None:
                reasons.setdefault(reason, []).append(module_name(name))
        if reasons:
            raise ConfigError(
                'these layers cannot run in integers; use "auto", which simulates them: '
                + "; ".join(f"{listed(names)} ({reason})" for reason, names in reasons.items())
            )
    with restore_on_error(attributes_of(found.values(), "execution")):
        for layer in found.values():
            layer.execution = execution
    return model


@contextmanager
def simulated(model: nn.Module) -> Iterator[None]:
    """A context in which every layer is simulated; each layer's own execution comes back."""
    found = [layer for layer in model.modules() if isinstance(layer, QuantizedLayer)]
    with restore_after(attributes_of(found, "execution")):
        for layer in found:
            layer.execution = Execution.SIMULATE
        yield
