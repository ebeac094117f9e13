"""Quantized values or codes and their mask, kept to be given out again: a pass over memory less for each time."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fakequant.numerics.qparams import QParams
from fakequant.numerics.spec import Gradient, QuantSpec

from .backend import BackwardCall
from .dispatch import choose
from .library import masked_gradient


class Kept(NamedTuple):
    """A tensor quantized once."""

    values: Tensor
    """The quantized values."""
    mask: Tensor | None
    """Where gradients pass, packed by the backend that made it.

    None if it was not asked for, or if gradients always pass (`Gradient.IDENTITY`).
    """
    call: BackwardCall


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


def keep_codes(x: Tensor, params: QParams, spec: QuantSpec) -> Tensor | None:
    """The codes of x; None if x has NaN, which has no code. For formats with codes of 8 bits that round to nearest."""
    with torch.inference_mode(False), torch.no_grad():
        found = choose(x, spec, codes=True).encode(x, params, spec, mask=False)
    return None if found.has_nan else found.codes


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
