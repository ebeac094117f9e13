"""Products whose operands are quantized in numpy: forward in int8 of the whole tensor, backward in any format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

import fakequant as fq
from fakequant.nn.backward import products
from tests.support import oracle
from tests.support.cases import FORMATS, FormatCase

PLAIN = {name: case for name, case in FORMATS.items() if case.symmetric and not isinstance(case.format, fq.Format)}
GROUPS = {"tensor": fq.PerTensor(), "rows": fq.PerToken(), "blocks": fq.PerBlock({-1: 8})}


def by_oracle(x: Tensor, case: FormatCase, groups: str) -> Tensor:
    """A tensor quantized in float32 along its last axis, in numpy."""
    values = np.ascontiguousarray(x.detach().numpy())
    blocks = values.reshape(*values.shape[:-1], -1, 8) if groups == "blocks" else values[..., None, :]
    top = np.abs(blocks).max(axis=None if groups == "tensor" else -1, keepdims=True).astype(np.float32)
    fmt = case.oracle
    bound = (fmt.high or -fmt.low) if isinstance(fmt, oracle.Integers) else float(np.nanmax(np.abs(_finite(fmt))))
    scale = np.broadcast_to(np.where(top == 0, np.float32(1), top / np.float32(bound)), blocks.shape)
    found = oracle.fake_quantize(blocks, np.ascontiguousarray(scale), None, fmt, "divide").value
    return torch.from_numpy(found.reshape(values.shape))


def _finite(fmt: oracle.OracleFormat) -> np.ndarray:
    if isinstance(fmt, oracle.Values):
        return np.array(fmt.numbers)
    values = oracle._every_value(fmt)
    return values[np.isfinite(values)]


_SUMS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, F.linear, Tensor.sum)


class ExactSums(TorchFunctionMode):
    """Products and sums of float32 in float64, rounded once: their bits depend on no order in memory."""

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function within this mode."""

        @wraps(function)
        def within(*args: Any) -> Any:
            with ExactSums():
                return function(*args)

        return within

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _SUMS:
            return func(*args, **(kwargs or {}))
        wide = [one.double() if isinstance(one, Tensor) else one for one in args]
        return func(*wide, **(kwargs or {})).float()


@pytest.fixture
def exact_sums(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All of a test within `ExactSums`, which autograd leaves, so that backward passes enter it."""
    for one in (products._Multiplied, _Product):
        monkeypatch.setattr(one, "backward", staticmethod(ExactSums()(one.backward)))
    with ExactSums():
        yield


class _Product(torch.autograd.Function):
    """x [..., n, k] times other [..., k, m], or with a bias x [..., k] times [k, m] as a linear layer has it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, other: Tensor, bias: Tensor | None, case: FormatCase, groups: str, held: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, other)
        ctx.how, ctx.has_bias, ctx.is_held = (case, groups), bias is not None, held is not None
        x, other = (by_oracle(one, FORMATS["int8"], "tensor") for one in (x, other))
        return x @ other if bias is None else F.linear(x, other.mT, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, other), dy = ctx.saved_tensors, grads[0]
        shape, of_bias = x.shape, dy.reshape(-1, dy.shape[-1]).sum(0) if ctx.has_bias else None
        if other.dim() == 2:
            x, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])

        dx = by_oracle(dy, *ctx.how) @ by_oracle(other, *ctx.how).mT
        d_other = by_oracle(x.mT, *ctx.how) @ by_oracle(dy.mT, *ctx.how).mT
        dx = dx.reshape(shape) if other.dim() == 2 else dx.sum_to_size(shape)
        of_held, dx = (dx, None) if ctx.is_held else (None, dx)
        return dx, d_other.sum_to_size(other.shape), of_bias, None, None, of_held


class Reference:
    """Products with a format and groups of the gradients' operands."""

    def __init__(self, case: FormatCase, groups: str = "tensor") -> None:
        self.case, self.groups = case, groups

    @property
    def gradient(self) -> fq.GradientConfig:
        """The configuration that these are the reference of."""
        spec = self.case.spec(GROUPS[self.groups], fq.Arithmetic.DIVIDE)
        return fq.GradientConfig(spec, input=spec, weight=spec)

    def rule(self, pattern: str = "*", **others: Any) -> fq.Rule:
        """The rule of the products."""
        forward = {"input": "int8 per_tensor dynamic", "weight": "int8 per_tensor"}
        return fq.Rule(pattern, **forward, gradient=self.gradient, **others)

    def matmul(self, x: Tensor, other: Tensor) -> Tensor:
        return _Product.apply(x, other, None, self.case, self.groups, None)  # type: ignore[no-any-return]

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, held: Tensor | None = None) -> Tensor:
        """The product of x, or with the gradient of x as `held` has it, which is x quantized in the forward pass."""
        bias = weight.new_zeros(len(weight)) if bias is None else bias
        return _Product.apply(x, weight.T, bias, self.case, self.groups, held)  # type: ignore[no-any-return]
