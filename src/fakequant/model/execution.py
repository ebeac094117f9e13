"""Whether a model is simulated, runs in integers, or computes what a device computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import TypeVar

from torch import nn

from fakequant.data.arguments import refuse_unprepared
from fakequant.errors import ConfigError, CoverageWarning, nearest, warn_user
from fakequant.model.engine import Engine, known_engines
from fakequant.nn.device import Device
from fakequant.nn.integer import Execution
from fakequant.nn.paths import matches
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.quantizer import Quantizer
from fakequant.nn.wrappers import accepts_wrapped_model
from fakequant.restore import attributes_of, restore_after, restore_on_error
from fakequant.text import listed, module_name

Model = TypeVar("Model", bound=nn.Module)


def _chosen(execution: Execution | Device | Engine | str) -> tuple[Execution, Device | None]:
    """How layers compute, and whose codes quantizers store."""
    if isinstance(execution, Engine) and execution.device is not None:
        execution = execution.device
    if isinstance(execution, Device):
        return Execution.SIMULATE, execution
    names = [known.value for known in Execution]
    if isinstance(execution, Execution) or (isinstance(execution, str) and execution in names):
        return Execution(execution), None
    known = {name: engine.device for name, engine in known_engines().items() if engine.device is not None}
    if not isinstance(execution, str) or execution not in known:
        is_known = isinstance(execution, Engine) or (isinstance(execution, str) and execution in known_engines())
        hint = "; no other arithmetic of it is known" if is_known else nearest(str(execution), [*names, *known])
        raise ConfigError(
            f"execution must be one of {', '.join(map(repr, [*names, *sorted(known)]))}, got {execution!r}{hint}"
        )
    return Execution.SIMULATE, known[execution]


@accepts_wrapped_model
def set_execution(model: Model, execution: Execution | Device | Engine | str, pattern: str = "*") -> Model:
    """Set how a prepared model computes, in place; the model is returned.

    The name of an engine with an arithmetic, such as "qnn", lets quantizers store the codes that it stores: products
    have exact sums, and the rule of the device rounds them. Gradients are those of the simulation. A trace, such as
    that of `torch.compile` or of an export, sees the simulation.

    Args:
        model: a prepared model.
        execution: "simulate", "auto" or "integer", see `fakequant.nn.Execution`; the name of an engine that has an
            arithmetic, or a `fakequant.nn.Device`.
        pattern: of the paths of layers and of modules that call functions with quantizers; `*` matches any characters
            (fnmatch).

    Raises:
        ConfigError: nothing matches; under "integer" some layers can never run in integers, under a device no quantizer
            has codes of the device (names them all, with the reasons); nothing is changed then.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), presets.INT8)
    >>> print(summary(set_execution(model, "auto")))
    layer  type    input            weight               execution  state
    -----  ------  ---------------  -------------------  ---------  --------------
    0      Linear  int8 per_tensor  int8 per_channel(0)  integer    not calibrated
    weights: 80 bytes in float, 48 quantized (16 bits per weight)
    """
    refuse_unprepared(model)
    execution, device = _chosen(execution)
    modules = {name: module for name, module in model.named_modules() if matches(name, pattern)}
    layers = {name: module for name, module in modules.items() if isinstance(module, QuantizedLayer)}
    # A quantizer belongs to what matches if it does itself, or one of the modules around it.
    quantizers = dict[str, Quantizer]()
    for name, module in model.named_modules():
        paths = accumulate(name.split("."), "{}.{}".format)
        if isinstance(module, Quantizer) and not modules.keys().isdisjoint(paths):
            quantizers[name] = module
    if not layers and (device is None or not quantizers):
        raise ConfigError(f"no quantized layer matches {pattern!r}; correct the pattern")
    reasons = dict[str, list[str]]()
    if execution is Execution.INTEGER:
        for name, layer in layers.items():
            if (reason := layer.why_simulated(execution)) is not None:
                reasons.setdefault(reason, []).append(module_name(name))
    elif device is not None:
        for name, quantizer in quantizers.items():
            if (reason := quantizer.why_simulated(device)) is not None:
                reasons.setdefault(reason, []).append(name)
    told = "; ".join(f"{listed(names)} ({reason})" for reason, names in reasons.items())
    if execution is Execution.INTEGER and reasons:
        raise ConfigError(f'these layers cannot run in integers; use "auto", which simulates them: {told}')
    if device is not None and reasons:
        message = f'under "{device.name}" these quantizers are simulated: {told}'
        if sum(map(len, reasons.values())) == len(quantizers):
            raise ConfigError(f'{message}; prepare with a preset such as "int8_affine" and target="{device.name}"')
        warn_user(message, CoverageWarning)
    of_layers = attributes_of(layers.values(), "execution")
    of_quantizers = attributes_of(quantizers.values(), "device")
    with restore_on_error(of_layers), restore_on_error(of_quantizers):
        for layer in layers.values():
            layer.execution = execution
        for quantizer in quantizers.values():
            quantizer.device = device
    return model


@contextmanager
def simulated(model: nn.Module) -> Iterator[None]:
    """A context in which a model is simulated; the execution of each layer comes back."""
    layers = [layer for layer in model.modules() if isinstance(layer, QuantizedLayer)]
    quantizers = [module for module in model.modules() if isinstance(module, Quantizer)]
    with restore_after(attributes_of(layers, "execution")), restore_after(attributes_of(quantizers, "device")):
        for layer in layers:
            layer.execution = Execution.SIMULATE
        for quantizer in quantizers:
            quantizer.device = None
        yield
