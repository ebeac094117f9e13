"""Quantized values or codes and their mask, kept to be given out again: a pass over memory less for each time."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fakequant.numerics.qparams import QParams
from fakequant.numerics.spec import Gradient, QuantSpec

from .backend import BackwardCall, Direct
from .dispatch import choose
from .library import EagerLearnedCodes, masked_gradient
from .traced import tensors_of


class Kept(NamedTuple):
    """A tensor quantized once."""

    values: Tensor
    """The quantized values, or the codes."""
    mask: Tensor | None
    """Where gradients pass, packed by the backend that made it.

    None if it was not asked for, if gradients always pass (`Gradient.IDENTITY`), or if `encode_directly` found that
    they pass everywhere.
    """
    call: BackwardCall
    dense: bool = False
    """Whether the gradient is to lie in memory as x does, see `masked_gradient_dense`."""
    direct: Direct | None = None
    """By what the codes were found, if by one operator; then the backward pass may go this way too."""


def keep(x: Tensor, params: QParams | None, spec: QuantSpec, *, mask: bool) -> Kept:
    """Quantize x by given parameters, else by those that its range gives; x must be a plain tensor (`is_watched`)."""
    backend, mask = choose(x, spec), mask and spec.gradient is not Gradient.IDENTITY
    # What is kept must be plain tensors, which a later backward pass may save.
    with torch.inference_mode(False), torch.no_grad():
        if params is None:
            values, bits = backend.fake_quantize_dynamic(x, spec, mask=mask)
        else:
            values, bits = backend.fake_quantize(x, params, spec, mask=mask)
    return Kept(values, bits, (backend, spec, x.stride()))


def keep_codes(x: Tensor, params: QParams, spec: QuantSpec, *, mask: bool, relu: bool = False) -> Kept | None:
    """The codes of x, or of its ReLU where `rectified.in_one_pass` says so; None if x has NaN, which has no code.

    For formats with codes of 8 bits that round to nearest, and parameters whose gradient nobody asks for here.
    """
    backend, mask = choose(x, spec, codes=True), mask and (relu or spec.gradient is not Gradient.IDENTITY)
    with torch.inference_mode(False), torch.no_grad():
        found = (backend.encode_relu if relu else backend.encode)(x, params, spec, mask=mask)
    return None if found.has_nan else Kept(found.codes, found.mask, (backend, spec, x.stride()), relu)


def encode_learned(x: Tensor, params: QParams, spec: QuantSpec) -> tuple[Tensor, Kept] | None:
    """`keep_codes` where scale or zero point get a gradient: what takes that of the quantized x, and the codes.

    The first is a tensor of zeros, the shape of x, that takes no memory: a product of the codes is a function of it,
    with the gradient of the product of the quantized values, which passes to it everywhere.
    """
    zeros, codes, has_nan = EagerLearnedCodes.apply(x, *tensors_of(params), spec)
    return None if has_nan else (zeros, Kept(codes, None, (choose(x, spec, codes=True), spec, x.stride())))


def give(x: Tensor, kept: Kept) -> Tensor:
    """The kept values of x, as its function where gradients are wanted."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _Given.apply(x, kept)
    return kept.values.detach()


class _Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Kept) -> Tensor:
        # Saved as an attribute: autograd frees saved tensors after a backward pass, and this one is used again.
        ctx.kept = kept
        # Another tensor each time, on the same memory: autograd writes the node that made it into its output.
        return kept.values.detach()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return masked_gradient(grad_outputs[0], ctx.kept.mask, ctx.kept.call), None
