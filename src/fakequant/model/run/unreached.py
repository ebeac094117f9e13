"""The weights that a recorded run does not reach."""

from __future__ import annotations

import torch
from torch import nn

from fakequant.model.run.queries import modules_called
from fakequant.model.run.recorded import Recording


class Unreached:
    """The weights that a run of a model does not reach: no function reads them, and their layer is not called.

    One run shows which layers read a value. An expert that got no rows, or a head for training, may read it in another
    run.

    Args:
        model: as it ran.
        recording: of the run.

    >>> from fakequant.model.run.recording import record
    >>> model, x = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 2)]), torch.ones(1, 4)
    >>> found = Unreached(model, record(model, lambda: model[1](model[0](x))))
    >>> found.why_not(8)
    'this batch does not reach 2.weight, which may belong to the same values; give a batch that does, or remove it'
    >>> found.why_not(4) is None
    True
    """

    def __init__(self, model: nn.Module, recording: Recording) -> None:
        read = {value for call in recording.calls for value in call.inputs}
        leaves = [module for module in modules_called(model, recording) if next(module.children(), None) is None]
        reached = {id(p) for module in leaves for p in module.parameters()}
        reached |= {id(p) for p, number in recording.numbers(model).items() if number in read}
        hidden = [module for module in model.modules() if isinstance(module, torch.jit.ScriptModule)]
        scripted = {id(parameter) for module in hidden for parameter in module.parameters()}
        self._scripted = {name for name, parameter in model.named_parameters() if id(parameter) in scripted}
        self._shapes = {
            name: tuple(parameter.shape)
            for name, parameter in model.named_parameters()
            if id(parameter) not in reached and parameter.dim() > 1 and bool(parameter.any())
        }

    def why_not(self, width: int) -> str | None:
        """Why values with `width` channels cannot be changed, or None."""
        name = next((name for name, shape in self._shapes.items() if width in shape), None)
        if name is None:
            return None
        if name in self._scripted:
            return (
                f"{name} may belong to the same values, and torch.jit does not show whether a run reads it; change the "
                "weights first, and script the module afterwards"
            )
        return (
            f"this batch does not reach {name}, which may belong to the same values; give a batch that does, or remove "
            "it"
        )
