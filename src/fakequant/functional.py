"""The functions that most people call: fake_quantize, fake_quantize_, quantize, dequantize, choose_qparams."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import CallError, DTypeError, QParamsError, ShapeError, SpecError
from .numerics.philox import draw_seed
from .numerics.qparams import (
    FLOATING,
    QParams,
    Range,
    check_tensor,
    compute_dtype,
    is_plain_eager,
    is_readable_without_sync,
    shape_of,
)
from .numerics.qparams import choose_qparams as _qparams_of_range
from .numerics.spec import Arithmetic, QuantSpec, Rounding, as_spec
from .ops import library
from .ops.dispatch import find_plan
from .ops.gradients import apply_plan

Number = float | int | Tensor | np.generic | np.ndarray[Any, Any]

_Bounds = tuple[float, float, str]  # the least and the largest value of a parameter, and both in words
_LARGEST = torch.finfo(torch.float64).max
_ROUNDED_TO_0 = 2.0**-150  # half of the smallest float32
_MAGNITUDE: _Bounds = 0.0, _LARGEST, "a number >= 0"
_SMALLEST = 2.0**-1074  # which compares equal to 0 where the processor flushes subnormal numbers
_POSITIVE: _Bounds = _SMALLEST, _LARGEST, "a positive, finite number"
# 1 / 2**-128 is beyond float32, that of the next number is not; likewise for float64.
_WITH_RECIPROCAL: dict[torch.dtype, _Bounds] = {
    dtype: (least, _LARGEST, "a positive, finite number with a finite reciprocal")
    for dtype, least in ((torch.float32, 2.0**-128 + 2.0**-149), (torch.float64, 2.0**-1024 + 2.0**-1074))
}


def fake_quantize(
    x: Tensor,
    spec: QuantSpec | str,
    *,
    scale: Number | None = None,
    zero_point: Number | None = None,
    amax: Number | None = None,
    seed: int | Tensor | None = None,
) -> Tensor:
    """x rounded to the values that a format has, differentiable by the straight-through estimator.

    Without parameters the range is taken from x itself, per group, without a gradient to it.

    Args:
        x: any shape that the granularity accepts; float32, float64, float16 or bfloat16.
        spec: how to quantize, as a value or as text ("int8 per_channel(0)").
        scale: one value per group, in units of x per code (codes per unit of x under `Arithmetic.MULTIPLIER`): a
            number (of Python or NumPy) or 0-d tensor per tensor, [C] per channel, or x's shape with every axis divided
            by its block. If it requires grad it gets its gradient (LSQ).
        zero_point: the code of 0.0, of the same shape; only where `spec.symmetric` is false.
        amax: instead of `scale`: the magnitude that is mapped to the format's largest code. If it requires grad it gets
            a gradient by the chain rule, through the scale.
        seed: an integer or 0-d int64 tensor that decides stochastic rounding, see `Rounding`; only for specifications
            with it. Without one it is drawn from torch's default generator (`torch.manual_seed`). Equal seeds give
            elements at equal positions equal random numbers: give every tensor its own.

    Returns:
        A tensor of the shape and dtype of x. NaN stays NaN, inf becomes the largest value of its group (which is inf
        if a given scale is so large that codes times scale exceed the dtype).

    Raises:
        DTypeError: x is not a floating tensor.
        ShapeError: x does not fit the granularity, or a parameter does not fit x.
        QParamsError: a scale that is not positive and finite, a zero point out of range, a seed that is no int64;
            values are not read under torch.compile, torch.func and dispatch modes, nor of tensors on an accelerator.
        SpecError: a seed for a specification that rounds to nearest, a zero point for a symmetric one.

    >>> fake_quantize(torch.tensor([0.1, -0.52, 1.27]), "int8", scale=0.01)
    tensor([ 0.1000, -0.5200,  1.2700])
    >>> fake_quantize(torch.tensor([[0.3, -1.0], [5.0, 2.4]]), QuantSpec("int2", PerChannel(0)))
    tensor([[ 0., -1.],
            [ 5.,  0.]])
    >>> fake_quantize(torch.full((8,), 0.25), "int8 per_tensor stochastic", scale=1.0, seed=3)
    tensor([0., 1., 0., 0., 0., 0., 1., 0.])
    """
    spec = as_spec(spec)
    if scale is not None and amax is None and seed is None:
        if (given := _as_tensors(scale, zero_point, x, spec)) is not None:
            scale, zero_point = given
            # Kernels check parameters in the pass that quantizes; what is wrong with one is found below.
            plan = find_plan(x, spec, scale, zero_point)
            if plan is not None and plan.checks and (y := apply_plan(plan, x, scale, zero_point)) is not None:
                return y
    elif scale is None and zero_point is None and amax is None:
        check_tensor("x", x)
        return library.fake_quantize_dynamic(x, spec, _resolve_seed(seed, spec, x))
    return library.quantize_by(x, spec, *_resolve(x, spec, scale, zero_point, amax, seed))


def fake_quantize_(
    x: Tensor,
    spec: QuantSpec | str,
    *,
    scale: Number | None = None,
    zero_point: Number | None = None,
    amax: Number | None = None,
    seed: int | Tensor | None = None,
) -> Tensor:
    """`fake_quantize` in place, without a gradient: it overwrites x and every tensor that shares its memory.

    Arguments, errors and bits are those of `fake_quantize`. With given parameters on the CPU, a large x takes half the
    time of a copy, and no memory.

    Returns:
        x itself.

    Raises:
        CallError: a gradient of x or of a parameter would be wanted.

    >>> x = torch.tensor([0.104, -0.52, 5.0])
    >>> fake_quantize_(x, "int8", scale=0.01) is x
    True
    >>> x
    tensor([ 0.1000, -0.5200,  1.2700])
    """
    spec = as_spec(spec)
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in (x, scale, zero_point, amax)):
        raise CallError(
            "fake_quantize_ has no gradient, and x or a parameter requires grad; call fake_quantize, or this one under "
            "torch.no_grad()"
        )
    if scale is None and zero_point is None and amax is None:
        values = fake_quantize(x, spec, seed=seed)  # first, because it says what is wrong with x
        return x.copy_(values)
    given = _as_tensors(scale, zero_point, x, spec) if scale is not None and amax is None and seed is None else None
    if given is not None and library.fake_quantize_over(x, spec, *given):
        return x
    params = _resolve(x, spec, scale, zero_point, amax, seed)
    if library.fake_quantize_over(x, spec, params.scale, params.zero_point):
        return x
    return x.copy_(library.fake_quantize(x, params, spec))


def quantize(
    x: Tensor,
    spec: QuantSpec | str,
    *,
    scale: Number | None = None,
    zero_point: Number | None = None,
    amax: Number | None = None,
    seed: int | Tensor | None = None,
) -> tuple[Tensor, QParams]:
    """The codes of x and the parameters that `dequantize` needs; arguments and errors as for `fake_quantize`.

    Codes come in the smallest torch dtype that holds them. NaN has no integer code and becomes quant_min. The
    parameters keep the seed of stochastic rounding.

    >>> codes, params = quantize(torch.tensor([0.1, -0.52, 1.27]), "int8")
    >>> codes
    tensor([ 10, -52, 127], dtype=torch.int8)
    """
    spec = as_spec(spec)
    params = _resolve(x, spec, scale, zero_point, amax, seed)
    return library.quantize(x, params, spec), params


def dequantize(codes: Tensor, params: QParams, spec: QuantSpec | str, *, dtype: torch.dtype | None = None) -> Tensor:
    """The values of codes made by `quantize`, in the dtype of the scale or the one given.

    >>> codes, params = quantize(torch.tensor([0.1, -0.52, 1.27]), "int8")
    >>> dequantize(codes, params, "int8")
    tensor([ 0.1000, -0.5200,  1.2700])
    """
    spec = as_spec(spec)
    check_tensor("codes", codes)
    if codes.dtype != spec.format.storage:
        raise DTypeError(
            f"codes of dtype {codes.dtype}, but the codes of {spec.format} come in {spec.format.storage}; "
            "give what fakequant.quantize returned"
        )
    computed = compute_dtype(params.scale.dtype)
    compute_dtype(dtype or computed)
    traced = library.needs_tracing(codes, params.scale, params.zero_point)
    valid = _checked(params.scale, params.zero_point, codes, spec, computed, traced=traced)
    return library.dequantize(codes, valid, spec, dtype or params.scale.dtype)


def choose_qparams(x: Tensor, spec: QuantSpec | str) -> QParams:
    """The scale and zero point of every group of x, from its own range [groups, axes kept].

    >>> choose_qparams(torch.tensor([-1.0, 0.5]), "int8").scale
    tensor([0.0079])
    """
    spec = as_spec(spec)
    check_tensor("x", x)
    compute_dtype(x.dtype)
    return _qparams_like(x, library.measure(x, spec.granularity), spec)


def _qparams_like(x: Tensor, range: Range, spec: QuantSpec) -> QParams:
    """Of a range of a tensor like x."""
    wide = library.needs_wide_division(range.lo)
    return _qparams_of_range(range, spec, largest=torch.finfo(x.dtype).max, wide=wide)


def _resolve(
    x: Tensor,
    spec: QuantSpec,
    scale: Number | None,
    zero_point: Number | None,
    amax: Number | None,
    seed: int | Tensor | None,
) -> QParams:
    """The parameters in the shape that broadcasts, checked."""
    if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_nested:
        check_tensor("x", x)
    dtype = compute_dtype(x.dtype)
    traced = library.needs_tracing(x, scale, zero_point, amax, seed)
    if scale is not None and amax is None:
        params = _checked(scale, zero_point, x, spec, dtype, traced=traced)
    elif scale is not None:
        raise QParamsError("both scale and amax were given; the scale follows from amax, so give one of them")
    elif zero_point is not None and amax is not None:
        raise QParamsError("a zero_point was given with amax, which is for symmetric ranges; give it with a scale")
    elif zero_point is not None:
        raise QParamsError("a zero_point was given without a scale; give both, or neither to take them from x")
    elif amax is not None:
        limit = _fit("amax", _as_tensor("amax", amax, x, dtype), x, spec)
        _check_values("amax", limit, _MAGNITUDE, traced=traced)
        limit = _on_device_of(x, limit)
        params = _qparams_like(x, Range(-limit, limit), spec)
    else:
        params = choose_qparams(x, spec)
    if seed is not None or spec.rounding is Rounding.STOCHASTIC:
        params = params._replace(seed=_resolve_seed(seed, spec, x))
    return params


def _resolve_seed(seed: int | Tensor | None, spec: QuantSpec, x: Tensor) -> Tensor | None:
    """The seed of stochastic rounding, drawn if none is given; None where rounding is to nearest."""
    if spec.rounding is Rounding.NEAREST_EVEN:
        if seed is None:
            return None
        raise SpecError(f"a seed was given, but {spec} rounds to nearest; use rounding=Rounding.STOCHASTIC")
    if seed is None:
        return draw_seed()
    if isinstance(seed, Tensor):
        _check_has_values("seed", seed, x)
        if seed.dtype == torch.int64 and seed.dim() == 0:
            return seed
        got = f"a tensor of {seed.dtype} and shape {list(seed.shape)}"
    elif isinstance(seed, int) and -(2**63) <= seed < 2**63:
        return torch.tensor(seed, dtype=torch.int64, device="cpu")
    else:
        got = repr(seed)
    raise QParamsError(f"seed must be an integer of 64 bits with a sign, or a 0-d int64 tensor, got {got}")


def _checked(
    scale: Number, zero_point: Number | None, x: Tensor, spec: QuantSpec, dtype: torch.dtype, *, traced: bool
) -> QParams:
    """Scale and zero point for x (or its codes) in the shape that broadcasts.

    Raises:
        ShapeError, QParamsError, SpecError: they do not fit x, the format or the specification.
    """
    if zero_point is not None and spec.symmetric:
        raise SpecError(f"a zero_point was given, but {spec} is symmetric; use symmetric=False")
    scale = _fit("scale", _as_tensor("scale", scale, x, dtype), x, spec)
    check_scale(scale, spec.arithmetic, traced=traced)
    scale = _on_device_of(x, scale)
    if zero_point is None:
        return QParams(scale)
    zero_point = _fit("zero_point", _as_tensor("zero_point", zero_point, x, dtype), x, spec)
    lowest, highest = spec.format.quant_min, spec.format.quant_max
    expected = f"a code of {spec.format}, {lowest:g} to {highest:g}"
    _check_values("zero_point", zero_point, (lowest, highest, expected), whole=True, traced=traced)
    return QParams(scale, _on_device_of(x, zero_point))


def check_scale(scale: Tensor, arithmetic: Arithmetic, *, traced: bool = True) -> None:
    """Check the values of a scale, float32 or float64, where they are known: surely if the call is not `traced`.

    Raises:
        QParamsError: one that is not positive and finite, or has no finite reciprocal where that is needed.
    """
    bounds = _WITH_RECIPROCAL[scale.dtype] if arithmetic is Arithmetic.RECIPROCAL else _POSITIVE
    _check_values("scale", scale, bounds, positive=True, traced=traced)


def _check_has_values(name: str, value: Tensor, x: Tensor) -> None:
    if value.device.type == "meta" != x.device.type:
        raise QParamsError(
            f"{name} is on the device meta, which holds no values, and x is on {x.device}; give a {name} with values"
        )


def _as_tensors(
    scale: Number, zero_point: Number | None, x: Tensor, spec: QuantSpec
) -> tuple[Tensor, Tensor | None] | None:
    """Scale and zero point, made tensors where they are numbers; None where that or what comes before it will raise."""
    if isinstance(scale, Tensor) and (zero_point is None or isinstance(zero_point, Tensor)):
        return scale, zero_point
    if not isinstance(x, Tensor) or x.dtype not in FLOATING or (zero_point is not None and spec.symmetric):
        return None
    dtype = compute_dtype(x.dtype)
    made, made_zero_point = _made_tensor(scale, dtype), None
    if zero_point is not None and (made_zero_point := _made_tensor(zero_point, dtype)) is None:
        return None
    return None if made is None else (made, made_zero_point)


def _made_tensor(value: Number, dtype: torch.dtype) -> Tensor | None:
    """A tensor as it is, the tensor of a number; None of all else, and of a number that is 0 or none in the dtype."""
    if isinstance(value, Tensor):
        return value
    value = _plain_number(value)
    if not isinstance(value, (int, float)) or (0 < abs(value) <= _ROUNDED_TO_0 and dtype == torch.float32):
        return None
    try:
        return torch.tensor(value, dtype=dtype, device="cpu")
    except OverflowError:
        return None


def _plain_number(value: Number) -> Number:
    """A number of NumPy, also as an array of no axes, as Python's own."""
    return value.item() if isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0 else value


def _as_tensor(name: str, value: Number, x: Tensor, dtype: torch.dtype) -> Tensor:
    value = _plain_number(value)
    if isinstance(value, Tensor):
        check_tensor(name, value)
        _check_has_values(name, value, x)
        if value.is_complex():
            raise QParamsError(f"{name} must be real, got a tensor of {value.dtype}")
        if is_plain_eager() and value._is_zerotensor():  # zeros without memory, see `is_concrete`
            value = value.clone()
    if (made := _made_tensor(value, dtype)) is not None:
        return made if made.dtype == dtype else made.to(dtype)
    if not isinstance(value, (int, float)):
        wanted = f"{name} must be an int, a float or a tensor of real numbers, got {value!r}"
        raise QParamsError(f"{wanted}; convert it, for example by float()")
    found = "0" if abs(value) < 1 else "beyond all numbers"
    raise QParamsError(f"{name}={value!r} is {found} in {dtype}, in which tensors of {x.dtype} are quantized")


def _on_device_of(x: Tensor, values: Tensor) -> Tensor:
    """Checked parameters on the device of x, without a wait for it."""
    return values if values.device == x.device else values.to(x.device, non_blocking=True)


def _fit(name: str, values: Tensor, x: Tensor, spec: QuantSpec) -> Tensor:
    """Parameters in one of the accepted shapes, as the one that broadcasts."""
    shapes = spec.granularity.scale_shapes(shape_of(x))
    given = shape_of(values)
    if given == shapes[0]:
        return values
    if tuple(given) in shapes or (values.numel() == 1 == math.prod(shapes[0])):
        return values.reshape(shapes[0])
    accepted = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
    raise ShapeError(
        f"{name} has shape {list(values.shape)}, but {spec.granularity} on a tensor of shape {list(x.shape)} needs "
        f"{accepted}; reshape it, or choose the granularity that it belongs to"
    )


def _check_values(
    name: str, values: Tensor, bounds: _Bounds, *, whole: bool = False, positive: bool = False, traced: bool
) -> None:
    """Raise if a parameter is not within bounds in every group, where its values are `is_readable_without_sync`.

    Most parameters are one number: read, it costs a tenth of comparing and reducing it as a tensor. Behind a tensor
    that has pushed all else out of the caches that difference is as long as copying a million elements.

    Args:
        positive: whether 0.0 is refused. Where the processor flushes subnormal numbers, they are 0.0 and so is a lower
            bound among them, and a kernel would divide by it.
    """
    number = values.numel()
    if not number or not is_readable_without_sync(values, traced=traced):
        return
    lowest, highest, expected = bounds
    least, most = (values.item(),) * 2 if number == 1 else (end.item() for end in values.aminmax())
    in_bounds = lowest <= least and most <= highest and (least > 0 or not positive)
    if in_bounds and not (whole and bool((values != values.round()).any())):
        return
    if positive and least == 0 and _SMALLEST == 0:
        raise QParamsError(
            f"{name} must be {expected} in every group, got one that is 0 because torch.set_flush_denormal(True) makes "
            f"0 of all numbers below {torch.finfo(values.dtype).tiny:g}; give a larger {name}"
        )
    exact = values.double()  # torch would round the bounds to the dtype of the values
    good = (exact >= lowest) & (exact <= highest)
    if whole:
        good &= exact == exact.round()
    raise QParamsError(f"{name} must be {expected} in every group, got {values[~good][0].item()}")
