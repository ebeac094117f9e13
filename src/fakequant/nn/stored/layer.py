"""A layer whose weights may be stored as codes: how it is moved, and its state dict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fakequant.errors import ConfigError
from fakequant.nn.stored.weight import CODES, SPEC, StoredWeight


class StoringLayer(nn.Module):
    """A layer whose parameters may be of the class `StoredWeight`; its state dict has their packed codes as bytes."""

    def products(self) -> Any:
        """The weights that have a quantizer or could have one."""
        raise NotImplementedError

    def _stored(self) -> dict[str, StoredWeight]:
        return {name: own for name, own in self._parameters.items() if isinstance(own, StoredWeight)}

    def put(self, name: str, parameter: nn.Parameter) -> None:
        """Hold another parameter of the same shape, as floats or as codes."""
        self._parameters[name] = parameter

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        stored: dict[str, Any] = self._stored()
        if not stored:
            return super()._apply(fn, recurse)
        held = [(stored[own.name], own.quantizer) for own in self.products() if own.name in stored]
        shares = [(weight, own) for weight, own in held if own is not None and own.scale is weight.scale]
        self._parameters.update(dict.fromkeys(stored))
        try:
            super()._apply(fn, recurse)
            for weight in stored.values():  # in place, because layers may share it
                weight.become(weight.moved(fn))
        finally:
            for name, weight in stored.items():
                self.put(name, weight)
        for weight, quantizer in shares:  # one copy of the scale stays one
            weight.scale, weight.zero_point = quantizer.scale, quantizer.zero_point
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not (stored := self._stored()):
            return
        for name in [*self._parameters, *self._buffers]:  # in the order of the float layer
            if (value := destination.pop(prefix + name, None)) is not None:
                key, weight = prefix + name, stored.get(name)
                held = {key: value} if weight is None else {key + CODES: weight.packed, key + SPEC: _bytes(weight)}
                destination.update(held)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *args: Any, **kwargs: Any
    ) -> None:
        for name, weight in self._stored().items():
            key = prefix + name
            if (packed := state_dict.get(key + CODES)) is not None:
                spec = state_dict.get(key + SPEC)
                spec = "unknown" if spec is None else bytes(spec.tolist()).decode()
                if spec != str(weight.spec):
                    raise ConfigError(f"the codes of {key} are {spec}, and those of the model {weight.spec}")
                attribute = next(own.attribute for own in self.products() if own.name == name)
                params = (state_dict.get(f"{prefix}{attribute}.{own}") for own in ("scale", "zero_point"))
                state_dict = {name: own for name, own in state_dict.items() if name not in (key + CODES, key + SPEC)}
                state_dict[key] = weight.with_parts(packed, *params)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)


def _bytes(weight: StoredWeight) -> Tensor:
    return torch.tensor([*str(weight.spec).encode()], dtype=torch.uint8)
