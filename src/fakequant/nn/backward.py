"""Products of an input with a weight or with another input, and their two backward products, which are quantized.

Sources: NVIDIA, arXiv 2509.25149 (NVFP4: stochastic rounding of gradients, a random Hadamard matrix along the tokens);
Quartet, arXiv 2505.14669 (MXFP4: both products).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.grad import conv1d_input, conv1d_weight, conv2d_input, conv2d_weight, conv3d_input, conv3d_weight

from fakequant.distributed import is_sharded
from fakequant.errors import ConfigError
from fakequant.nn.transforms import hadamard
from fakequant.numerics.philox import draw_seed
from fakequant.numerics.spec import QuantSpec, Rounding, as_spec
from fakequant.ops import library
from fakequant.ops.graph_operators import is_compiled_in_transforms, is_recorded, needs_tracing, quantize_as_node

_AXES = {0: {-1: 0, 0: 1}, 1: {-1: 1, 0: 0}}
"""By the axis of a factor that the product sums over: the factor's axes for the axes -1 and 0 of a specification."""


@dataclass(frozen=True)
class GradientConfig:
    """The specifications by which the factors of a layer's backward products are quantized, each in its present range.

    The gradient dy of the output is a factor of both products: dx = dy W, a sum over outputs, and dW = dy^T x, a sum
    over tokens. In a specification axis -1 is the axis of the sum, and axis 0 the other axis.

    Args:
        gradient: the specification of dy in both products; stochastic rounding keeps the gradient unbiased. An
            infinite dy becomes NaN, so that a GradScaler skips the step.
        input: the specification for the unquantized x in dW; None: dW reads x as quantized for the forward product.
        weight: the specification for the unquantized W in dx; None: dx reads W as quantized for the forward product,
            which suits square blocks.
        hadamard: the block size of a Hadamard matrix with random signs. Before quantization both factors of a product
            are multiplied by the matrix along the axis of the sum, which spreads a large value over a block. dW uses
            the matrix if `input` is a specification, dx if `weight` is a specification. Convolutions never use the
            matrix, because they also sum over positions. 0: no matrix.

    Raises:
        SpecError: no specification of the gradient, or one that cannot be read.
        ConfigError: a Hadamard matrix without `input` and `weight`, or of another size than a power of two.

    >>> print(GradientConfig("float8_e5m2"))
    float8_e5m2 per_tensor
    >>> GradientConfig.parse("int8 stochastic; input=int8 per_token; hadamard=16").hadamard
    16
    """

    gradient: QuantSpec
    input: QuantSpec | None = None
    weight: QuantSpec | None = None
    hadamard: int = 0
    operands: dict[tuple[str, int], QuantSpec | None] = field(init=False, repr=False, compare=False)
    """The specification by the factor's name, and by the axis of the factor (0 or 1) that the product sums over."""

    def __init__(
        self,
        gradient: QuantSpec | str,
        input: QuantSpec | str | None = None,
        weight: QuantSpec | str | None = None,
        hadamard: int = 0,
    ) -> None:
        object.__setattr__(self, "gradient", as_spec(gradient))
        for name, spec in {"input": input, "weight": weight}.items():
            object.__setattr__(self, name, None if spec is None else as_spec(spec))
        object.__setattr__(self, "hadamard", hadamard)
        if not isinstance(hadamard, int) or hadamard < 0 or hadamard == 1 or hadamard & (hadamard - 1):
            raise ConfigError(f"hadamard must be a power of two such as 16, or 0 for none, got {hadamard!r}")
        # `replace` of a specification while a compiler reads the code takes its numbers for ones that vary.
        operands = {
            (name, axis): None if spec is None else spec.regrouped(lambda one, axis=axis: one.remap_axes(_AXES[axis]))
            for name, spec in (("gradient", self.gradient), ("input", self.input), ("weight", self.weight))
            for axis in _AXES
        }
        object.__setattr__(self, "operands", operands)
        if hadamard and input is None and weight is None:
            raise ConfigError(
                f"hadamard={hadamard} needs both operands of a backward product quantized, but only the gradient is; "
                "give input= (for the weight's gradient) or weight= (for the input's gradient)"
            )

    def __str__(self) -> str:
        others = (f"{name}={value}" for name in _OTHERS if (value := getattr(self, name)))
        return "; ".join([str(self.gradient), *others])

    def __repr__(self) -> str:
        return f"GradientConfig.parse({str(self)!r})"

    def to_text(self) -> str:
        """The same text as `str(self)`, for files; raises the errors of `QuantSpec.to_text`."""
        for spec in (self.gradient, self.input, self.weight):
            if spec is not None:
                spec.to_text()
        return str(self)

    @classmethod
    def parse(cls, text: str) -> GradientConfig:
        """Read the text of a configuration: the specification of the gradient, then other arguments by name.

        Raises:
            ConfigError: an unknown name, a name twice, or a block that is not a number.
            SpecError: a specification that cannot be read.
        """
        gradient, *others = (part.strip() for part in text.split(";"))
        found: dict[str, str] = {}
        for part in others:
            name, equals, value = part.partition("=")
            if not equals or name not in _OTHERS or name in found:
                raise ConfigError(
                    f"cannot read {part!r} in the gradient {text!r}: after the specification of the gradient, expected "
                    f"{', '.join(f'{one}=' for one in _OTHERS)}, each at most once, with ';' between them"
                )
            found[name] = value
        block = found.pop("hadamard", "0")
        if not block.isdecimal():
            raise ConfigError(f"hadamard must be a power of two such as 16, got {block!r}")
        return cls(gradient, **found, hadamard=int(block))


_OTHERS = ("input", "weight", "hadamard")
"""The arguments that the text of a configuration names."""
_SIGNS = 0x9E3779B97F4A7C15
"""Random signs of 64 rows, which repeat in larger blocks: the digits of the golden ratio. All layers use the same
signs, as in NVIDIA's recipe."""


def rotated(x: Tensor, block: int, axis: int = 0) -> Tensor:
    """Multiply blocks of the first or second axis of x by a Hadamard matrix with random signs; zeros pad the end.

    The matrix is orthogonal: rounding aside, rotating both factors keeps a sum of products along the axis.

    >>> x = torch.tensor([[8.0], [0.0], [0.0]])
    >>> rotated(x, 4).flatten()
    tensor([-4., -4., -4., -4.])
    """
    if torch.compiler.is_compiling():
        return torch.ops.fakequant.rotate(x, block, axis)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    missing = -x.shape[axis] % block
    made = _signed_hadamard if needs_tracing(x) else _made_once
    matrix, device = made(block, wide.dtype, x.device), x.device.type
    # A backward pass that begins within autocast would multiply in half precision.
    with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
        if axis:
            wide = wide.movedim(1, -1)
            wide = F.pad(wide, (0, missing)) if missing else wide  # a copy
            return (wide.unflatten(-1, (-1, block)) @ matrix.T).flatten(-2).movedim(-1, 1).to(x.dtype)
        wide = wide.reshape(x.shape[0], math.prod(x.shape[1:]))
        wide = F.pad(wide, (0, 0, 0, missing)) if missing else wide
        y = (matrix @ wide.unflatten(0, (-1, block))).flatten(0, 1).to(x.dtype)
    return y.unflatten(1, x.shape[1:])


def _signed_hadamard(block: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    signs = torch.tensor([1.0 - 2.0 * (_SIGNS >> row % 64 & 1) for row in range(block)], device="cpu")
    return (hadamard(block) * signs).to(device, dtype)


_made_once = lru_cache(maxsize=64)(_signed_hadamard)  # 60 us of the 90 us that a matrix of 128 x 128 took on a CPU


# One node of a compiled graph: as operations of torch the matrix is made anew at each step.
@torch.library.custom_op("fakequant::rotate", mutates_args=(), schema="(Tensor x, int block, int axis) -> Tensor")
def _rotate(x: Tensor, block: int, axis: int) -> Tensor:
    y = rotated(x, block, axis)
    declared = _declared(x, block, axis)
    return y if y.stride() == declared.stride() else declared.copy_(y)


@_rotate.register_fake
def _declared(x: Tensor, block: int, axis: int) -> Tensor:
    """An empty tensor with the shape and strides of the rotated tensor: contiguous, with the rotated axis last."""
    n = x.shape[axis]
    if not axis:
        return x.new_empty((n + -n % block, *x.shape[1:]))
    return x.new_empty((x.shape[0], *x.shape[2:], n + -n % block)).movedim(-1, 1)


class Backward(NamedTuple):
    """How dx and dW, the two backward products of a forward product, are quantized."""

    config: GradientConfig

    def quantized(self, operand: str, axis: int, x: Tensor) -> Tensor:
        """Quantize x for a sum over `axis` of x, by the specification of the factor that `operand` names.

        `operand` is "gradient", "input" or "weight". Without a specification, x is returned unchanged.
        """
        spec = self.config.operands[operand, axis]
        if spec is None:
            return x
        if not is_compiling():
            return library.fake_quantize_dynamic(x, spec)
        # One node of the graph: as operations of torch 1M elements take twice as long, and the compiler many times.
        return quantize_as_node(x, spec, seed=draw_seed() if spec.rounding is Rounding.STOCHASTIC else None)

    @property
    def rounds_once(self) -> bool:
        """Whether both backward products use the same quantized gradient of the output."""
        first, second = (self.config.operands["gradient", axis] for axis in (0, 1))
        return first == second and self.config.gradient.rounding is not Rounding.STOCHASTIC and not self.config.hadamard


class Trained(nn.Module):
    """Base of modules that multiply tensors and may quantize the backward products."""

    gradient: GradientConfig | None = None
    """How the products of the backward pass are quantized; None leaves them in float."""

    def backward_of(self) -> Backward | None:
        """How the backward products are quantized, or None if they stay in float."""
        return None if self.gradient is None else Backward(self.gradient)


class Factor(NamedTuple):
    """A factor of a product, quantized (`value`) and unquantized (`before`).

    If gradients stay in float, `before` is the same object as `value`.
    """

    value: Tensor
    before: Tensor

    @classmethod
    def of(cls, layer: Any, attribute: str, x: Tensor) -> Factor:
        """The factor for x, which is quantized by the quantizer in the attribute `attribute` of `layer`."""
        value = layer.quantized(attribute, x)
        return cls(value, value if layer.gradient is None else x)

    def map(self, change: Callable[[Tensor], Tensor]) -> Factor:
        """The factor with a function applied to both tensors."""
        value = change(self.value)
        return Factor(value, value if self.before is self.value else change(self.before))


class Gradients(NamedTuple):
    """The two backward products of one product, with their factors quantized."""

    how: Backward
    product: WeightedSum

    def rounded(self, dy: Tensor) -> Tensor | None:
        """dy quantized for both products at once; None if each product quantizes dy separately."""
        return self.how.quantized("gradient", 0, dy) if self.how.rounds_once else None

    def of_input(self, dy: Tensor, rounded: Tensor | None, weight: Tensor, shape: torch.Size) -> Tensor:
        """dx = dy W, reshaped to `shape`. dy [rows, out, ...]; `rounded` is dy quantized already, or None."""
        dy, weight = self._operands(dy, rounded, 1, self.product.by_output(weight), "weight")
        return self.product.of_input(dy, weight, shape)

    def of_weight(self, dy: Tensor, rounded: Tensor | None, x: Tensor, shape: torch.Size) -> Tensor:
        """dW = dy^T x, reshaped to `shape`. dy [rows, out, ...], x [rows, in, ...]; `rounded` is as for `of_input`."""
        return self.product.of_weight(*self._operands(dy, rounded, 0, x, "input"), shape)

    def _operands(
        self, dy: Tensor, rounded: Tensor | None, axis: int, other: Tensor, name: str
    ) -> tuple[Tensor, Tensor]:
        """The quantized dy, or `rounded` if that is not None, and the quantized `other`, for a sum over `axis` of dy.

        `name` says which factor `other` is: "input" or "weight".
        """
        config = self.how.config
        if config.hadamard and self.product.rotates and config.operands[name, 0] is not None:
            dy, other = rotated(dy, config.hadamard, axis), rotated(other, config.hadamard)
        other = self.how.quantized(name, 0, other)
        return self.how.quantized("gradient", axis, dy) if rounded is None else rounded, other.to(dy.dtype)


class WeightedSum(ABC):
    """A product of an input with a weight, summed over input channels, and its two backward products."""

    rotates: ClassVar[bool] = False
    """Whether a matrix can rotate the axes of rows and outputs, over which the backward products sum."""

    def padded(self, x: Tensor) -> Tensor:
        """The input x, padded as the product needs it."""
        return x

    @abstractmethod
    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The output of the layer."""

    @abstractmethod
    def rows(self, x: Tensor) -> Tensor:
        """An input or output as [rows, channels, ...]; the weight's gradient sums over the rows."""

    def by_output(self, weight: Tensor) -> Tensor:
        """A weight as [out, in, ...]; the input's gradient sums over the outputs."""
        return weight

    @abstractmethod
    def of_input(self, dy: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        """The gradient of the input, from dy as `rows` and a weight as `by_output` return them."""

    @abstractmethod
    def of_weight(self, dy: Tensor, x: Tensor, shape: torch.Size) -> Tensor:
        """The gradient of the weight, from dy and x as `rows` returns them."""


class LinearSum(WeightedSum):
    """The product of a linear layer: x [..., in] and a weight [out, in]."""

    rotates = True

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def rows(self, x: Tensor) -> Tensor:
        return x.reshape(-1, x.shape[-1])

    def of_input(self, dy: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        return (dy @ weight).reshape(shape)

    def of_weight(self, dy: Tensor, x: Tensor, shape: torch.Size) -> Tensor:
        return dy.T @ x


class TurnedSum(LinearSum):
    """The product of `matmul` with a matrix: x [..., in] and a weight [in, out]."""

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return x @ weight if bias is None else x @ weight + bias

    def by_output(self, weight: Tensor) -> Tensor:
        return weight.T

    def of_weight(self, dy: Tensor, x: Tensor, shape: torch.Size) -> Tensor:
        return x.T @ dy


class BatchedSum(WeightedSum):
    """The product of `matmul` with several matrices: x [..., rows, in] and a factor [..., in, out], broadcast."""

    rotates = True

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return x @ weight

    def rows(self, x: Tensor) -> Tensor:
        return x.movedim((-2, -1), (0, 1))

    def by_output(self, weight: Tensor) -> Tensor:
        return weight.movedim((-1, -2), (0, 1))

    def of_input(self, dy: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        return (_last(dy) @ _last(weight)).sum_to_size(shape)

    def of_weight(self, dy: Tensor, x: Tensor, shape: torch.Size) -> Tensor:
        return (_last(x).mT @ _last(dy)).sum_to_size(shape)


def _last(x: Tensor) -> Tensor:
    return x.movedim((0, 1), (-2, -1))


class WindowSum(WeightedSum):
    """The product of a convolution: x [n, in, ...] and a weight [out, in / groups, ...].

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
    """A product of quantized x and weight; `x_before` and `weight_before` are unquantized, None if not needed."""

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        x_before: Tensor | None,
        weight_before: Tensor | None,
        gradients: Gradients,
    ) -> Tensor:
        return gradients.product.output(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, x_before, weight_before, gradients = inputs
        of_input, of_weight, *_ = ctx.needs_input_grad  # by the gradient of one is the other multiplied
        ctx.save_for_backward(
            (x if x_before is None else x_before) if of_weight else None,
            (weight if weight_before is None else weight_before) if of_input else None,
        )
        ctx.gradients, ctx.shapes = gradients, (x.shape, weight.shape)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        gradients: Gradients = ctx.gradients
        (x, weight), rows = ctx.saved_tensors, gradients.product.rows
        dx = dw = db = None
        dy = rows(grad_outputs[0])
        # NaN for infinity, which quantizers clip, so that a GradScaler sees an overflow of float16.
        if torch.compiler.is_compiling():  # the code for `nan_to_num` asks element by element: a seventh of a step
            dy = torch.where(dy.abs() < math.inf, dy, math.nan)
        else:
            dy = dy.nan_to_num(math.nan, math.nan, math.nan)
        rounded = gradients.rounded(dy) if any(ctx.needs_input_grad[:2]) else None
        if ctx.needs_input_grad[0]:
            dx = gradients.of_input(dy, rounded, weight, ctx.shapes[0])
        if ctx.needs_input_grad[1]:
            dw = gradients.of_weight(dy, rounded, rows(x), ctx.shapes[1])
        if ctx.needs_input_grad[2]:
            db = dy.sum([axis for axis in range(dy.dim()) if axis != 1])
        return dx, dw, db, None, None, None


class _MultipliedInTransforms(_Multiplied):
    """`_Multiplied` under function transforms and forward-mode AD; separate, as torch.compile cannot trace a `jvp`."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _Multiplied.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:2])

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        x, weight = ctx.saved_tensors
        output, (of_x, of_weight, of_bias, *_) = ctx.gradients.product.output, tangents
        moved: Tensor = output(torch.zeros_like(x) if of_x is None else of_x, weight, of_bias)
        return moved if of_weight is None else moved + output(x, of_weight, None)


def is_trained(config: GradientConfig | None) -> bool:
    """Whether gradients are enabled and `config` quantizes them; False while an exporter or torch.jit.trace records."""
    return config is not None and torch.is_grad_enabled() and not is_recorded()


def multiplied(
    product: WeightedSum, how: Backward | None, x: Factor, weight: Factor, bias: Tensor | None = None
) -> Tensor:
    """The product of two factors, with quantized backward products if gradients are computed and a factor is quantized.

    Args:
        how: how the backward products are quantized; None leaves them in float.
        x: the input.
        weight: the weight, or the other input.
        bias: a tensor that is added to the product.

    Raises:
        ConfigError: `parallelize_module` sharded the weight, or torch.compile traces a transform of torch.func.
    """
    in_float = x.value is x.before and weight.value is weight.before
    if how is None or in_float or not is_trained(how.config):
        return product.output(x.value, weight.value, bias)
    if is_sharded(weight.before):
        raise ConfigError(
            "gradients are quantized by the ranges of whole tensors, but parallelize_module sharded this layer; leave "
            "gradient= out of its rule, or shard the model by fully_shard"
        )
    if is_compiled_in_transforms():  # the gradient of a bias was 0
        raise ConfigError(
            "torch.compile cannot quantize gradients within torch.func; call the transform without torch.compile, "
            "compile a step with loss.backward() in its place, or leave gradient= out of the rule"
        )
    in_transforms = library.needs_tracing(x.before) and not torch.compiler.is_compiling()
    return (_MultipliedInTransforms if in_transforms else _Multiplied).apply(  # type: ignore[no-any-return]
        _by_autocast(x.value),
        _by_autocast(weight.value),
        bias,
        None if how.config.input is None else x.before,
        None if how.config.weight is None else weight.before,
        Gradients(how, product),
    )


def matmul(how: Backward | None, x: Factor, other: Factor) -> Tensor:
    """`x @ other`, computed by `multiplied`. If `other` is a matrix, all axes of x except the last count as rows."""
    if other.value.dim() == 1:
        return matmul(how, x, other.map(lambda own: own[:, None])).squeeze(-1)
    if other.value.dim() == 2:
        return multiplied(TurnedSum(), how, x, other)
    if x.value.dim() == 1:
        return matmul(how, x.map(lambda own: own[None]), other).squeeze(-2)
    return multiplied(BatchedSum(), how, x, other)


def trained_product(layer: Any, x: Tensor, config: GradientConfig) -> Tensor | None:
    """The output of a quantized layer with quantized backward products; None if the backward products stay in float.

    A layer whose quantizers are off computes gradients in float, too. An exporter or torch.jit.trace records the layer
    without quantized backward products, since its graph cannot express them.
    """
    is_on = is_trained(config) and (layer.is_on("_input_quantizer") or layer.is_on("_weight_quantizer"))
    product = type(layer).weighted_sum(layer) if is_on else None
    if product is None:
        return None
    weight = layer.weight  # once: a parametrization computes it, and one of spectral norm changes its state
    if (transform := layer.input_transform) is not None:
        x = transform(x)
    factor = Factor.of(layer, "_input_quantizer", x).map(product.padded)
    return multiplied(product, layer.backward_of(), factor, Factor.of(layer, "_weight_quantizer", weight), layer.bias)


def _by_autocast(x: Tensor) -> Tensor:
    """x in the dtype of autocast, so that the converted copy is saved for the backward pass."""
    device = x.device.type
    if x.dtype is torch.float64 or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))
