"""Modules of small tensors that keep their precision, and what they accept as a state."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fakequant.errors import NoWeightError
from fakequant.numerics.qparams import compute_dtype


class PreciseModule(nn.Module):
    """A module whose own tensors keep their precision in a half-precision model and take their shape from a state."""

    def __getattr__(self, name: str) -> Any:
        """What torch finds; of a weight, for which `RowwiseParallel` asks every module inside a layer, the way out."""
        if name == "weight":
            raise NoWeightError
        return nn.Module.__getattr__(self, name)  # of quantizers in peft's adapters, `super()` is another class

    def _own(self) -> dict[str, Tensor | None]:
        return {**self._parameters, **self._buffers}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PreciseModule:
        """Move with the model, but in float32 at least: a float16 scale would change every code."""
        # Detached, because a parameter is converted in place.
        before = {name: value.detach() for name, value in self._own().items() if value is not None}
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = getattr(self, name)
            dtype = compute_dtype(new.dtype) if old.is_floating_point() else old.dtype
            if new.dtype != dtype and old.device.type != "meta":
                restored = old.to(new.device, dtype)
                if isinstance(new, nn.Parameter):
                    new.data = restored
                else:
                    setattr(self, name, restored)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Accept tensors that this module does not have yet, or has in another shape."""
        for name, own in self._own().items():
            given = state_dict.get(prefix + name)
            if given is not None and (own is None or own.shape != given.shape):
                fresh = torch.empty_like(given, device=given.device if own is None else own.device)
                setattr(self, name, nn.Parameter(fresh) if name in self._parameters else fresh)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class QuantizerPart(PreciseModule):
    """A quantizer or a part of one: it stays as it is where a state holds nothing of any quantizer."""

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load, and count what is missing only if the state holds something of a quantizer of the same model.

        So a state dict of the float model loads with `strict=True`, and one that lacks some quantizers does not.
        """
        absent: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, absent, unexpected_keys, error_msgs)
        given = not prefix or any(key.startswith(prefix) for key in state_dict)  # no prefix: it is loaded alone
        _absent.add(missing_keys, absent, given)


class _Absent(threading.local):
    """The keys of quantizers that one call of `load_state_dict` did not find, while it found none.

    A quantizer sees its own part of the state only. torch's list of missing keys is one object in the whole call.
    """

    call: list[str] | None = None
    keys: list[str] | None = None

    def add(self, missing_keys: list[str], absent: list[str], given: bool) -> None:
        if self.call is not missing_keys:
            self.call, self.keys = missing_keys, []
        if given and self.keys is not None:
            missing_keys += self.keys
            self.keys = None
        if self.keys is None:
            missing_keys += absent
        else:
            self.keys += absent


_absent = _Absent()
