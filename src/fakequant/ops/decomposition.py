"""The operator as plain torch operations, for compilers, function transforms and forward-mode AD."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fakequant.distributed import is_sharded
from fakequant.numerics import reference
from fakequant.numerics.qparams import QParams, Range
from fakequant.numerics.spec import QuantSpec

Grads = tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None, None]


class Decomposed(torch.autograd.Function):
    """The definition as plain torch operations, forward and backward, which a compiler fuses with its neighbours."""

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
    """x, made to depend on dy, so that a compiler computes all that follows from it in the backward pass.

    Compilers move operations that do not need dy into the forward pass, and save the mask, and that of a ReLU before
    it, as bool tensors. Inductor writes these one element at a time on the CPU: 2 to 5 ms for 1M elements, which are
    quantized in 0.08 ms. The compiled step of a network of six convolutions took 2.2 times as long as in float. It
    takes 1.05 times as long if the backward pass computes the mask from x. The cost is memory: x itself is saved
    between the passes, unless another operation saves it anyway; eager mode saves one bit per element.
    """
    return torch.where(dy == 0, x, x)


class DecomposedInTransforms(Decomposed):
    """`Decomposed` for function transforms and forward-mode AD; torch.compile cannot trace a `jvp`."""

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
    """`DecomposedInTransforms` by the text of a specification, for compiled function transforms.

    A compiler that reads `torch.func.grad` differentiates what an autograd function does forward, which gave 0
    everywhere; it does not look into this one, and the transform finds the autograd function.
    """
    y: Tensor = DecomposedInTransforms.apply(x, *tensors, QuantSpec.parse(text))
    return y


def keep_whole() -> None:
    """Tell a compiler not to look into `apply_in_transforms`; it runs this while it reads the call.

    Told at import, it would be imported itself: 3 s.
    """
    torch._dynamo.allow_in_graph(apply_in_transforms)


keep_whole._dynamo_marked_constant = True  # type: ignore[attr-defined]  as torch.compiler.assume_constant_result does


def tensors_of(params: QParams) -> tuple[Tensor | None, ...]:
    """The arguments of `params_of`: autograd functions know no tensors within tuples."""
    lo, hi = params.range or (None, None)
    return params.scale, params.zero_point, lo, hi, params.seed


def params_of(
    scale: Tensor, zero_point: Tensor | None, lo: Tensor | None, hi: Tensor | None, seed: Tensor | None
) -> QParams:
    """The inverse of `tensors_of`."""
    return QParams(scale, zero_point, None if lo is None or hi is None else Range(lo, hi), seed)


def on_mesh_of(x: Tensor, params: QParams) -> QParams:
    """The parameters, replicated as DTensors if x is a DTensor: torch does not mix DTensors and tensors."""
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
