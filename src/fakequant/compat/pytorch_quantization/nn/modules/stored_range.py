"""The tensors that a quantizer stores: amax, and what inputs are multiplied with before all else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fakequant.compat.pytorch_quantization.utils.quant_logging import logger
from fakequant.nn.learned import PreciseModule

_BUFFERS = ("_amax", "_pre_quant_scale")


class StoredRange(PreciseModule):
    """Buffers `_amax` and `_pre_quant_scale`, which are there from when they are set; copies, in float32 at least."""

    _amax: Tensor

    @property
    def pre_quant_scale(self) -> Tensor | None:
        """What tensors are multiplied with before all else, also when disabled; None if nothing."""
        return self._buffers.get("_pre_quant_scale")

    @pre_quant_scale.setter
    def pre_quant_scale(self, value: Any) -> None:
        self._set("_pre_quant_scale", value)

    @property
    def amax(self) -> Tensor | None:
        """The largest magnitude that has a code, before `scale_amax`; None if it is that of every tensor.

        Raises:
            RuntimeError: the setter is given another shape than amax has.
        """
        return self._buffers.get("_amax")

    @amax.setter
    def amax(self, value: Any) -> None:
        self._set("_amax", value)

    def _set(self, name: str, value: Any) -> None:
        """What the setters do."""
        if value is None:
            logger.error("%s cannot be set to None; delete it instead", name)
            return
        value = torch.as_tensor(value)
        old = self._buffers.get(name)
        if old is not None and old.shape != value.shape:
            raise RuntimeError(
                f"Changing shape when setting {name.strip('_')} is not allowed: it has {list(old.shape)}, got "
                f"{list(value.shape)}; delete it before"
            )
        self._set_buffer(name, value)

    def _set_buffer(self, name: str, value: Tensor) -> None:
        """A copy as a buffer: in the one that is there, if the shape is the same."""
        old = self._buffers.get(name)
        value = value.detach().to(torch.promote_types(value.dtype, torch.float32))
        if old is None or old.shape != value.shape:
            vars(self).pop(name, None)
            self.register_buffer(name, value.clone() if old is None else value.to(old.device, copy=True))
        else:
            old.data.copy_(value)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name in _BUFFERS:
            if prefix + name in state_dict and name not in self._buffers:
                self.register_buffer(name, None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _short_amax(self) -> str:
        amax = self.amax
        if amax is None:
            return "dynamic"
        if amax.numel() == 1:
            return f"{amax.item():.4f}"
        return f"[{amax.min().item():.4f}, {amax.max().item():.4f}]({amax.numel()})"
