"""Owners of sites whose `forward` calls more functions while torch traces it: see `sites.py`.

Vision transformers resize their table of positions in a trace, also where it has the right size already, so that the
trace takes images of any size. Such calls compute with parameters alone. No plan has them, because the model does not
call them otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fakequant.errors import SiteError
from fakequant.nn.sites.sites import SiteMode, Sites
from fakequant.numerics.compilers import is_exporting


def is_traced() -> bool:
    """Whether torch.export or torch.jit.trace follow the calls of Python; torch.compile reads code instead."""
    if torch.compiler.is_dynamo_compiling():
        return False
    return is_exporting() or torch._C._is_tracing()


MakeMode = Callable[[Sites, nn.Module], SiteMode]
"""Makes the mode for one call of an owner's `forward`, from its sites and the owner."""


def run_traced(run: Callable[[MakeMode], Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    """The result of an owner: where its calls do not fit the plan, those with parameters alone do not count.

    What the first try called has no use in the trace. The error stays if it wrote to a tensor that was there before.

    Args:
        run: calls the owner's `forward` under the mode that is made by its argument.
        module: the owner.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.

    Raises:
        SiteError: the calls do not fit without those either; the error of the first try.
    """
    before = [*_tensors((args, kwargs)), *module.buffers()]
    versions = [x._version for x in before]
    try:
        return run(SiteMode)
    except SiteError as error:
        if [x._version for x in before] != versions:
            raise
        try:
            return run(_OfInputs)
        except SiteError:
            raise error from None


class _OfInputs(SiteMode):
    """Counts no call whose float tensors are all computed from parameters."""

    def __init__(self, sites: Sites, module: nn.Module) -> None:
        super().__init__(sites, module)
        self.alive = list[Tensor](module.parameters())  # an id belongs to a tensor as long as that lives
        self.constants = {id(x) for x in self.alive}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in _tensors((args, kwargs)) if x.is_floating_point()]  # sizes are tensors in a trace
        if not given or any(id(x) not in self.constants for x in given):
            return super().__torch_function__(func, types, args, kwargs)
        result = func(*args, **(kwargs or {}))
        self.alive += _tensors(result)
        self.constants.update(map(id, _tensors(result)))
        return result


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]
