"""Quotients of float32 numbers with the bits of eager mode where a compiler divides approximately.

Inductor writes them as `/` in Triton, which is off by up to 2 units in the last place on a GPU, and those by a constant
as products with its reciprocal. Quotients of float64 rounded to float32 are right all the same: 53 bits are at least
2 * 24 + 2, so that no quotient of float32 numbers comes so close to a middle between two others that its error in
float64 matters, and float64 reaches beyond all of them. float64 numbers are divided directly.

The question is asked at each division, not by a caller: where a compiler gives a caller up, it may still compile what
that calls.

Source: Figueroa, When is double rounding innocuous?, SIGNUM Newsletter 30(3), 1995.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fakequant.numerics.compilers import is_approximate


def divide(a: Tensor, b: Tensor) -> Tensor:
    """a / b, of the same dtype.

    >>> divide(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    tensor([0.3333, 0.5000])
    """
    return Quotient.apply(a, b) if a.dtype == torch.float32 and is_approximate(a) else a / b


def reciprocal(x: Tensor) -> Tensor:
    """1 / x, of the same dtype.

    >>> reciprocal(torch.tensor([3.0, 4.0]))
    tensor([0.3333, 0.2500])
    """
    return Reciprocal.apply(x) if x.dtype == torch.float32 and is_approximate(x) else x.reciprocal()


class Quotient(torch.autograd.Function):
    """a / b, with the gradients as autograd rounds them: dy / b and -dy * ((a / b) / b)."""

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return _quotient(a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None]:
        dy, (a, b, y) = grad_outputs[0], ctx.saved_tensors
        da = _quotient(dy, b).sum_to_size(a.shape) if ctx.needs_input_grad[0] else None
        db = _product(-dy, _quotient(y, b)).sum_to_size(b.shape) if ctx.needs_input_grad[1] else None
        return da, db


class Reciprocal(torch.autograd.Function):
    """1 / x, with the gradient as autograd rounds it: -dy * (y * y)."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return _quotient(torch.ones_like(x), x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return _product(-grad_outputs[0], y * y)


def _quotient(a: Tensor, b: Tensor) -> Tensor:
    return (_negative(a) / _negative(b)).to(a.dtype)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a * b, exact in float64 and rounded once: no compiler contracts it with a sum of gradients that follows."""
    return (_negative(a) * _negative(b)).to(a.dtype)


def _negative(x: Tensor) -> Tensor:
    """-x in float64.

    Something must stand between two conversions: before torch 2.13 Inductor drops the rounding of float64 to float32
    where the result, such as a quotient or the gradient of one, is at once made float64 again.
    """
    return (-x).double()
