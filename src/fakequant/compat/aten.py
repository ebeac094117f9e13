"""torch's fake-quantization functions, with torch's signatures and errors, computed by this package.

Finite inputs give torch's bits: values, masks and gradients. torch's faults are not copied (NaN becomes a number,
infinity the lowest code), and codes beyond 2^24 are refused; docs/compat-aten.md and docs/notes/differences.md list
every difference.

Source: pytorch, aten/src/ATen/native/quantized/FakeQuantPer{Tensor,Channel}Affine.cpp and cpu/kernels/
QuantizedOpKernels.cpp.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fakequant.errors import AxisError, CallError, SpecError, UnsupportedDTypeError
from fakequant.nn.ranges import straight_through
from fakequant.numerics.formats.floats import IntegerFormat
from fakequant.numerics.granularity import Granularity, PerChannel, PerTensor
from fakequant.numerics.qparams import FLOATING, QParams, check_scale, compute_dtype, is_concrete
from fakequant.numerics.reference import grad_input
from fakequant.numerics.spec import Arithmetic, QuantSpec
from fakequant.ops import library
from fakequant.restore import restore_after


class CodeRange(NamedTuple):
    """The codes from `quant_min` to `quant_max`, with granularity and arithmetic.

    >>> CodeRange(-8, 7, PerTensor(), Arithmetic.DIVIDE).origin, CodeRange(5, 20, PerTensor(), Arithmetic.DIVIDE).origin
    (0, 5)
    """

    quant_min: int
    quant_max: int
    granularity: Granularity
    arithmetic: Arithmetic

    @property
    def origin(self) -> int:
        """The code nearest to 0; codes are counted from it, because every format of this package contains 0."""
        return max(self.quant_min, min(self.quant_max, 0))

    @property
    def spec(self) -> QuantSpec:
        """The specification for codes counted from `origin`.

        Raises:
            SpecError: a range of fewer than two codes, or of more than 24 bits.
        """
        spec = _specs.get(self)
        if spec is None:
            try:
                fmt = IntegerFormat(self.quant_min - self.origin, self.quant_max - self.origin)
            except SpecError as error:
                raise SpecError(f"codes from {self.quant_min} to {self.quant_max}: {error}") from error
            spec = QuantSpec(fmt, self.granularity, symmetric=False, arithmetic=self.arithmetic)
            if not torch.compiler.is_compiling():  # a trace must not change what outlives it
                _specs[self] = spec
        return spec


# A plain dict: torch.compile warns about functools.lru_cache.
_specs: dict[CodeRange, QuantSpec] = {}

_CHANNEL_ZERO_POINTS = (torch.int32, torch.float32, torch.float16)


def fake_quantize_per_tensor_affine(
    input: Tensor, scale: float | Tensor, zero_point: int | Tensor, quant_min: int, quant_max: int
) -> Tensor:
    """`torch.fake_quantize_per_tensor_affine`, both overloads.

    Args:
        input: any shape; float32, float64, float16 or bfloat16.
        scale: units of input per code; a float, or a tensor of one element.
        zero_point: the code of 0.0; an int. Beside a scale that is a tensor, it may be a tensor of one element, too.
        quant_min: lowest code.
        quant_max: highest code; the range has at most 24 bits and at least two codes.

    Raises:
        CallError: a RuntimeError, as torch raises for a zero point out of range or a range that is empty.
        UnsupportedDTypeError: a NotImplementedError, for inputs that are not floating.
        TypeError: arguments of other types.
        QParamsError: a scale that is not positive and finite, which torch accepts.

    >>> fake_quantize_per_tensor_affine(torch.tensor([0.12, -9.0]), 0.1, 0, -8, 7)
    tensor([ 0.1000, -0.8000])
    """
    return _values(_per_tensor(input, scale, zero_point, quant_min, quant_max))


def fake_quantize_per_channel_affine(
    input: Tensor, scale: Tensor, zero_point: Tensor, axis: int, quant_min: int, quant_max: int
) -> Tensor:
    """`torch.fake_quantize_per_channel_affine`.

    Args:
        input: any shape with at least one axis; float32, float64, float16 or bfloat16.
        scale: units of input per code [C]; float32 or bfloat16.
        zero_point: the code of 0.0 [C]; int32, or float32 or float16, which is added before rounding.
        axis: the axis of length C, counted from 0.
        quant_min: lowest code.
        quant_max: highest code; the range has at most 24 bits and at least two codes.

    Raises:
        CallError: a RuntimeError, as torch raises for wrong dtypes, shapes and values.
        AxisError: an IndexError, for an axis that the input does not have.
        UnsupportedDTypeError: a NotImplementedError, for inputs that are not floating.
        QParamsError: a scale that is not positive and finite, which torch accepts.

    >>> x, scale, zero_point = torch.ones(2, 2), torch.tensor([0.4, 3.0]), torch.tensor([0, 1], dtype=torch.int32)
    >>> fake_quantize_per_channel_affine(x, scale, zero_point, 1, 0, 255)
    tensor([[0.8000, 0.0000],
            [0.8000, 0.0000]])
    """
    return _values(_per_channel(input, scale, zero_point, axis, quant_min, quant_max))


def fake_quantize_per_tensor_affine_cachemask(
    input: Tensor, scale: float | Tensor, zero_point: int | Tensor, quant_min: int, quant_max: int
) -> tuple[Tensor, Tensor]:
    """`fake_quantize_per_tensor_affine`, and a bool mask [shape of input] of where its gradient reaches the input."""
    return _values_and_mask(_per_tensor(input, scale, zero_point, quant_min, quant_max))


def fake_quantize_per_channel_affine_cachemask(
    input: Tensor, scale: Tensor, zero_point: Tensor, axis: int, quant_min: int, quant_max: int
) -> tuple[Tensor, Tensor]:
    """`fake_quantize_per_channel_affine`, and a bool mask [shape of input] of where its gradient reaches the input."""
    return _values_and_mask(_per_channel(input, scale, zero_point, axis, quant_min, quant_max))


def _fake_quantize_per_tensor_affine_cachemask_tensor_qparams(
    input: Tensor, scale: Tensor, zero_point: Tensor, fake_quant_enabled: Tensor, quant_min: int, quant_max: int
) -> tuple[Tensor, Tensor]:
    """`fake_quantize_per_tensor_affine_cachemask`, or the unchanged input if `fake_quant_enabled` [1] is 0."""
    call = _per_tensor(input, scale, zero_point, quant_min, quant_max)
    if not fake_quant_enabled.item():
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    return _values_and_mask(call)


def fake_quantize_per_tensor_affine_cachemask_backward(grad: Tensor, mask: Tensor) -> Tensor:
    """The gradient of the input: `grad` where the mask is set, else 0, even where `grad` is NaN or infinite.

    Raises:
        CallError: a RuntimeError, as torch raises for a mask of another dtype or size.
    """
    if mask.dtype != torch.bool:
        raise CallError(f"the mask has dtype {mask.dtype}, expected torch.bool; give the cachemask function's mask")
    if mask.numel() != grad.numel():
        raise CallError(f"the mask has shape {list(mask.shape)}, but the gradient {list(grad.shape)}; they must agree")
    return grad_input(grad, mask)


fake_quantize_per_channel_affine_cachemask_backward = fake_quantize_per_tensor_affine_cachemask_backward


def _fake_quantize_learnable_per_tensor_affine(
    input: Tensor, scale: Tensor, zero_point: Tensor, quant_min: int, quant_max: int, grad_factor: float = 1.0
) -> Tensor:
    """`torch._fake_quantize_learnable_per_tensor_affine`: scale and zero point get gradients, too.

    Args:
        input: any shape; float32, float16 or bfloat16, or float64 while neither scale nor zero point requires grad.
        scale: units of input per code [1].
        zero_point: the code of 0.0 [1]; rounded half to even and clamped to the codes; the gradient ignores both.
        quant_min: lowest code.
        quant_max: highest code.
        grad_factor: the factor of the gradients of scale and zero point.

    Raises:
        CallError: a RuntimeError, as torch raises, at the latest in the backward.

    >>> x, scale = torch.tensor([1.2, 9.0]), torch.tensor([0.5], requires_grad=True)
    >>> _fake_quantize_learnable_per_tensor_affine(x, scale, torch.zeros(1), -8, 7, 0.1).sum().backward()
    >>> scale.grad  # 0.1 * (rint(2.4) - 2.4 + 7)
    tensor([0.6600])
    """
    scale, zero_point = _one("scale", scale), _one("zero_point", zero_point)
    codes = _codes(quant_min, quant_max, PerTensor())
    return _values(_learnable(input, scale, zero_point, codes, grad_factor))


def _fake_quantize_learnable_per_channel_affine(
    input: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    axis: int,
    quant_min: int,
    quant_max: int,
    grad_factor: float = 1.0,
) -> Tensor:
    """`torch._fake_quantize_learnable_per_channel_affine`, with scale and zero point [C] that get gradients, too."""
    _check_channels(input, scale, zero_point, axis)
    codes = _codes(quant_min, quant_max, PerChannel(operator.index(axis)))
    return _values(_learnable(input, scale, zero_point, codes, grad_factor))


_ROUTED = (
    fake_quantize_per_tensor_affine,
    fake_quantize_per_channel_affine,
    _fake_quantize_per_tensor_affine_cachemask_tensor_qparams,
    _fake_quantize_learnable_per_tensor_affine,
    _fake_quantize_learnable_per_channel_affine,
)
_lock = threading.Lock()
_inside: set[object] = set()
_originals: dict[str, Any] = {}


@contextmanager
def routed() -> Iterator[None]:
    """A context in which this module's functions replace torch's fake-quantization functions, in all threads.

    This serves models that call them as `torch.<name>`, such as torch.ao.quantization's FakeQuantize. It may be nested,
    left by an exception, and used as a decorator. It does not replace names that were imported from torch
    before, `torch.ops.aten`, or `torch.fused_moving_avg_obs_fake_quant`.

    >>> x = torch.tensor([float("nan"), 0.12])
    >>> torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -8, 7)
    tensor([-0.8000,  0.1000])
    >>> with routed():
    ...     torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -8, 7)
    tensor([   nan, 0.1000])
    """
    # Threads may leave in another order than they entered: the last one restores the functions that the first one saw.
    inside = object()

    def leave() -> None:
        with _lock:
            _inside.discard(inside)
            if not _inside:
                for name, original in _originals.items():
                    setattr(torch, name, original)
                _originals.clear()

    with restore_after(leave):
        with _lock:
            if not _inside:
                _originals.update({f.__name__: getattr(torch, f.__name__) for f in _ROUTED})
            _inside.add(inside)
            for function in _ROUTED:
                setattr(torch, function.__name__, function)
        yield


class _Call(NamedTuple):
    """The checked arguments of a call.

    Attributes:
        params: scale, and zero point counted from the origin of the codes [groups per axis].
        added: a zero point that torch adds before rounding [groups per axis]; the zero point in `params` is then 0.
    """

    x: Tensor
    spec: QuantSpec
    params: QParams
    added: Tensor | None

    @property
    def is_one_operation(self) -> bool:
        """Whether a call of this package's operator gives torch's bits; float64 has reciprocals of float32 there."""
        return self.added is None and self.x.dtype != torch.float64


def _values(call: _Call) -> Tensor:
    if call.is_one_operation:
        return library.fake_quantize(call.x, call.params, call.spec)
    return _around_the_operator(call)[0]


def _values_and_mask(call: _Call) -> tuple[Tensor, Tensor]:
    if call.is_one_operation:
        return library.fake_quantize_with_mask(call.x, call.params, call.spec)
    return _around_the_operator(call)


def _around_the_operator(call: _Call) -> tuple[Tensor, Tensor]:
    """Round by this package's operator with scale 1, between torch's steps to codes and back; only x has a gradient."""
    x, scale, zero_point = call.x, call.params.scale, call.params.zero_point
    steps = x.detach().double() * scale.reciprocal().double()
    if call.added is not None:
        # torch's builds contract the product and a float32 zero point into one FMA (on processors that have it), which
        # rounds once; with a float16 zero point the product is rounded first.
        rounded = steps.to(compute_dtype(x.dtype)) if call.added.dtype == torch.float16 else steps
        steps = (rounded + call.added.to(rounded.dtype)).float()
    codes, mask = library.fake_quantize_with_mask(steps, QParams(torch.ones_like(scale), zero_point), call.spec)
    # torch multiplies in float32 per tensor, and in float64 per channel.
    dtype = torch.float32 if isinstance(call.spec.granularity, PerTensor) else torch.float64
    codes = codes.to(dtype) if call.added is None else codes.to(dtype) - call.added.to(dtype)
    values = (codes * scale.to(dtype)).to(x.dtype)
    return values + torch.where(mask, x - x.detach(), 0.0), mask


def _per_tensor(x: Tensor, scale: float | Tensor, zero_point: int | Tensor, quant_min: int, quant_max: int) -> _Call:
    if isinstance(scale, Tensor):
        scale = _one("scale", scale)
        zero_point = (
            zero_point if isinstance(zero_point, Tensor) else torch.tensor(operator.index(zero_point), device="cpu")
        )
        zero_point = _one("zero_point", zero_point)
        zero_point = zero_point.trunc() if zero_point.is_floating_point() else zero_point
    else:
        if not isinstance(scale, Real) or isinstance(zero_point, Tensor):
            raise TypeError(
                f"scale {scale!r}, zero_point {zero_point!r}: expected a float and an int, or tensors of one element"
            )
        scale = torch.tensor(float(scale), dtype=torch.float32, device="cpu")
        zero_point = torch.tensor(operator.index(zero_point), device="cpu")
    codes = _codes(quant_min, quant_max, PerTensor())
    _check_codes(zero_point, codes)
    return _call(x, scale.detach(), zero_point.detach(), codes)


def _per_channel(x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, quant_min: int, quant_max: int) -> _Call:
    _check_channels(x, scale, zero_point, axis)
    codes = _codes(quant_min, quant_max, PerChannel(operator.index(axis)))
    if zero_point.dtype not in _CHANNEL_ZERO_POINTS:
        raise CallError(f"the zero point has dtype {zero_point.dtype}, expected int32, float32 or float16; convert it")
    scale, zero_point = scale.detach(), zero_point.detach()
    if zero_point.is_floating_point():
        return _call(x, scale, torch.zeros_like(scale), codes, added=zero_point)
    _check_codes(zero_point, codes)
    return _call(x, scale, zero_point, codes)


def _learnable(x: Tensor, scale: Tensor, zero_point: Tensor, codes: CodeRange, grad_factor: float) -> _Call:
    if x.dtype == torch.float64 and torch.is_grad_enabled() and (scale.requires_grad or zero_point.requires_grad):
        raise CallError("a learned scale or zero point needs an input in float32, float16 or bfloat16, got float64")
    _check_codes(None, codes)
    nearest = zero_point.detach().round().clamp(codes.quant_min, codes.quant_max)
    given = straight_through(scale, scale, grad_factor), straight_through(nearest, zero_point, grad_factor)
    return _call(x, *given, codes)


def _check_input(x: object) -> None:
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        kind = f"a tensor of layout {x.layout}" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"input must be a dense torch.Tensor, got {kind}; convert it")


def _call(x: Tensor, scale: Tensor, zero_point: Tensor, codes: CodeRange, *, added: Tensor | None = None) -> _Call:
    _check_input(x)
    if x.dtype not in FLOATING:
        raise UnsupportedDTypeError(
            f"fake quantization is not implemented for {x.dtype}: expected float32, float64, float16 or bfloat16"
        )
    scale = scale.to(x.device, torch.float32)
    check_scale(scale, Arithmetic.RECIPROCAL)
    groups = codes.granularity.group_shape(x.shape)
    zero_point = zero_point.to(x.device)
    zero_point = zero_point - codes.origin if codes.origin else zero_point
    params = QParams(scale.reshape(groups), zero_point.reshape(groups))
    return _Call(x, codes.spec, params, None if added is None else added.to(x.device).reshape(groups))


def _one(name: str, value: Tensor) -> Tensor:
    """A tensor of one element as a 0-d tensor; raises CallError for more or fewer elements."""
    if value.numel() != 1:
        raise CallError(f"{name} has shape {list(value.shape)}; expected one element, or use the function per channel")
    return value.reshape(())


def _codes(quant_min: int, quant_max: int, granularity: Granularity) -> CodeRange:
    return CodeRange(operator.index(quant_min), operator.index(quant_max), granularity, Arithmetic.RECIPROCAL)


def _check_codes(zero_point: Tensor | None, codes: CodeRange) -> None:
    low, high = codes.quant_min, codes.quant_max
    if low > high:
        raise CallError(f"`quant_min` should be less than or equal to `quant_max`, got {low} and {high}")
    if max(abs(low), abs(high)) > 1 << 24:
        raise SpecError(f"codes from {low} to {high}: expected -2^24 to 2^24, up to which float32 counts exactly")
    if zero_point is None or not zero_point.numel() or not is_concrete(zero_point):
        return
    least, most = (end.item() for end in zero_point.aminmax()) if zero_point.numel() > 1 else [zero_point.item()] * 2
    if not (low <= least and most <= high):
        raise CallError(f"`zero_point` must be between {low} and {high}, got {most if low <= least else least}")


def _check_channels(x: Tensor, scale: Tensor, zero_point: Tensor, axis: int) -> None:
    _check_input(x)
    if scale.dtype not in (torch.float32, torch.bfloat16):
        raise CallError(f"the scale has dtype {scale.dtype}, expected float32 or bfloat16; convert it")
    if scale.dim() != 1 or zero_point.dim() != 1 or scale.numel() != zero_point.numel():
        raise CallError(
            f"scale has shape {list(scale.shape)}, zero_point {list(zero_point.shape)}; expected one value per channel"
        )
    if not -x.dim() <= axis < x.dim():
        raise AxisError(f"axis {axis} is out of range for an input of shape {list(x.shape)}")
    if axis < 0:
        raise CallError(f"`axis` must be counted from 0, got {axis}; use {axis + x.dim()}")
    if scale.numel() != x.shape[axis]:
        raise CallError(
            f"scale has {scale.numel()} elements, but axis {axis} of an input of shape {list(x.shape)} has "
            f"{x.shape[axis]}; they must agree"
        )
