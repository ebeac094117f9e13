"""Division of float32 numbers that gives eager mode's bits, even if a compiler divides approximately.

Inductor writes a quotient as `/` in Triton, which is off by up to 2 units in the last place on a GPU; a division by a
constant as a product with the reciprocal; and it lets a product be contracted with the sum that follows. So a graph for
such a device holds a quotient, and the gradients of it, as nodes, which compute what eager mode computes. float64
numbers are divided directly: compilers divide them exactly.

Each division asks whether a compiler runs it; its caller does not. After a graph break in the caller, the compiler may
still compile the functions that the caller calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fakequant.numerics.compilers import is_approximate


def divide(a: Tensor, b: Tensor) -> Tensor:
    """a / b, of the same dtype.

    >>> divide(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    tensor([0.3333, 0.5000])
    """
    return divide_as_node(a, b) if a.dtype == torch.float32 and is_approximate(a) else a / b


def reciprocal(x: Tensor) -> Tensor:
    """1 / x, of the same dtype.

    >>> reciprocal(torch.tensor([3.0, 4.0]))
    tensor([0.3333, 0.2500])
    """
    return reciprocal_as_node(x) if x.dtype == torch.float32 and is_approximate(x) else x.reciprocal()


def _node(function: Callable[..., Tensor]) -> Any:
    """The function as an operator of torch; of fake tensors it computes fake results, with the strides of real ones."""
    made = torch.library.custom_op(f"fakequant::{function.__name__.strip('_')}", function, mutates_args=())
    made.register_fake(function)
    return made


@_node
def divide_as_node(a: Tensor, b: Tensor) -> Tensor:
    """a / b as a node of a graph."""
    return a / b


@_node
def reciprocal_as_node(x: Tensor) -> Tensor:
    """1 / x as a node of a graph."""
    return x.reciprocal()


@_node
def _grad_of_divisor(dy: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """The gradient of b, rounded as autograd rounds it, and summed where b was broadcast."""
    return (-dy * (y / b)).sum_to_size(b.shape)


@_node
def _grad_of_reciprocal(dy: Tensor, y: Tensor) -> Tensor:
    return -dy * (y * y)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs, output)


def _through_quotient(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
    a, b, y = ctx.saved_tensors
    da = divide_as_node(dy, b).sum_to_size(a.shape) if ctx.needs_input_grad[0] else None
    return da, _grad_of_divisor(dy, b, y) if ctx.needs_input_grad[1] else None


divide_as_node.register_autograd(_through_quotient, setup_context=_keep)
reciprocal_as_node.register_autograd(lambda ctx, dy: _grad_of_reciprocal(dy, ctx.saved_tensors[1]), setup_context=_keep)
