"""The operator: `fake_quantize` for eager code, compilers, exporters and function transforms.

* Eager: an autograd function over a backend's kernels; saves one bit per element unless a scale is learned. On the CPU
  most calls with given parameters do not come here: `direct.py`.
* torch.compile where compilers would compute other bits (`dispatch.node_devices`): one node, `opaque.py`.
* torch.compile elsewhere, torch.func, forward-mode AD, tensor subclasses: the definition as plain torch operations, so
  that a compiler fuses it with its neighbours. What is saved there is x itself, see `traced.py`.
* torch.export and torch.jit.trace: the opaque operators `fakequant::fake_quantize` and, for scales that follow from the
  range of the tensor itself, `fakequant::choose_scale`, so that exporters see nodes that carry the specification as
  text.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx

from fakequant.errors import ExportError
from fakequant.numerics import reference
from fakequant.numerics.granularity import Granularity
from fakequant.numerics.philox import draw_seed
from fakequant.numerics.qparams import QParams, Range, choose_qparams, compute_dtype, has_values
from fakequant.numerics.qparams import measure as _measure
from fakequant.numerics.spec import Gradient, QuantSpec, Rounding

from . import dispatch
from .backend import BackwardCall
from .dispatch import choose
from .traced import Grads, Traced, Transformed, on_mesh_of, params_of, tensors_of


def fake_quantize(x: Tensor, params: QParams, spec: QuantSpec, *, watched: bool | None = None) -> Tensor:
    """x encoded and decoded, with the straight-through gradient of the specification.

    `params` are taken as valid: [groups, axes kept], on the device of x. The public function that checks them is
    `fakequant.fake_quantize`. Without a seed, that of stochastic rounding is drawn. `watched` is the answer of
    `is_watched` for x and the parameters, if the caller has it already.
    """
    if spec.rounding is Rounding.STOCHASTIC and params.seed is None:
        params = params._replace(seed=draw_seed())
    if watched is None:
        watched = is_watched(x, params.scale, params.zero_point, params.seed)
    if watched:
        if _is_recorded():
            seed = () if params.seed is None else (params.seed,)
            return torch.ops.fakequant.fake_quantize(x, params.scale, params.zero_point, spec.to_text(), *seed)
        if _is_compiled_as_node(x):
            return _as_node(x, params, params.seed, spec)
        traced = Traced if torch.compiler.is_compiling() else Transformed
        return traced.apply(x, *tensors_of(on_mesh_of(x, params)), spec)
    if not torch.is_grad_enabled():
        return choose(x, spec).fake_quantize(x, params, spec, mask=False)[0]
    if params.scale.requires_grad or (params.zero_point is not None and params.zero_point.requires_grad):
        return _EagerLearned.apply(x, *tensors_of(params), spec)
    if x.requires_grad:
        return _apply_eager(x, spec, params)
    return choose(x, spec).fake_quantize(x, params, spec, mask=False)[0]


def fake_quantize_with_mask(x: Tensor, params: QParams, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """`fake_quantize`, and where its gradient reaches x: a bool tensor, the shape of x.

    For libraries whose operators return the mask. Autograd itself keeps one bit per element instead of this byte.
    """
    if spec.rounding is Rounding.STOCHASTIC and params.seed is None:
        params = params._replace(seed=draw_seed())
    if is_watched(x, params.scale, params.zero_point, params.seed):
        return fake_quantize(x, params, spec), reference.passes(x, params, spec)
    if spec.gradient is Gradient.IDENTITY:
        return fake_quantize(x, params, spec), torch.ones_like(x, dtype=torch.bool)
    backend = choose(x, spec)
    with torch.no_grad():
        y, bits = backend.fake_quantize(x, params, spec, mask=True)
        assert bits is not None, "only IDENTITY has no mask"
        mask = backend.unpack_mask(bits, x, spec)
    # Quantized again where gradients are wanted: the autograd function has one output, and costs about one copy.
    return (fake_quantize(x, params, spec) if _needs_grad(x, params) else y), mask


def fake_quantize_dynamic(x: Tensor, spec: QuantSpec, seed: Tensor | None = None) -> Tensor:
    """`fake_quantize` with the parameters that the range of x itself gives; no gradient goes to the range.

    The same bits as measuring, choosing parameters and quantizing one after the other, in fewer passes over memory.
    Without a seed, that of stochastic rounding is drawn.

    Raises:
        DTypeError: x is not a floating tensor.
        ShapeError: the granularity does not fit x.
    """
    compute_dtype(x.dtype)
    if spec.rounding is Rounding.STOCHASTIC and seed is None:
        seed = draw_seed()
    if is_watched(x, seed):
        if _is_recorded() and spec.symmetric:
            scale = torch.ops.fakequant.choose_scale(x.detach(), spec.to_text())
            return fake_quantize(x, QParams(scale, seed=seed), spec)
        if _is_compiled_as_node(x):
            return _as_node(x, None, seed, spec)
        params = choose_qparams(_measure(x, spec.granularity), spec, largest=torch.finfo(x.dtype).max)
        return fake_quantize(x, params._replace(seed=seed), spec)
    if torch.is_grad_enabled() and x.requires_grad:
        return _apply_eager(x, spec, None, seed)
    return choose(x, spec).fake_quantize_dynamic(x, spec, mask=False, seed=seed)[0]


def measure(x: Tensor, granularity: Granularity) -> Range:
    """The range of the finite values of every group, see `numerics.qparams.measure`.

    Raises:
        DTypeError: x is not a floating tensor.
        ShapeError: the granularity does not fit x.
    """
    compute_dtype(x.dtype)
    if is_watched(x):
        return _measure(x, granularity)
    return dispatch.choose_for(x).measure(x.detach(), granularity)


def quantize(x: Tensor, params: QParams, spec: QuantSpec) -> Tensor:
    """The codes of x; no gradient."""
    x = x.detach()
    if is_watched(x, params.seed):
        return reference.quantize(x, on_mesh_of(x, params), spec)
    return choose(x, spec, codes=True).quantize(x, params, spec)


def dequantize(codes: Tensor, params: QParams, spec: QuantSpec, dtype: torch.dtype) -> Tensor:
    """The values of codes; no gradient."""
    if is_watched(codes):
        return reference.dequantize(codes, params, spec, dtype)
    return choose(codes, spec, codes=True).dequantize(codes, params, spec, dtype)


def needs_wide_division(x: Tensor) -> bool:
    """Whether a compiler would divide numbers like x approximately; for the few of each group, see `numerics.division`.

    Not for exporters, which are shown the plain division. Nor for function transforms: within a compiled graph they
    differentiate what an autograd function does in place of it, which gives other bits.
    """
    return (
        _is_compiled_as_node(x)
        and not torch.compiler.is_exporting()
        and not torch._C._are_functorch_transforms_active()
    )


def _is_recorded() -> bool:
    """Whether an exporter or torch.jit.trace records operators.

    Raises:
        ExportError: torch.onnx.export, which has no form for these.
    """
    found = torch.compiler.is_exporting() or (not torch.compiler.is_compiling() and torch._C._is_tracing())
    if found:
        _refuse_onnx()
    return found


_translated: ContextVar[bool] = ContextVar("_translated", default=False)


@contextmanager
def translated_to_onnx() -> Iterator[None]:
    """A context in which torch.onnx.export is given a form for the operators of this module."""
    token = _translated.set(True)
    try:
        yield
    finally:
        _translated.reset(token)


def _refuse_onnx() -> None:
    exporter = sys.modules.get("torch.onnx")
    if exporter is not None and exporter.is_in_onnx_export() and not _translated.get():
        raise ExportError(
            "torch.onnx.export has no form for the quantizers of fakequant; "
            "call fakequant.export_onnx(model, example, path) instead"
        )


def _is_compiled_as_node(x: Tensor) -> bool:
    return torch.compiler.is_compiling() and x.device.type in dispatch.node_devices


def _as_node(x: Tensor, params: QParams | None, seed: Tensor | None, spec: QuantSpec) -> Tensor:
    # Imports torch's compiler, which takes a second, and which is there where this is called.
    from .opaque import Opaque

    return Opaque(spec)(x, params, seed)


def _needs_grad(x: Tensor, params: QParams) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or are_learned(params))


def are_learned(params: QParams) -> bool:
    """Whether scale or zero point get a gradient."""
    return params.scale.requires_grad or (params.zero_point is not None and params.zero_point.requires_grad)


def is_watched(*tensors: object) -> bool:
    """Whether something other than plain eager execution watches: it must see torch operations, not a kernel."""
    if not has_values(*tensors):
        return True
    in_forward_mode = forward_ad._current_level >= 0
    return in_forward_mode and any(
        forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors if isinstance(tensor, Tensor)
    )


class _Eager(torch.autograd.Function):
    """Backend kernels with parameters that get no gradient: given ones, else those that the range of x gives.

    The mask is packed and belongs to the backend that made it. Every input and attribute costs time at each call.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: QuantSpec, params: QParams | None, seed: Tensor | None = None) -> Tensor:
        backend = choose(x, spec)
        ctx.call = backend, spec, x.stride()
        needs_mask = spec.gradient is not Gradient.IDENTITY
        if params is None:
            y, mask = backend.fake_quantize_dynamic(x, spec, mask=needs_mask, seed=seed)
        else:
            y, mask = backend.fake_quantize(x, params, spec, mask=needs_mask)
        ctx.save_for_backward(mask)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (mask,) = ctx.saved_tensors
        return masked_gradient(grad_outputs[0], mask, ctx.call), None, None, None


# `Function.apply` asks for function transforms, of which `is_watched` knows already, and looks through every argument;
# that takes 2 us of the 30 that a small tensor takes, forward and backward.
_apply_eager: Any = super(torch.autograd.Function, _Eager).apply  # pyright: ignore[reportAttributeAccessIssue]


class _EagerLearned(torch.autograd.Function):
    """`_Eager` where scale or zero point get a gradient too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *params_and_spec: Any) -> Tensor:
        *params, spec = params_and_spec
        backend = choose(x, spec)
        ctx.call = backend, spec, x.stride()
        needs_mask = ctx.needs_input_grad[0] and spec.gradient is not Gradient.IDENTITY
        y, mask = backend.fake_quantize(x, params_of(*params), spec, mask=needs_mask)
        ctx.save_for_backward(mask, x, *params)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Grads:
        mask, x, *params = ctx.saved_tensors
        dy, wants = grad_outputs[0], (ctx.needs_input_grad[1], ctx.needs_input_grad[2])
        _, spec, _ = ctx.call
        scale_grad, zero_point_grad = grad_params(dy, x, params_of(*params), spec, wants)
        return masked_gradient(dy, mask, ctx.call), scale_grad, zero_point_grad, None, None, None, None


def masked_gradient(dy: Tensor, mask: Tensor | None, call: BackwardCall) -> Tensor:
    """The gradient of the input of an eager function."""
    if mask is None:
        return dy
    backend, spec, x_stride = call
    if is_watched(dy):
        like_x = mask.new_empty_strided(dy.shape, x_stride)
        return reference.grad_input(dy, backend.unpack_mask(mask, like_x, spec))
    # Grad mode is on in a backward only if a gradient of this gradient will be asked for.
    if torch.is_grad_enabled():
        return _MaskedGradient.apply(dy, mask, call)
    return backend.grad_input(dy, mask, spec, x_stride)


def masked_gradient_dense(dy: Tensor, mask: Tensor | None, call: BackwardCall) -> Tensor:
    """`masked_gradient` for an input without gaps in memory, whose strides it gets, also along single elements."""
    dx, (_, _, stride) = masked_gradient(dy, mask, call), call
    if dx.stride() == stride or is_watched(dx):
        return dx
    # With a mask dx has the order of x; without one it is dy, in any order.
    if mask is None and any(n > 1 and a != b for n, a, b in zip(dx.shape, dx.stride(), stride, strict=True)):
        return dx.new_empty_strided(dx.shape, stride).copy_(dx)
    return dx.as_strided(dx.shape, stride)


def grad_params(
    dy: Tensor, x: Tensor, params: QParams, spec: QuantSpec, wants: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of scale and zero point of `fake_quantize`, if they are wanted."""
    watched = is_watched(dy, x, params.scale, params.zero_point)
    if watched and is_legacy_batchedtensor(dy):
        given = *tensors_of(params), spec.to_text(), wants
        by_scale, by_zero_point = torch.ops.fakequant.grad_params(dy, x, *given)
        has_zero_point = wants[1] and params.zero_point is not None
        return by_scale if wants[0] else None, by_zero_point if has_zero_point else None
    # Grad mode as in `masked_gradient`: torch operations can be differentiated again, and give the same bits.
    if watched or torch.is_grad_enabled():
        return reference.grad_params(dy, x, params, spec, wants)
    return choose(x, spec).grad_params(dy, x, params, spec, wants)


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


class _MaskedGradient(torch.autograd.Function):
    """`Backend.grad_input`, which is linear in dy and hence its own derivative."""

    @staticmethod
    def forward(ctx: Any, dy: Tensor, mask: Tensor, call: BackwardCall) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.call = call
        backend, spec, x_stride = call
        return backend.grad_input(dy, mask, spec, x_stride)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return masked_gradient(grad_outputs[0], mask, ctx.call), None, None


@torch.library.custom_op(
    "fakequant::fake_quantize",
    mutates_args=(),
    schema="(Tensor x, Tensor scale, Tensor? zero_point, str spec, Tensor? seed=None) -> Tensor",
)
def _exported(x: Tensor, scale: Tensor, zero_point: Tensor | None, spec: str, seed: Tensor | None = None) -> Tensor:
    parsed = QuantSpec.parse(spec)
    y = torch.empty_like(x)
    params = QParams(scale, zero_point, seed=seed)
    return y.copy_(choose(x, parsed).fake_quantize(x, params, parsed, mask=False)[0])


@_exported.register_fake
def _(x: Tensor, scale: Tensor, zero_point: Tensor | None, spec: str, seed: Tensor | None = None) -> Tensor:
    if torch.compiler.is_exporting():  # not seen by `_is_recorded` where torch's compiler reads its code
        _refuse_onnx()
    return torch.empty_like(x)


@torch.library.custom_op("fakequant::choose_scale", mutates_args=(), schema="(Tensor x, str spec) -> Tensor")
def _exported_scale(x: Tensor, spec: str) -> Tensor:
    parsed = QuantSpec.parse(spec)
    return choose_qparams(measure(x, parsed.granularity), parsed, largest=torch.finfo(x.dtype).max).scale


@_exported_scale.register_fake
def _(x: Tensor, spec: str) -> Tensor:
    return x.new_empty(QuantSpec.parse(spec).granularity.group_shape(x.shape), dtype=compute_dtype(x.dtype))


def _exported_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, scale, zero_point, spec, seed = inputs
    ctx.save_for_backward(x, scale, zero_point, seed)
    ctx.spec = QuantSpec.parse(spec)  # type: ignore[attr-defined]


def _exported_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
    x, scale, zero_point, seed = ctx.saved_tensors
    params = QParams(scale, zero_point, seed=seed)
    wants = ctx.needs_input_grad[1], ctx.needs_input_grad[2]
    scale_grad = zero_point_grad = None
    if any(wants):
        scale_grad, zero_point_grad = grad_params(dy, x, params, ctx.spec, wants)
    return reference.grad_input(dy, reference.passes(x, params, ctx.spec)), scale_grad, zero_point_grad, None, None


_exported.register_autograd(_exported_backward, setup_context=_exported_context)
