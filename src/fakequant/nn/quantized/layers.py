"""Quantized layers: the table of quantized classes by float class, and how the basic layers compute.

A quantized layer is a subclass of its float layer with quantizers on its inputs and its weight. It has no further
state, so that `prepare` can quantize a float layer by changing its class. A new layer is one class here; attention,
recurrent and foreign layers have separate files, which `nn/__init__.py` imports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeGuard, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fakequant.errors import ConfigError, NoWeightError
from fakequant.nn import backward
from fakequant.nn.integer import ConvolutionProduct, Execution, IntegerProduct, LinearProduct, MatMulProduct
from fakequant.nn.products import MatrixProduct, Product, TransposedWindowProduct, WindowProduct
from fakequant.nn.quantizer import Mode, Proxy, Quantizer, as_leaf
from fakequant.nn.sharded import is_shared_out, note_mesh
from fakequant.nn.stored import StoringLayer
from fakequant.nn.transforms import InputTransform
from fakequant.nn.wrappers import Kernel, Operand, Role


class MatMul(nn.Module):
    """The product of two activations, for example in attention, as a module that `prepare` can quantize.

    >>> MatMul()(torch.eye(2), torch.ones(2, 2))
    tensor([[1., 1.],
            [1., 1.]])
    """

    def forward(self, input: Tensor, other: Tensor) -> Tensor:
        """The product of input [..., n, k] and other [..., k, m]."""
        return torch.matmul(input, other)


class Add(nn.Module):
    """The sum of two activations, for example in residual connections, as a module that `prepare` can quantize."""

    def forward(self, input: Tensor, other: Tensor) -> Tensor:
        """The sum of input and other, broadcast."""
        return input + other


_ATTRIBUTES = {f"{name}_quantizer": f"_{name}_quantizer" for name in ("input", "weight", "output")}
_ATTRIBUTES["input_transform"] = "_input_transform"
"""The public properties that hold modules, and the attributes and `state_dict` keys behind them."""


_layers: dict[type[nn.Module], type[QuantizedLayer]] = {}


class QuantizedLayer(StoringLayer, backward.Trained):
    """Base of all quantized layers; each also derives from the class of its float layer.

    A quantizer that is None leaves its tensor in float.
    """

    float_class: ClassVar[type[nn.Module]]
    inputs: ClassVar[tuple[str, ...]] = ("_input_quantizer",)
    """The attributes that hold the quantizers of the inputs, in the order of `forward`'s arguments."""
    output_channels: ClassVar[int | None] = 0
    """The axis of output channels in the weight; None for a layer without a weight."""
    input_reductions: ClassVar[tuple[int, ...]] = (-1,)
    """For each input, the axis that the product sums over, along which blocks lie; for a layer without a product, the
    axis of features. Axes are counted from the end, because a batch axis may be missing."""
    weight_reduction: ClassVar[int] = -1
    """The axis of the weight that the product sums over; for embeddings, the axis of features."""

    # Axes that a class does not name are those of the torch layer that it is a subclass of.

    product_class: ClassVar[type[Product]] = Product
    """The class of the product that algorithms get for the layer's weight; see `products`."""
    product: ClassVar[IntegerProduct | None] = None
    """The integer product of this kind of layer; None if it has none."""
    execution: Execution = Execution.SIMULATE
    """How the product is computed, see `Execution`."""

    weight: Tensor
    _input_quantizer: Quantizer | None
    _weight_quantizer: Quantizer | None
    _output_quantizer: Quantizer | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """A layer without quantizers, as its float class makes it: peft calls the class of a layer for its adapters."""
        super().__init__(*args, **kwargs)
        vars(self).update(dict.fromkeys(self.operands(self)))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        form = next((_layers[base] for base in cls.__mro__ if base in _layers), None)
        for name in ("output_channels", "input_reductions", "weight_reduction", "product_class"):
            owner = next(base for base in cls.__mro__ if name in vars(base))
            if form is not None and owner is QuantizedLayer:
                setattr(cls, name, getattr(form, name))

    @property
    def input_quantizer(self) -> Quantizer | None:
        """The quantizer of the first input, which may be replaced; None leaves the input in float."""
        return self._input_quantizer

    @property
    def weight_quantizer(self) -> Quantizer | None:
        """The quantizer of the weight, which may be replaced; None leaves the weight in float."""
        return self._weight_quantizer

    @property
    def output_quantizer(self) -> Quantizer | None:
        """The quantizer of the result, which may be replaced; None leaves the result in float."""
        return self._output_quantizer

    @property
    def input_transform(self) -> InputTransform | None:
        """The transform of the first input, whose inverse is in the weight; None without a transform."""
        return cast("InputTransform | None", self._modules.get("_input_transform"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        quantizer = self._modules.get("_output_quantizer")
        if quantizer is None:
            return super().__call__(*args, **kwargs)
        if is_shared_out(self, quantizer):  # before a hook of torch takes the part of this process
            with self.register_forward_hook(lambda _, __, y: _quantized_output(quantizer, y), prepend=True):
                return super().__call__(*args, **kwargs)
        return _quantized_output(quantizer, super().__call__(*args, **kwargs))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if "." in name:  # torch's styles share out the parameters of learned ranges, too
            raise NoWeightError
        super().register_parameter(name, param)

    def __setattr__(self, name: str, value: Any) -> None:
        # torch registers a module under the name it is given, before it looks for a property of that name.
        super().__setattr__(_ATTRIBUTES.get(name, name), value)
        if name == "_distribute_module_applied":  # by which `parallelize_module` marks a layer that it has shared out
            note_mesh(self)

    @classmethod
    def operands(cls, layer: nn.Module) -> dict[str, Operand]:
        """The quantized tensors of a float or quantized layer, by the attributes of their quantizers."""
        return {**cls.factors(layer), "_output_quantizer": Operand(Role.OUTPUT, cls.input_reductions[0])}

    @classmethod
    def factors(cls, layer: nn.Module) -> dict[str, Operand]:
        """The quantized tensors of a layer except its output.

        The default reads `inputs`, `output_channels` and the axes of reduction of this class. Layers with several
        weights, or with quantizers inside, override this method.
        """
        # Fewer inputs than axes: a layer that overrides `inputs` with none.
        axes, sizes = zip(cls.inputs, cls.input_reductions, strict=False), cls.kernel_sizes(layer)
        found = {attribute: Operand(Role.INPUT, axis, kernel=Kernel.of(sizes)) for attribute, axis in axes}
        if cls.output_channels is not None:
            kernel = Kernel.of(sizes, getattr(layer, "in_channels", 0) // getattr(layer, "groups", 1) or None)
            weight = Operand(Role.WEIGHT, cls.weight_reduction, cls.output_channels, "weight", kernel=kernel)
            found["_weight_quantizer"] = weight
        return found

    @classmethod
    def kernel_sizes(cls, layer: nn.Module) -> Sequence[int]:
        """The sizes of the layer's kernel, along the last axes of its input; () for a layer without a kernel."""
        return getattr(layer, "kernel_size", ())

    @classmethod
    def products_of(cls, layer: nn.Module) -> list[Product]:
        """A `Product` for each weight of a float or quantized layer that has a quantizer or may get one."""
        operands = cls.operands(layer).items()
        return [cls.product_class.of(layer, attribute, own.weight) for attribute, own in operands if own.weight]

    def products(self) -> list[Product]:
        """A `Product` for each weight of this layer that has a quantizer or may get one."""
        return self.products_of(self)

    @classmethod
    def takes(cls, layer: nn.Module) -> bool:
        """Whether this class can quantize a float layer; if not, `prepare` leaves the layer in float and warns."""
        return True

    @classmethod
    def check(cls, layer: nn.Module) -> None:
        """Raise ConfigError, with reason and cure, for a float layer that this class cannot quantize."""

    def quantized_weight(self) -> Tensor:
        """The weight after its quantizer, as the product reads it."""
        quantizer = self._weight_quantizer
        return self.weight if quantizer is None else quantizer(self.weight)

    @classmethod
    def weighted_sum(cls, layer: nn.Module) -> backward.WeightedSum | None:
        """The layer's product, for layers whose backward products can be quantized; None for other layers."""
        return None

    def integer_product(self, x: Tensor, other: Tensor, bias: Tensor | None = None) -> Tensor | None:
        """The output in integer execution for x and `other`, a weight or input; None if the layer is simulated."""
        # Compilers and exporters cannot look into integer products: they get the simulated layer.
        if self.execution is Execution.SIMULATE or self.product is None or torch.compiler.is_compiling():
            return None
        return self.product(self, x, other, bias)

    def why_simulated(self, execution: Execution | None = None) -> str | None:
        """Why the layer is simulated for all inputs under `execution` (None: its present one); None if it is not."""
        if self.product is None:
            return f"there is no integer product for {type(self).float_class.__name__}"
        return self.product.why_simulated(self, execution or self.execution)

    def is_on(self, attribute: str) -> bool:
        """Whether the attribute `attribute` holds a quantizer that is not off: it quantizes or observes."""
        quantizer = getattr(self, attribute)
        return quantizer is not None and quantizer.mode is not Mode.OFF

    def quantized(self, attribute: str, x: Tensor) -> Tensor:
        """x after the quantizer in the attribute `attribute`; x itself without a quantizer."""
        quantizer = getattr(self, attribute)
        return x if quantizer is None else quantizer(x)

    def quantized_input(self, x: Tensor) -> Tensor:
        """The first input after its transform and its quantizer."""
        if (transform := self._modules.get("_input_transform")) is not None:
            x = transform(x)
        quantizer = self._input_quantizer
        return x if quantizer is None else quantizer(x)


def _quantized_output(quantizer: nn.Module, y: Any) -> Any:
    """A layer's result after the output quantizer; of several results only the first is quantized."""
    if isinstance(y, Proxy):  # the call of the layer is recorded, which will do it
        return y
    if isinstance(y, PackedSequence):
        return y._replace(data=quantizer(y.data))
    if isinstance(y, tuple):
        return (_quantized_output(quantizer, y[0]), *y[1:])
    return quantizer(y)


_named_layers: dict[str, type[QuantizedLayer]] = {}
_made_layers: dict[str, type[QuantizedLayer]] = {}
LayerClass = TypeVar("LayerClass", bound=type[QuantizedLayer])


def quantizes(float_class: type[nn.Module] | str) -> Callable[[LayerClass], LayerClass]:
    """Register a class as the quantized form of a float layer.

    Args:
        float_class: the float layer's class; or its full name, if its package need not be installed. With a name, the
            registered class does not derive from the float class: `prepare` makes a class that derives from both.

    Raises:
        ConfigError: the registered class does not derive from `float_class`, `float_class` already has a quantized
            class, or `input_reductions` lacks the axis of an input.

    >>> class Scaled(torch.nn.Linear):
    ...     "Overrides `forward`, so that `prepare` leaves it in float."
    ...     def forward(self, input):
    ...         return 2 * super().forward(input)
    >>> @quantizes(Scaled)
    ... class QuantScaled(Scaled, QuantLinear):
    ...     "Scaled, on top of a quantized Linear."
    >>> prepare(torch.nn.Sequential(Scaled(4, 4)), "INT8")[0].__class__.__name__
    'QuantScaled'
    >>> del _layers[Scaled]  # of the example only
    """

    def register(quantized: LayerClass) -> LayerClass:
        table: dict[Any, type[QuantizedLayer]] = _named_layers if isinstance(float_class, str) else _layers
        name = float_class if isinstance(float_class, str) else float_class.__name__
        if not isinstance(float_class, str) and float_class not in quantized.__mro__:
            raise ConfigError(
                f"{quantized.__name__} is not a subclass of {name}, as the quantized class of a float layer must be; "
                f"derive it from {name}, too"
            )
        if float_class in table:
            raise ConfigError(
                f"{name} already has the quantized class {table[float_class].__name__}; register only one class for it"
            )
        if len(quantized.inputs) > len(quantized.input_reductions):
            raise ConfigError(
                f"{quantized.__name__} has {len(quantized.inputs)} inputs, but input_reductions names the axes of "
                f"{len(quantized.input_reductions)}; for every input, name the axis that the product sums over"
            )
        if not isinstance(float_class, str):
            quantized.float_class = float_class
        table[float_class] = quantized
        return quantized

    return register


def quantizes_made_by(module: str) -> Callable[[LayerClass], LayerClass]:
    """Register the quantized class for all layers whose `forward` was written by a decorator of a module.

    `module` is the module's full name. The module need not be installed, because `prepare` makes a class that derives
    from the float and the registered class. Raises ConfigError for a module that has a quantized class already.
    """

    def register(quantized: LayerClass) -> LayerClass:
        if module in _made_layers:
            raise ConfigError(
                f"layers of {module} already have the quantized class {_made_layers[module].__name__}; register only "
                "one class for them"
            )
        _made_layers[module] = quantized
        return quantized

    return register


def layers() -> dict[type[nn.Module], type[QuantizedLayer]]:
    """The registered quantized classes, by the classes of float layers; without classes registered by a name."""
    return dict(_layers)


def registered(cls: type[nn.Module]) -> type[QuantizedLayer] | None:
    """The quantized class that is registered for `cls`, not for a base class of it; None if there is none.

    It is registered for the class, its full name, or the module of the decorator that wrote its `forward`.
    """
    known = _layers.get(cls) or _named_layers.get(f"{cls.__module__}.{cls.__qualname__}")
    if known is not None:
        return known
    written = getattr(vars(cls).get("forward"), "__globals__", {}).get("__name__")
    return None if issubclass(cls, QuantizedLayer) else _made_layers.get(written or "")


_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a normalisation of torch, whose weight is not a factor of a matrix product."""
    return isinstance(module, _NORMS)


def has_statistics(module: nn.Module) -> bool:
    """Whether a module is a normalisation of torch that may normalise by the statistics of a batch in training."""
    return isinstance(module, nn.modules.batchnorm._NormBase)


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def is_linear(module: Any) -> TypeGuard[nn.Linear]:
    """Whether a module multiplies the last axis of its input with a weight [out, in]."""
    return isinstance(module, nn.Linear)


def is_convolution(module: Any) -> bool:
    """Whether a module is a convolution, which is not transposed, with a weight [out, in / groups, ...]."""
    return isinstance(module, CONVOLUTIONS)


def is_table(module: Any) -> TypeGuard[nn.Embedding]:
    """Whether a module looks up rows of its weight [rows, channels]."""
    return isinstance(module, nn.Embedding)


def subtracts_mean(module: Any) -> TypeGuard[nn.LayerNorm]:
    """Whether a normalisation subtracts the mean of each row before it divides by the norm of the row."""
    return isinstance(module, nn.LayerNorm)


def without_mean(norm: nn.LayerNorm) -> nn.Module:
    """An RMSNorm of weight 1 that has, for rows with mean 0, the result of `norm` with weight 1 and no bias."""
    return nn.RMSNorm(list(norm.normalized_shape), eps=norm.eps).to(norm.weight).train(norm.training)


@quantizes(nn.Linear)
class QuantLinear(QuantizedLayer, nn.Linear):
    """Linear with quantized input [..., in] and weight [out, in]."""

    product_class = MatrixProduct
    product = LinearProduct()

    @classmethod
    def weighted_sum(cls, layer: nn.Module) -> backward.WeightedSum | None:
        return backward.LinearSum() if cls.forward is QuantLinear.forward else None

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, Proxy):
            return as_leaf(self, input)
        y = None if self.gradient is None else backward.trained_product(self, input, self.gradient)
        if y is None and self.execution is not Execution.SIMULATE:  # before a computed weight is read, and computed
            y = self.integer_product(input, self.weight, self.bias)
        if y is None:
            y = F.linear(self.quantized_input(input), self.quantized_weight(), self.bias)
        return y


class SpatialLayer(QuantizedLayer):
    """A layer whose input [n, channels, ...] has spatial axes; the axis n may be missing."""

    def quantized_input(self, x: Tensor) -> Tensor:
        """The quantized input. The quantizer always gets an axis n: learned steps count the elements of an example."""
        if not self._is_one_example(x):
            return super().quantized_input(x)
        return super().quantized_input(x.unsqueeze(0)).squeeze(0)

    def _is_one_example(self, x: Tensor) -> bool:
        # Channels are the first axis then, and `input_reductions` counts theirs from the end.
        return x.dim() == -self.input_reductions[0]


_FORWARDS = {one._conv_forward for one in CONVOLUTIONS}


class _QuantConv(SpatialLayer):
    weight_reduction: ClassVar[int] = 1
    product_class = WindowProduct
    product = ConvolutionProduct()
    bias: Tensor | None
    _conv_forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]

    @classmethod
    def weighted_sum(cls, layer: nn.Module) -> backward.WeightedSum | None:
        is_plain = cls.forward is _QuantConv.forward and cls._conv_forward in _FORWARDS
        return backward.WindowSum(layer) if is_plain else None

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, Proxy):
            return as_leaf(self, input)
        if self._is_one_example(input):
            return self.forward(input.unsqueeze(0)).squeeze(0)
        y = None if self.gradient is None else backward.trained_product(self, input, self.gradient)
        if y is None and self.execution is not Execution.SIMULATE:
            y = self.integer_product(input, self.weight, self.bias)
        if y is not None:
            return y
        return self._conv_forward(self.quantized_input(input), self.quantized_weight(), self.bias)


@quantizes(nn.Conv1d)
class QuantConv1d(_QuantConv, nn.Conv1d):
    """Conv1d with quantized input [n, in, length] and weight [out, in / groups, k]."""

    input_reductions = (-2,)


@quantizes(nn.Conv2d)
class QuantConv2d(_QuantConv, nn.Conv2d):
    """Conv2d with quantized input [n, in, h, w] and weight [out, in / groups, kh, kw]."""

    input_reductions = (-3,)


@quantizes(nn.Conv3d)
class QuantConv3d(_QuantConv, nn.Conv3d):
    """Conv3d with quantized input [n, in, d, h, w] and weight [out, in / groups, kd, kh, kw]."""

    input_reductions = (-4,)


class _QuantPair(QuantizedLayer):
    inputs: ClassVar[tuple[str, ...]] = ("_input_quantizer", "_other_quantizer")
    input_reductions: ClassVar[tuple[int, ...]] = (-1, -1)
    _other_quantizer: Quantizer | None


@quantizes(MatMul)
class QuantMatMul(_QuantPair, MatMul):
    """MatMul of two quantized activations [..., n, k] and [..., k, m]."""

    output_channels: ClassVar[int | None] = None
    input_reductions = (-1, -2)
    product = MatMulProduct()

    @classmethod
    def weighted_sum(cls, layer: nn.Module) -> backward.WeightedSum | None:
        return backward.BatchedSum()

    def forward(self, input: Tensor, other: Tensor) -> Tensor:
        if isinstance(input, Proxy):
            return as_leaf(self, input, other)
        if backward.is_trained(self.gradient):
            factors = (
                backward.Factor.of(self, "_input_quantizer", input),
                backward.Factor.of(self, "_other_quantizer", other),
            )
            return backward.matmul(self.backward_of(), *factors)
        if (y := self.integer_product(input, other)) is not None:
            return y
        return super().forward(self.quantized_input(input), self.quantized("_other_quantizer", other))


@quantizes(Add)
class QuantAdd(_QuantPair, Add):
    """Add of two quantized activations."""

    output_channels: ClassVar[int | None] = None

    def forward(self, input: Tensor, other: Tensor) -> Tensor:
        if isinstance(input, Proxy):
            return as_leaf(self, input, other)
        return super().forward(self.quantized_input(input), self.quantized("_other_quantizer", other))


@quantizes(nn.Bilinear)
class QuantBilinear(_QuantPair, nn.Bilinear):
    """Bilinear with quantized inputs [..., in1] and [..., in2] and weight [out, in1, in2].

    The product sums over both of the weight's last axes. Blocks of the weight lie along its last axis, as blocks of the
    second input.

    >>> model = prepare(nn.Bilinear(4, 6, 2), presets.INT8)
    >>> used = calibrate(model, [(torch.ones(3, 4), torch.ones(3, 6))])
    >>> model._other_quantizer.calibrated
    True
    """

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        """The output [..., out] of two inputs, as `nn.Bilinear` computes it."""
        if isinstance(input1, Proxy):
            return as_leaf(self, input1, input2)
        first, second = self.quantized_input(input1), self.quantized("_other_quantizer", input2)
        return F.bilinear(first, second, self.quantized_weight(), self.bias)


class _QuantTable(QuantizedLayer):
    inputs: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def check(cls, layer: nn.Module) -> None:
        table, name = cast("nn.Embedding", layer), cls.float_class.__name__
        if table.max_norm is not None:
            raise ConfigError(
                f"{name}(max_norm=...) rescales its weight in every forward pass and cannot be quantized; "
                "leave it in float by a rule, or normalise the weight once and set max_norm=None"
            )
        if table.sparse:
            raise ConfigError(
                f"{name}(sparse=True) has a sparse gradient, which quantizers cannot pass on; "
                "leave it in float by a rule, or set sparse=False"
            )


@quantizes(nn.Embedding)
class QuantEmbedding(_QuantTable, nn.Embedding):
    """Embedding with a quantized table [rows, features]: each row is a channel, and blocks lie along features."""

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, Proxy):
            return as_leaf(self, input)
        return F.embedding(
            input,
            self.quantized_weight(),
            self.padding_idx,
            scale_grad_by_freq=self.scale_grad_by_freq,
            sparse=self.sparse,
        )


@quantizes(nn.EmbeddingBag)
class QuantEmbeddingBag(_QuantTable, nn.EmbeddingBag):
    """EmbeddingBag with a quantized table [rows, features]: each row is a channel, and blocks lie along features.

    Rows are quantized before they are summed, averaged or compared. `per_sample_weights` stay in float.

    >>> model = prepare(nn.Sequential(nn.EmbeddingBag(8, 4, mode="sum")), presets.INT8_WEIGHT_ONLY)
    >>> model[0](torch.tensor([[0, 3], [5, 5]])).shape
    torch.Size([2, 4])
    """

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """One row for each bag [bags, features]; the arguments are those of `nn.EmbeddingBag`."""
        if isinstance(input, Proxy):
            return as_leaf(self, input, offsets, per_sample_weights)
        return F.embedding_bag(
            input,
            self.quantized_weight(),
            offsets,
            scale_grad_by_freq=self.scale_grad_by_freq,
            mode=self.mode,
            sparse=self.sparse,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=self.padding_idx,
        )


def leave_fast_paths(model: nn.Module) -> None:
    """Change every transformer encoder in `model` that has quantized layers, so that it calls these layers.

    In eval mode without gradients torch otherwise computes an encoder layer in one operator from the float weights,
    without quantizers. `nn.MultiheadAttention` has such an operator, too, but its quantized class does not use it.
    """
    for module in model.modules():
        if not isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerEncoder)):
            continue
        if not any(isinstance(child, (QuantizedLayer, Quantizer)) for child in module.modules()):
            continue
        if isinstance(module, nn.TransformerEncoderLayer):
            # The layer computes `activation`; only the fast path reads this number, and 0 turns the fast path off.
            module.activation_relu_or_gelu = 0
        else:
            # The encoder makes nested tensors of padded inputs for the fast path, which quantizers do not take.
            module.use_nested_tensor = False


_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def conv_transpose(layer: nn.Module, input: Tensor, weight: Tensor, output_size: list[int] | None) -> Tensor:
    """The output of a transposed convolution with `weight` [in, out / groups, ...] in place of the layer's weight."""
    # All of them have the same attributes.
    layer = cast("nn.ConvTranspose2d", layer)
    axes = len(layer.kernel_size)
    output_padding = layer._output_padding(
        input,
        output_size,
        list(layer.stride),
        list(cast("tuple[int, ...]", layer.padding)),
        list(layer.kernel_size),
        axes,
        list(layer.dilation),
    )
    options: Any = layer.stride, layer.padding, output_padding, layer.groups, layer.dilation
    return _TRANSPOSED[axes](input, weight, layer.bias, *options)


class _QuantConvTranspose(SpatialLayer):
    output_channels: ClassVar[int | None] = 1
    weight_reduction: ClassVar[int] = 0
    product_class = TransposedWindowProduct

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if isinstance(input, Proxy):
            return as_leaf(self, input, output_size)
        return conv_transpose(self, self.quantized_input(input), self.quantized_weight(), output_size)


@quantizes(nn.ConvTranspose1d)
class QuantConvTranspose1d(_QuantConvTranspose, nn.ConvTranspose1d):
    """ConvTranspose1d with quantized input [n, in, length] and weight [in, out / groups, k]."""

    input_reductions = (-2,)


@quantizes(nn.ConvTranspose2d)
class QuantConvTranspose2d(_QuantConvTranspose, nn.ConvTranspose2d):
    """ConvTranspose2d with quantized input [n, in, h, w] and weight [in, out / groups, kh, kw]."""

    input_reductions = (-3,)


@quantizes(nn.ConvTranspose3d)
class QuantConvTranspose3d(_QuantConvTranspose, nn.ConvTranspose3d):
    """ConvTranspose3d with quantized input [n, in, d, h, w] and weight [in, out / groups, kd, kh, kw]."""

    input_reductions = (-4,)


class _QuantPool(SpatialLayer):
    output_channels: ClassVar[int | None] = None

    @classmethod
    def kernel_sizes(cls, layer: nn.Module) -> Sequence[int]:
        size: Any = getattr(layer, "kernel_size", 0)  # an adaptive layer has none: it is as long as the input needs
        return size if isinstance(size, tuple) else [size] * (-cls.input_reductions[0] - 1)

    def forward(self, input: Tensor) -> Any:
        return as_leaf(self, input) if isinstance(input, Proxy) else super().forward(self.quantized_input(input))


for _pool in (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
):
    _channels = -1 - int(_pool.__name__[-2])
    _made = {
        "__doc__": f"{_pool.__name__} of a quantized input.",
        "__module__": __name__,
        "input_reductions": (_channels,),
    }
    globals()[f"Quant{_pool.__name__}"] = quantizes(_pool)(type(f"Quant{_pool.__name__}", (_QuantPool, _pool), _made))
