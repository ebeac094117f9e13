"""The operator as nodes of graphs, for exporters and for compilers that must not decompose it.

Nodes carry the specification as text. `fakequant::fake_quantize` is the node of exported programs.
`fakequant::fake_quantize_in_graph` is the node of compilers: with a backward pass it also returns one bit per element,
and only these bits are saved. The name of the backend and the strides of x tell what the bits mean, so that a graph
needs no tensors on the CPU, which a CUDA graph could not hold. The node has no autograd formula, because torch's
wrapper of an operator with a formula took a third of the 115 us of Python that a node took.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from fakequant.distributed import is_sharded
from fakequant.errors import ExportError
from fakequant.numerics import division, reference
from fakequant.numerics.division import is_exporting
from fakequant.numerics.formats.floats import FloatFormat, IntegerFormat
from fakequant.numerics.granularity import padding
from fakequant.numerics.qparams import QParams, Range, compute_dtype, is_concrete
from fakequant.numerics.reference import is_less_by_plain_sums
from fakequant.numerics.spec import Gradient, QuantSpec, Rounding
from fakequant.ops import dispatch
from fakequant.ops.backend import VALUES, CallKind, Extras, KernelPlan, ParameterKind
from fakequant.ops.dispatch import backends, choose, choose_for, plan_by, plan_of


def needs_tracing(*tensors: object) -> bool:
    """Whether a transform, tracer, subclass or forward-mode AD must see torch operations instead of a kernel."""
    return not is_concrete(*tensors) or (forward_ad._current_level >= 0 and dispatch.have_tangents(*tensors))


def is_compiled_as_node(x: Tensor) -> bool:
    """Whether a compiler runs, and graphs on the device of x contain the operator as one node, see `Backend`."""
    return torch.compiler.is_compiling() and x.device.type in division.approximate_devices


def is_compiled_in_line(x: Tensor, spec: QuantSpec, params: QParams) -> bool:
    """Whether a compiler computes the right bits of this call from the definition, even if `is_compiled_as_node`."""
    return (
        x.dtype == torch.float32
        and x.device.type in division.FUSED_DEVICES
        and spec.rounding is Rounding.NEAREST_EVEN
        and not spec.arithmetic.has_two_scales
        and isinstance(spec.format, (IntegerFormat, FloatFormat))
        and spec.offset is None
        and not spec.scale.is_exact
        and not (params.scale.requires_grad or (params.zero_point is not None and params.zero_point.requires_grad))
        and not is_sharded(x)
    )


def is_compiled_in_transforms() -> bool:
    """Whether a compiler traces a function transform, in which gradients of autograd functions would be wrong."""
    return torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def is_recorded() -> bool:
    """Whether an exporter or torch.jit.trace records operators; raises ExportError in torch.onnx.export."""
    recorded = not torch.compiler.is_compiling() and (torch._C._is_tracing() or _seen.get())
    found = division.is_exporting() or recorded
    if found:
        refuse_onnx()
    return found


_translated: ContextVar[bool] = ContextVar("_translated", default=False)


@contextmanager
def _raised(flag: ContextVar[bool]) -> Iterator[None]:
    token = flag.set(True)
    try:
        yield
    finally:
        flag.reset(token)


def translated_to_onnx() -> AbstractContextManager[None]:
    """A context in which torch.onnx.export has translations of this package's operators."""
    return _raised(_translated)


_seen: ContextVar[bool] = ContextVar("_seen", default=False)


def seen_as_operators() -> AbstractContextManager[None]:
    """A context in which dispatch modes of torch, such as exporters', see each fake_quantize call as one operator."""
    return _raised(_seen)


def refuse_onnx() -> None:
    """Raise ExportError if torch.onnx.export runs outside of `translated_to_onnx`."""
    exporter = sys.modules.get("torch.onnx")
    if exporter is not None and exporter.is_in_onnx_export() and not _translated.get():
        raise ExportError(
            "torch.onnx.export has no form for the quantizers of fakequant; "
            "call fakequant.export_onnx(model, example, path) instead"
        )


Grads = tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None, None]


class Decomposed(torch.autograd.Function):
    """The operator as the definition's torch operations, forward and backward, which a compiler can fuse."""

    @staticmethod
    def forward(
        x: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        lo: Tensor | None,
        hi: Tensor | None,
        seed: Tensor | None,
        spec: QuantSpec,
    ) -> Tensor:
        values = reference.fake_quantize(x, params_of(scale, zero_point, lo, hi, seed), spec)
        # A tensor of its own: before torch 2.13 a compiled graph returns every intermediate, and where the result is
        # one of these (a `.to` of its own dtype returns its input), the gradient of the result is lost, and dx is 0.
        return values.view_as(values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, spec = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.spec = spec

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Grads:
        x, *tensors = ctx.saved_tensors
        dy, params, spec = grad_outputs[0], params_of(*tensors), ctx.spec
        dx = scale_grad = zero_point_grad = None
        x = _found_in_backward(x, dy)
        if ctx.needs_input_grad[0]:
            dx = reference.grad_input(dy, reference.passes(x, params, spec))
        wants = ctx.needs_input_grad[1], ctx.needs_input_grad[2]
        if any(wants):
            scale_grad, zero_point_grad = reference.grad_params(dy, x, params, spec, wants)
        return dx, scale_grad, zero_point_grad, None, None, None, None


def _found_in_backward(x: Tensor, dy: Tensor) -> Tensor:
    """x; on a CPU made to depend on dy, so that a compiler computes the mask in the backward pass and does not save it.

    Compilers move operations that do not need dy into the forward pass, and save the mask, and the mask of a ReLU
    before it, as bool tensors. Inductor writes these one element at a time on the CPU: 2 to 5 ms for 1M elements, which
    are quantized in 0.08 ms. The compiled step of a network of six convolutions took 2.2 times as long as in float. It
    takes 1.05 times as long if the backward pass computes the mask from x. The cost is memory: x itself is saved
    between the passes, unless another operation saves it anyway; eager mode saves one bit per element. GPUs write bool
    tensors as fast as others, and bool tensors take a quarter of the memory.
    """
    return torch.where(dy == 0, x, x) if x.is_cpu else x


class DecomposedInTransforms(Decomposed):
    """`Decomposed` for function transforms and forward-mode AD; separate, as torch.compile cannot trace a `jvp`."""

    generate_vmap_rule = True

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        x, *tensors = ctx.saved_tensors
        params, spec = params_of(*tensors), ctx.spec
        moved = reference.tangent_params(x, params, spec, (tangents[1], tangents[2]))
        if tangents[0] is not None:
            through = reference.grad_input(tangents[0], reference.passes(x, params, spec))
            moved = through if moved is None else through + moved
        assert moved is not None, "forward-mode AD calls jvp only if an input has a tangent"
        return moved


def apply_in_transforms(x: Tensor, text: str, *tensors: Tensor | None) -> Tensor:
    """Call `DecomposedInTransforms` with a specification as text, for compiled function transforms.

    A compiler that traces `torch.func.grad` ignores the backward of an autograd function: it differentiates the
    forward, and all gradients were 0. It does not trace into `apply_in_transforms` (see `keep_whole`), so that
    `torch.func.grad` calls the backward.
    """
    y: Tensor = DecomposedInTransforms.apply(x, *tensors, QuantSpec.parse(text))
    return y


def keep_whole() -> None:
    """Tell the compiler not to trace into `apply_in_transforms`.

    The compiler calls this function while it traces. A call at the import of this module would import the compiler,
    which takes 3 s.
    """
    torch._dynamo.allow_in_graph(apply_in_transforms)


def tensors_of(params: QParams) -> tuple[Tensor | None, ...]:
    """The tensors of parameters as arguments of `params_of`, since autograd functions ignore tensors in tuples."""
    lo, hi = params.range or (None, None)
    return params.scale, params.zero_point, lo, hi, params.seed


def params_of(
    scale: Tensor, zero_point: Tensor | None, lo: Tensor | None, hi: Tensor | None, seed: Tensor | None
) -> QParams:
    """The inverse of `tensors_of`."""
    return QParams(scale, zero_point, None if lo is None or hi is None else Range(lo, hi), seed)


def on_mesh_of(x: Tensor, params: QParams) -> QParams:
    """The parameters, as replicated DTensors if x is a DTensor: torch does not mix DTensors and plain tensors."""
    if not is_sharded(x):
        return params
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(x, DTensor)
    mesh, whole = x.device_mesh, [Replicate()] * x.device_mesh.ndim
    scale, zero_point, lo, hi, seed = (
        p if p is None or isinstance(p, DTensor) else DTensor.from_local(p, mesh, whole) for p in tensors_of(params)
    )
    assert scale is not None, "parameters have a scale"
    return params_of(scale, zero_point, lo, hi, seed)


_FixedCall = tuple[KernelPlan, Tensor | None, Tensor | None]
_LearnedCall = tuple[KernelPlan, float | None]


def apply_plan(
    plan: KernelPlan, x: Tensor, scale: Tensor | None, zero_point: Tensor | None, factor: float | None = None
) -> Tensor | None:
    """x quantized by its plan, with gradients if they are needed; None if a parameter is not valid.

    The scale is None if the parameters come from the range of x. With `factor`, by which the scale's gradient is
    multiplied, the scale may change before the backward pass.
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
    """Quantizes with a gradient of x alone; plan and parameters are one tuple, because every argument costs time."""

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
    """Quantizes with gradients of x, and of scale or zero point."""

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
            groups, extras = plan.spec.granularity.group_shape(x.shape), plan.descriptor
            given = scale, zero_point
            extras = extras if isinstance(extras, Extras) else Extras()
            of_groups = None if zero_point is None else zero_point.reshape(groups)
            params = QParams(scale.reshape(groups), of_groups, *extras)
            of_params = (
                None if own is None or p is None else own.reshape(p.shape)
                for own, p in zip(grad_params(dy, x, params, plan.spec, wants), given, strict=True)
            )
            found = masked_gradient(dy, mask, plan), *of_params
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
    """dy where the mask is set, else 0; dy without a mask."""
    if mask is None:
        return dy
    # Grad mode is on in a backward only if a gradient of this gradient will be asked for.
    if torch.is_grad_enabled() or needs_tracing(dy):
        return reference.grad_input(dy, unpack_mask(mask, dy.shape, plan))
    return plan.grad_input(laid(dy, plan.stride), mask)


def unpack_mask(mask: Tensor, shape: torch.Size, plan: KernelPlan) -> Tensor:
    """The packed mask as a bool tensor [shape]."""
    ones = mask.new_empty_strided(shape, plan.stride, dtype=torch.bool).fill_(True)
    return plan.grad_input(ones, mask).bool()


def laid(x: Tensor, stride: tuple[int, ...]) -> Tensor:
    """x with the strides that kernels read; it is copied only if another view of it cannot have them."""
    if x.stride() == stride:
        return x
    if all(n <= 1 or a == b for n, a, b in zip(x.shape, x.stride(), stride, strict=True)):
        return x.as_strided(x.shape, stride)
    return x.new_empty_strided(x.shape, stride).copy_(x)


def grad_params(
    dy: Tensor, x: Tensor, params: QParams, spec: QuantSpec, wants: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of scale and zero point by torch operations; None for a gradient that is not in `wants`."""
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


_PARAMS = "Tensor? scale, Tensor? zero_point, str spec, Tensor? seed=None"


def quantize_as_node(
    x: Tensor,
    spec: QuantSpec,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    range: Range | None = None,
    seed: Tensor | None = None,
) -> Tensor:
    """`library.fake_quantize` as one node of a graph, or without a scale `library.fake_quantize_dynamic`."""
    text = text_of(spec)
    by = name_of_choice(x.device, x.dtype, text)
    wanted = (t.requires_grad for t in (x, scale, zero_point) if t is not None)
    lo, hi = (None, None) if range is None else range
    if torch.is_grad_enabled() and any(wanted):
        return _AsNode.apply(x, scale, zero_point, seed, lo, hi, text, by)
    # Strides are for the mask; within a backward pass Dynamo knows none, and lays x anew.
    return torch.ops.fakequant.fake_quantize_in_graph(x, scale, zero_point, seed, lo, hi, text, by, None, False)[0]


def text_of(spec: QuantSpec) -> str:
    """`spec.to_text()`; in torch.compile, whose dynamic mode cannot trace it, `str(spec)` if the format is known."""
    text = str(spec)
    is_known = torch.compiler.is_compiling() and QuantSpec.parse(text).format is spec.format
    return text if is_known else spec.to_text()


@torch.library.custom_op("fakequant::fake_quantize", mutates_args=(), schema=f"(Tensor x, {_PARAMS}) -> Tensor")
def _values(
    x: Tensor, scale: Tensor | None, zero_point: Tensor | None, spec: str, seed: Tensor | None = None
) -> Tensor:
    plan = plan_of(x, QuantSpec.parse(spec), scale, zero_point)
    assert plan is not None, "graphs hold no other calls"
    y = (plan.otherwise or plan).values(x, scale, zero_point, Extras(None, seed))
    assert y is not None, "the plan takes any parameters"
    # Strides to the last: also that of an axis of one element decides whether a tensor counts as channels-last.
    if y.stride() == x.stride() and x.is_contiguous():
        return y
    declared = _declared(x, x.stride())
    return y if y.stride() == declared.stride() else declared.copy_(y)


@_values.register_fake
def _(x: Tensor, scale: Tensor | None, zero_point: Tensor | None, spec: str, seed: Tensor | None = None) -> Tensor:
    if is_exporting():  # not seen by `is_recorded` where torch's compiler reads its code
        refuse_onnx()
    return _declared(x, x.stride())


class _AsNode(torch.autograd.Function):
    """The operator as nodes, forward and backward; operators' autograd formulas would cost Python time at each call."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Any) -> Tensor:
        scale, zero_point, seed, _, _, text, by = given
        y, mask = torch.ops.fakequant.fake_quantize_in_graph(x, *given, x.stride(), True)
        ctx.text, ctx.by = text, by
        ctx.learned = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        ctx.save_for_backward(mask, *((x, scale, zero_point, seed) if ctx.learned else ()))
        ctx.stride = x.stride()
        # A tensor of its own, as in `Decomposed`. A view of the same shape would give an axis of one element another
        # stride, and with it a channels-last tensor would count as row by row.
        return y[...]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (mask, *saved) = grad_outputs, ctx.saved_tensors
        dx = by_scale = by_zero_point = None
        if ctx.needs_input_grad[0]:
            dx = torch.ops.fakequant.grad_input(dy, mask, ctx.text, ctx.by, ctx.stride) if has_mask(ctx.text) else dy
        if ctx.learned:
            x, scale, zero_point, seed = saved
            given = scale, zero_point, seed, ctx.text, ctx.by, ctx.stride
            by_scale, by_zero_point = torch.ops.fakequant.grad_of_params(dy, x, *given)
            by_zero_point = None if zero_point is None else by_zero_point
        return dx, by_scale, by_zero_point, None, None, None, None, None


def name_of_choice(device: torch.device, dtype: torch.dtype, text: str) -> str:
    """The name of the backend that serves plain tensors of a device and dtype, for a specification `text`."""
    with _disable_current_modes():
        return choose(torch.empty(0, dtype=dtype, device=device), QuantSpec.parse(text)).name


def has_mask(text: str) -> bool:
    """Whether a specification masks gradients: all do except those with IDENTITY. A trace takes it as a constant."""
    return QuantSpec.parse(text).gradient is not Gradient.IDENTITY


for _own in (keep_whole, name_of_choice, has_mask):
    _own._dynamo_marked_constant = True  # type: ignore[attr-defined]  as torch.compiler.assume_constant_result does


class _Node(NamedTuple):
    """The plan and strides with which calls of a node are computed.

    Attributes:
        plan: a plan that takes any parameters.
        declared: the strides of results.
        mask_bytes: the size of a mask in bytes.
    """

    plan: KernelPlan
    declared: tuple[int, ...]
    mask_bytes: int


_nodes: dict[Any, _Node] = {}


def _node_of(x_kind: tuple[Any, ...], scale: Tensor | None, zero_point: Tensor | None, text: str, name: str) -> _Node:
    """The cached `_Node` for tensors of one kind; `x_kind` is the dtype, device, shape and compiled strides of x."""
    of_scale = None if scale is None else (scale.dtype, scale.device, scale.shape, scale.is_contiguous())
    of_zero_point = None
    if zero_point is not None:
        of_zero_point = zero_point.dtype, zero_point.device, zero_point.shape, zero_point.is_contiguous()
    key = text, name, x_kind, of_scale, of_zero_point
    if (known := _nodes.get(key)) is not None:
        return known
    dtype, device, shape, stride = x_kind
    (backend,) = (backend for backend in backends() if backend.name == name)
    kinds = (None if own is None else ParameterKind(*own) for own in (of_scale, of_zero_point))
    plan = plan_by(backend, CallKind(QuantSpec.parse(text), VALUES, dtype, device, shape, stride, *kinds))
    x = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    made = _Node(plan.otherwise or plan, _declared(x, stride).stride(), _mask_bytes(x, plan.spec))
    if len(_nodes) >= _MOST_NODES:
        _nodes.clear()
    _nodes[key] = made
    return made


_MOST_NODES = 4096
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_LIBRARY.define(
    "fake_quantize_in_graph(Tensor x, Tensor? scale, Tensor? zero_point, Tensor? seed, Tensor? lo, Tensor? hi, "
    "str spec, str by, SymInt[]? stride, bool masked) -> (Tensor y, Tensor mask)",
    tags=_TAGS,
)


@torch.library.impl(_LIBRARY, "fake_quantize_in_graph", "CompositeExplicitAutograd")
def _fake_quantize_in_graph(
    x: Tensor, scale: Tensor | None, zero_point: Tensor | None, *given: Any
) -> tuple[Tensor, Tensor]:
    seed, lo, hi, spec, by, stride, masked = given
    of_x, stride = (x.dtype, x.device, x.shape), x.stride() if stride is None else tuple(stride)
    plan, declared, mask_bytes = _node_of((*of_x, stride), scale, zero_point, spec, by)
    if x.stride() != stride:  # the bits of a mask lie as x does
        x = laid(x, declared)
        plan = _node_of((*of_x, declared), scale, zero_point, spec, by).plan
    extras = None if seed is lo is None else Extras(None if lo is None or hi is None else Range(lo, hi), seed)
    if masked:
        y, mask = plan.values_and_mask(x, scale, zero_point, extras or plan.descriptor)
    else:
        y, mask = plan.values(x, scale, zero_point, extras or plan.descriptor), None
    assert y is not None, "the plan takes any parameters"
    if mask is None:
        mask = x.new_empty(0, dtype=torch.uint8)
    elif mask.numel() != mask_bytes:
        mask = F.pad(mask, (0, mask_bytes - mask.numel()))
    return laid(y, declared), mask


@torch.library.register_fake("fakequant::fake_quantize_in_graph", lib=_LIBRARY)
def _(x: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    *_, spec, _, stride, masked = given
    mask_bytes = _mask_bytes(x, QuantSpec.parse(spec)) if masked else 0
    return _declared(x, x.stride() if stride is None else stride), x.new_empty(mask_bytes, dtype=torch.uint8)


_LIBRARY.define("grad_input(Tensor dy, Tensor mask, str spec, str by, SymInt[] stride) -> Tensor", tags=_TAGS)


@torch.library.impl(_LIBRARY, "grad_input", "CompositeExplicitAutograd")
def _grad_input(dy: Tensor, mask: Tensor, spec: str, by: str, stride: Sequence[int]) -> Tensor:
    plan, declared, _ = _node_of((dy.dtype, mask.device, dy.shape, tuple(stride)), None, None, spec, by)
    return laid(plan.grad_input(laid(dy, plan.stride), mask), declared)


@torch.library.register_fake("fakequant::grad_input", lib=_LIBRARY)
def _(dy: Tensor, mask: Tensor, spec: str, by: str, stride: Sequence[int]) -> Tensor:
    return _declared(dy, stride)


_LIBRARY.define(
    "grad_of_params(Tensor dy, Tensor x, Tensor scale, Tensor? zero_point, Tensor? seed, str spec, str by, "
    "SymInt[] stride) -> (Tensor by_scale, Tensor by_zero_point)",
    tags=_TAGS,
)


@torch.library.impl(_LIBRARY, "grad_of_params", "CompositeExplicitAutograd")
def _grad_of_params(
    dy: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None, *given: Any
) -> tuple[Tensor, Tensor]:
    seed, spec, by, stride = given
    plan = _node_of((x.dtype, x.device, x.shape, tuple(stride)), scale, zero_point, spec, by).plan
    extras = plan.descriptor if seed is None else Extras(None, seed)
    tensors = laid(dy.to(x.dtype), plan.stride), laid(x, plan.stride), None, scale, zero_point
    _, *found = plan.gradients(*tensors, extras, True, zero_point is not None)
    by_scale, by_zero_point = (scale.new_empty(0) if g is None else g.contiguous() for g in found)
    return by_scale, by_zero_point


@torch.library.register_fake("fakequant::grad_of_params", lib=_LIBRARY)
def _(dy: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    by_zero_point = scale.new_empty(0) if zero_point is None else zero_point.new_empty(zero_point.shape)
    return scale.new_empty(scale.shape), by_zero_point


def _setup_values(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, scale, zero_point, spec, seed = inputs
    ctx.save_for_backward(x, scale, zero_point, seed)
    ctx.spec = QuantSpec.parse(spec)


def _backward_of_values(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients in an exported program, by torch operations on x; few exported programs are trained."""
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


def _mask_bytes(x: Tensor, spec: QuantSpec) -> int:
    """The bytes of a mask with one bit per element; the last blocks count as full, because some backends pad."""
    if spec.gradient is Gradient.IDENTITY:
        return 0
    missing = padding(x.shape, spec.granularity.block_shape(x.shape))
    return (math.prod(n + m for n, m in zip(x.shape, missing, strict=True)) + 7) // 8


def _declared(x: Tensor, stride: Sequence[int]) -> Tensor:
    """An empty tensor with the strides of results: `stride`, or contiguous if that leaves gaps."""
    laid = x.new_empty_strided(x.shape, stride)
    return laid if _is_dense(laid) else x.new_empty(x.shape)


def _is_dense(x: Tensor) -> bool:
    """Whether x has neither gaps nor overlaps in memory, in any order of axes."""
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
