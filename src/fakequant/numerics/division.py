"""Quotients and products of float32 numbers with the bits of eager mode, also under compilers that approximate them.

Inductor writes a quotient as `/` in Triton, which is off by up to 2 units in the last place on a GPU; a division by a
constant as a product with the reciprocal; and it lets a product be contracted with the sum that follows. So a graph for
such a device holds a quotient and its gradients as nodes, which compute the same as eager mode. float64
numbers are divided directly: compilers divide them exactly.

Inductor fuses these nodes with their neighbours: it writes them as single instructions of the GPU, see `_INSTRUCTIONS`.
Other compilers call them as they are.

Each function here asks whether a compiler runs it; its caller need not ask: after a graph break in the caller, the
compiler may still compile the functions that the caller calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

# Types of devices for which compilers compute other bits; `ops.dispatch` adds those of its backends. Compilers read
# sets of strings, and no backends.
approximate_devices: frozenset[str] = frozenset()

FUSED_DEVICES: frozenset[str] = frozenset({"cpu"} if torch.version.hip else {"cpu", "cuda"})
"""Types of devices for which `numerics.division` tells Inductor how to compute the right bits."""


def is_exporting() -> bool:
    """Whether torch.export traces the running code.

    Before torch 2.13 Dynamo answers True for `torch.compiler.is_exporting()` within every torch.compile.
    """
    return torch.compiler._is_exporting_flag


def is_watched() -> bool:
    """Whether a compiler or tracer records the operations; some of them drop a conversion and its inverse."""
    return torch.compiler.is_compiling() or torch._C._is_tracing()


def is_approximate(x: Tensor) -> bool:
    """Whether a compiler would divide numbers like x approximately.

    False for exporters, which see the plain division. False under function transforms, too: in a compiled graph they
    differentiate the operations inside an autograd function, which gives other bits than the function's backward.
    """
    return (
        torch.compiler.is_compiling()
        and x.device.type in approximate_devices
        and not is_exporting()
        and not torch._C._are_functorch_transforms_active()
    )


def divide(a: Tensor, b: Tensor) -> Tensor:
    """a / b, of the same dtype.

    >>> divide(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    tensor([0.3333, 0.5000])
    """
    return _of_nodes(divide_as_node, a, b) if a.dtype == torch.float32 and is_approximate(a) else a / b


def reciprocal(x: Tensor) -> Tensor:
    """1 / x, of the same dtype.

    >>> reciprocal(torch.tensor([3.0, 4.0]))
    tensor([0.3333, 0.2500])
    """
    return _of_nodes(reciprocal_as_node, x) if x.dtype == torch.float32 and is_approximate(x) else x.reciprocal()


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """a * b, rounded to their dtype before anything is added to the product; no gradients where `is_approximate`."""
    return _of_nodes(multiply_as_node, a, b) if a.dtype == torch.float32 and is_approximate(a) else a * b


def _of_nodes(node: Any, *given: Tensor) -> Tensor:
    _teach_inductor()
    return node(*given)


def _node(function: Callable[..., Tensor]) -> Any:
    """The function as an operator of torch; for fake tensors it returns fake results with the real strides."""
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
def multiply_as_node(a: Tensor, b: Tensor) -> Tensor:
    """a * b as a node of a graph."""
    return a * b


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


_INSTRUCTIONS = {
    "divide_as_node": ("div.rn.f32 $0, $1, $2;", lambda ops, a, b: ops.truediv(a, b)),
    "reciprocal_as_node": ("rcp.rn.f32 $0, $1;", lambda ops, x: ops.truediv(ops.constant(1.0, torch.float32), x)),
    "multiply_as_node": ("mul.rn.f32 $0, $1, $2;", lambda ops, a, b: ops.mul(a, b)),
}
"""For each node its instruction on NVIDIA's GPUs, and its operations in C++, where a product and a sum stay two.

`ops.mul_rn` of Inductor is not used: it becomes `mul.rn.ftz.f32`, which makes subnormal products 0.
"""


_taught: list[str] = []


def _teach_inductor() -> None:
    """Tell Inductor how to write the nodes; a compiler runs this while it reads a call.

    It does not run when this module is imported, because the import of Inductor takes a second.
    """
    if _taught:
        return
    from torch._inductor.lowering import fallback_handler, make_pointwise, register_lowering
    from torch._inductor.virtualized import ops

    def teach(name: str, instruction: str, plainly: Callable[..., Any]) -> None:
        node = getattr(torch.ops.fakequant, name).default
        constraints = ",".join(["=f"] + ["f"] * (instruction.count("$") - 1))

        def exactly(*values: Any) -> Any:
            return ops.inline_asm_elementwise(
                *values, asm=instruction, constraints=constraints, dtype=torch.float32, is_pure=True, pack=1
            )

        def write(*given: Any) -> Any:
            device = given[0].get_device().type
            if device not in FUSED_DEVICES or any(own.get_dtype() != torch.float32 for own in given):
                return fallback_handler(node, add_to_fallback_set=False)(*given)
            return make_pointwise(exactly if device == "cuda" else partial(plainly, ops))(*given)

        register_lowering(node, broadcast=True, type_promotion_kind=None)(write)
        _taught.append(name)

    for name, (instruction, plainly) in _INSTRUCTIONS.items():
        teach(name, instruction, plainly)


_teach_inductor._dynamo_marked_constant = True  # type: ignore[attr-defined]  as torch.compiler.assume_constant_result does
