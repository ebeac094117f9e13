"""The operator as nodes of graphs, for exporters, and for compilers that must not look inside.

Nodes carry the specification as text. `fakequant::fake_quantize` returns the values. `fakequant::fake_quantize_masked`
is the same for graphs with a backward pass: it also returns one bit per element, which is all that is saved, so that
such a graph has the eager bits at the eager speed.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fakequant.numerics import reference
from fakequant.numerics.blocks import padding
from fakequant.numerics.compilers import is_exporting
from fakequant.numerics.qparams import QParams, Range, compute_dtype
from fakequant.numerics.spec import Gradient, QuantSpec
from fakequant.numerics.sums import is_less_by_plain_sums

from .backend import VALUES, CallKind, Extras, KernelPlan
from .dispatch import backends, choose_for, plan_by, plan_of
from .gradients import grad_params, laid, masked_gradient
from .tracing import refuse_onnx

_PARAMS = "Tensor? scale, Tensor? zero_point, str spec, Tensor? seed=None"


def quantize_as_node(
    x: Tensor,
    spec: QuantSpec,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    range: Range | None = None,
    seed: Tensor | None = None,
) -> Tensor:
    """`library.fake_quantize` as one node of a graph; without a scale `library.fake_quantize_dynamic`."""
    text = text_of(spec)
    wanted = (t.requires_grad for t in (x, scale, zero_point) if t is not None)
    if not (torch.is_grad_enabled() and any(wanted)):
        return torch.ops.fakequant.fake_quantize(x, scale, zero_point, text, seed)
    lo, hi = (None, None) if range is None else range
    return torch.ops.fakequant.fake_quantize_masked(x, scale, zero_point, text, seed, lo, hi)[0]


def text_of(spec: QuantSpec) -> str:
    """`spec.to_text()`; a compiler that takes numbers for ones that vary cannot compare those of two formats."""
    text = str(spec)
    is_known = torch.compiler.is_compiling() and QuantSpec.parse(text).format is spec.format
    return text if is_known else spec.to_text()


@torch.library.custom_op("fakequant::fake_quantize", mutates_args=(), schema=f"(Tensor x, {_PARAMS}) -> Tensor")
def _values(
    x: Tensor, scale: Tensor | None, zero_point: Tensor | None, spec: str, seed: Tensor | None = None
) -> Tensor:
    plan = _plan_of(x, scale, zero_point, spec, Extras(None, seed))
    return _as_declared(plan.values(x, scale, zero_point, plan.descriptor), x)


@_values.register_fake
def _(x: Tensor, scale: Tensor | None, zero_point: Tensor | None, spec: str, seed: Tensor | None = None) -> Tensor:
    if is_exporting():  # not seen by `is_recorded` where torch's compiler reads its code
        refuse_onnx()
    return _declared(x)


@torch.library.custom_op(
    "fakequant::fake_quantize_masked",
    mutates_args=(),
    schema=f"(Tensor x, {_PARAMS}, Tensor? lo=None, Tensor? hi=None) -> (Tensor y, Tensor mask, Tensor packed_by)",
)
def _masked(
    x: Tensor,
    scale: Tensor | None,
    zero_point: Tensor | None,
    spec: str,
    seed: Tensor | None = None,
    lo: Tensor | None = None,
    hi: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    plan = _plan_of(x, scale, zero_point, spec, Extras(None if lo is None or hi is None else Range(lo, hi), seed))
    y, mask = plan.values_and_mask(x, scale, zero_point, plan.descriptor)
    declared = _mask_bytes(x, plan.spec)
    mask = x.new_empty(0, dtype=torch.uint8) if mask is None else F.pad(mask, (0, declared - mask.numel()))
    # The backend that packed and the real strides of x: a compiler may expect others, and the bits lie as x does.
    packed_by = torch.tensor([_number_of(plan.backend), *x.stride()], dtype=torch.int64, device="cpu")
    return _as_declared(y, x), mask, packed_by


@_masked.register_fake
def _(
    x: Tensor, scale: Tensor | None, zero_point: Tensor | None, spec: str, *_: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    mask = x.new_empty(_mask_bytes(x, QuantSpec.parse(spec)), dtype=torch.uint8)
    return _declared(x), mask, torch.empty(1 + x.dim(), dtype=torch.int64, device="meta" if x.is_meta else "cpu")


@torch.library.custom_op(
    "fakequant::grad_input",
    mutates_args=(),
    schema="(Tensor dy, Tensor mask, Tensor packed_by, str spec, SymInt[] declared) -> Tensor",
)
def _grad_input(dy: Tensor, mask: Tensor, packed_by: Tensor, spec: str, declared: list[int]) -> Tensor:
    number, *stride = packed_by.tolist()
    (backend,) = (backend for backend in backends() if _number_of(backend.name) == number)
    kind = CallKind(QuantSpec.parse(spec), VALUES, dy.dtype, mask.device, dy.shape, tuple(stride), None, None)
    return laid(masked_gradient(dy, mask, plan_by(backend, kind)), tuple(declared))


@_grad_input.register_fake
def _(dy: Tensor, mask: Tensor, packed_by: Tensor, spec: str, declared: list[int]) -> Tensor:
    return dy.new_empty_strided(dy.shape, declared)


@torch.library.custom_op(
    "fakequant::grad_of_params",
    mutates_args=(),
    schema="(Tensor dy, Tensor x, Tensor scale, Tensor? zero_point, str spec, Tensor? seed) -> "
    "(Tensor by_scale, Tensor by_zero_point)",
)
def _grad_of_params(
    dy: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None, spec: str, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    plan = _plan_of(x, scale, zero_point, spec, Extras(None, seed))
    given = laid(dy.to(x.dtype), plan.stride), laid(x, plan.stride), None, scale, zero_point, plan.descriptor
    _, *found = plan.gradients(*given, True, zero_point is not None)
    by_scale, by_zero_point = (scale.new_empty(0) if g is None else g.contiguous() for g in found)
    return by_scale, by_zero_point


@_grad_of_params.register_fake
def _(
    dy: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None, spec: str, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    by_zero_point = scale.new_empty(0) if zero_point is None else zero_point.new_empty(zero_point.shape)
    return scale.new_empty(scale.shape), by_zero_point


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, scale, zero_point, spec, seed, *_ = inputs
    y, mask, packed_by = output
    learned = any(p is not None and p.requires_grad for p in (scale, zero_point))
    ctx.save_for_backward(mask, packed_by, *((x, scale, zero_point, seed) if learned else ()))
    ctx.spec, ctx.declared = spec, y.stride()


def _backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    mask, packed_by, *saved = ctx.saved_tensors
    dx, by_scale, by_zero_point = dy, None, None
    if QuantSpec.parse(ctx.spec).gradient is not Gradient.IDENTITY:
        dx = torch.ops.fakequant.grad_input(dy, mask, packed_by, ctx.spec, ctx.declared)
    if saved:
        x, scale, zero_point, seed = saved
        by_scale, by_zero_point = torch.ops.fakequant.grad_of_params(dy, x, scale, zero_point, ctx.spec, seed)
        by_zero_point = None if zero_point is None else by_zero_point
    return dx, by_scale, by_zero_point, None, None, None, None


_masked.register_autograd(_backward, setup_context=_setup)


def _setup_values(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, scale, zero_point, spec, seed = inputs
    ctx.save_for_backward(x, scale, zero_point, seed)
    ctx.spec = QuantSpec.parse(spec)


def _backward_of_values(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients in an exported program, by torch's operations on x. Few exported programs are trained."""
    x, scale, zero_point, seed = ctx.saved_tensors
    params = QParams(scale, zero_point, seed=seed)
    wants = ctx.needs_input_grad[1], ctx.needs_input_grad[2]
    found = grad_params(dy, x, params, ctx.spec, wants) if any(wants) else (None, None)
    return reference.grad_input(dy, reference.passes(x, params, ctx.spec)), *found, None, None


_values.register_autograd(_backward_of_values, setup_context=_setup_values)


@torch.library.custom_op("fakequant::choose_scale", mutates_args=(), schema="(Tensor x, str spec) -> Tensor")
def _chosen_scale(x: Tensor, spec: str) -> Tensor:
    parsed = QuantSpec.parse(spec)
    measured = choose_for(x).measure(x.detach(), parsed.granularity)
    return reference.choose_from(x, measured, parsed, is_less_by_plain_sums).scale


@_chosen_scale.register_fake
def _(x: Tensor, spec: str) -> Tensor:
    return x.new_empty(QuantSpec.parse(spec).granularity.group_shape(x.shape), dtype=compute_dtype(x.dtype))


def _plan_of(x: Tensor, scale: Tensor | None, zero_point: Tensor | None, spec: str, extras: Extras) -> KernelPlan:
    """That takes any parameters."""
    plan = plan_of(x, QuantSpec.parse(spec), scale, zero_point)
    assert plan is not None, "graphs hold no other calls"
    return (plan.otherwise or plan)._replace(descriptor=extras)


def _number_of(backend: str) -> int:
    """The name of a backend as a number: graphs hold tensors only."""
    return zlib.crc32(backend.encode())


def _mask_bytes(x: Tensor, spec: QuantSpec) -> int:
    """Bytes of one bit per element, of full blocks where a backend pads them."""
    if spec.gradient is Gradient.IDENTITY:
        return 0
    missing = padding(x.shape, spec.granularity.block_shape(x.shape))
    return (math.prod(n + m for n, m in zip(x.shape, missing, strict=True)) + 7) // 8


def _declared(x: Tensor) -> Tensor:
    """A tensor that lies in memory as results do: like x, or row by row where x has gaps or overlaps."""
    return x.new_empty_strided(x.shape, x.stride()) if _is_dense(x) else x.new_empty(x.shape)


def _is_dense(x: Tensor) -> bool:
    """Whether x lies in memory without gaps and overlaps, in any order of axes."""
    if not all(isinstance(n, int) for n in (*x.stride(), *x.shape)):
        from torch.fx.experimental.symbolic_shapes import guard_or_false  # takes a second, for sympy

        # Sizes may depend on values, and cannot be sorted. torch keeps the strides of tensors without gaps alone.
        return all(guard_or_false(a == b) for a, b in zip(torch.empty_like(x).stride(), x.stride(), strict=True))
    if 0 in x.shape:
        return True
    expected = 1
    for stride, n in sorted(zip(x.stride(), x.shape, strict=True)):
        if n != 1 and stride != expected:
            return False
        expected *= n
    return True


def _as_declared(y: Tensor | None, x: Tensor) -> Tensor:
    assert y is not None, "the plan takes any parameters"
    # Strides to the last: also that of an axis of one element decides whether a tensor counts as channels-last.
    if y.stride() == x.stride() and x.is_contiguous():
        return y
    declared = _declared(x)
    return y if y.stride() == declared.stride() else declared.copy_(y)
