"""The weights that one run of a model does not reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fakequant.model.calls import layers_called
from fakequant.model.modes import evaluating
from fakequant.restore import restore_after, stack_without


class Unreached:
    """The weights that a run of a model does not reach: no function reads them, and their layer is not called.

    One run shows which layers read a value. An expert that got no rows, or a head for training, may read it in another
    run.

    Args:
        model: it runs in eval mode, without gradients.
        run: runs it.

    >>> model = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 2)])
    >>> found = Unreached(model, lambda: model[1](model[0](torch.ones(1, 4))))
    >>> found.why_not(8)
    'this batch does not reach 2.weight, which may belong to the same values; give a batch that does, or remove it'
    >>> found.why_not(4) is None
    True
    """

    def __init__(self, model: nn.Module, run: Callable[[], Any]) -> None:
        reads = _Reads()
        with evaluating(model), torch.no_grad(), restore_after(stack_without(reads)), reads:
            called = layers_called(model, run, nn.Module)
        leaves = [module for module in called if next(module.children(), None) is None]
        reached = reads.seen | {id(p) for module in leaves for p in module.parameters()}
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


class _Reads(TorchFunctionMode):
    """Notes the parameters that functions of torch get."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = set[int]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        self.seen |= {id(leaf) for leaf in tree_leaves((args, given)) if isinstance(leaf, Tensor)}
        return func(*args, **given)
