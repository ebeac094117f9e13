"""Products whose operands are quantized in numpy: forward in int8 of the whole tensor, backward in any format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import fakequant as fq
from fakequant.nn import backward as products
from fakequant.numerics.philox import draw_seed
from tests.support import oracle
from tests.support.bits import assert_same_bits
from tests.support.cases import FORMATS, FormatCase

PLAIN = {name: case for name, case in FORMATS.items() if case.symmetric and not isinstance(case.format, fq.Format)}
GROUPS = {"tensor": fq.PerTensor(), "rows": fq.PerToken(), "blocks": fq.PerBlock({-1: 8})}


def by_oracle(x: Tensor, case: FormatCase, groups: str, counted: tuple[int, int] | None = None) -> Tensor:
    """A tensor [..., n, summed] quantized in float32 along its last axis, in numpy."""
    values = np.ascontiguousarray(x.detach().numpy())
    words = None
    if counted is not None:
        first = oracle.random_words(int(draw_seed()), x.movedim(counted, (0, 1)).shape)
        words = np.ascontiguousarray(np.moveaxis(first, (0, 1), counted))
    blocks = values.reshape(*values.shape[:-1], -1, 8) if groups == "blocks" else values[..., None, :]
    top = np.abs(blocks).max(axis=None if groups == "tensor" else -1, keepdims=True).astype(np.float32)
    fmt = case.oracle
    bound = (fmt.high or -fmt.low) if isinstance(fmt, oracle.Integers) else float(np.nanmax(np.abs(_finite(fmt))))
    scale = np.broadcast_to(np.where(top == 0, np.float32(1), top / np.float32(bound)), blocks.shape)
    words = None if words is None else words.reshape(blocks.shape)
    found = oracle.fake_quantize(blocks, np.ascontiguousarray(scale), None, fmt, "divide", words).value
    return torch.from_numpy(found.reshape(values.shape))


def turned(x: Tensor, block: int) -> Tensor:
    """Blocks of the last axis, the last filled with zeros, times Sylvester's matrix, whose columns have signs."""
    signs = [-1.0 if 0x9E3779B97F4A7C15 >> column % 64 & 1 else 1.0 for column in range(block)]
    matrix = [[signs[j] * (-1.0) ** (i & j).bit_count() / block**0.5 for j in range(block)] for i in range(block)]
    wide = np.pad(x.detach().double().numpy(), [(0, 0)] * (x.dim() - 1) + [(0, -x.shape[-1] % block)])
    found = wide.reshape(*wide.shape[:-1], -1, block) @ np.array(matrix).T
    return torch.from_numpy(found.reshape(wide.shape).astype(np.float32))


class Held(torch.autograd.Function):
    """A tensor as a product sees it, quantized in numpy, which is more than a product's; the gradient goes through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return by_oracle(x, FORMATS["int8"], "tensor")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def _finite(fmt: oracle.OracleFormat) -> np.ndarray:
    if isinstance(fmt, oracle.Values):
        return np.array(fmt.numbers)
    values = oracle._every_value(fmt)
    return values[np.isfinite(values)]


_SUMS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, F.linear, Tensor.sum)


class ExactSums(TorchFunctionMode):
    """Products and sums of float32 in float64, rounded once: their bits depend on no order in memory."""

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def within(*args: Any) -> Any:
            with ExactSums():
                return function(*args)

        return within

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _SUMS:
            return func(*args, **(kwargs or {}))
        wide = [one.double() if isinstance(one, Tensor) else one for one in args]
        result = func(*wide, **(kwargs or {}))
        return result if args[0].dtype is torch.float64 else result.float()


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
        ctx: Any, x: Tensor, other: Tensor, bias: Tensor | None, how: Reference, held: Tensor | None, in_float: bool
    ) -> Tensor:
        ctx.save_for_backward(x, other)
        ctx.how, ctx.has_bias, ctx.is_held = how, bias is not None, held is not None
        other = by_oracle(other, FORMATS["int8"], "tensor")
        x = x if in_float else by_oracle(x, FORMATS["int8"], "tensor")
        return x @ other if bias is None else F.linear(x, other.mT, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, other), dy = ctx.saved_tensors, grads[0]
        shape, of_bias = x.shape, dy.reshape(-1, dy.shape[-1]).sum(0) if ctx.has_bias else None
        if other.dim() == 2:
            x, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])

        dx = None
        if ctx.needs_input_grad[4 if ctx.is_held else 0]:
            of_other, of_dy = ctx.how.operands(other, dy, (-2, -1))
            dx = of_dy @ of_other.mT
            dx = dx.reshape(shape) if other.dim() == 2 else dx.sum_to_size(shape)
        of_x, of_dy = ctx.how.operands(x.mT, dy.mT, (-1, -2))
        d_other = (of_x @ of_dy.mT).sum_to_size(other.shape)
        of_held, dx = (dx, None) if ctx.is_held else (None, dx)
        return dx, d_other, of_bias, None, of_held, None


@dataclass(frozen=True)
class Reference:
    """Products with a format and groups of the gradients' operands, the rounding, and the size of a Hadamard matrix."""

    case: FormatCase
    groups: str = "tensor"
    stochastic: bool = False
    hadamard: int = 0

    def __str__(self) -> str:
        more = f"{' stochastic' if self.stochastic else ''}{' hadamard' if self.hadamard else ''}"
        return f"{self.case.format} {self.groups}{more}"

    def operands(self, other: Tensor, dy: Tensor, counted: tuple[int, int]) -> list[Tensor]:
        """Both as the sum over their last axis sees them, in the order in which seeds are drawn."""
        if self.hadamard:
            other, dy = turned(other, self.hadamard), turned(dy, self.hadamard)
        both = (other, (-1, -2)), (dy, counted)
        return [by_oracle(one, self.case, self.groups, order if self.stochastic else None) for one, order in both]

    @property
    def gradient(self) -> fq.GradientConfig:
        rounding = fq.Rounding.STOCHASTIC if self.stochastic else fq.Rounding.NEAREST_EVEN
        spec = self.case.spec(GROUPS[self.groups], fq.Arithmetic.DIVIDE, rounding=rounding)
        return fq.GradientConfig(spec, input=spec, weight=spec, hadamard=self.hadamard)

    def rule(self, pattern: str = "*", **others: Any) -> fq.Rule:
        forward = {"input": "int8 per_tensor dynamic", "weight": "int8 per_tensor"}
        return fq.Rule(pattern, **forward, gradient=self.gradient, **others)

    def matmul(self, x: Tensor, other: Tensor, *, in_float: bool = False) -> Tensor:
        """The product of both, of which the forward pass has the first in float if it says so."""
        return _Product.apply(x, other, None, self, None, in_float)  # type: ignore[no-any-return]

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, held: Tensor | None = None) -> Tensor:
        """The product of x, or with the gradient of x as `held` has it, which is x quantized in the forward pass."""
        bias = weight.new_zeros(len(weight)) if bias is None else bias
        return _Product.apply(x, weight.T, bias, self, held, False)  # type: ignore[no-any-return]


REFERENCES = [
    Reference(PLAIN[name], stochastic=stochastic, hadamard=hadamard)
    for name in ("int8", "float8_e5m2", "float4_e2m1fn")
    for stochastic in (False, True)
    for hadamard in (0, 16)
]


def assert_same_gradients(found: Tensor, right: Tensor, model: nn.Module, plain: nn.Module, *inputs: Tensor) -> None:
    """Of both outputs, whose bits are the same, for the parameters of both models, and the inputs."""
    assert_same_bits(found, right)
    dy = torch.randn(right.shape)
    gradients = []
    for output, own in ((found, model), (right, plain)):
        torch.manual_seed(7)  # of stochastic rounding
        gradients.append(torch.autograd.grad(output, [*own.parameters(), *inputs], dy))
    assert gradients[0]
    for one, other in zip(*gradients, strict=True):
        assert_same_bits(one, other)
