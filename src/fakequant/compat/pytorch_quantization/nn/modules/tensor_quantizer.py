"""The quantizer of one tensor, as a descriptor says."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from fakequant.compat.pytorch_quantization import calib
from fakequant.compat.pytorch_quantization import utils as quant_utils
from fakequant.compat.pytorch_quantization.nn.modules import onnx_form
from fakequant.compat.pytorch_quantization.nn.modules.blocks import Blocks
from fakequant.compat.pytorch_quantization.nn.modules.clip import Clip
from fakequant.compat.pytorch_quantization.nn.modules.stored_range import StoredRange
from fakequant.compat.pytorch_quantization.specification import NumBits, format_of
from fakequant.compat.pytorch_quantization.tensor_quant import (
    QuantDescriptor,
    fake_quantize,
    fake_tensor_quant,
    tensor_quant,
)
from fakequant.compat.pytorch_quantization.utils.quant_logging import logger

__all__ = ["TensorQuantizer"]

_CALIBRATORS = {"max": calib.MaxCalibrator, "histogram": calib.HistogramCalibrator}


class TensorQuantizer(StoredRange):
    """Calibrates for, clips and quantizes one tensor, each of which can be turned on and off.

    Without an amax, from the descriptor, a calibrator, a state dict or the setter, the range is that of every tensor.
    amax stays float32 when the model becomes half precision.

    Args:
        quant_desc: how to quantize.
        disabled: return tensors as they are.
        if_quant: quantize.
        if_clip: clip to the learned range; only with `learn_amax`, which turns it on.
        if_calib: show tensors to the calibrator.

    >>> quantizer = TensorQuantizer(QuantDescriptor(num_bits=4, amax=0.7))
    >>> quantizer
    TensorQuantizer(4bit fake per-tensor amax=0.7000 calibrator=MaxCalibrator scale=1.0 quant)
    >>> quantizer(torch.tensor([0.12, -0.66, 5.0]))
    tensor([ 0.1000, -0.7000,  0.7000])
    """

    use_fb_fake_quant: ClassVar[bool] = False
    """The switch of older releases for what `quant_modules.enable_onnx_export` does."""
    _enable_onnx_export = False
    # Models that were pickled by the original lack these.
    _dynamic = False
    _blocks: Blocks | None = None

    clip: Clip

    def __init__(
        self,
        quant_desc: QuantDescriptor = QuantDescriptor(),  # noqa: B008  descriptors are immutable
        disabled: bool = False,
        if_quant: bool = True,
        if_clip: bool = False,
        if_calib: bool = False,
    ) -> None:
        super().__init__()
        # Scripts and pickled models know these names.
        self._num_bits: NumBits = quant_desc.num_bits
        self._fake_quant = quant_desc.fake_quant
        self._axis = quant_desc.axis
        self._scale_amax = quant_desc.scale_amax
        self._learn_amax = quant_desc.learn_amax
        self._unsigned = quant_desc.unsigned
        self._narrow_range = quant_desc.narrow_range
        self._dynamic = quant_desc.dynamic
        self._blocks = None if quant_desc.block_sizes is None else Blocks(quant_desc.block_sizes)
        self._scale: Any = 1.0 if quant_desc.fake_quant else None
        self._disabled = disabled
        self._if_quant = if_quant
        self._if_clip = False
        self._if_calib = if_calib
        amax = quant_desc.amax
        if amax is not None:
            self._set_buffer("_amax", torch.as_tensor(amax))
        if self._learn_amax:
            start = 1.0 if amax is None else amax
            self.clip = Clip(-start, start, learn_min=True, learn_max=True)
        if self._learn_amax or if_clip:
            self.enable_clip()
        # Any other method leaves the attribute out: that the name is wrong shows where it is used.
        if calibrator := _CALIBRATORS.get(quant_desc.calib_method):
            self._calibrator = calibrator(self._num_bits, self._axis, self._unsigned)

    @property
    def num_bits(self) -> NumBits:
        """Bits of an integer code, or exponent and mantissa bits of a float."""
        return self._num_bits

    @num_bits.setter
    def num_bits(self, value: NumBits) -> None:
        self._num_bits = value

    @property
    def unsigned(self) -> bool:
        """Whether integer codes begin at 0."""
        return self._unsigned

    @unsigned.setter
    def unsigned(self, value: bool) -> None:
        self._unsigned = value

    @property
    def narrow_range(self) -> bool:
        """Whether the lowest signed code is left out."""
        return self._narrow_range

    @narrow_range.setter
    def narrow_range(self, value: bool) -> None:
        self._narrow_range = value

    @property
    def maxbound(self) -> float:
        """The code that amax is mapped to."""
        bound = format_of(self._num_bits, self._unsigned).bound
        return int(bound) if isinstance(self._num_bits, int) else bound

    @property
    def axis(self) -> Any:
        """The axis or axes that keep their own amax; None for one amax."""
        return self._axis

    @property
    def fake_quant(self) -> bool:
        """Whether values come out, not codes."""
        return self._fake_quant

    @property
    def scale(self) -> Any:
        """Codes per unit of the last tensor that became codes; 1.0 where values come out."""
        if self._fake_quant:
            logger.error("a quantizer that gives values has no scale; ask for amax or step_size")
        elif self._scale is None:
            logger.critical("no tensor was quantized yet, so there is no scale")
        return self._scale

    @property
    def step_size(self) -> Tensor | None:
        """Units per code; None if amax is that of every tensor.

        Raises:
            TypeError: a float format, whose steps differ.
        """
        if not isinstance(self._num_bits, int):
            raise TypeError(f"num_bits={self._num_bits} is a float format, whose codes have no one step size")
        if self.amax is None:
            logger.error("amax is that of every tensor, so there is no one step_size")
            return None
        return self.amax / self.maxbound

    def disable(self) -> None:
        """Return tensors as they are."""
        self._disabled = True

    def enable(self) -> None:
        """End `disable`."""
        self._disabled = False

    def disable_clip(self) -> None:
        """Stop learning amax; it stays where it is.

        Raises:
            AttributeError: amax is not learned.
        """
        self.clip.requires_grad_(False)
        self._if_clip = False

    def enable_clip(self) -> None:
        """Learn amax.

        Raises:
            ValueError: the descriptor has no `learn_amax`.
        """
        if not self._learn_amax:
            raise ValueError("there is no learned range to clip to; give a descriptor with learn_amax=True")
        self.clip.requires_grad_(True)
        self._if_clip = True

    def disable_calib(self) -> None:
        """Stop showing tensors to the calibrator."""
        self._if_calib = False

    def enable_calib(self) -> None:
        """Show tensors to the calibrator.

        Raises:
            ValueError: there is none.
            AttributeError: the descriptor named an unknown method.
        """
        if self._calibrator is None:
            raise ValueError("the quantizer has no calibrator; set _calibrator, or make a new quantizer")
        self._if_calib = True

    def disable_quant(self) -> None:
        """Stop quantizing."""
        self._if_quant = False

    def enable_quant(self) -> None:
        """Quantize."""
        self._if_quant = True

    def load_calib_amax(self, *args: Any, strict: bool = True, **kwargs: Any) -> None:
        """Take over the amax that the calibrator finds, as a copy.

        Args:
            args: of the calibrator's `compute_amax`, such as the method of a histogram.
            strict: whether a calibrator that has seen nothing is an error; otherwise amax becomes NaN.
            kwargs: also of `compute_amax`.

        Raises:
            RuntimeError: there is no calibrator, or it has seen nothing.
        """
        calibrator = getattr(self, "_calibrator", None)
        if calibrator is None:
            raise RuntimeError("Calibrator not created; make the quantizer with calib_method 'max' or 'histogram'")
        amax = calibrator.compute_amax(*args, **kwargs)
        if amax is None:
            message = "Calibrator returned None: it has seen no tensor"
            if strict:
                raise RuntimeError(f"{message}; run batches that reach it, or pass strict=False to set amax to NaN")
            logger.warning("%s; amax becomes NaN", message)
            amax = torch.tensor(math.nan)
        self._set_buffer("_amax", amax if self._blocks is None else self._blocks.restored(amax))

    def init_learn_amax(self) -> None:
        """Begin learning at the present amax; at the largest, if there are several.

        Raises:
            RuntimeError: the descriptor has no `learn_amax`.
            AttributeError: there is no amax.
        """
        if not self._learn_amax:
            raise RuntimeError("init_learn_amax without learn_amax; give a descriptor with learn_amax=True")
        amax = self._amax.max()
        self.clip.clip_value_min.data.copy_(-amax)
        self.clip.clip_value_max.data.copy_(amax)

    def forward(self, inputs: Tensor) -> Tensor:
        """Inputs as the stages that are on leave them.

        Raises:
            AssertionError: while ONNX export is enabled, a quantizer that cannot be exported.
        """
        if (factor := self.pre_quant_scale) is not None:
            inputs = (inputs * factor).to(inputs.dtype)
        if self._disabled:
            return inputs
        if self._if_calib:
            self._collect(inputs)
        if self._if_clip and not self._learn_amax:
            raise RuntimeError("there is no learned range to clip to; give a descriptor with learn_amax=True")
        if self._if_quant:
            return self._quant_forward(inputs)
        return self.clip(inputs) if self._if_clip else inputs

    @property
    def quantizes(self) -> bool:
        """Whether calls give quantized tensors, see `fakequant.nn.Quantizer`."""
        return not self._disabled and self._if_quant

    @property
    def passes_through(self) -> bool:
        """Whether tensors come out as they are, and nothing sees them."""
        active = not self._disabled and (self._if_quant or self._if_clip or self._if_calib)
        return self.pre_quant_scale is None and not active

    def _collect(self, inputs: Tensor) -> None:
        if self._calibrator is None:
            raise RuntimeError("Calibrator was not created; call disable_calib, or set _calibrator")
        if self._blocks is None:
            self._calibrator.collect(inputs)
        else:
            self._blocks.collect(self._calibrator, inputs)

    def _quant_forward(self, inputs: Tensor) -> Tensor:
        fmt = format_of(self._num_bits, self._unsigned, self._narrow_range)
        exporting = self._enable_onnx_export or TensorQuantizer.use_fb_fake_quant
        if self._blocks is not None:
            amax = None if self._dynamic else self.amax
            return self._blocks.fake_quantize(inputs, amax, self._scale_amax, fmt, exporting=exporting)
        is_integer = isinstance(self._num_bits, int)
        learns = self._learn_amax and is_integer
        if exporting:
            known = self._learned_amax() if learns else None if self.amax is None else self._get_amax(inputs)
            onnx_form.check(known, fmt, self._narrow_range)
            assert known is not None
            return onnx_form.fake_quantize(inputs, known, fmt)
        amax = self._learned_amax() if learns else self._get_amax(inputs)
        # Clipped in the precision of amax: rounded to half precision a clipped value may lie beyond it.
        x = self.clip(inputs.to(torch.promote_types(inputs.dtype, amax.dtype))) if learns else inputs
        if not isinstance(self._num_bits, int):
            return fake_quantize(x, amax, fmt)
        if self._fake_quant:
            return fake_tensor_quant(x, amax, self._num_bits, self._unsigned, self._narrow_range).to(inputs.dtype)
        outputs, self._scale = tensor_quant(x, amax, self._num_bits, self._unsigned, self._narrow_range)
        return outputs

    def _learned_amax(self) -> Tensor:
        return torch.maximum(-self.clip.clip_value_min, self.clip.clip_value_max).detach()

    def _get_amax(self, inputs: Tensor) -> Tensor:
        """The amax to quantize inputs with: the stored one or their own, in float32 at least."""
        amax = None if self._dynamic else self.amax
        if amax is None:
            kept = () if self._axis is None else (self._axis,) if isinstance(self._axis, int) else self._axis
            kept = {axis % inputs.dim() for axis in kept}
            reduced = None if self._axis is None else tuple(i for i in range(inputs.dim()) if i not in kept)
            amax = quant_utils.reduce_amax(inputs, axis=reduced, keepdims=True).detach()
        amax = amax.to(torch.promote_types(amax.dtype, torch.float32))
        return amax if self._scale_amax is None else amax * self._scale_amax

    def extra_repr(self) -> str:
        if self._disabled:
            return "disabled"
        calibrator = getattr(self, "_calibrator", None)
        words = {
            "unsigned": self._unsigned,
            f"{self._num_bits}bit": True,
            "narrow": self._narrow_range,
            "fake": self._fake_quant,
            "per-tensor" if self._axis is None else f"axis={self._axis}": self._blocks is None,
            f"{self._blocks}": self._blocks is not None,
            f"amax={self._short_amax()}": True,
            f"*{self._scale_amax}": bool(self._scale_amax),
            "pre_quant_scale": self.pre_quant_scale is not None,
            "learned": self._learn_amax,
            f"calibrator={type(calibrator).__name__}": calibrator is not None,
            f"scale={self._scale}": self._scale is not None,
            "quant": self._if_quant,
            "clip": self._if_clip,
            "calib": self._if_calib,
        }
        return " ".join(word for word, shown in words.items() if shown)
