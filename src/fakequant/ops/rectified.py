"""ReLU and fake quantization after it in one pass, with the bits of one after the other."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from fakequant.numerics.qparams import QParams
from fakequant.numerics.spec import QuantSpec, Rounding

from .backend import Backend
from .dispatch import choose
from .library import are_learned, fake_quantize, is_watched, masked_gradient_dense

_CHANNELS_LAST = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}


def fake_quantize_relu(x: Tensor, params: QParams, spec: QuantSpec) -> Tensor:
    """`library.fake_quantize` of torch.relu(x), forward and gradient.

    In one pass over memory each, where a backend can; between them it saves one bit per element, while torch.relu alone
    saves its result.
    """
    if not in_one_pass(x, params, spec):
        return fake_quantize(torch.relu(x), params, spec)
    if torch.is_grad_enabled() and x.requires_grad:
        return _Rectified.apply(x, params, spec)
    return choose(x, spec).fake_quantize_relu(x, params, spec, mask=False)[0]


def rectifies(backend: Backend, x: Tensor) -> bool:
    """Whether a backend can compute torch.relu(x) as torch does: its bits, and how it lies in memory."""
    return backend.rectifies and _keeps_negative_zero(x.dtype) and _keeps_strides(x.shape, x.stride())


def relu_later(x: Tensor) -> Tensor:
    """x, before a reshape or a maximum whose result `fake_quantize_relu` gets; torch.relu(x) if that lies otherwise."""
    return x if _keeps_strides(x.shape, x.stride()) else torch.relu(x)


def in_one_pass(x: Tensor, params: QParams, spec: QuantSpec) -> bool:
    """Whether `fake_quantize_relu` takes one pass over memory."""
    # A scale that learns needs the ReLU's result again.
    if is_watched(x, params.scale, params.zero_point) or spec.rounding is Rounding.STOCHASTIC:
        return False
    return not are_learned(params) and rectifies(choose(x, spec), x)


@cache
def _keeps_negative_zero(dtype: torch.dtype) -> bool:
    """Whether torch.relu gives -0.0 for -0.0 here, as the kernels do; torch leaves it to the processor's maximum."""
    return bool(torch.relu(torch.full((67,), -0.0, dtype=dtype, device="cpu")).signbit().all())


@lru_cache(maxsize=4096)
def _keeps_strides(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the result of torch.relu is known to lie as its input: how the next product sums may depend on it."""
    x = torch.empty_strided(shape, stride, device="meta")
    for format in (torch.contiguous_format, *_CHANNELS_LAST.get(len(shape), ())):
        if x.is_contiguous(memory_format=format):
            # An axis of one element may have any stride; torch gives it that of the format.
            return torch.empty(shape, device="meta", memory_format=format).stride() == stride
    return False


class _Rectified(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, params: QParams, spec: QuantSpec) -> Tensor:
        backend = choose(x, spec)
        ctx.call = backend, spec, x.stride()
        y, mask = backend.fake_quantize_relu(x, params, spec, mask=True)
        ctx.save_for_backward(mask)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return masked_gradient_dense(grad_outputs[0], mask, ctx.call), None, None
