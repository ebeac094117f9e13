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
from fakequant.numerics.qparams import QParams
from fakequant.numerics.spec import Gradient, QuantSpec

from .dispatch import choose

_ARGUMENTS = "Tensor x, Tensor? scale, Tensor? zero_point, Tensor? seed, str spec"
# Held, because the operators vanish with it.
_LIBRARY = torch.library.Library("fakequant", "FRAGMENT")
_LIBRARY.define(f"opaque({_ARGUMENTS}) -> Tensor")
_LIBRARY.define(f"opaque_masked({_ARGUMENTS}) -> (Tensor y, Tensor mask, Tensor stride)")
_LIBRARY.define("opaque_backward(Tensor dy, Tensor mask, Tensor stride, str spec, SymInt[] declared) -> Tensor")


class Opaque:
    """`library.fake_quantize`, or without parameters `library.fake_quantize_dynamic`, as one node of a graph.

    Scale and zero point get no gradient. Made outside of what is compiled: compilers cannot read specifications.
    """

    def __init__(self, spec: QuantSpec) -> None:
        self._text = spec.to_text()
        self._needs_mask = spec.gradient is not Gradient.IDENTITY

    def __call__(self, x: Tensor, params: QParams | None, seed: Tensor | None) -> Tensor:
        scale, zero_point = (None, None) if params is None else params[:2]
        if not (torch.is_grad_enabled() and x.requires_grad):
            return torch.ops.fakequant.opaque(x, scale, zero_point, seed, self._text)
        if self._needs_mask:
            return _Masked.apply(x, scale, zero_point, seed, self._text)[0]
        return _Identity.apply(x, scale, zero_point, seed, self._text)


# What runs in a compiled graph would otherwise be looked at as if it were to be compiled too.
@torch.library.impl(_LIBRARY, "opaque", "CompositeExplicitAutograd")
@torch.compiler.disable
def _forward(x: Tensor, scale: Tensor | None, zero_point: Tensor | None, seed: Tensor | None, spec: str) -> Tensor:
    return _laid_like(_run(x, scale, zero_point, seed, QuantSpec.parse(spec), mask=False)[0], x)


@torch.library.impl(_LIBRARY, "opaque_masked", "CompositeExplicitAutograd")
@torch.compiler.disable
def _masked_forward(
    x: Tensor, scale: Tensor | None, zero_point: Tensor | None, seed: Tensor | None, spec: str
) -> tuple[Tensor, Tensor, Tensor]:
    parsed = QuantSpec.parse(spec)
    y, mask = _run(x, scale, zero_point, seed, parsed, mask=True)
    assert mask is not None
    missing = _mask_bytes(x, parsed) - mask.numel()
    # The real strides: those that a compiler expects of x may be others, and the bits lie as x does.
    return _laid_like(y, x), F.pad(mask, (0, missing)) if missing else mask, torch.tensor(x.stride(), device="cpu")


@torch.library.impl(_LIBRARY, "opaque_backward", "CompositeExplicitAutograd")
@torch.compiler.disable
def _backward(dy: Tensor, mask: Tensor, stride: Tensor, spec: str, declared: list[int]) -> Tensor:
    parsed = QuantSpec.parse(spec)
    dx = choose(dy, parsed).grad_input(dy, mask, parsed, tuple(stride.tolist()))
    if list(dx.stride()) == declared:
        return dx
    return dx.new_empty_strided(dx.shape, declared).copy_(dx)


def _run(
    x: Tensor, scale: Tensor | None, zero_point: Tensor | None, seed: Tensor | None, spec: QuantSpec, *, mask: bool
) -> tuple[Tensor, Tensor | None]:
    backend = choose(x, spec)
    if scale is None:
        return backend.fake_quantize_dynamic(x, spec, mask=mask, seed=seed)
    return backend.fake_quantize(x, QParams(scale, zero_point, seed=seed), spec, mask=mask)


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
def _(x: Tensor, scale: Tensor | None, zero_point: Tensor | None, seed: Tensor | None, spec: str) -> Tensor:
    return _declared(x)


@torch.library.register_fake("fakequant::opaque_masked", lib=_LIBRARY)
def _(
    x: Tensor, scale: Tensor | None, zero_point: Tensor | None, seed: Tensor | None, spec: str
) -> tuple[Tensor, Tensor, Tensor]:
    mask = x.new_empty(_mask_bytes(x, QuantSpec.parse(spec)), dtype=torch.uint8)
    return _declared(x), mask, torch.empty(x.dim(), dtype=torch.int64, device="meta" if x.is_meta else "cpu")


@torch.library.register_fake("fakequant::opaque_backward", lib=_LIBRARY)
def _(dy: Tensor, mask: Tensor, stride: Tensor, spec: str, declared: list[int]) -> Tensor:
    return dy.new_empty_strided(dy.shape, declared)


class _Masked(torch.autograd.Function):
    """The gradient through the mask of the forward; not registered with the operator, whose calls would cost double."""

    @staticmethod
    def forward(
        x: Tensor, scale: Tensor | None, zero_point: Tensor | None, seed: Tensor | None, spec: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.fakequant.opaque_masked(x, scale, zero_point, seed, spec)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        y, mask, stride = output
        ctx.mark_non_differentiable(mask, stride)
        ctx.save_for_backward(mask, stride)
        ctx.spec, ctx.declared = inputs[-1], y.stride()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None, None]:
        dx = torch.ops.fakequant.opaque_backward(grad_outputs[0], *ctx.saved_tensors, ctx.spec, ctx.declared)
        return dx, None, None, None, None


class _Identity(torch.autograd.Function):
    """The gradient that passes everywhere."""

    @staticmethod
    def forward(x: Tensor, scale: Tensor | None, zero_point: Tensor | None, seed: Tensor | None, spec: str) -> Tensor:
        return torch.ops.fakequant.opaque(x, scale, zero_point, seed, spec)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None, None]:
        return grad_outputs[0], None, None, None, None
