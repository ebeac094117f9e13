"""The base class of the interface's calibrators."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fakequant.compat.pytorch_quantization.specification import NumBits
from fakequant.compat.pytorch_quantization.utils.quant_logging import logger

__all__ = ["_Calibrator"]


class _Calibrator:
    """Collects statistics of tensors and computes an amax.

    Args:
        num_bits: bits of a code.
        axis: the axis or axes that keep one amax per index; None for one amax in all.
        unsigned: whether codes begin at 0.
    """

    def __init__(self, num_bits: NumBits, axis: int | tuple[int, ...] | None, unsigned: bool) -> None:
        self._num_bits = num_bits
        self._axis = axis
        self._unsigned = unsigned
        self._told: set[str] = set()

    def collect(self, x: Tensor) -> None:
        """Collect a tensor."""
        raise NotImplementedError

    def reset(self) -> None:
        """Discard all collected data."""
        raise NotImplementedError

    def compute_amax(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Return the amax of the collected data, or None if there is none."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"num_bits={self._num_bits} axis={self._axis} unsigned={self._unsigned}"

    def _tell(self, message: str) -> None:
        """Log a warning the first time."""
        if message not in self._told:
            self._told.add(message)
            logger.warning(message)
