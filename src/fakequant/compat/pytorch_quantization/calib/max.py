"""The calibrator of the largest magnitude."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fakequant.compat.pytorch_quantization.specification import NumBits
from fakequant.compat.pytorch_quantization.utils import reduce_amax

from .calibrator import _Calibrator

__all__ = ["MaxCalibrator"]


class MaxCalibrator(_Calibrator):
    """Collects the largest magnitude of all tensors.

    Args:
        num_bits: bits of a code.
        axis: the axis or axes that keep one amax per index; negative ones count from the end.
        unsigned: whether codes begin at 0; negative values then only cause a warning.
        track_amax: whether to keep the amax of every tensor in `amaxs`.

    >>> calibrator = MaxCalibrator(8, 0, False)
    >>> calibrator.collect(torch.tensor([[1.0, -3.0], [0.5, 0.25]]))
    >>> calibrator.collect(torch.tensor([[2.0, 2.0], [2.0, 2.0]]))
    >>> calibrator.compute_amax()
    tensor([[3.],
            [2.]])
    """

    def __init__(
        self,
        num_bits: NumBits,
        axis: int | tuple[int, ...] | None,
        unsigned: bool,
        track_amax: bool = False,
    ) -> None:
        super().__init__(num_bits, axis, unsigned)
        self._track_amax = track_amax
        self._amaxs: list[np.ndarray] = []
        self._calib_amax: Tensor | None = None

    @property
    def amaxs(self) -> list[np.ndarray]:
        """The amax of every collected tensor if `track_amax` is set."""
        return self._amaxs

    @torch.inference_mode(False)
    @torch.no_grad()
    def collect(self, x: Tensor) -> None:
        """Collect a tensor.

        Raises:
            RuntimeError: amax has another shape than for the tensors before, or the tensor has no elements.
            IndexError: an axis that it does not have.
        """
        amax = reduce_amax(x.detach(), self._reduced_axes(x))
        if self._unsigned and x.numel() and bool((x < 0).any()):
            self._tell("Calibrator encountered negative values, although codes are unsigned; is this the right tensor?")
        if bool(amax.isnan().any()):
            self._tell("Calibrator encountered NaN, so amax is NaN; repair the layer that makes it.")
        if self._track_amax:
            self._amaxs.append(amax.cpu().float().numpy())
        if self._calib_amax is not None:
            if amax.shape != self._calib_amax.shape:
                raise RuntimeError(
                    f"amax shape changed! It was {list(self._calib_amax.shape)} and is {list(amax.shape)} for a tensor "
                    f"of shape {list(x.shape)}; collect tensors of one layout"
                )
            amax = torch.maximum(self._calib_amax, amax.to(self._calib_amax.device))
        self._calib_amax = amax

    def reset(self) -> None:
        """Discard all collected data."""
        self._calib_amax = None

    def compute_amax(self) -> Tensor | None:
        """Return a copy of the largest magnitude, or None if nothing was collected."""
        return None if self._calib_amax is None else self._calib_amax.clone()

    def _reduced_axes(self, x: Tensor) -> list[int]:
        axes = self._axis if isinstance(self._axis, list | tuple) else [] if self._axis is None else [self._axis]
        for axis in axes:
            if not -x.dim() <= axis < x.dim():
                raise IndexError(f"axis {axis} is out of range for a tensor of shape {list(x.shape)}")
        kept = {axis % x.dim() for axis in axes}
        return [axis for axis in range(x.dim()) if axis not in kept]

    def __str__(self) -> str:
        return f"MaxCalibrator(track_amax={self._track_amax})"

    def __repr__(self) -> str:
        tracked = f" amaxs={self._amaxs}" if self._track_amax else ""
        amax = f" calib_amax={self._calib_amax} track_amax={self._track_amax}{tracked}"
        return f"MaxCalibrator({super().__repr__()}{amax})"
