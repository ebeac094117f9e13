"""Owners of sites whose `forward` calls more functions while torch traces it: see `sites.py`.

Vision transformers resize their table of positions in a trace, also where it has the right size already, so that the
trace takes images of any size. Such calls compute with parameters alone. No plan has them, because the model does not
call them otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fakequant.errors import SiteError
from fakequant.nn.sites.sites import SITES, SiteMode, Sites
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

    Where they do not fit either, and the planned calls are among them in one way alone, the others stay in float, as a
    mask that is added in a trace alone. What earlier tries called has no use in the trace. The error stays if one wrote
    to a tensor that was there before.

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
            pass
        called: list[str] = []
        run(partial(_Listing, called))
        places = _embedding(module, called)
        if places is None or [x._version for x in before] != versions:
            raise error from None
        return run(partial(_Aligned, places))


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


class _Listing(SiteMode):
    """Quantizes nothing, and lists the functions that the plan counts."""

    def __init__(self, called: list[str], sites: Sites, module: nn.Module) -> None:
        super().__init__(sites, module)
        self.called = called

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := self.counted(func, args, kwargs or {})) is not None:
            self.called.append(name)
        return func(*args, **(kwargs or {}))

    def finish(self) -> None:
        pass


class _Aligned(SiteMode):
    """Counts the calls at some places alone."""

    def __init__(self, places: Collection[int], sites: Sites, module: nn.Module) -> None:
        super().__init__(sites, module)
        self.places, self.at = places, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.counted(func, args, kwargs or {}) is not None:
            self.at += 1
            if self.at - 1 not in self.places:
                return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def _embedding(module: nn.Module, called: Sequence[str]) -> list[int] | None:
    """The places of the planned calls among those of a trace; None if there is no way, or more than one."""
    planned = SiteMode(cast("Sites", module._modules[SITES]), module).steps
    first = _earliest(planned, called)
    last = [len(called) - 1 - place for place in _earliest(planned[::-1], called[::-1])][::-1]
    return first if len(first) == len(planned) and first == last else None


def _earliest(planned: Sequence[str], called: Sequence[str]) -> list[int]:
    places: list[int] = []
    for place, name in enumerate(called):
        if len(places) < len(planned) and planned[len(places)] == name:
            places.append(place)
    return places


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]
