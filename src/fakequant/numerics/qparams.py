"""From a range of real numbers to the parameters of a quantization."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from fakequant.errors import CalibrationError, DTypeError

from .blocks import block_axes, blocked, over_blocks
from .division import divide
from .granularity import Granularity
from .spec import Arithmetic, QuantSpec

# Types of tensors that kernels may read; other types redefine operations.
PLAIN = (Tensor, torch.nn.Parameter)
FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class Range(NamedTuple):
    """Lowest and highest value of every group, in units of x; lo <= 0 <= hi. Both [groups, axes kept].

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
        scale: [groups, axes kept] in units of x per code; under `Arithmetic.MULTIPLIER` codes per unit of x.
        zero_point: the code of 0.0, [groups, axes kept], or None if that is 0 everywhere; under `QuantSpec.offset` the
            offset, in units of x.
        range: what the scale was made from, or None; `Gradient.INPUT_RANGE` compares the input with it.
        seed: that of `Rounding.STOCHASTIC` [], int64; None before one is drawn, and where rounding is to nearest.

    >>> params = fq.choose_qparams(torch.tensor([-1.0, 2.54]), "int8")
    >>> params.scale, params.zero_point, params.range
    (tensor([0.0200]), None, Range(lo=tensor([-2.5400]), hi=tensor([2.5400])))
    """

    scale: Tensor
    zero_point: Tensor | None = None
    range: Range | None = None
    seed: Tensor | None = None


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which tensors of a dtype are quantized: float64 for itself, else float32.

    Raises:
        DTypeError: not a floating dtype of at least 16 bits.
    """
    if dtype not in FLOATING:
        raise DTypeError(
            f"cannot quantize a tensor of dtype {dtype}: expected float32, float64, float16 or bfloat16; "
            "convert it first, for example x.float()"
        )
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_tensor(name: str, value: object) -> None:
    """Check that a value is a tensor with one number for each element.

    Raises:
        DTypeError: no tensor, or a sparse, nested or quantized one.
    """
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

    The axes that scales divide then have the lengths of the example.
    """
    if torch.compiler.is_compiling() or (state := torch._C._get_tracing_state()) is None:
        return x.shape
    torch._C._set_tracing_state(None)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        return tuple(x.shape)
    finally:
        torch._C._set_tracing_state(state)  # pyright: ignore[reportAttributeAccessIssue]


def is_concrete(*tensors: object) -> bool:
    """Whether the tensors among these are plain ones in plain eager execution, so that their values may be looked at.

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
    """Whether values may be looked at without waiting until an accelerator has done all work before them.

    Args:
        traced: false if `is_concrete` is known to be true.
    """
    return values.device.type == "cpu" and (not traced or is_concrete(values))


def measure(x: Tensor, granularity: Granularity, *, with_zero: bool = True) -> Range:
    """The range of the finite values of every group, extended to contain 0.0.

    inf and NaN are left out, so that one of them does not spoil its whole group: NaN then stays NaN, and inf becomes
    the largest finite value. A group without elements has the range 0 to 0.

    Args:
        x: any shape that the granularity accepts.
        granularity: of the groups.
        with_zero: whether ranges are extended; else 0 is in those of groups that are padded or have no finite value.

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


def lend(range: Range, spec: QuantSpec) -> Range:
    """Give groups whose values are all zero the range of those with which they share a scale of scales.

    Where these are zero, too, or there are none, it is the range of the whole tensor, and -1 to 1 where that is zero.
    Zeros are the same by every scale. The smallest one, 2**-126, clips all that such a group gets later, and in an
    engine the bias divided by it overflows int32. Where the specification has no exact 0.0, but a scale of 0, the range
    stays.

    >>> lend(Range(torch.tensor([-3.0, 0.0]), torch.tensor([2.0, 0.0])), QuantSpec("int8"))
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
) -> QParams:
    """The scale and zero point that map a range onto the codes of a format.

    Symmetric: amax is mapped to the format's bound. Asymmetric: lo and hi to quant_min and quant_max, 0.0 to a code.
    A range too small for a normal scale gets the smallest normal one (2**-126 in float32), so that no scale is zero and
    no reciprocal infinite: all-zero groups stay zero. A range at the end of the dtype's gets the largest scale with
    which every code stays finite. Under an offset lo is mapped to 0 by it, and what the rounded offset leaves up to hi
    to quant_max.

    Args:
        range: lo and hi of every group [groups, axes kept], in units of x.
        spec: decides symmetry, format and which reciprocal `scale` is.
        largest: the largest finite value of x's dtype; by default of the range's.
        bound: the code that amax is mapped to instead of the one that the specification says.
        shared: the scale above symmetric scales, see `ScaleSpec.choose`.

    Returns:
        scale, zero_point (None when symmetric) and the range, all [groups, axes kept].

    Raises:
        CalibrationError: lo > hi somewhere, which means that no data was observed.

    Source: ONNX DynamicQuantizeLinear; Jacob et al., arXiv 1712.05877, section 3.

    >>> choose_qparams(Range(torch.tensor([-1.0]), torch.tensor([2.0])), QuantSpec("int8")).scale
    tensor([0.0157])
    """
    lo, hi = range
    if is_readable_without_sync(lo) and bool((lo > hi).any()):
        raise CalibrationError(
            f"a range with lo > hi (lo={lo.max().item()}, hi={hi.min().item()}): no data was observed"
        )
    # Less a unit in the last place: a quotient rounded to nearest may be half of one too large.
    largest = (torch.finfo(lo.dtype).max if largest is None else largest) * (1.0 - torch.finfo(lo.dtype).eps)
    fmt = spec.format
    if spec.symmetric:
        amax = range.amax
        limit = largest / max(-fmt.quant_min, fmt.quant_max)
        return QParams(_symmetric_scale(range, spec, limit, bound, shared), None, Range(-amax, amax))
    tiny = torch.finfo(lo.dtype).tiny
    if spec.offset is None or not spec.offset.needs_values:
        lo, hi = lo.clamp(max=0.0), hi.clamp(min=0.0)
    if spec.offset is not None:
        offset = spec.offset.choose_offset(lo, largest)
        scale = spec.scale.choose((hi + offset).clamp(min=0.0), fmt, largest / fmt.quant_max, fmt.quant_max)
        return QParams(scale, offset, Range(lo, hi))
    # Halved before the subtraction, so that hi - lo cannot overflow; exact in binary.
    steps = torch.full_like(lo, fmt.quant_max - fmt.quant_min)
    scale = (divide(hi * 0.5 - lo * 0.5, steps) * 2.0).clamp(tiny, torch.finfo(lo.dtype).max)
    if spec.scale.format is not None:
        scale = spec.scale.choose(scale, fmt, largest / (fmt.quant_max - fmt.quant_min), 1.0)
    code = fmt.quant_min - divide(lo, torch.where(scale == 0, 1.0, scale)).round()
    zero_point = code.clamp(fmt.quant_min, fmt.quant_max)
    if spec.scale.format is None:
        farthest = torch.maximum(zero_point - fmt.quant_min, fmt.quant_max - zero_point)
        scale = torch.minimum(scale, divide(torch.full_like(scale, largest), farthest))
    return QParams(scale, zero_point.to(torch.int32), Range(lo, hi))


def _symmetric_scale(range: Range, spec: QuantSpec, limit: float, bound: float | None, shared: Tensor | None) -> Tensor:
    """The scale that maps the range to the bound, at most `limit`; its reciprocal under MULTIPLIER."""
    if spec.arithmetic.is_linear:
        return spec.scale.choose(spec.scale.extent(*range, spec.format), spec.format, limit, bound, shared)
    amax = range.amax
    tiny = torch.finfo(amax.dtype).tiny
    if spec.arithmetic is not Arithmetic.MULTIPLIER:
        most = min(limit, torch.finfo(torch.float16).max) if spec.arithmetic is Arithmetic.Q8_0 else limit
        power = above(spec.format.bound)
        return (amax / power).clamp(tiny, most * spec.format.bound / power)
    multiplier = divide(torch.full_like(amax, spec.format.bound), amax)
    return multiplier.clamp(1.0 / limit, 1.0 / tiny)


def above(bound: float) -> float:
    """The power of two next above a bound; a quotient by it is exact."""
    return 2.0 ** math.frexp(bound)[1]
