"""The shortest way from Python to a kernel, for plain tensors and given parameters.

Copying 65,536 elements takes 4 us. Checking parameters, choosing a backend and planning its call take 10 us as Python
functions: here a backend answers once for each kind of tensor, and its kernel checks the values.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad

from fakequant.numerics.qparams import PLAIN, QParams, runs_eagerly
from fakequant.numerics.spec import Gradient, QuantSpec

from . import dispatch
from .backend import BackwardCall, Direct
from .library import grad_params, masked_gradient_dense
from .rectified import rectifies

_MOST = 4096  # kinds of tensors that are remembered
_found: dict[Hashable, Direct | None] = {}
_FixedCall = tuple[Direct, QuantSpec, Tensor, Tensor | None]
_LearnedCall = tuple[Direct, QuantSpec, float | None]  # the last is the factor of `fake_quantize_by_step`


def fake_quantize_directly(
    x: Tensor, spec: QuantSpec, scale: Tensor, zero_point: Tensor | None, *, relu: bool = False
) -> Tensor | None:
    """`library.fake_quantize` of x or its ReLU with parameters nobody checked yet; None where one operator cannot.

    That is: where something watches (`library.is_watched`) or is no plain tensor; where a parameter is not valid, has
    another shape, dtype or device than kernels read, or is learned beside a ReLU; where x or a parameter is to get
    another gradient than `Gradient.CODE_RANGE`; and where no backend offers it. The general way then serves, or says
    what is wrong.
    """
    direct = _direct_of(x, spec, scale, zero_point, relu)
    if direct is None:
        return None
    if torch.is_grad_enabled():
        if scale.requires_grad or (zero_point is not None and zero_point.requires_grad):
            return None if relu else _with_all_gradients(x, scale, zero_point, (direct, spec, None))
        if x.requires_grad:
            return _with_gradient(x, (direct, spec, scale, zero_point))
    return direct.values(x, scale, zero_point, direct.form)


def fake_quantize_by_step(
    x: Tensor, spec: QuantSpec, step: Tensor, zero_point: Tensor | None, factor: float
) -> Tensor | None:
    """`fake_quantize_directly` by a copy of a step, which gets the gradient of the scale times a factor."""
    if not (torch.is_grad_enabled() and step.requires_grad):
        return fake_quantize_directly(x, spec, step, zero_point)
    direct = _direct_of(x, spec, step, zero_point, relu=False)
    return None if direct is None else _with_all_gradients(x, step, zero_point, (direct, spec, factor))


def fake_quantize_over(x: Tensor, spec: QuantSpec, scale: Tensor, zero_point: Tensor | None) -> bool:
    """Write the values of x over x, without a gradient; False as in `fake_quantize_directly`, and x is as it was.

    False too where a parameter lies in the memory of x, which kernels overwrite while they read it, and for views whose
    memory holds the negatives, as of `torch.conj(z).imag`.
    """
    direct = _direct_of(x, spec, scale, zero_point, relu=False)
    if direct is None or x.is_inference() or x.is_neg():
        return False
    if any(_lies_with(x, one) for one in (scale, zero_point) if one is not None):
        return False
    if not direct.values_over(x, scale, zero_point, direct.form):
        return False
    # Autograd refuses a gradient for which the former values were saved.
    torch.autograd.graph.increment_version(x)
    return True


def _lies_with(x: Tensor, other: Tensor) -> bool:
    """Whether their storages share memory, as different ones do that come from NumPy or DLPack."""
    one, another = x.untyped_storage(), other.untyped_storage()
    first, second = one.data_ptr(), another.data_ptr()
    return first < second + another.nbytes() and second < first + one.nbytes()


def encode_directly(x: Tensor, spec: QuantSpec, scale: Tensor, zero_point: Tensor | None) -> Tensor | None:
    """The codes of x, without gradients; None as in `fake_quantize_directly`, and if x holds NaN."""
    direct = _direct_of(x, spec, scale, zero_point, relu=False)
    if direct is None or direct.codes is None:
        return None
    with torch.no_grad():
        codes = torch.empty_like(x, dtype=spec.format.storage)
        found, _ = direct.codes(x, scale, zero_point, direct.form, codes, False)
    return codes if found else None


def _direct_of(x: Tensor, spec: QuantSpec, scale: Tensor, zero_point: Tensor | None, relu: bool) -> Direct | None:
    if not runs_eagerly() or forward_ad._current_level >= 0 or type(x) not in PLAIN or type(scale) not in PLAIN:
        return None
    if x.layout is not torch.strided or is_legacy_batchedtensor(x):
        return None
    if x._is_zerotensor() or scale._is_zerotensor():
        return None
    try:
        if not scale.is_contiguous():
            return None
        sizes = x.shape, x.stride(), scale.shape
        key = dispatch._backends, spec, relu, x.dtype, x.device, scale.dtype, scale.device, sizes
    except RuntimeError:  # a nested tensor, which has no shape, or a sparse one without strides
        return None
    try:
        direct = _found[key]
    except KeyError:
        direct = _find(key, x, spec, scale, relu)
    return direct if direct is None or zero_point is None or _fits(zero_point, scale, spec) else None


def _with_gradient(x: Tensor, call: _FixedCall) -> Tensor | None:
    _, spec, *_ = call
    if spec.gradient is not Gradient.CODE_RANGE:
        return None
    try:
        return _apply(x, call)
    except _NotValidError:
        return None


def _with_all_gradients(x: Tensor, scale: Tensor, zero_point: Tensor | None, call: _LearnedCall) -> Tensor | None:
    direct, spec, _ = call
    if spec.gradient is not Gradient.CODE_RANGE or direct.gradients is None:
        return None
    try:
        return _apply_learned(x, scale, zero_point, call)
    except _NotValidError:
        return None


def _find(key: Hashable, x: Tensor, spec: QuantSpec, scale: Tensor, relu: bool) -> Direct | None:
    fits = x.is_floating_point() and scale.device == x.device
    backend = dispatch.choose(x, spec) if fits else None
    direct = None
    if backend is not None and (not relu or rectifies(backend, x)):
        direct = backend.direct(x, spec, scale, relu=relu)
    if len(_found) >= _MOST:
        _found.clear()
    _found[key] = direct
    return direct


def _fits(zero_point: Tensor, scale: Tensor, spec: QuantSpec) -> bool:
    return (
        type(zero_point) in PLAIN
        and not spec.symmetric
        and not zero_point.is_nested
        and zero_point.shape == scale.shape
        and (zero_point.dtype == scale.dtype or zero_point.dtype == torch.int32)
        and zero_point.device == scale.device
        and zero_point.is_contiguous()
        and not zero_point._is_zerotensor()
    )


class _NotValidError(Exception):
    """A scale or a zero point is not valid; the general way says which."""


def _is_plain(dy: Tensor) -> bool:
    """Whether kernels may read a gradient in a backward pass: nothing watches, and it is no other kind of tensor.

    Of zeros without memory (see `has_values`) kernels would be given one element.
    """
    # Grad mode is on in a backward only if a gradient of this gradient will be asked for.
    if not runs_eagerly() or forward_ad._current_level >= 0 or torch.is_grad_enabled():
        return False
    return type(dy) in PLAIN and not is_legacy_batchedtensor(dy) and not dy._is_zerotensor()


class _QuantizeDirectly(torch.autograd.Function):
    """Every argument costs time at each call: the parameters, which get no gradient, come as one that is no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: _FixedCall) -> Tensor:
        direct, _, scale, zero_point = call
        y, mask = direct.values_and_mask(x, scale, zero_point, direct.form)
        if y is None:
            raise _NotValidError
        ctx.direct = direct
        ctx.save_for_backward(mask)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (mask,), (dy,), direct = ctx.saved_tensors, grad_outputs, ctx.direct
        _, _, stride = direct.call
        if dy.stride() == stride and _is_plain(dy):
            return direct.grad_input(dy, mask), None
        # By the backend that packed the mask: dy may be of another kind, which another one serves.
        return masked_gradient_dense(dy, mask, direct.call), None


# Without what `Function.apply` asks and does for function transforms, which were asked for above.
_apply: Any = super(torch.autograd.Function, _QuantizeDirectly).apply  # pyright: ignore[reportAttributeAccessIssue]


class _QuantizeDirectlyLearned(torch.autograd.Function):
    """`_QuantizeDirectly` where scale or zero point get a gradient too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor | None, call: _LearnedCall) -> Tensor:
        (direct, _, factor), mask = call, None
        if factor is not None:
            ctx.step, scale = scale, scale.clone()
        if ctx.needs_input_grad[0]:
            y, mask = direct.values_and_mask(x, scale, zero_point, direct.form)
        else:
            y = direct.values(x, scale, zero_point, direct.form)
        if y is None:
            raise _NotValidError
        ctx.call = call
        ctx.save_for_backward(mask, x, scale, zero_point)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (mask, x, scale, zero_point), (dy,), (direct, _, factor) = ctx.saved_tensors, grad_outputs, ctx.call
        _, *wants, _ = ctx.needs_input_grad
        _, _, stride = direct.call
        if not (dy.stride() == x.stride() == stride and _is_plain(dy)):  # hooks on saved tensors may lay x otherwise
            if factor is not None:
                scale = scale + (ctx.step - ctx.step.detach()) * factor  # its value, with the gradient of the step
            found = _gradients(dy, mask, x, (scale, zero_point), direct.call, wants)
        else:
            if zero_point is not None and zero_point.dtype != scale.dtype:
                zero_point = zero_point.to(scale.dtype)
            found = direct.gradients(dy, x, mask, scale, zero_point, direct.form, *wants)
        if factor is None:
            return *found, None
        dx, by_scale, by_zero_point = found
        return dx, None if by_scale is None else by_scale * factor, by_zero_point, None


def _gradients(
    dy: Tensor,
    mask: Tensor | None,
    x: Tensor,
    given: tuple[Tensor, Tensor | None],
    call: BackwardCall,
    wants: list[bool],
) -> tuple[Tensor | None, ...]:
    """Those of x, scale and zero point in the general way."""
    (scale, zero_point), (_, spec, _) = given, call
    groups = spec.granularity.group_shape(x.shape)
    params = QParams(scale.view(groups), None if zero_point is None else zero_point.view(groups))
    of_params = grad_params(dy, x, params, spec, (wants[0], wants[1]))
    dx = None if mask is None else masked_gradient_dense(dy, mask, call)
    return dx, *(None if one is None else one.view(scale.shape) for one in of_params)


_apply_learned: Any = super(torch.autograd.Function, _QuantizeDirectlyLearned).apply  # pyright: ignore[reportAttributeAccessIssue]
