"""The weights of layers and functions, and the products of these weights with rows of an input.

`products()` of a layer, or of a `Site` (a call of a function with quantizers), returns a `Product` for each weight, so
that algorithms, files and reports need no layer classes. Algorithms choose the codes of a `MatrixProduct`; weights of
other products are rounded to nearest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fakequant.errors import ConfigError
from fakequant.memory import fetched
from fakequant.nn.integer import Execution
from fakequant.nn.paths import join, layer_of
from fakequant.nn.quantizer import Quantizer
from fakequant.nn.transforms import InputTransform
from fakequant.nn.wrappers import Role
from fakequant.numerics.granularity import Granularity, PerBlock
from fakequant.numerics.qparams import QParams
from fakequant.numerics.spec import QuantSpec
from fakequant.restore import restore_on_error, state_of

_SUFFIX = "_weight_quantizer"
_PARTS = (Quantizer, InputTransform)


class Matrix(NamedTuple):
    """A weight matrix [out, columns] that multiplies rows [..., columns], in the form that solvers need.

    Attributes:
        weight: float [out, ...], in which each output has as many elements as a row.
        spec: the quantizer's specification, with the axes of this weight.
        params: the quantizer's scale and zero point.
        nearest: returns the weight fake-quantized by the quantizer.
    """

    weight: Tensor
    spec: QuantSpec
    params: QParams
    nearest: Callable[[], Tensor]


class Product:
    """A weight of a layer or a function, and its quantizer.

    Args:
        layer: a quantized layer, a float layer that may become one, or a `Site`.
        attribute: the layer's attribute that holds the quantizer.
        owner: the module that holds the weight: the layer, a module inside the layer, or the module that makes the
            call of a site.
        name: the owner's attribute that holds the weight.
    """

    is_stack: ClassVar[bool] = False
    """Whether the weight is a stack of matrices [matrices, ...], each with separate inputs."""

    def __init__(self, layer: nn.Module, attribute: str, owner: nn.Module, name: str) -> None:
        self.layer: Any = layer
        self.attribute, self.owner, self.name = attribute, owner, name

    @classmethod
    def of(cls, layer: nn.Module, attribute: str, path: str) -> Product:
        """The product of the weight at `path` in a layer, such as "out_proj.weight"."""
        owner, _, name = path.rpartition(".")
        return cls(layer, attribute, layer.get_submodule(owner), name)

    @property
    def is_matrix(self) -> bool:
        """Whether the weight multiplies rows of inputs as a matrix, so that algorithms can choose its codes."""
        return False

    @property
    def kind(self) -> str:
        """The name of the layer's class, for messages."""
        return type(self.layer).__name__

    @property
    def channels(self) -> int:
        """The axis of the weight that holds output channels."""
        return self.layer.operands(self.layer)[self.attribute].channels

    @property
    def quantizer(self) -> Any:
        """The quantizer of the weight, or None while the weight stays in float."""
        return getattr(self.layer, self.attribute, None)

    @property
    def tensor(self) -> Tensor:
        """The present weight, also where a parametrization computes it or an offloading hook fetches it."""
        return fetched(self.owner, self.name, getattr(self.owner, self.name))

    @property
    def parameter(self) -> nn.Parameter | None:
        """The weight if it is a parameter of its owner, None if it is computed."""
        return self.owner._parameters.get(self.name)

    @property
    def computed_by_hook(self) -> bool:
        """Whether a hook computes the weight at each call of the owner."""
        return self.name in vars(self.owner)

    @property
    def has_fixed_codes(self) -> bool:
        """Whether a solver, a file or the user fixed the codes of the weight, so that no range can lower its error."""
        quantizer = self.quantizer
        return quantizer is not None and self.parameter is not None and quantizer.holds(self.tensor)

    def fix_codes(self, codes: Tensor, params: QParams | None = None) -> None:
        """Fix the codes of the weight as `Quantizer.fix_codes` does.

        `params` are the scale and zero point of the codes; None: those that the quantizer has.

        Raises:
            ConfigError: the weight has no quantizer, or is not a parameter.
            Exception: the errors of `Quantizer.fix_codes`; the quantizer stays as it was.
        """
        quantizer, parameter = self.quantizer, self.parameter
        if quantizer is None or parameter is None:
            reason = "it has no quantizer" if quantizer is None else "it is computed; make it a parameter first"
            raise ConfigError(f"the codes of the weight {self.name} of a {self.kind} cannot be fixed: {reason}")
        with restore_on_error(state_of([quantizer])):
            if params is not None:
                quantizer.set_qparams(params)
            quantizer.fix_codes(codes, parameter)

    def row_name(self, path: str) -> str:
        """The weight's name in results: the path of its layer, and the weight's name if the layer has several.

        >>> layer = prepare(nn.Linear(2, 2), "INT8_WEIGHT_ONLY")
        >>> layer.products()[0].row_name("encoder.0._weight_quantizer")
        'encoder.0'
        >>> cell = prepare(nn.LSTMCell(2, 2), "INT8_WEIGHT_ONLY")
        >>> cell.products()[1].row_name("encoder.1._hh_weight_quantizer")
        'encoder.1.hh'
        """
        name = layer_of(path)
        if sum(other.quantizer is not None for other in self.layer.products()) <= 1:
            return name
        return join(name, path.rpartition(".")[2].removeprefix("_").removesuffix(_SUFFIX))

    def rows(self, x: Tensor) -> Tensor:
        """The rows [groups, rows, columns] of x that the weight matrix multiplies; ConfigError without a matrix."""
        raise ConfigError(f"a {self.kind} has no weight matrix that multiplies rows of an input")


class MatrixProduct(Product):
    """The product of rows of an input with a weight [out, in], as in a linear layer."""

    readers: int = 1
    """How many weights multiply the layer's first input; its transform changes all of them. 0: it can have none."""

    takes_parts: ClassVar[bool] = False
    """Whether the rows can be computed for some channels of the input at a time."""
    has_steps: ClassVar[bool] = False
    """Whether a call multiplies at each of several steps, and reads the bias at each of them."""

    is_result: bool = True
    """Whether the first tensor that a call returns is this product, with a row for each row of the input."""

    why_no_bias: str | None = None
    """The reason why calls have a bias that algorithms cannot correct; None if there is no such bias."""

    reads: tuple[int, ...] = (0,)
    """For each block of rows of the weight, the index in `inputs` of the input that these rows multiply."""

    @property
    def is_matrix(self) -> bool:
        return True

    @property
    def has_own_forward(self) -> bool:
        """Whether a package other than torch and fakequant defines the layer's `forward`."""
        return type(self.layer).forward.__module__.partition(".")[0] not in ("torch", "fakequant")

    @property
    def bias(self) -> tuple[nn.Parameter | None, slice]:
        """The parameter that holds the bias, and the slice of it that belongs to this weight."""
        return self.layer._parameters.get("bias"), slice(None)

    @property
    def input_quantizer(self) -> Quantizer | None:
        """The quantizer of the input; None without a quantizer, or if other weights multiply its output, too."""
        return self.layer.input_quantizer

    @property
    def input_transform(self) -> InputTransform | None:
        """The transform of the input before its quantizer; None without one."""
        return self.layer.input_transform

    @property
    def columns(self) -> int:
        """The length of each row, which is the count of the weight's elements for each output."""
        return self.tensor[0].numel()

    @property
    def groups(self) -> int:
        """The count of groups of output channels; each group multiplies separate rows."""
        return 1

    def register_forward_pre_hook(self, hook: Callable[..., Any], *, with_kwargs: bool) -> Any:
        """Register a hook that is called as hook(self, args, kwargs) before each product, with the input as args[0]."""
        return self.layer.register_forward_pre_hook(hook, with_kwargs=with_kwargs)

    def inputs(self, call: Any) -> tuple[Tensor, ...]:
        """The inputs in `call`, the record of a hook, before quantization; `reads` are indices into them."""
        return (call.first,)

    def quantized_inputs(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """The inputs that the product multiplies: transformed and quantized."""
        return (self.layer.quantized_input(inputs[0]),)

    def with_axis(self, x: Tensor) -> Tensor:
        """The input x, with a first axis of rows or examples added if x has none."""
        return x[None] if x.dim() == 1 else x

    def pieces(self, x: Tensor) -> Sequence[Tensor]:
        """The input x split so that its rows need little memory: for a convolution, about 16 MB for each piece."""
        return [x]

    def rows(self, x: Tensor) -> Tensor:
        return x.reshape(1, -1, x.shape[-1])

    def product(self, weight: Tensor, x: Tensor) -> Tensor:
        """The output without bias for the input x, of any float dtype, and `weight` in place of the layer's weight."""
        x = x.to(weight.dtype)
        return own_forward(self.layer, weight, x) if self.has_own_forward else self.multiplied(weight, x)

    def multiplied(self, weight: Tensor, x: Tensor) -> Tensor:
        """The product of x and `weight`, computed by the function of torch that layers of this class call."""
        return F.linear(x, weight)

    def computes_product(self, x: Tensor) -> bool:
        """Whether the layer computes exactly the product of the rows of x with its weight, within rounding."""
        x, weight = self.with_axis(x), self.tensor
        try:
            rows, wanted = self.rows(x), self.product(weight, x)
        except (RuntimeError, TypeError):  # of torch, for what its own forward does
            return False
        matrix, wanted = self.matrix(weight).reshape(len(rows), -1, rows.shape[-1]), self.channels_last(wanted)
        found = (rows.to(matrix.dtype) @ matrix.mT).movedim(0, 1).reshape(-1, wanted.shape[-1])
        return found.numel() == wanted.numel() and torch.allclose(found, wanted.reshape_as(found), 1e-3, 1e-4)

    def matrix(self, weight: Tensor) -> Tensor:
        """The weight or its scales, with axes in the order [out, ...]."""
        return weight

    def channels_last(self, y: Tensor) -> Tensor:
        """The output y with its axis of channels last."""
        return y

    def makes_same_rows(self, other: MatrixProduct) -> bool:
        """Whether the product `other` makes the same rows as this product from the same input."""
        return type(self) is type(other)

    def matrices(self) -> list[Matrix]:
        """The matrix of the weight; for a stack of weights, the matrix of each, in the order of `inputs`."""
        weight, quantizer = self.tensor.detach(), self.quantizer
        return [Matrix(weight, quantizer.spec, quantizer.qparams(weight), lambda: quantizer(weight))]

    def joined(self, values: Sequence[Tensor], params: Sequence[QParams]) -> tuple[Tensor, QParams]:
        """The values and parameters of the weight, joined from the values and parameters of its matrices."""
        return values[0], params[0]


def own_forward(layer: Any, weight: Tensor, x: Tensor) -> Tensor:
    """The output of a layer's `forward` for another weight, with a bias of zeros, and without quantizers."""
    bias = layer._parameters.get("bias")
    if bias is not None:  # a weight of another shape picks values of windows, one for each of its outputs
        bias = weight.new_zeros(len(bias) if weight.shape == layer.weight.shape else len(weight))
    parts = {name: None if isinstance(own, _PARTS) else own for name, own in layer._modules.items()}
    parameters = {**layer._parameters, "weight": weight, "bias": bias}
    twin = with_attributes(layer, _parameters=parameters, _modules=parts, execution=Execution.SIMULATE)
    return type(layer).forward(twin, x)


def with_attributes(layer: Any, **attributes: Any) -> Any:
    """A shallow copy of a layer with some attributes replaced."""
    twin = object.__new__(type(layer))
    vars(twin).update(vars(layer) | attributes)
    return twin


class TurnedProduct(MatrixProduct):
    """The product of rows of an input with a weight [in, out, ...]."""

    readers = 0

    @property
    def columns(self) -> int:
        return self.tensor[:, 0].numel()

    def multiplied(self, weight: Tensor, x: Tensor) -> Tensor:
        return x @ weight

    def matrices(self) -> list[Matrix]:
        axes = self.tensor.dim()
        exchanged = {0: 1, 1: 0, -axes: 1, 1 - axes: 0}
        return [
            own._replace(
                weight=self.matrix(own.weight),
                spec=remapped(own.spec, exchanged),
                params=_turned(own.params),
                nearest=lambda own=own: self.matrix(own.nearest()),
            )
            for own in super().matrices()
        ]

    def matrix(self, weight: Tensor) -> Tensor:
        return _exchanged(weight)

    def joined(self, values: Sequence[Tensor], params: Sequence[QParams]) -> tuple[Tensor, QParams]:
        return _exchanged(values[0]), _turned(params[0])


def _exchanged(values: Tensor) -> Tensor:
    """A weight or its scales, with the first two axes exchanged."""
    return values.transpose(0, 1).contiguous() if values.dim() > 1 else values


def _turned(params: QParams) -> QParams:
    return QParams(_exchanged(params.scale), None if params.zero_point is None else _exchanged(params.zero_point))


def remapped(spec: QuantSpec, axes: dict[int, int]) -> QuantSpec:
    """A specification for the same weight with its axes in another order; `axes` maps old axes to new axes."""
    return spec.regrouped(lambda one: one.remap_axes(axes))


_INPUTS = ("query", "key", "value")
_READS = {"in_proj_weight": (0, 1, 2), "q_proj_weight": (0,), "k_proj_weight": (1,), "v_proj_weight": (2,)}


class _Projection(MatrixProduct):
    readers = 0

    @property
    def input_transform(self) -> None:
        return None

    def makes_same_rows(self, other: MatrixProduct) -> bool:
        return self is other


class InProjection(_Projection):
    """The product with the weight that projects query, key and value of an attention layer, or one of the three."""

    is_result = False

    @property
    def reads(self) -> tuple[int, ...]:  # type: ignore[override]
        return _READS[self.name]

    @property
    def input_quantizer(self) -> Quantizer | None:
        layer = self.layer
        others = layer._key_input_quantizer, layer._value_input_quantizer
        return layer._input_quantizer if len(self.reads) == len(_INPUTS) and others == (None, None) else None

    @property
    def bias(self) -> tuple[nn.Parameter | None, slice]:
        first, last, width = self.reads[0], self.reads[-1] + 1, self.layer.embed_dim
        return self.layer._parameters.get("in_proj_bias"), slice(first * width, last * width)

    def register_forward_pre_hook(self, hook: Callable[..., Any], *, with_kwargs: bool) -> Any:
        def see(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = {**dict(zip(_INPUTS, args, strict=False)), **kwargs}
            inputs = {name: given[name] for name in _INPUTS}
            hook(self, (inputs[_INPUTS[self.reads[0]]],), inputs)

        return self.layer.register_forward_pre_hook(see, with_kwargs=with_kwargs)

    def inputs(self, call: Any) -> tuple[Tensor, ...]:
        return tuple(call.kwargs[name] for name in _INPUTS)

    def quantized_inputs(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        query, key, value = inputs
        return [one.value for one in self.layer._quantized_inputs(query, key, value)]


class OutProjection(_Projection):
    """The product with the weight of an attention layer's output projection; the layer computes the input inside."""

    @property
    def is_result(self) -> bool:  # type: ignore[override]
        return self.layer.batch_first  # else its rows have another order

    @property
    def input_quantizer(self) -> Quantizer | None:
        return self.layer._out_proj_input_quantizer

    @property
    def bias(self) -> tuple[nn.Parameter | None, slice]:
        return self.layer.out_proj._parameters.get("bias"), slice(None)

    def register_forward_pre_hook(self, hook: Callable[..., Any], *, with_kwargs: bool) -> Any:
        return self.layer.watch(lambda x: hook(self, (x.transpose(0, 1),), {}))

    def quantized_inputs(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        x = inputs[0].transpose(0, 1)  # the attention quantizes one matrix, whose rows have this order
        y = self.layer.quantized("_out_proj_input_quantizer", x.reshape(-1, x.shape[-1]))
        return (y.view(x.shape).transpose(0, 1),)


class ExpertProduct(MatrixProduct):
    """The product of each expert's tokens with the expert's weight, which is a matrix of a stack.

    The stack is [experts, out, in] or [experts, in, out]. In a call of the layer with `*args` and `**kwargs`, the
    layer's method `tokens(attribute, *args, **kwargs)` returns the tokens of each expert before their quantizer.
    """

    readers = 0
    is_stack = True
    is_result = False

    @property
    def input_quantizer(self) -> None:
        """None, because experts share the quantizer of their inputs: no single expert can choose the range."""
        return None

    @property
    def input_transform(self) -> None:
        return None

    @property
    def is_matrix(self) -> bool:
        """Whether the weight is in float, or each expert has separate scales."""
        quantizer, shape = self.quantizer, self.tensor.shape
        return quantizer is None or quantizer.spec.granularity.group_shape(shape)[0] == shape[0]

    @property
    def bias(self) -> tuple[nn.Parameter | None, slice]:
        return None, slice(None)

    @property
    def columns(self) -> int:
        return self.tensor.shape[1 if self._is_transposed else 2]

    @property
    def _is_transposed(self) -> bool:
        """Whether each matrix of the stack is [in, out]."""
        return self.layer.factors(self.layer)[self.attribute].reduction == -2

    @property
    def reads(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(range(len(self.tensor)))

    def makes_same_rows(self, other: MatrixProduct) -> bool:
        return self is other

    def inputs(self, call: Any) -> tuple[Tensor, ...]:
        return tuple(self.layer.tokens(self.attribute, *call.args, **call.kwargs))

    def quantized_inputs(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """The inputs of all experts, quantized as one tensor with one range."""
        operands = self.layer.factors(self.layer)
        inputs_of_layer = [name for name, own in operands.items() if own.role is Role.INPUT]
        weights = [name for name, own in operands.items() if own.role is Role.WEIGHT]
        name = inputs_of_layer[weights.index(self.attribute)]
        return self.layer.quantized(name, torch.cat([*inputs])).split([len(x) for x in inputs])

    def matrices(self) -> list[Matrix]:
        weight, quantizer = self.tensor.detach(), self.quantizer
        spec, params, nearest = quantizer.spec, quantizer.qparams(weight), quantizer(weight)
        scale = spec.scale
        if scale.granularity is not None:
            scale = replace(scale, granularity=self._of_one(scale.granularity, params.scale.shape))
        one = spec.replace(granularity=self._of_one(spec.granularity, weight.shape), scale=scale)
        points = params.zero_point
        return [
            Matrix(
                self.matrix(weight[expert]),
                one,
                QParams(self.matrix(params.scale[expert]), None if points is None else self.matrix(points[expert])),
                lambda expert=expert: self.matrix(nearest[expert]),
            )
            for expert in range(len(weight))
        ]

    def _of_one(self, granularity: Granularity, shape: torch.Size) -> Granularity:
        """The granularity for one matrix [out, in] of the stack."""
        _, *blocks = granularity.block_shape(shape)
        return PerBlock(dict(enumerate(reversed(blocks) if self._is_transposed else blocks)), pad=True)

    def matrix(self, weight: Tensor) -> Tensor:
        return weight.mT.contiguous() if self._is_transposed else weight

    def joined(self, values: Sequence[Tensor], params: Sequence[QParams]) -> tuple[Tensor, QParams]:
        points = [own.zero_point for own in params if own.zero_point is not None]
        scale = torch.stack([self.matrix(own.scale) for own in params])
        zero_point = torch.stack([self.matrix(point) for point in points]) if points else None
        return torch.stack([self.matrix(own) for own in values]), QParams(scale, zero_point)


_MOST = 2**22
"""How many elements of windows are in memory at a time; another number rounds float32 products differently."""
_WINDOW = ["kernel_size", "stride", "padding", "dilation", "groups", "padding_mode", "output_padding", "same_pad"]
"""The attributes of a convolution that decide how an input becomes rows."""


class WindowProduct(MatrixProduct):
    """The product of the windows of an input [n, in, ...] with a weight [out, in / groups, ...]."""

    takes_parts = True

    @property
    def geometry(self) -> Any:
        """The convolution, whose stride, padding, dilation and kernel size define the windows."""
        return self.layer

    @property
    def groups(self) -> int:
        return self.geometry.groups

    def with_axis(self, x: Tensor) -> Tensor:
        return x[None] if x.dim() == len(self.geometry.kernel_size) + 1 else x

    def pieces(self, x: Tensor) -> Sequence[Tensor]:
        if not x.numel():
            return [x]
        x = self.with_axis(x)
        values = x[0].numel() * math.prod(self.geometry.kernel_size)
        return x.split(max(1, _MOST * self._step() // values))  # at least one example each

    def _step(self) -> int:
        """The count of input positions per window, which is the product of the strides."""
        return math.prod(self.geometry.stride)

    def rows(self, x: Tensor) -> Tensor:
        """The rows, computed by a convolution of each channel with kernels that each pick one element of the window."""
        own = self.has_own_forward
        return self._windows(x, own_forward if own else lambda one, picks, x: one._conv_forward(x, picks, None))

    def _windows(self, x: Tensor, convolve: Callable[[Any, Tensor, Tensor], Tensor]) -> Tensor:
        """The rows [groups, rows, columns]: each channel is convolved as a separate example, at the cost of a copy."""
        x, kernel, groups = self.with_axis(x), self.geometry.kernel_size, self.groups
        positions = math.prod(kernel)
        picks = torch.eye(positions, dtype=x.dtype, device=x.device).view(positions, 1, *kernel)
        one = with_attributes(self.geometry, groups=1)
        windows = convolve(one, picks, x.flatten(0, 1)[:, None]).flatten(2)  # with the layer's padding
        columns, places = x.shape[1] // groups * positions, windows.shape[2]
        windows = windows.reshape(len(x), groups, columns, places)
        return windows.permute(1, 0, 3, 2).reshape(groups, len(x) * places, columns)

    def multiplied(self, weight: Tensor, x: Tensor) -> Tensor:
        return self.geometry._conv_forward(x, weight, None)

    def channels_last(self, y: Tensor) -> Tensor:
        return y.movedim(1, -1)

    def makes_same_rows(self, other: MatrixProduct) -> bool:
        return (
            isinstance(other, WindowProduct)
            and type(self) is type(other)
            and all(getattr(self.geometry, name, None) == getattr(other.geometry, name, None) for name in _WINDOW)
        )


class TransposedWindowProduct(TurnedProduct, WindowProduct):
    """The product of a transposed convolution: inputs that an output sums, times a weight [in, out, ...]."""

    takes_parts = False

    @property
    def is_matrix(self) -> bool:
        """Whether the weight is a matrix once its first two axes are exchanged; False for a layer with groups."""
        return self.groups == 1

    @property
    def kind(self) -> str:
        return super().kind if self.is_matrix else f"{super().kind} with groups"

    def _step(self) -> int:
        return 1

    def rows(self, x: Tensor) -> Tensor:
        """The rows, computed by a transposed convolution with kernels that each have one element 1, the others 0."""
        return self._windows(x, lambda one, picks, x: _transposed(one, picks.transpose(0, 1), x))

    def multiplied(self, weight: Tensor, x: Tensor) -> Tensor:
        return _transposed(self.geometry, weight, x)


def _transposed(layer: Any, weight: Tensor, x: Tensor) -> Tensor:
    convolve = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[len(layer.kernel_size) - 1]
    return convolve(x, weight, None, layer.stride, layer.padding, layer.output_padding, 1, layer.dilation)
