"""The quantizer of one tensor, configured by a descriptor, and clipping with bounds that can be learned."""

from __future__ import annotations

import math
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fakequant import functional
from fakequant.compat.pytorch_quantization import calib
from fakequant.compat.pytorch_quantization import utils as quant_utils
from fakequant.compat.pytorch_quantization.tensor_quant import (
    NumBits,
    QuantDescriptor,
    block_axes,
    block_specification,
    fake_quantize,
    fake_tensor_quant,
    format_of,
    granularity_of,
    tensor_quant,
)
from fakequant.compat.pytorch_quantization.utils import logger
from fakequant.errors import shown
from fakequant.nn.ranges import PreciseModule, straight_through
from fakequant.numerics.formats.floats import Format, IntegerFormat
from fakequant.numerics.granularity import PerBlock, PerChannel, PerTensor
from fakequant.numerics.qparams import QParams, Range, compute_dtype
from fakequant.numerics.spec import Arithmetic, Gradient, QuantSpec
from fakequant.ops import library
from fakequant.ops.trt_fp8 import as_trt_fp8, writes_trt_fp8

__all__ = ["Clip", "ClipFunction", "TensorQuantizer", "clip"]


# Codes 0 and 1 under a scale of 1: every 1 saturates, and gives the scale its gradient.
_REACHED = QuantSpec(IntegerFormat.of(1, signed=False), PerTensor(), symmetric=True, gradient=Gradient.CLIP)


def clip(input: Tensor, clip_value_min: Tensor, clip_value_max: Tensor) -> Tensor:
    """Clip the input between two bounds; a bound gets the gradients of the elements that it clips (PACT).

    A value on a bound counts as clipped: its gradient goes to the bound. The gradients are summed as under
    `Gradient.CLIP`, with the same result in any order.

    Raises:
        ValueError: in the backward pass, if a bound has more than one element.

    Source: Choi et al., PACT, arXiv 1805.06085, equation 2.

    >>> bound = torch.tensor(1.0, requires_grad=True)
    >>> clip(torch.tensor([0.5, 1.0, 3.0]), -bound.detach(), bound).sum().backward()
    >>> bound.grad
    tensor(2.)
    """
    scalar = clip_value_min.numel() == clip_value_max.numel() == 1
    low, high = (bound.detach() if scalar else bound for bound in (clip_value_min, clip_value_max))
    ends = torch.maximum(torch.minimum(input.detach(), high.to(input.dtype)), low.to(input.dtype))
    output = torch.where((input > low) & (input < high), input, ends)
    if scalar:
        return _to_bound(_to_bound(output, input <= low, clip_value_min), input >= high, clip_value_max)
    if output.requires_grad:
        shapes = f"{list(low.shape)} and {list(high.shape)}"

        def refuse(_: Tensor) -> None:
            raise ValueError(f"bounds that are learned can only be scalar, got shapes {shapes}; learn one per tensor")

        output.register_hook(refuse)
    return output


class ClipFunction:
    """A class whose static method `apply` is `clip`, as scripts call it."""

    apply = staticmethod(clip)


def _to_bound(output: Tensor, reached: Tensor, bound: Tensor) -> Tensor:
    """The output; its gradient at elements where `reached` is set also goes to a bound of one element."""
    if not (bound.requires_grad and torch.is_grad_enabled()):
        return output
    flags = reached.to(torch.promote_types(output.dtype, bound.dtype))
    # A bound that is not finite would make the scale NaN, and nothing would be learned from it.
    finite = bound.nan_to_num(0.0, 0.0, 0.0).reshape((1,) * output.dim())
    scale = straight_through(torch.ones_like(finite), finite)
    # Subtracting +0.0 changes no value, not even -0.0.
    return output - (flags - library.fake_quantize(flags, QParams(scale), _REACHED)).to(output.dtype)


class Clip(PreciseModule):
    """Clips between two bounds; learned bounds are parameters, others are buffers.

    A parameter that is given as a bound stays the same parameter.

    Args:
        clip_value_min: the lower bound, a number, a tensor, a parameter or an array.
        clip_value_max: the upper bound.
        learn_min: whether the lower bound is learned, which needs one number, not a tensor.
        learn_max: whether the upper bound is learned.

    Raises:
        ValueError: a bound that shall be learned and is not one number.
        TypeError: a bound that is neither a number nor a tensor or an array of numbers.

    >>> Clip(-1.0, 2.0)(torch.tensor([-3.0, 0.5, 3.0]))
    tensor([-1.0000,  0.5000,  2.0000])
    """

    clip_value_min: Tensor
    clip_value_max: Tensor

    def __init__(
        self, clip_value_min: Any, clip_value_max: Any, learn_min: bool = False, learn_max: bool = False
    ) -> None:
        super().__init__()
        bounds = {"clip_value_min": (clip_value_min, learn_min), "clip_value_max": (clip_value_max, learn_max)}
        for name, (value, learned) in bounds.items():
            try:
                if isinstance(value, Tensor) and value.is_complex():
                    raise TypeError(f"{value.dtype} has no order")
                bound = torch.as_tensor(value, dtype=torch.float32).clone()
            except (TypeError, ValueError, RuntimeError) as error:
                expected = "a number, or a tensor or an array of numbers"
                raise TypeError(f"{name} must be {expected}, got {value!r}") from error
            if not learned and isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
            elif not learned:
                self.register_buffer(name, bound)
            elif bound.numel() != 1 or isinstance(value, Tensor):
                # Scripts match this text, "initilizing" included.
                expected = "clip_value_min/clip_value_max must be scalar for initilizing learnable range."
                raise ValueError(f"{expected} {name} is {shown(value)} of shape {list(bound.shape)}; give one number")
            else:
                self.register_parameter(name, nn.Parameter(bound))

    def forward(self, inputs: Tensor) -> Tensor:
        return clip(inputs, self.clip_value_min, self.clip_value_max)


_BUFFERS = ("_amax", "_pre_quant_scale")


class Blocks:
    """Measures, calibrates and quantizes for a quantizer with `block_sizes`; the last block of an axis may be smaller.

    Args:
        block_sizes: the descriptor's `block_sizes`.
    """

    def __init__(self, block_sizes: dict[Any, Any]) -> None:
        self.block_sizes = dict(block_sizes)
        self.granularity = PerBlock(block_axes(self.block_sizes), pad=True)
        self._observed: torch.Size | None = None

    def fake_quantize(
        self, inputs: Tensor, amax: Tensor | None, factor: float | None, fmt: Format, *, exporting: bool
    ) -> Tensor:
        """Inputs rounded to values of the format under the scales of their blocks.

        Args:
            inputs: any shape.
            amax: the calibrated amax [blocks per axis]; None: the amax of each block of inputs.
            factor: multiplies amax, unless None.
            fmt: the format of the elements.
            exporting: whether to compute as ONNX does, see `_as_quantize_linear`.
        """
        spec = block_specification(fmt, self.block_sizes)
        if exporting:
            spec = spec.replace(arithmetic=Arithmetic.DIVIDE)
        if factor is not None:
            amax = factor * (library.measure(inputs, self.granularity).amax if amax is None else amax)
        return functional.fake_quantize(inputs, spec, amax=amax)

    def collect(self, calibrator: Any, inputs: Tensor) -> None:
        """Show the amax of every block [1, blocks] to a calibrator.

        Raises:
            NotImplementedError: the calibrator is not a `MaxCalibrator`.
        """
        if not isinstance(calibrator, calib.MaxCalibrator):
            raise NotImplementedError(f"{type(calibrator).__name__} has no blocks; use calib_method='max'")
        amax = library.measure(inputs, self.granularity).amax[None]
        self._observed = amax.shape[1:]
        calibrator._axis = tuple(range(1, amax.dim()))
        calibrator.collect(amax)

    def restored(self, amax: Tensor) -> Tensor:
        """A calibrator's amax [1, blocks] reshaped to [blocks per axis]; a single number stays unchanged."""
        shape = self._observed
        return amax if shape is None or amax.numel() != shape.numel() else amax.reshape(shape)

    def __str__(self) -> str:
        return f"block_sizes={self.block_sizes}"


# The bits of integers that TensorRT runs.
_BITS = 8


def _check_exportable(amax: Tensor | None, fmt: Format, narrow_range: bool) -> None:
    """Check that TensorRT can express a quantizer.

    Raises:
        AssertionError: TensorRT cannot express it, or amax is missing.
    """
    if amax is None:
        raise AssertionError("the quantizer has no amax: calibrate it and load amax before exporting to ONNX")
    several = sum(n != 1 for n in amax.shape)
    if not fmt.has_zero_point:
        if several:
            raise AssertionError(f"floats are exported per tensor only, got an amax of shape {list(amax.shape)}")
        return
    if fmt.bits != _BITS:
        raise AssertionError(f"integers are exported with {_BITS} bits only, got num_bits={fmt.bits}")
    if fmt.signed and narrow_range:
        raise AssertionError("a narrow range is not exported: ONNX has all 256 codes; set narrow_range=False")
    if several > 1:
        raise AssertionError(f"amax may vary along one axis only, got shape {list(amax.shape)}")


def _as_quantize_linear(inputs: Tensor, amax: Tensor, fmt: Format) -> Tensor:
    """Inputs [...] fake-quantized as by QuantizeLinear and DequantizeLinear; amax may vary along one axis.

    These operators divide by the scale and multiply by it, while the quantizer multiplies by 1 / scale and divides. So
    the model computes in torch what its file computes. Values differ by at most one unit in the last place.
    """
    granularity, shape = granularity_of(amax.shape, inputs.shape)
    amax = amax.detach().to(inputs.device, compute_dtype(inputs.dtype)).reshape(shape)
    scale = amax / torch.full_like(amax, fmt.bound)
    # Any scale gives 0 for 0, but ONNX and TensorRT want a positive one.
    scale = torch.where(scale > 0, scale, 1.0)
    if writes_trt_fp8(fmt):
        return as_trt_fp8(inputs, scale)
    if torch.onnx.is_in_onnx_export():
        if not isinstance(fmt, IntegerFormat):
            raise AssertionError(f"torch.onnx.export has no form for {fmt}; use fakequant.export_onnx")
        # The operators for which torch.onnx.export knows QuantizeLinear and DequantizeLinear. QuantizeLinear takes
        # float16 from opset 19 on, with a float16 scale only.
        x = inputs.to(scale.dtype)
        zero_point = torch.zeros(scale.numel(), dtype=torch.int32, device=x.device)
        codes = int(fmt.quant_min), int(fmt.quant_max)
        if isinstance(granularity, PerChannel):
            (axis,) = granularity.axes
            values = torch.fake_quantize_per_channel_affine(x, scale.reshape(-1), zero_point, axis, *codes)
        else:
            values = torch.fake_quantize_per_tensor_affine(x, scale.reshape(()), zero_point.reshape(()), *codes)
        return values.to(inputs.dtype)
    spec = QuantSpec(fmt, granularity, symmetric=True, gradient=Gradient.INPUT_RANGE)
    return library.fake_quantize(inputs, QParams(scale, None, Range(-amax, amax)), spec)


_CALIBRATORS = {"max": calib.MaxCalibrator, "histogram": calib.HistogramCalibrator}


def _setting(name: str, doc: str) -> Any:
    """A property that reads and sets an attribute."""
    return property(attrgetter(name), lambda quantizer, value: setattr(quantizer, name, value), doc=doc)


class TensorQuantizer(PreciseModule):
    """Calibrates, clips and quantizes one tensor; each of these steps can be turned on and off.

    Until the descriptor, a calibrator, a state dict or the setter sets amax, each tensor's range is used. amax and
    `pre_quant_scale` become buffers when they are set: copies in at least float32, which stay float32 when the model
    becomes half precision.

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
    """The switch of older releases for the effect of `quant_modules.enable_onnx_export`."""
    _enable_onnx_export = False
    # Models that were pickled by the original lack these.
    _dynamic = False
    _blocks: Blocks | None = None

    clip: Clip
    _amax: Tensor

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
    def pre_quant_scale(self) -> Tensor | None:
        """The factor by which tensors are multiplied first, also if the quantizer is disabled; None for no factor."""
        return self._buffers.get("_pre_quant_scale")

    @pre_quant_scale.setter
    def pre_quant_scale(self, value: Any) -> None:
        self._set("_pre_quant_scale", value)

    @property
    def amax(self) -> Tensor | None:
        """The largest magnitude that has a code, before `scale_amax`; None if each tensor's amax is used.

        Raises:
            RuntimeError: the new amax has another shape than the present amax.
        """
        return self._buffers.get("_amax")

    @amax.setter
    def amax(self, value: Any) -> None:
        self._set("_amax", value)

    def _set(self, name: str, value: Any) -> None:
        """Set a buffer from a user's value; logs an error for None, and raises RuntimeError for another shape."""
        if value is None:
            logger.error("%s cannot be set to None; delete it instead", name)
            return
        value = torch.as_tensor(value)
        old = self._buffers.get(name)
        if old is not None and old.shape != value.shape:
            raise RuntimeError(
                f"Changing shape when setting {name.strip('_')} is not allowed: it has {list(old.shape)}, got "
                f"{list(value.shape)}; delete it first"
            )
        self._set_buffer(name, value)

    def _set_buffer(self, name: str, value: Tensor) -> None:
        """Store a copy of a value in a buffer: in the existing tensor if the shape is the same."""
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

    num_bits: NumBits = _setting("_num_bits", "Bits of an integer code, or exponent and mantissa bits of a float.")
    unsigned: bool = _setting("_unsigned", "Whether integer codes begin at 0.")
    narrow_range: bool = _setting("_narrow_range", "Whether the lowest signed code is left out.")

    @property
    def maxbound(self) -> float:
        """The code of amax."""
        bound = format_of(self._num_bits, self._unsigned).bound
        return int(bound) if isinstance(self._num_bits, int) else bound

    @property
    def axis(self) -> Any:
        """The axis or axes along which each index has a separate amax; None for one amax."""
        return self._axis

    @property
    def fake_quant(self) -> bool:
        """Whether the quantizer returns values instead of codes."""
        return self._fake_quant

    @property
    def scale(self) -> Any:
        """Codes per unit of the last quantized tensor; 1.0 if the quantizer returns values."""
        if self._fake_quant:
            logger.error("a quantizer that gives values has no scale; ask for amax or step_size")
        elif self._scale is None:
            logger.critical("no tensor was quantized yet, so there is no scale")
        return self._scale

    @property
    def step_size(self) -> Tensor | None:
        """Units per code; None if each tensor's amax is used.

        Raises:
            TypeError: a float format, whose steps differ.
        """
        if not isinstance(self._num_bits, int):
            raise TypeError(f"num_bits={self._num_bits} is a float format, whose codes have no single step size")
        if self.amax is None:
            logger.error("amax is taken from each tensor, so that there is no single step_size")
            return None
        return self.amax / self.maxbound

    def disable(self) -> None:
        """Make calls return tensors unchanged."""
        self._disabled = True

    def enable(self) -> None:
        """Undo `disable`."""
        self._disabled = False

    def disable_clip(self) -> None:
        """Stop learning amax, which keeps its present value.

        Raises:
            AttributeError: amax is not learned.
        """
        self.clip.requires_grad_(False)
        self._if_clip = False

    def enable_clip(self) -> None:
        """Start learning amax.

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
        """Start showing tensors to the calibrator.

        Raises:
            ValueError: the quantizer has no calibrator.
            AttributeError: the descriptor named an unknown method.
        """
        if self._calibrator is None:
            raise ValueError("the quantizer has no calibrator; set _calibrator, or make a new quantizer")
        self._if_calib = True

    def disable_quant(self) -> None:
        """Stop quantizing."""
        self._if_quant = False

    def enable_quant(self) -> None:
        """Start quantizing."""
        self._if_quant = True

    def load_calib_amax(self, *args: Any, strict: bool = True, **kwargs: Any) -> None:
        """Set amax to a copy of the calibrator's result.

        Args:
            args: arguments of the calibrator's `compute_amax`, such as the method of a histogram.
            strict: whether a calibrator without data is an error; otherwise amax becomes NaN.
            kwargs: further arguments of `compute_amax`.

        Raises:
            RuntimeError: there is no calibrator, or it has no data.
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
            amax = torch.tensor(math.nan, device="cpu")
        self._set_buffer("_amax", amax if self._blocks is None else self._blocks.restored(amax))

    def init_learn_amax(self) -> None:
        """Set the learned bounds to the present amax, or to the largest if there are several.

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
        """Inputs after the steps that are on: calibration, clipping and quantization.

        Raises:
            AssertionError: while ONNX export is enabled, a quantizer that cannot be exported.
        """
        if (factor := self.pre_quant_scale) is not None:
            inputs = (inputs * factor).to(inputs.dtype)
        if self._disabled:
            return inputs
        if self._if_calib:
            if self._calibrator is None:
                raise RuntimeError("Calibrator was not created; call disable_calib, or set _calibrator")
            if self._blocks is None:
                self._calibrator.collect(inputs)
            else:
                self._blocks.collect(self._calibrator, inputs)
        if self._if_clip and not self._learn_amax:
            raise RuntimeError("there is no learned range to clip to; give a descriptor with learn_amax=True")
        if self._if_quant:
            fmt = format_of(self._num_bits, self._unsigned, self._narrow_range)
            exporting = self._enable_onnx_export or TensorQuantizer.use_fb_fake_quant
            if self._blocks is not None:
                amax = None if self._dynamic else self.amax
                return self._blocks.fake_quantize(inputs, amax, self._scale_amax, fmt, exporting=exporting)
            is_integer = isinstance(self._num_bits, int)
            learns = self._learn_amax and is_integer
            if exporting:
                known = self._learned_amax() if learns else None if self.amax is None else self._get_amax(inputs)
                _check_exportable(known, fmt, self._narrow_range)
                assert known is not None
                return _as_quantize_linear(inputs, known, fmt)
            amax = self._learned_amax() if learns else self._get_amax(inputs)
            # Clipped in the precision of amax: rounded to half precision a clipped value may lie beyond it.
            x = self.clip(inputs.to(torch.promote_types(inputs.dtype, amax.dtype))) if learns else inputs
            if not isinstance(self._num_bits, int):
                return fake_quantize(x, amax, fmt)
            if self._fake_quant:
                return fake_tensor_quant(x, amax, self._num_bits, self._unsigned, self._narrow_range).to(inputs.dtype)
            outputs, self._scale = tensor_quant(x, amax, self._num_bits, self._unsigned, self._narrow_range)
            return outputs
        return self.clip(inputs) if self._if_clip else inputs

    @property
    def quantizes(self) -> bool:
        """Whether calls give quantized tensors, see `fakequant.nn.Quantizer`."""
        return not self._disabled and self._if_quant

    @property
    def passes_through(self) -> bool:
        """Whether tensors are returned unchanged, and no calibrator sees them."""
        active = not self._disabled and (self._if_quant or self._if_clip or self._if_calib)
        return self.pre_quant_scale is None and not active

    def _learned_amax(self) -> Tensor:
        return torch.maximum(-self.clip.clip_value_min, self.clip.clip_value_max).detach()

    def _get_amax(self, inputs: Tensor) -> Tensor:
        """The amax by which inputs are quantized, at least float32: the stored amax, or else the amax of the inputs."""
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
        calibrator, amax, shown_amax = getattr(self, "_calibrator", None), self.amax, "dynamic"
        if amax is not None:
            several = f"[{amax.min().item():.4f}, {amax.max().item():.4f}]({amax.numel()})"
            shown_amax = f"{amax.item():.4f}" if amax.numel() == 1 else several
        words = {
            "unsigned": self._unsigned,
            f"{self._num_bits}bit": True,
            "narrow": self._narrow_range,
            "fake": self._fake_quant,
            "per-tensor" if self._axis is None else f"axis={self._axis}": self._blocks is None,
            f"{self._blocks}": self._blocks is not None,
            f"amax={shown_amax}": True,
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
