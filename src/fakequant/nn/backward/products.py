"""Products of an input with a weight whose backward products are quantized.

Sources: NVIDIA, arXiv 2509.25149 (NVFP4: stochastic rounding of gradients, a random Hadamard matrix along the tokens);
Quartet, arXiv 2505.14669 (MXFP4: both products).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv1d_input, conv1d_weight, conv2d_input, conv2d_weight, conv3d_input, conv3d_weight

from fakequant.distributed import is_sharded
from fakequant.errors import ConfigError
from fakequant.nn.backward.config import GradientConfig
from fakequant.nn.transforms import hadamard
from fakequant.numerics.spec import QuantSpec
from fakequant.ops import library

_OVER_ROWS = {-1: 0, 0: 1}
"""Where the axes of a specification are in a tensor [rows, columns, ...] whose rows a product sums over."""
_OVER_COLUMNS = {-1: 1}
_SIGNS = 0x9E3779B97F4A7C15
"""Random signs of 64 rows, which repeat in larger blocks: the digits of the golden ratio. One vector serves all layers,
as NVIDIA's recipe has it."""


class Gradients(NamedTuple):
    """The backward products of one call of a layer, and what quantizes their operands."""

    config: GradientConfig
    product: WeightedSum

    def of_input(self, dy: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        """dx = dy W in a shape, for dy [rows, out, ...] and a weight [out, ...]."""
        own = self.config
        if own.weight is not None:
            if own.hadamard and self.product.rotates:
                dy, weight = rotated(dy, 1, own.hadamard), rotated(weight, 0, own.hadamard)
            weight = _quantized(weight, own.weight, _OVER_ROWS)
        return self.product.of_input(_quantized(dy, own.gradient, _OVER_COLUMNS), weight.to(dy.dtype), shape)

    def of_weight(self, dy: Tensor, x: Tensor, shape: torch.Size) -> Tensor:
        """dW = dy^T x in a shape, for dy [rows, out, ...] and x [rows, in, ...]."""
        own = self.config
        if own.input is not None:
            if own.hadamard and self.product.rotates:
                dy, x = rotated(dy, 0, own.hadamard), rotated(x, 0, own.hadamard)
            x = _quantized(x, own.input, _OVER_ROWS)
        return self.product.of_weight(_quantized(dy, own.gradient, _OVER_ROWS), x.to(dy.dtype), shape)


def _quantized(x: Tensor, spec: QuantSpec, axes: dict[int, int]) -> Tensor:
    return library.fake_quantize_dynamic(x, spec.regrouped(lambda one: one.remap_axes(axes)))


def rotated(x: Tensor, axis: int, block: int) -> Tensor:
    """x with blocks of an axis multiplied by a Hadamard matrix with random signs, zeros added to fill the last block.

    The matrix is orthogonal: rounding aside, a sum of products along the axis stays what it is.

    >>> x = torch.tensor([[8.0], [0.0], [0.0]])
    >>> rotated(x, 0, 4).flatten()
    tensor([4., 4., 4., 4.])
    """
    x = x.movedim(axis, 0)
    rows = x.shape[0]
    signs = torch.tensor([1.0 - 2.0 * (_SIGNS >> row % 64 & 1) for row in range(block)], device=x.device)
    matrix = hadamard(block).to(x.device) * signs
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).reshape(rows, math.prod(x.shape[1:]))
    blocks = F.pad(wide, (0, 0, 0, -rows % block)).unflatten(0, (-1, block))
    y = (matrix.to(wide.dtype) @ blocks).flatten(0, 1).to(x.dtype)
    return y.unflatten(1, x.shape[1:]).movedim(0, axis)


class WeightedSum(ABC):
    """The product of an input with a weight, and its two backward products."""

    rotates: ClassVar[bool] = False
    """Whether rows and outputs can be multiplied by a matrix before they are summed over."""

    def padded(self, x: Tensor) -> Tensor:
        """The input with what is added at its borders before the product."""
        return x

    @abstractmethod
    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The output of the layer."""

    @abstractmethod
    def rows(self, x: Tensor) -> Tensor:
        """An input or output as [rows, channels, ...]; the sum of a weight's gradient is over rows."""

    @abstractmethod
    def of_input(self, dy: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        """The gradient of the input."""

    @abstractmethod
    def of_weight(self, dy: Tensor, x: Tensor, shape: torch.Size) -> Tensor:
        """The gradient of the weight."""


class LinearSum(WeightedSum):
    """That of a linear layer: x [..., in] and a weight [out, in]."""

    rotates = True

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def rows(self, x: Tensor) -> Tensor:
        return x.reshape(-1, x.shape[-1])

    def of_input(self, dy: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        return (dy @ weight).reshape(shape)

    def of_weight(self, dy: Tensor, x: Tensor, shape: torch.Size) -> Tensor:
        return dy.T @ x


class WindowSum(WeightedSum):
    """That of a convolution: x [n, in, ...] and a weight [out, in / groups, ...].

    Args:
        layer: the convolution.
    """

    def __init__(self, layer: Any) -> None:
        pads = layer._reversed_padding_repeated_twice
        # As in torch: zeros, as many on both sides, are the kernel's own, and all else is there before.
        is_own = layer.padding_mode == "zeros" and pads[::2] == pads[1::2]
        padding = tuple(pads[::2][::-1]) if is_own else (0,) * (len(pads) // 2)
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        self.before = None if is_own else (pads, mode)
        self.options = layer.stride, padding, layer.dilation, layer.groups
        self.functions = _CONVOLUTIONS[len(pads) // 2]

    def padded(self, x: Tensor) -> Tensor:
        return x if self.before is None else F.pad(x, *self.before)

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.functions[0](x, weight, bias, *self.options)

    def rows(self, x: Tensor) -> Tensor:
        return x

    def of_input(self, dy: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        return self.functions[1](shape, weight, dy, *self.options)

    def of_weight(self, dy: Tensor, x: Tensor, shape: torch.Size) -> Tensor:
        return self.functions[2](x, shape, dy, *self.options)


_CONVOLUTIONS: dict[int, tuple[Any, Any, Any]] = {
    1: (F.conv1d, conv1d_input, conv1d_weight),
    2: (F.conv2d, conv2d_input, conv2d_weight),
    3: (F.conv3d, conv3d_input, conv3d_weight),
}


class _Multiplied(torch.autograd.Function):
    """x and weight as the forward product has them; the other two are what they were before, without gradients."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, x_before: Tensor, weight_before: Tensor, gradients: Gradients
    ) -> Tensor:
        return gradients.product.output(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, x_before, weight_before, gradients = inputs
        config = gradients.config
        own = x if config.input is None else x_before, weight if config.weight is None else weight_before
        ctx.save_for_backward(*own)
        ctx.gradients, ctx.shapes = gradients, (x.shape, weight.shape)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        gradients: Gradients = ctx.gradients
        (x, weight), rows = ctx.saved_tensors, gradients.product.rows
        dy = rows(grad_outputs[0])
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = gradients.of_input(dy, weight, ctx.shapes[0])
        if ctx.needs_input_grad[1]:
            dw = gradients.of_weight(dy, rows(x), ctx.shapes[1])
        if ctx.needs_input_grad[2]:
            db = dy.sum([axis for axis in range(dy.dim()) if axis != 1])
        return dx, dw, db, None, None, None


def multiplied(layer: Any, x: Tensor, gradients: Gradients) -> Tensor:
    """The output of a quantized layer for its input, with quantized backward products.

    Args:
        layer: with an input transform, quantizers, a weight and a bias, all of which but the weight may be None.
        x: the input.
        gradients: how its backward products are quantized.

    Raises:
        ConfigError: `parallelize_module` shared the weight out.
    """
    if is_sharded(layer.weight):
        raise ConfigError(
            "gradients are quantized by the ranges of whole tensors, and parallelize_module shared this layer's out; "
            "leave gradient= out of its rule, or share the model out by fully_shard"
        )
    if (transform := layer.input_transform) is not None:
        x = transform(x)
    padded = gradients.product.padded
    own = padded(layer.quantized("_input_quantizer", x)), layer.quantized_weight(), layer.bias
    return _Multiplied.apply(*own, padded(x.detach()), layer.weight.detach(), gradients)  # type: ignore[no-any-return]
