"""The functions that most people call: fake_quantize, fake_quantize_, quantize, dequantize, choose_qparams."""

from __future__ import annotations

import torch
from torch import Tensor

from fakequant.errors import CallError, DTypeError, QParamsError
from fakequant.numerics.qparams import (
    MAGNITUDE,
    Number,
    QParams,
    Range,
    as_tensor,
    as_tensors,
    check_tensor,
    check_values,
    checked_params,
    compute_dtype,
    fit,
    on_device_of,
    resolve_seed,
)
from fakequant.numerics.qparams import choose_qparams as _qparams_of_range
from fakequant.numerics.spec import QuantSpec, Rounding, as_spec
from fakequant.ops import library
from fakequant.ops.dispatch import find_plan
from fakequant.ops.graph_operators import apply_plan


def fake_quantize(
    x: Tensor,
    spec: QuantSpec | str,
    *,
    scale: Number | None = None,
    zero_point: Number | None = None,
    amax: Number | None = None,
    seed: int | Tensor | None = None,
) -> Tensor:
    """x rounded to the values of a format, with the gradient of the straight-through estimator.

    Without parameters the range of each group is computed from x itself, and has no gradient.

    Args:
        x: a tensor of any shape that the granularity accepts, in float32, float64, float16 or bfloat16.
        spec: how to quantize, as a value or as text ("int8 per_channel(0)").
        scale: a value for each group, in units of x per code (codes per unit of x under `Arithmetic.MULTIPLIER`): a
            number (of Python or NumPy) or 0-d tensor if there is one scale per tensor, [C] if there is one per channel,
            or always the shape of x with every axis divided by its block. A scale that requires grad gets its gradient
            (LSQ).
        zero_point: the code of 0.0, in the shape of the scale; only if `spec.symmetric` is false.
        amax: instead of `scale`, the magnitude that is mapped to the format's largest code. If `amax` requires grad, it
            gets a gradient by the chain rule, through the scale.
        seed: an integer or 0-d int64 tensor that decides stochastic rounding, see `Rounding`; only for specifications
            that round so. By default it is drawn from torch's default generator (`torch.manual_seed`). With equal
            seeds, elements at equal positions get equal random numbers: give every tensor another seed.

    Returns:
        A tensor of the shape and dtype of x. NaN stays NaN; inf becomes the largest value of its group, which is inf if
        the scale is so large that codes times scale exceed the dtype.

    Raises:
        DTypeError: x is not a floating tensor.
        ShapeError: x does not fit the granularity, or a parameter does not fit x.
        QParamsError: a scale is not positive and finite, a zero point is out of range, or a seed is not an int64.
            Values are not checked under torch.compile, torch.func and dispatch modes, nor in tensors on an accelerator.
        SpecError: a seed for a specification that rounds to nearest, or a zero point for a symmetric specification.

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
        if (given := as_tensors(scale, zero_point, x, spec)) is not None:
            scale, zero_point = given
            # Kernels check parameters in the pass that quantizes; what is wrong with one is found below.
            plan = find_plan(x, spec, scale, zero_point)
            if plan is not None and plan.checks and (y := apply_plan(plan, x, scale, zero_point)) is not None:
                return y
    elif scale is None and zero_point is None and amax is None:
        check_tensor("x", x)
        return library.fake_quantize_dynamic(x, spec, resolve_seed(seed, spec, x))
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

    Arguments, errors and bits are those of `fake_quantize`. On the CPU, with a scale or amax, a large x takes half the
    time of a copy, and no memory.

    Returns:
        x itself.

    Raises:
        CallError: x or a parameter requires a gradient.

    >>> x = torch.tensor([0.104, -0.52, 5.0])
    >>> fake_quantize_(x, "int8", scale=0.01) is x
    True
    >>> x
    tensor([ 0.1000, -0.5200,  1.2700])
    """
    spec = as_spec(spec)
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in (x, scale, zero_point, amax)):
        raise CallError(
            "fake_quantize_ has no gradient, and x or a parameter requires grad; call fake_quantize, or fake_quantize_ "
            "under torch.no_grad()"
        )
    if scale is None and zero_point is None and amax is None:
        values = fake_quantize(x, spec, seed=seed)  # first, because it says what is wrong with x
        return x.copy_(values)
    given = as_tensors(scale, zero_point, x, spec) if scale is not None and amax is None and seed is None else None
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

    Codes have the smallest torch dtype that holds them. NaN has no integer code and becomes quant_min. The
    parameters include the seed of stochastic rounding.

    >>> codes, params = quantize(torch.tensor([0.1, -0.52, 1.27]), "int8")
    >>> codes
    tensor([ 10, -52, 127], dtype=torch.int8)
    """
    spec = as_spec(spec)
    params = _resolve(x, spec, scale, zero_point, amax, seed)
    return library.quantize(x, params, spec), params


def dequantize(codes: Tensor, params: QParams, spec: QuantSpec | str, *, dtype: torch.dtype | None = None) -> Tensor:
    """The values of codes made by `quantize`, in `dtype`, or by default in the dtype of the scale.

    Raises DTypeError if the codes have another dtype than `quantize` returns.

    >>> codes, params = quantize(torch.tensor([0.1, -0.52, 1.27]), "int8")
    >>> dequantize(codes, params, "int8")
    tensor([ 0.1000, -0.5200,  1.2700])
    """
    spec = as_spec(spec)
    check_tensor("codes", codes)
    if codes.dtype != spec.format.storage:
        raise DTypeError(
            f"codes have dtype {codes.dtype}, but codes of {spec.format} have {spec.format.storage}; "
            "give the codes that fakequant.quantize returned"
        )
    computed = compute_dtype(params.scale.dtype)
    compute_dtype(dtype or computed)
    traced = library.needs_tracing(codes, params.scale, params.zero_point)
    valid = checked_params(params.scale, params.zero_point, codes, spec, computed, traced=traced)
    return library.dequantize(codes, valid, spec, dtype or params.scale.dtype)


def choose_qparams(x: Tensor, spec: QuantSpec | str) -> QParams:
    """The scale and zero point of every group of x, from the group's range, in the shape [groups per axis].

    >>> choose_qparams(torch.tensor([-1.0, 0.5]), "int8").scale
    tensor([0.0079])
    """
    spec = as_spec(spec)
    check_tensor("x", x)
    compute_dtype(x.dtype)
    return library.choose(x, spec)


def _resolve(
    x: Tensor,
    spec: QuantSpec,
    scale: Number | None,
    zero_point: Number | None,
    amax: Number | None,
    seed: int | Tensor | None,
) -> QParams:
    """The parameters, checked and reshaped to the shape that broadcasts, [groups per axis]."""
    if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_nested:
        check_tensor("x", x)
    dtype = compute_dtype(x.dtype)
    traced = library.needs_tracing(x, scale, zero_point, amax, seed)
    if scale is not None and amax is None:
        params = checked_params(scale, zero_point, x, spec, dtype, traced=traced)
    elif scale is not None:
        raise QParamsError("scale and amax were both given, but the scale follows from amax; pass only one of them")
    elif zero_point is not None and amax is not None:
        raise QParamsError(
            "a zero_point was given with amax, but amax means a symmetric range; pass the zero_point with a scale"
        )
    elif zero_point is not None:
        raise QParamsError("a zero_point was given without a scale; pass both, or neither to compute them from x")
    elif amax is not None:
        limit = fit("amax", as_tensor("amax", amax, x, dtype), x, spec)
        check_values("amax", limit, MAGNITUDE, traced=traced)
        limit = on_device_of(x, limit)
        params = _qparams_of_range(Range(-limit, limit), spec, largest=torch.finfo(x.dtype).max)
    else:
        params = choose_qparams(x, spec)
    if seed is not None or spec.rounding is Rounding.STOCHASTIC:
        params = params._replace(seed=resolve_seed(seed, spec, x))
    return params
