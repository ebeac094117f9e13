"""Which layers a recorded run calls, and which weights it reads without a call of their layer."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from fakequant.model.run.recorded import QUANTIZER, Recording, RunStep
from fakequant.nn.quantized.layers import QuantizedLayer


def modules_called(model: nn.Module, recording: Recording) -> set[nn.Module]:
    """The modules that a run of a model calls.

    >>> from fakequant.model.run.recording import record
    >>> model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(1, 4)
    >>> modules_called(model, record(model, lambda: model[0](x))) == {model[0]}
    True
    """
    modules = dict(model.named_modules())
    return {modules[call.path] for call in recording.modules}


def weight_readers(model: nn.Module, recording: Recording, others: Iterable[nn.Module] = ()) -> dict[nn.Module, str]:
    """The quantized layers whose weight a run reads without a call of them, and the path of the module that reads it.

    Args:
        model: as it ran.
        recording: of the run.
        others: layers in float to look for, too, which have one weight.

    >>> from fakequant.model.run.recording import record
    >>> class Projects(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.inner = nn.Linear(4, 4)
    ...     def forward(self, x):
    ...         return nn.functional.linear(x, self.inner.weight)
    >>> model = prepare(nn.Sequential(Projects()), presets.INT8_WEIGHT_ONLY)
    >>> weight_readers(model, record(model, lambda: model(torch.ones(1, 4)))) == {model[0].inner: "0"}
    True
    """
    numbers = recording.numbers(model)
    modules = dict(model.named_modules())
    # Parameters alone: a parametrization would compute an unused weight, and may change its buffers.
    held = {m: [w.parameter for w in m.products()] for m in modules.values() if isinstance(m, QuantizedLayer)}
    held |= {layer: [layer._parameters.get("weight")] for layer in others}
    holders: dict[int, list[nn.Module]] = {}
    for layer, parameters in held.items():
        for parameter in parameters:
            if parameter is not None and parameter in numbers:
                holders.setdefault(numbers[parameter], []).append(layer)
    found: dict[nn.Module, str] = {}
    quantized: set[nn.Module] = set()
    running: list[str] = []
    for step, one in recording.steps():
        if step is RunStep.ENTER:
            running.append(one.path)
        elif step is RunStep.LEAVE:
            running.pop()
        else:
            # A call without a result asks for a shape or a dtype; a quantizer that observes has none.
            read = one.read if one.outputs or one.function == QUANTIZER else ()
            layers = [layer for value in read for layer in holders.get(value, ())]
            if not layers or any(modules[path] in layers for path in running):
                continue
            if one.function == QUANTIZER:  # that of a function, which takes the weight next
                quantized.update(layers)
            else:
                path = running[-1] if running else ""
                found.update((layer, path) for layer in layers if layer not in found and layer not in quantized)
    return found


def read_together(recording: Recording, paths: Iterable[str]) -> dict[str, list[str]]:
    """For each of these modules that a run calls, the ones with the same first inputs in all calls, itself among them.

    >>> from fakequant.model.run.recording import record
    >>> model, x = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), torch.ones(1, 4)
    >>> read_together(record(model, lambda: model[0](x) + model[1](x)), ["0", "1"])
    {'0': ['0', '1'], '1': ['0', '1']}
    """
    wanted, first = set(paths), dict[str, tuple[int, ...]]()
    for call in recording.modules:
        if call.path in wanted:
            first[call.path] = (*first.get(call.path, ()), *call.inputs[:1])
    groups: dict[tuple[int, ...], list[str]] = {}
    for path, values in first.items():
        groups.setdefault(values, []).append(path)
    return {path: groups[values] for path, values in first.items()}
