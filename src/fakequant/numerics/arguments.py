"""Scale, zero point, amax and seed as callers give them: made tensors, brought to one shape, and checked."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fakequant.errors import QParamsError, ShapeError, SpecError

from .philox import draw_seed
from .qparams import (
    FLOATING,
    QParams,
    check_tensor,
    compute_dtype,
    is_plain_eager,
    is_readable_without_sync,
    shape_of,
)
from .spec import Arithmetic, QuantSpec, Rounding

Number = float | int | Tensor | np.generic | np.ndarray[Any, Any]

_Bounds = tuple[float, float, str]  # the least and the largest value of a parameter, and both in words
_LARGEST = torch.finfo(torch.float64).max
_ROUNDED_TO_0 = 2.0**-150  # half of the smallest float32
MAGNITUDE: _Bounds = 0.0, _LARGEST, "a number >= 0"
_SMALLEST = 2.0**-1074  # which compares equal to 0 where the processor flushes subnormal numbers
_FINITE: _Bounds = -_LARGEST, _LARGEST, "a finite number"
_POSITIVE: _Bounds = _SMALLEST, _LARGEST, "a positive, finite number"
# 1 / 2**-128 is beyond float32, that of the next number is not; likewise for float64.
_WITH_RECIPROCAL: dict[torch.dtype, _Bounds] = {
    dtype: (least, _LARGEST, "a positive, finite number with a finite reciprocal")
    for dtype, least in ((torch.float32, 2.0**-128 + 2.0**-149), (torch.float64, 2.0**-1024 + 2.0**-1074))
}


def resolve_seed(seed: int | Tensor | None, spec: QuantSpec, x: Tensor) -> Tensor | None:
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


def checked_params(
    scale: Number, zero_point: Number | None, x: Tensor, spec: QuantSpec, dtype: torch.dtype, *, traced: bool
) -> QParams:
    """Scale and zero point for x (or its codes) in the shape that broadcasts.

    Raises:
        ShapeError, QParamsError, SpecError: they do not fit x, the format or the specification.
    """
    if zero_point is not None and spec.symmetric:
        raise SpecError(f"a zero_point was given, but {spec} is symmetric; use symmetric=False")
    scale = fit("scale", as_tensor("scale", scale, x, dtype), x, spec)
    check_scale(scale, spec.arithmetic, exact=spec.scale.is_exact, traced=traced)
    scale = on_device_of(x, scale)
    if zero_point is None:
        return QParams(scale)
    zero_point = fit("zero_point", as_tensor("zero_point", zero_point, x, dtype), x, spec)
    lowest, highest = spec.format.quant_min, spec.format.quant_max
    expected = f"a code of {spec.format}, {lowest:g} to {highest:g}"
    bounds = _FINITE if spec.offset is not None else (lowest, highest, expected)
    check_values("zero_point", zero_point, bounds, whole=spec.offset is None, traced=traced)
    return QParams(scale, on_device_of(x, zero_point))


def check_scale(scale: Tensor, arithmetic: Arithmetic, *, exact: bool = False, traced: bool = True) -> None:
    """Check the values of a scale, float32 or float64, where they can be read: always if the call is not `traced`.

    Args:
        scale: any shape.
        arithmetic: of the specification.
        exact: whether its scales may be 0 or negative, see `ScaleSpec.is_exact`.
        traced: see `is_readable_without_sync`.

    Raises:
        QParamsError: one that is not finite, not positive where scales have to be, or has no finite reciprocal where
            that is needed.
    """
    if exact:
        check_values("scale", scale, _FINITE, traced=traced)
        return
    bounds = _WITH_RECIPROCAL[scale.dtype] if arithmetic is Arithmetic.RECIPROCAL else _POSITIVE
    check_values("scale", scale, bounds, positive=True, traced=traced)


def _check_has_values(name: str, value: Tensor, x: Tensor) -> None:
    if value.device.type == "meta" != x.device.type:
        raise QParamsError(
            f"{name} is on the device meta, which holds no values, and x is on {x.device}; give a {name} with values"
        )


def as_tensors(
    scale: Number, zero_point: Number | None, x: Tensor, spec: QuantSpec
) -> tuple[Tensor, Tensor | None] | None:
    """Scale and zero point as tensors; None where `checked_params`, or a check before it, will say what is wrong."""
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
    """A tensor as it is, a number as a tensor; None for all else, and for a number that would become 0 or infinite."""
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
    """A number of NumPy, or in a NumPy array without axes, as a number of Python; all else as it is."""
    return value.item() if isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0 else value


def as_tensor(name: str, value: Number, x: Tensor, dtype: torch.dtype) -> Tensor:
    """A parameter for x as a tensor of a dtype.

    Raises:
        DTypeError, QParamsError: it is no real number, or one that the dtype does not have.
    """
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


def on_device_of(x: Tensor, values: Tensor) -> Tensor:
    """Checked parameters on the device of x, without a wait for it."""
    return values if values.device == x.device else values.to(x.device, non_blocking=True)


def fit(name: str, values: Tensor, x: Tensor, spec: QuantSpec) -> Tensor:
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


def check_values(
    name: str, values: Tensor, bounds: _Bounds, *, whole: bool = False, positive: bool = False, traced: bool
) -> None:
    """Raise if a parameter is not within bounds in every group, where its values are `is_readable_without_sync`.

    Most parameters are one number. To read it costs a tenth of what comparing and reducing it as a tensor would. After
    a tensor that has pushed all else out of the caches, the difference is the time in which a million elements are
    copied.

    Args:
        positive: whether 0.0 is refused. Where the processor flushes subnormal numbers, a subnormal parameter and a
            subnormal lower bound both become 0.0, and a kernel would divide by it.
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
