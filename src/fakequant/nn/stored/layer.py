"""A layer whose weights may be stored as codes: how it is moved, and its state dict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fakequant.nn.stored.weight import CODES, StoredWeight


class StoringLayer(nn.Module):
    """A layer whose parameters may be of the class `StoredWeight`; its state dict has their packed codes as bytes."""

    def products(self) -> Any:
        """The weights that have a quantizer or could have one."""
        raise NotImplementedError

    def _stored(self) -> dict[str, StoredWeight]:
        return {name: own for name, own in self._parameters.items() if isinstance(own, StoredWeight)}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        stored: dict[str, Any] = self._stored()
        if not stored:
            return super()._apply(fn, recurse)
        held = [(stored[own.name], own.quantizer) for own in self.products() if own.name in stored]
        shares = [(weight, own) for weight, own in held if own is not None and own.scale is weight.scale]
        self._parameters.update(dict.fromkeys(stored))
        try:
            super()._apply(fn, recurse)
        finally:
            self._parameters.update(stored)
        for weight in stored.values():  # in place, because layers may share it
            torch.utils.swap_tensors(weight, nn.Parameter(weight.moved(fn), requires_grad=weight.requires_grad))
        for weight, quantizer in shares:  # one copy of the scale stays one
            weight.scale, weight.zero_point = quantizer.scale, quantizer.zero_point
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not (stored := self._stored()):
            return
        for name in [*self._parameters, *self._buffers]:  # in the order of the float layer
            if (value := destination.pop(prefix + name, None)) is not None:
                weight = stored.get(name)
                destination.update({prefix + name: value} if weight is None else {prefix + name + CODES: weight.packed})

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name, weight in self._stored().items():
            if (packed := state_dict.get(prefix + name + CODES)) is not None:
                attribute = next(own.attribute for own in self.products() if own.name == name)
                params = (state_dict.get(f"{prefix}{attribute}.{key}") for key in ("scale", "zero_point"))
                state_dict = {key: own for key, own in state_dict.items() if key != prefix + name + CODES}
                state_dict[prefix + name] = weight.with_parts(packed, *params)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
