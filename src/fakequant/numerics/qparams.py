"""Computes the scale and zero point of a quantization from a range of real numbers, and checks them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from fakequant.errors import CalibrationError, DTypeError, QParamsError, ShapeError, SpecError
from fakequant.numerics.division import divide
from fakequant.numerics.granularity import Granularity, block_axes, blocked, over_blocks
from fakequant.numerics.philox import draw_seed
from fakequant.numerics.spec import Arithmetic, QuantSpec, Rounding

# Types of tensors that kernels may read; other types redefine operations.
PLAIN = (Tensor, torch.nn.Parameter)
FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class Range(NamedTuple):
    """Lowest and highest value of every group, in units of x; lo <= 0 <= hi. Both are [groups per axis].

    >>> Range(torch.tensor([-3.0, 0.0]), torch.tensor([2.0, 5.0])).amax
    tensor([3., 5.])
    """

    lo: Tensor
    hi: Tensor

    @property
    def amax(self) -> Tensor:
        """The largest magnitude of every group."""
        # + 0.0: for an all-zero group -lo is -0.0, and bound / -0.0 would be -inf.
        return torch.maximum(-self.lo, self.hi) + 0.0


class QParams(NamedTuple):
    """Scale and zero point of every group, and the range they were made from.

    Args:
        scale: [groups per axis] in units of x per code; under `Arithmetic.MULTIPLIER` codes per unit of x.
        zero_point: the code of 0.0, [groups per axis], or None if that is 0 everywhere; under `QuantSpec.offset` the
            offset, in units of x.
        range: the range from which the scale was made, or None; `Gradient.INPUT_RANGE` compares the input with it.
        seed: the seed of `Rounding.STOCHASTIC`, [] int64; None before it is drawn, and where rounding is to nearest.

    >>> params = fq.choose_qparams(torch.tensor([-1.0, 2.54]), "int8")
    >>> params.scale, params.zero_point, params.range
    (tensor([0.0200]), None, Range(lo=tensor([-2.5400]), hi=tensor([2.5400])))
    """

    scale: Tensor
    zero_point: Tensor | None = None
    range: Range | None = None
    seed: Tensor | None = None


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which floats of `dtype` are quantized: float64 or float32. Raises DTypeError for other dtypes."""
    if dtype not in FLOATING:
        raise DTypeError(
            f"cannot quantize a tensor of dtype {dtype}: expected float32, float64, float16 or bfloat16; "
            "convert it first, for example x.float()"
        )
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_tensor(name: str, value: object) -> None:
    """Raise DTypeError unless a value is a tensor, and neither sparse, nested nor quantized."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_nested or value.is_quantized:
        if isinstance(value, Tensor) and value.is_nested:
            kind, way = "a nested tensor", f"torch.nested.to_padded_tensor({name}, 0.0)"
        elif isinstance(value, Tensor) and value.is_quantized:
            kind, way = f"a tensor of {value.dtype}", f"{name}.dequantize()"
        elif isinstance(value, Tensor):
            kind, way = f"a tensor of layout {value.layout}", f"{name}.to_dense()"
        else:
            kind, way = type(value).__name__, f"torch.tensor({name})"
        raise DTypeError(f"{name} must be a dense torch.Tensor, got {kind}; convert it first, as by {way}")


def is_plain_eager() -> bool:
    """Whether torch's operations just run: no compiler, exporter, tracer, transform or dispatch mode watches them."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
    )


def shape_of(x: Tensor) -> tuple[int, ...]:
    """The shape of x as numbers; torch.jit.trace would record its lengths as tensors, and warn where they are compared.

    In a trace, axes with several scales therefore have the lengths of the example.
    """
    if torch.compiler.is_compiling() or (state := torch._C._get_tracing_state()) is None:
        return x.shape
    torch._C._set_tracing_state(None)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        return tuple(x.shape)
    finally:
        torch._C._set_tracing_state(state)  # pyright: ignore[reportAttributeAccessIssue]


def is_concrete(*tensors: object) -> bool:
    """Whether the tensors among the arguments are plain tensors in plain eager execution, so that values may be read.

    It is false where something watches (see `is_plain_eager`), and for three kinds of tensors: subclasses; the batches
    of `torch.autograd.grad(..., is_grads_batched=True)`, which are neither subclasses nor a function transform's; and
    zeros without memory, as autograd makes for the gradient of `torch.sgn`.
    """
    if not is_plain_eager():
        return False
    # A loop, because every call of the operator runs it, and the frames of a generator expression cost more.
    for x in tensors:
        if x is None or not isinstance(x, Tensor):
            continue
        if type(x) not in PLAIN or x.is_meta or is_legacy_batchedtensor(x) or x._is_zerotensor():
            return False
    return True


def is_readable_without_sync(values: Tensor, *, traced: bool = True) -> bool:
    """Whether values may be read without waiting for an accelerator; `traced` is False if `is_concrete` is True."""
    return values.device.type == "cpu" and (not traced or is_concrete(values))


def measure(x: Tensor, granularity: Granularity, *, with_zero: bool = True) -> Range:
    """The range of the finite values of every group, extended to contain 0.0.

    inf and NaN are left out, so that one of them does not spoil its whole group: NaN then stays NaN, and inf becomes
    the largest finite value. A group without elements has the range 0 to 0.

    Args:
        x: any shape that the granularity accepts.
        granularity: which elements are a group.
        with_zero: whether ranges are extended to 0; if not, only padding and groups without finite values count as 0.

    >>> measure(torch.tensor([[-1.0, 2.0], [3.0, float("inf")]]), PerChannel(0)).hi
    tensor([[2.],
            [3.]])
    """
    blocks = granularity.block_shape(x.shape)
    groups = granularity.group_shape(x.shape)
    x = x.detach()
    if x.numel() == 0:
        zeros = x.new_zeros(groups, dtype=compute_dtype(x.dtype))
        return Range(zeros, torch.zeros_like(zeros))  # two tensors: torch.compile takes none twice
    values = blocked(x.to(compute_dtype(x.dtype)), blocks)
    axes, finite = block_axes(x.shape, blocks), values.isfinite()
    if not with_zero:
        lowest, highest = torch.where(finite, values, torch.inf), torch.where(finite, values, -torch.inf)
        lo, hi = (lowest.amin(axes), highest.amax(axes)) if axes else (lowest, highest)
        return Range(*(torch.where(end.isfinite(), end, 0.0).reshape(groups) for end in (lo, hi)))
    values = torch.where(finite, values, 0.0)
    lo, hi = (values.amin(axes), values.amax(axes)) if axes else (values, values)
    return Range(lo.reshape(groups).clamp(max=0.0), hi.reshape(groups).clamp(min=0.0))


def fill_empty_groups(range: Range, spec: QuantSpec) -> Range:
    """The range in which groups of zeros have the range of the groups with which they share a scale of scales.

    Without such groups that hold other values, groups of zeros get the range of the whole tensor, or -1 to 1 if the
    whole tensor is zero. Zeros stay zeros under every scale, but under the smallest scale, 2**-126, later values of
    such a group would be clipped, and a bias divided by this scale would overflow int32 in an engine. The range is
    returned unchanged if the specification allows a scale of 0 and its format has no 0.0.

    >>> fill_empty_groups(Range(torch.tensor([-3.0, 0.0]), torch.tensor([2.0, 0.0])), QuantSpec("int8"))
    Range(lo=tensor([-3., -3.]), hi=tensor([2., 2.]))
    """
    has_zero = spec.format.has_zero and spec.offset is None
    if not range.lo.numel() or (spec.scale.is_exact and not has_zero):
        return range
    if spec.scale.granularity is not None:
        blocks = spec.scale.granularity.block_shape(range.lo.shape)
        lo = over_blocks(range.lo, blocks, lambda view, axes: view.amin(axes, True))
        range = _lend(range, lo, over_blocks(range.hi, blocks, lambda view, axes: view.amax(axes, True)))
    lo, hi = range.lo.amin(), range.hi.amax()
    nothing = (lo == hi).to(lo.dtype)
    return _lend(range, lo - nothing, hi + nothing)


def _lend(range: Range, lo: Tensor, hi: Tensor) -> Range:
    empty = range.amax == 0
    return Range(torch.where(empty, lo, range.lo), torch.where(empty, hi, range.hi))


def choose_qparams(
    range: Range,
    spec: QuantSpec,
    *,
    largest: float | None = None,
    bound: float | None = None,
    shared: Tensor | None = None,
    steps: int = 0,
) -> QParams:
    """The scale and zero point that map a range onto the codes of a format.

    Symmetric: amax is mapped to the format's bound. Asymmetric: lo and hi to quant_min and quant_max, 0.0 to a code. A
    range too small for a normal scale gets the smallest normal one (2**-126 in float32), so that no scale is zero and
    no reciprocal infinite: all-zero groups stay zero. A range that reaches the end of the dtype gets the largest scale
    with which every code stays finite. Under `QuantSpec.offset`, the rounded offset maps lo to 0, and the scale maps
    hi + offset to quant_max.

    Args:
        range: lo and hi of every group [groups per axis], in units of x.
        spec: decides symmetry and format, and whether `scale` is units per code or its reciprocal.
        largest: the largest finite value of x's dtype; by default of the range's dtype.
        bound: the code that amax is mapped to; by default the bound of the specification.
        shared: see `ScaleSpec.choose`, also for `steps`; both are for symmetric scales.

    Returns:
        scale, zero_point (None when symmetric) and the range, all [groups per axis].

    Raises:
        CalibrationError: lo > hi somewhere, which means that no data was observed.

    Source: ONNX DynamicQuantizeLinear; Jacob et al., arXiv 1712.05877, section 3.

    >>> choose_qparams(Range(torch.tensor([-1.0]), torch.tensor([2.0])), QuantSpec("int8")).scale
    tensor([0.0157])
    """
    lo, hi = range
    if is_readable_without_sync(lo) and bool((lo > hi).any()):
        raise CalibrationError(
            f"no data was observed: the range has lo > hi (lo={lo.max().item()}, hi={hi.min().item()}); calibrate first"
        )
    # Less a unit in the last place: a quotient rounded to nearest may be half of one too large.
    largest = (torch.finfo(lo.dtype).max if largest is None else largest) * (1.0 - torch.finfo(lo.dtype).eps)
    fmt = spec.format
    if spec.symmetric:
        amax = range.amax
        limit = largest / max(-fmt.quant_min, fmt.quant_max)
        return QParams(_symmetric_scale(range, spec, limit, bound, shared, steps), None, Range(-amax, amax))
    tiny = torch.finfo(lo.dtype).tiny
    if spec.offset is None or not spec.offset.needs_values:
        lo, hi = lo.clamp(max=0.0), hi.clamp(min=0.0)
    if spec.offset is not None:
        offset = spec.offset.choose_offset(lo, largest)
        scale = spec.scale.choose((hi + offset).clamp(min=0.0), fmt, largest / fmt.quant_max, fmt.quant_max)
        return QParams(scale, offset, Range(lo, hi))
    # Halved before the subtraction, so that hi - lo cannot overflow; exact in binary.
    spacings = torch.full_like(lo, fmt.quant_max - fmt.quant_min)
    scale = (divide(hi * 0.5 - lo * 0.5, spacings) * 2.0).clamp(tiny, torch.finfo(lo.dtype).max)
    if spec.scale.format is not None:
        scale = spec.scale.choose(scale, fmt, largest / (fmt.quant_max - fmt.quant_min), 1.0)
    code = fmt.quant_min - divide(lo, torch.where(scale == 0, 1.0, scale)).round()
    zero_point = code.clamp(fmt.quant_min, fmt.quant_max)
    if spec.scale.format is None:
        farthest = torch.maximum(zero_point - fmt.quant_min, fmt.quant_max - zero_point)
        scale = torch.minimum(scale, divide(torch.full_like(scale, largest), farthest))
    return QParams(scale, zero_point.to(torch.int32), Range(lo, hi))


def _symmetric_scale(
    range: Range, spec: QuantSpec, limit: float, bound: float | None, shared: Tensor | None, steps: int
) -> Tensor:
    """The scale that maps the range to the bound, at most `limit`; under MULTIPLIER the reciprocal of that scale."""
    if spec.arithmetic.is_linear:
        return spec.scale.choose(spec.scale.extent(*range, spec.format), spec.format, limit, bound, shared, steps)
    amax = range.amax
    tiny = torch.finfo(amax.dtype).tiny
    if spec.arithmetic is not Arithmetic.MULTIPLIER:
        most = min(limit, torch.finfo(torch.float16).max) if spec.arithmetic is Arithmetic.Q8_0 else limit
        power = above(spec.format.bound)
        return (amax / power).clamp(tiny, most * spec.format.bound / power)
    multiplier = divide(torch.full_like(amax, spec.format.bound), amax)
    return multiplier.clamp(1.0 / limit, 1.0 / tiny)


def above(bound: float) -> float:
    """The next power of two above a bound; division by it is exact."""
    return 2.0 ** math.frexp(bound)[1]


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
    """The seed of stochastic rounding, drawn if none is given; None if rounding is to nearest."""
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
    """Scale and zero point for x (or its codes) in the shape that broadcasts; errors if they do not fit."""
    if zero_point is not None and spec.symmetric:
        raise SpecError(f"a zero_point was given, but {spec} is symmetric; use symmetric=False")
    scale = fit("scale", as_tensor("scale", scale, x, dtype), x, spec)
    check_scale(scale, spec.arithmetic, exact=spec.scale.is_exact, signed=spec.has_signed_scales, traced=traced)
    scale = on_device_of(x, scale)
    if zero_point is None:
        return QParams(scale)
    zero_point = fit("zero_point", as_tensor("zero_point", zero_point, x, dtype), x, spec)
    lowest, highest = spec.format.quant_min, spec.format.quant_max
    expected = f"a code of {spec.format}, {lowest:g} to {highest:g}"
    bounds = _FINITE if spec.offset is not None else (lowest, highest, expected)
    check_values("zero_point", zero_point, bounds, whole=spec.offset is None, traced=traced)
    return QParams(scale, on_device_of(x, zero_point))


def check_scale(
    scale: Tensor, arithmetic: Arithmetic, *, exact: bool = False, signed: bool = False, traced: bool = True
) -> None:
    """Check the values of a scale, float32 or float64, where they can be read: always if the call is not `traced`.

    Args:
        scale: any shape.
        arithmetic: the arithmetic of the specification.
        exact: whether scales may be 0 or negative, see `ScaleSpec.is_exact`.
        signed: whether scales may be negative, see `QuantSpec.has_signed_scales`.
        traced: see `is_readable_without_sync`.

    Raises:
        QParamsError: a scale that is not finite, not positive where scales must be positive, or has no finite
            reciprocal where that is needed.
    """
    if exact:
        check_values("scale", scale, _FINITE, traced=traced)
        return
    bounds = _WITH_RECIPROCAL[scale.dtype] if arithmetic is Arithmetic.RECIPROCAL else _POSITIVE
    check_values("scale", scale.abs() if signed else scale, bounds, positive=True, traced=traced)


def _check_has_values(name: str, value: Tensor, x: Tensor) -> None:
    if value.device.type == "meta" != x.device.type:
        raise QParamsError(
            f"{name} is on the device meta, which holds no values, and x is on {x.device}; give a {name} with values"
        )


def as_tensors(
    scale: Number, zero_point: Number | None, x: Tensor, spec: QuantSpec
) -> tuple[Tensor, Tensor | None] | None:
    """Scale and zero point as tensors; None if they are wrong, which `checked_params` or an earlier check reports."""
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
    """A number as a tensor, a tensor as it is; None for other types, and for numbers that become 0 or infinite."""
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
    """A number of NumPy, or a NumPy array without axes, as a number of Python; other values as they are."""
    return value.item() if isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0 else value


def as_tensor(name: str, value: Number, x: Tensor, dtype: torch.dtype) -> Tensor:
    """`value`, a parameter for x, as a tensor of `dtype`; raises DTypeError or QParamsError unless it is real."""
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
    found, wanted = ("0", "a larger") if abs(value) < 1 else ("beyond all numbers", "a smaller")
    where = f"in {dtype}, in which tensors of {x.dtype} are quantized"
    raise QParamsError(f"{name}={value!r} is {found} {where}; give {wanted} {name}")


def on_device_of(x: Tensor, values: Tensor) -> Tensor:
    """Checked parameters on the device of x, copied without waiting for the device."""
    return values if values.device == x.device else values.to(x.device, non_blocking=True)


def fit(name: str, values: Tensor, x: Tensor, spec: QuantSpec) -> Tensor:
    """Parameters in an accepted shape, reshaped to the shape that broadcasts, [groups per axis]."""
    shapes = spec.granularity.scale_shapes(shape_of(x))
    given = shape_of(values)
    if given == shapes[0]:
        return values
    if tuple(given) in shapes or (values.numel() == 1 == math.prod(shapes[0])):
        return values.reshape(shapes[0])
    accepted = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
    raise ShapeError(
        f"{name} has shape {list(values.shape)}, but {spec.granularity} on a tensor of shape {list(x.shape)} needs "
        f"{accepted}; reshape {name}, or choose the granularity for its shape"
    )


def check_values(
    name: str, values: Tensor, bounds: _Bounds, *, whole: bool = False, positive: bool = False, traced: bool
) -> None:
    """Raise QParamsError if a value is not within `bounds`; values that cannot be read without waiting are not checked.

    Most parameters are one number. Reading it takes a tenth of the time of comparing and reducing it as a tensor. With
    cold caches, the difference is the time in which a million elements are copied.

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
