"""The block_sizes of a descriptor: one amax per block of neighbours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fakequant.compat.pytorch_quantization import calib
from fakequant.compat.pytorch_quantization.specification import block_axes, block_specification
from fakequant.functional import fake_quantize
from fakequant.numerics.formats.floats import Format
from fakequant.numerics.granularity import PerBlock
from fakequant.numerics.spec import Arithmetic
from fakequant.ops import library


class Blocks:
    """How a quantizer with `block_sizes` measures, calibrates and quantizes; the last block of an axis may be smaller.

    Args:
        block_sizes: of the descriptor.
    """

    def __init__(self, block_sizes: dict[Any, Any]) -> None:
        self.block_sizes = dict(block_sizes)
        self.granularity = PerBlock(block_axes(self.block_sizes), pad=True)
        self._observed: torch.Size | None = None

    def fake_quantize(
        self, inputs: Tensor, amax: Tensor | None, factor: float | None, fmt: Format, *, exporting: bool
    ) -> Tensor:
        """Inputs rounded to what the format has under the scale of their block.

        Args:
            inputs: any shape.
            amax: calibrated, [blocks, axes kept]; None for that of every block of inputs.
            factor: what amax is multiplied with, if anything.
            fmt: of the elements.
            exporting: compute as ONNX does, see `onnx_form`.
        """
        spec = block_specification(fmt, self.block_sizes)
        if exporting:
            spec = spec.replace(arithmetic=Arithmetic.DIVIDE)
        if factor is not None:
            amax = factor * (library.measure(inputs, self.granularity).amax if amax is None else amax)
        return fake_quantize(inputs, spec, amax=amax)

    def collect(self, calibrator: Any, inputs: Tensor) -> None:
        """Show the amax of every block to a calibrator, [1, blocks].

        Raises:
            NotImplementedError: a calibrator of another kind than "max".
        """
        if not isinstance(calibrator, calib.MaxCalibrator):
            raise NotImplementedError(f"{type(calibrator).__name__} has no blocks; use calib_method='max'")
        amax = library.measure(inputs, self.granularity).amax[None]
        self._observed = amax.shape[1:]
        calibrator._axis = tuple(range(1, amax.dim()))
        calibrator.collect(amax)

    def restored(self, amax: Tensor) -> Tensor:
        """What a calibrator made of [1, blocks], as [blocks, axes kept]; one number that stands for none stays."""
        shape = self._observed
        return amax if shape is None or amax.numel() != shape.numel() else amax.reshape(shape)

    def __str__(self) -> str:
        return f"block_sizes={self.block_sizes}"
