"""Division of float32 numbers that gives eager mode's bits, even if a compiler divides approximately.

Inductor writes a quotient as `/` in Triton, which is off by up to 2 units in the last place on a GPU. It writes a
division by a constant as a product with the reciprocal. So float32 numbers are divided in float64, and the quotient is
rounded to float32. That gives the same bits: 53 bits are at least 2 * 24 + 2, so the error in float64 never moves a
quotient across a tie of float32, and float64 has the larger range. float64 numbers are divided directly.

Each division asks whether a compiler runs it; its caller does not. After a graph break in the caller, the compiler may
still compile the functions that the caller calls.

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

    An operation must stand between two conversions. Before torch 2.13, Inductor drops the rounding to float32 of a
    result that is converted back to float64 at once, such as a quotient or its gradient.
    """
    return (-x).double()
