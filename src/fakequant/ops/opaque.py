"""The operator as one node with one node as its gradient, for compilers that must not look inside.

`fakequant::fake_quantize` is what exporters see; compiled, its gradient would be a dozen of torch's operations. These
call the backends in the forward and in the backward pass and save one bit per element in between, so that a graph of
gradients has the eager bits at the eager speed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fakequant.numerics.granularity import padding
from fakequant.numerics.qparams import QParams, Range
from fakequant.numerics.spec import Gradient, QuantSpec

from .backend import Backend
from .dispatch import backends, choose
from .library import masked_gradient

_ARGUMENTS = "Tensor x, Tensor? scale, Tensor? zero_point, Tensor? seed, str spec, Tensor? lo=None, Tensor? hi=None"
# Held, because the operators vanish with it.
_LIBRARY = torch.library.Library("fakequant", "FRAGMENT")
_LIBRARY.define(f"opaque({_ARGUMENTS}) -> Tensor")
_LIBRARY.define(f"opaque_masked({_ARGUMENTS}) -> (Tensor y, Tensor mask, Tensor packed_by)")
_LIBRARY.define("opaque_backward(Tensor dy, Tensor mask, Tensor packed_by, str spec, SymInt[] declared) -> Tensor")
_LIBRARY.define(
    "opaque_params_backward(Tensor dy, Tensor x, Tensor scale, Tensor? zero_point, Tensor? seed, str spec) "
    "-> (Tensor by_scale, Tensor by_zero_point)"
)


class Opaque:
    """`library.fake_quantize`, or without parameters `library.fake_quantize_dynamic`, as one node of a graph.

    Make it outside of what is compiled where that is possible: reading a specification takes compilers long.
    """

    def __init__(self, spec: QuantSpec) -> None:
        self._text = spec.to_text()
        self._needs_mask = spec.gradient is not Gradient.IDENTITY

    def __call__(self, x: Tensor, params: QParams | None, seed: Tensor | None) -> Tensor:
        scale, zero_point = (None, None) if params is None else params[:2]
        lo, hi = (None, None) if params is None or params.range is None else params.range
        given = x, scale, zero_point, seed, self._text, lo, hi
        learned = [p for p in (scale, zero_point) if p is not None and p.requires_grad]
        if not (torch.is_grad_enabled() and (x.requires_grad or learned)):
            return torch.ops.fakequant.opaque(*given)
        if learned:
            return _Learned.apply(*given, self._needs_mask)[0]
        return _Masked.apply(*given)[0] if self._needs_mask else _Identity.apply(*given)


# What runs in a compiled graph would otherwise be looked at as if it were to be compiled too.
@torch.library.impl(_LIBRARY, "opaque", "CompositeExplicitAutograd")
@torch.compiler.disable
def _forward(
    x: Tensor,
    scale: Tensor | None,
    zero_point: Tensor | None,
    seed: Tensor | None,
    spec: str,
    *ends: Tensor | None,
) -> Tensor:
    parsed = QuantSpec.parse(spec)
    y, _ = _run(choose(x, parsed), x, parsed, (scale, zero_point, seed, *_two(ends)), mask=False)
    return _laid_like(y, x)


@torch.library.impl(_LIBRARY, "opaque_masked", "CompositeExplicitAutograd")
@torch.compiler.disable
def _masked_forward(
    x: Tensor,
    scale: Tensor | None,
    zero_point: Tensor | None,
    seed: Tensor | None,
    spec: str,
    *ends: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    parsed = QuantSpec.parse(spec)
    backend = choose(x, parsed)
    y, mask = _run(backend, x, parsed, (scale, zero_point, seed, *_two(ends)), mask=True)
    assert mask is not None
    missing = _mask_bytes(x, parsed) - mask.numel()
    return _laid_like(y, x), F.pad(mask, (0, missing)) if missing else mask, _packed_by(backend, x)


def _packed_by(backend: Backend, x: Tensor) -> Tensor:
    """What a mask is read by, as a tensor, which is all that graphs hold: the backend's number, and the strides of x.

    The real strides: those that a compiler expects of x may be others, and the bits lie as x does. The backend that
    packed: dy may be of another kind, which another one serves.
    """
    return torch.tensor([backends().index(backend), *x.stride()], dtype=torch.int64, device="cpu")


def _two(ends: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The ends of a range; an implementation is not given arguments that have their defaults."""
    return ends + (None,) * (2 - len(ends))


@torch.library.impl(_LIBRARY, "opaque_backward", "CompositeExplicitAutograd")
@torch.compiler.disable
def _backward(dy: Tensor, mask: Tensor, packed_by: Tensor, spec: str, declared: list[int]) -> Tensor:
    number, *stride = packed_by.tolist()
    dx = masked_gradient(dy, mask, (backends()[number], QuantSpec.parse(spec), tuple(stride)))
    if list(dx.stride()) == declared:
        return dx
    return dx.new_empty_strided(dx.shape, declared).copy_(dx)


@torch.library.impl(_LIBRARY, "opaque_params_backward", "CompositeExplicitAutograd")
@torch.compiler.disable
def _params_backward(
    dy: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None, seed: Tensor | None, spec: str
) -> tuple[Tensor, Tensor]:
    parsed, params = QuantSpec.parse(spec), QParams(scale, zero_point, seed=seed)
    found = choose(x, parsed).grad_params(dy.to(x.dtype), x, params, parsed, (True, zero_point is not None))
    by_scale, by_zero_point = (scale.new_empty(0) if g is None else g.contiguous() for g in found)
    return by_scale, by_zero_point


def _run(
    backend: Backend, x: Tensor, spec: QuantSpec, params: tuple[Tensor | None, ...], *, mask: bool
) -> tuple[Tensor, Tensor | None]:
    """Params are scale, zero point, seed and the ends of the range."""
    scale, zero_point, seed, lo, hi = params
    if scale is None:
        return backend.fake_quantize_dynamic(x, spec, mask=mask, seed=seed)
    measured = None if lo is None or hi is None else Range(lo, hi)
    return backend.fake_quantize(x, QParams(scale, zero_point, measured, seed), spec, mask=mask)


def _mask_bytes(x: Tensor, spec: QuantSpec) -> int:
    """Bytes of one bit per element, of full blocks where a backend pads them."""
    missing = padding(x.shape, spec.granularity.block_shape(x.shape))
    return (math.prod(n + m for n, m in zip(x.shape, missing, strict=True)) + 7) // 8


def _declared(x: Tensor) -> Tensor:
    """A tensor that lies in memory as results do: like x, or row by row where x has gaps."""
    return torch.empty_like(x) if _is_dense(x) else x.new_empty(x.shape)


def _is_dense(x: Tensor) -> bool:
    """Whether x lies in memory without gaps and overlaps, in any order of axes."""
    expected = 1
    for stride, n in sorted(zip(x.stride(), x.shape, strict=True)):
        if n != 1 and stride != expected:
            return False
        expected *= n
    return True


def _laid_like(y: Tensor, x: Tensor) -> Tensor:
    # Strides to the last: also that of an axis of one element decides whether a tensor counts as channels-last.
    if y.stride() == x.stride() and x.is_contiguous():
        return y
    declared = _declared(x)
    return y if y.stride() == declared.stride() else declared.copy_(y)


@torch.library.register_fake("fakequant::opaque", lib=_LIBRARY)
def _(x: Tensor, *_params: object, **_ends: object) -> Tensor:
    return _declared(x)


@torch.library.register_fake("fakequant::opaque_masked", lib=_LIBRARY)
def _(
    x: Tensor,
    scale: Tensor | None,
    zero_point: Tensor | None,
    seed: Tensor | None,
    spec: str,
    *_ends: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    mask = x.new_empty(_mask_bytes(x, QuantSpec.parse(spec)), dtype=torch.uint8)
    return _declared(x), mask, torch.empty(1 + x.dim(), dtype=torch.int64, device="meta" if x.is_meta else "cpu")


@torch.library.register_fake("fakequant::opaque_params_backward", lib=_LIBRARY)
def _(
    dy: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None, seed: Tensor | None, spec: str
) -> tuple[Tensor, Tensor]:
    by_zero_point = scale.new_empty(0) if zero_point is None else zero_point.new_empty(zero_point.shape)
    return scale.new_empty(scale.shape), by_zero_point


@torch.library.register_fake("fakequant::opaque_backward", lib=_LIBRARY)
def _(dy: Tensor, mask: Tensor, packed_by: Tensor, spec: str, declared: list[int]) -> Tensor:
    return dy.new_empty_strided(dy.shape, declared)


class _Masked(torch.autograd.Function):
    """The gradient through the mask of the forward; not registered with the operator, whose calls would cost double."""

    @staticmethod
    def forward(x: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.fakequant.opaque_masked(x, *given)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        y, mask, packed_by = output
        ctx.mark_non_differentiable(mask, packed_by)
        ctx.save_for_backward(mask, packed_by)
        ctx.spec, ctx.declared = inputs[4], y.stride()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        dx = torch.ops.fakequant.opaque_backward(grad_outputs[0], *ctx.saved_tensors, ctx.spec, ctx.declared)
        return dx, *_NO_GRADIENTS


class _Identity(torch.autograd.Function):
    """The gradient that passes everywhere."""

    @staticmethod
    def forward(x: Tensor, *given: Any) -> Tensor:
        return torch.ops.fakequant.opaque(x, *given)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return grad_outputs[0], *_NO_GRADIENTS


class _Learned(torch.autograd.Function):
    """`_Masked`, or without a mask `_Identity`, where scale or zero point get a gradient too."""

    @staticmethod
    def forward(x: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        *params, masked = given
        if masked:
            return torch.ops.fakequant.opaque_masked(x, *params)
        y = torch.ops.fakequant.opaque(x, *params)
        return y, y.new_empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.int64, device="cpu")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        y, mask, packed_by = output
        x, scale, zero_point, seed, spec, _, _, masked = inputs
        ctx.mark_non_differentiable(mask, packed_by)
        ctx.save_for_backward(mask, packed_by, x, scale, zero_point, seed)
        ctx.spec, ctx.declared, ctx.masked = spec, y.stride(), masked

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        mask, packed_by, x, *params = ctx.saved_tensors
        dy = dx = grad_outputs[0]
        if ctx.masked:
            dx = torch.ops.fakequant.opaque_backward(dy, mask, packed_by, ctx.spec, ctx.declared)
        by_scale, by_zero_point = torch.ops.fakequant.opaque_params_backward(dy, x, *params, ctx.spec)
        return dx, by_scale, None if params[1] is None else by_zero_point, None, None, None, None, None


# Of scale, zero point, seed, specification and the ends of the range.
_NO_GRADIENTS = (None,) * 6
