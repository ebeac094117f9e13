"""Plans under autograd: one function for parameters that get no gradient, one for those that are learned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from fakequant.numerics import reference
from fakequant.numerics.qparams import QParams
from fakequant.numerics.spec import QuantSpec

from .backend import Extras, KernelPlan
from .decomposition import params_of, tensors_of
from .tracing import needs_tracing

_FixedCall = tuple[KernelPlan, Tensor | None, Tensor | None]
_LearnedCall = tuple[KernelPlan, float | None]


def apply_plan(
    plan: KernelPlan, x: Tensor, scale: Tensor | None, zero_point: Tensor | None, factor: float | None = None
) -> Tensor | None:
    """x quantized by a plan for it, with gradients where they are wanted; None if a parameter is not valid.

    Args:
        plan: of `dispatch.find_plan` for these tensors.
        x: what to quantize.
        scale: None where the range of x gives the parameters.
        zero_point: None where it is 0.
        factor: by which the gradient of the scale is multiplied. The scale may then change before the backward pass.
    """
    if torch.is_grad_enabled():
        if scale is not None and (scale.requires_grad or (zero_point is not None and zero_point.requires_grad)):
            try:
                return _apply_learned(x, scale, zero_point, (plan, factor))
            except _NotValidError:
                return None
        if x.requires_grad:
            try:
                return _apply_fixed(x, (plan, scale, zero_point))
            except _NotValidError:
                return None
    return plan.values(x, scale, zero_point, plan.descriptor)


class _NotValidError(Exception):
    """A scale or a zero point is not valid."""


class _Fixed(torch.autograd.Function):
    """Every argument costs time at each call: the parameters, which get no gradient, come as one that is no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: _FixedCall) -> Tensor:
        plan, scale, zero_point = call
        y, mask = plan.values_and_mask(x, scale, zero_point, plan.descriptor)
        if y is None:
            raise _NotValidError
        ctx.plan = plan
        ctx.save_for_backward(mask)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (mask,), (dy,), plan = ctx.saved_tensors, grad_outputs, ctx.plan
        return masked_gradient(dy, mask, plan), None


class _Learned(torch.autograd.Function):
    """Where scale or zero point get a gradient too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor | None, call: _LearnedCall) -> Tensor:
        (plan, factor), mask = call, None
        if factor is not None:
            ctx.step, scale = scale, scale.clone()
        if ctx.needs_input_grad[0]:
            y, mask = plan.values_and_mask(x, scale, zero_point, plan.descriptor)
        else:
            y = plan.values(x, scale, zero_point, plan.descriptor)
        if y is None:
            raise _NotValidError
        ctx.call = call
        ctx.save_for_backward(mask, x, scale, zero_point)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (mask, x, scale, zero_point), (dy,), (plan, factor) = ctx.saved_tensors, grad_outputs, ctx.call
        wants = ctx.needs_input_grad[1], ctx.needs_input_grad[2]
        # Grad mode is on in a backward only if a gradient of this gradient will be asked for.
        if torch.is_grad_enabled() or needs_tracing(dy, x, scale, zero_point):
            if factor is not None:
                scale = scale + (ctx.step - ctx.step.detach()) * factor  # its value, with the gradient of the step
            found = _gradients_by_operations(dy, x, mask, (scale, zero_point), plan, wants)
        else:
            if zero_point is not None and zero_point.dtype != scale.dtype:
                zero_point = zero_point.to(scale.dtype)
            # Hooks on saved tensors may lay x otherwise.
            dy, x = laid(dy, plan.stride), laid(x, plan.stride)
            found = plan.gradients(dy, x, mask, scale, zero_point, plan.descriptor, *wants)
        if factor is None:
            return *found, None
        dx, by_scale, by_zero_point = found
        return dx, None if by_scale is None else by_scale * factor, by_zero_point, None


# Without what `Function.apply` asks and does for function transforms, of which `find_plan` knows already, and without
# its look through every argument: that takes 2 of 30 us that a small tensor takes, forward and backward.
_apply_fixed: Any = super(torch.autograd.Function, _Fixed).apply  # pyright: ignore[reportAttributeAccessIssue]
_apply_learned: Any = super(torch.autograd.Function, _Learned).apply  # pyright: ignore[reportAttributeAccessIssue]


def masked_gradient(dy: Tensor, mask: Tensor | None, plan: KernelPlan) -> Tensor:
    """dy where the mask is set, else 0."""
    if mask is None:
        return dy
    # Grad mode is on in a backward only if a gradient of this gradient will be asked for.
    if torch.is_grad_enabled() or needs_tracing(dy):
        return reference.grad_input(dy, unpack_mask(mask, dy.shape, plan))
    return plan.grad_input(laid(dy, plan.stride), mask)


def unpack_mask(mask: Tensor, shape: torch.Size, plan: KernelPlan) -> Tensor:
    """The packed mask as a bool tensor [shape]: where a gradient of ones is let through."""
    ones = mask.new_empty_strided(shape, plan.stride, dtype=torch.bool).fill_(True)
    return plan.grad_input(ones, mask).bool()


def laid(x: Tensor, stride: tuple[int, ...]) -> Tensor:
    """x with these strides, in which kernels read memory."""
    if x.stride() == stride:
        return x
    if all(n <= 1 or a == b for n, a, b in zip(x.shape, x.stride(), stride, strict=True)):
        return x.as_strided(x.shape, stride)
    return x.new_empty_strided(x.shape, stride).copy_(x)


def _gradients_by_operations(
    dy: Tensor,
    x: Tensor,
    mask: Tensor | None,
    given: tuple[Tensor, Tensor | None],
    plan: KernelPlan,
    wants: tuple[bool, bool],
) -> tuple[Tensor | None, ...]:
    """Those of x, scale and zero point by torch's operations, which something watches or differentiates."""
    groups, extras = plan.spec.granularity.group_shape(x.shape), plan.descriptor
    range, seed = extras if isinstance(extras, Extras) else Extras()
    scale, zero_point = given
    params = QParams(scale.reshape(groups), None if zero_point is None else zero_point.reshape(groups), range, seed)
    found = grad_params(dy, x, params, plan.spec, wants)
    of_params = (None if g is None or p is None else g.reshape(p.shape) for g, p in zip(found, given, strict=True))
    return masked_gradient(dy, mask, plan), *of_params


def grad_params(
    dy: Tensor, x: Tensor, params: QParams, spec: QuantSpec, wants: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of scale and zero point by torch's operations, where they are wanted."""
    if not is_legacy_batchedtensor(dy):
        return reference.grad_params(dy, x, params, spec, wants)
    by_scale, by_zero_point = torch.ops.fakequant.grad_params(dy, x, *tensors_of(params), spec.to_text(), wants)
    has_zero_point = wants[1] and params.zero_point is not None
    return by_scale if wants[0] else None, by_zero_point if has_zero_point else None


# `is_grads_batched` of torch.autograd lacks many of torch's operations; an operator it calls for one after the other.
_LIBRARY = torch.library.Library("fakequant", "FRAGMENT")
_LIBRARY.define(
    "grad_params(Tensor dy, Tensor x, Tensor scale, Tensor? zero_point, Tensor? lo, Tensor? hi, Tensor? seed, "
    "str spec, bool[2] wants) -> (Tensor by_scale, Tensor by_zero_point)"
)


@torch.library.impl(_LIBRARY, "grad_params", "CompositeImplicitAutograd")
def _grad_params(dy: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *params, spec, wants = rest
    found = grad_params(dy, x, params_of(*params), QuantSpec.parse(spec), wants)
    by_scale, by_zero_point = (x.new_empty(0) if gradient is None else gradient for gradient in found)
    return by_scale, by_zero_point
