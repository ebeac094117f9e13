"""Products of quantized layers on integer units: codes times codes, exact sums, one float epilogue.

`numerics/products.py` defines the result, `ops/products.py` computes it, and `ops/float8_products.py` what comes close
to it for codes of float8; `integer_products.py` has one class for each kind of layer. The gradients are those of the
simulated layer: those of the product of the values, through the masks that encoding gives beside the codes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fakequant.errors import ConfigError
from fakequant.nn.quantizer import Mode, Quantizer, is_as_made
from fakequant.numerics.products import Factor, Places
from fakequant.numerics.qparams import QParams
from fakequant.numerics.spec import Arithmetic, QuantSpec, Rounding
from fakequant.ops import library, products
from fakequant.ops.backend import Direct
from fakequant.ops.convolutions import PackedWeight
from fakequant.ops.direct import mask_directly, values_directly
from fakequant.ops.kept import Kept, encode_learned, keep_codes
from fakequant.ops.rectified import in_one_pass

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Laid(NamedTuple):
    """Where the elements of a tensor are that is not there any more."""

    shape: torch.Size
    stride: tuple[int, ...]


class Execution(Enum):
    """How a quantized layer computes its product."""

    SIMULATE = "simulate"
    """Quantized values are multiplied in float."""
    AUTO = "auto"
    """Codes are multiplied wherever that can be done exactly; else the layer is simulated."""
    INTEGER = "integer"
    """The same, and float8 codes, whose sums the device rounds; a layer that never can is refused."""


class CodedTensor(NamedTuple):
    """A quantized tensor as codes.

    Attributes:
        source: what takes the gradient: the tensor itself, or see `kept.encode_learned`.
        kept: the codes, the shape of the tensor, and where the gradient passes to the source.
        params: scale and zero point, without gradients.
        spec: what the codes mean.
    """

    source: Tensor
    kept: Kept
    params: QParams
    spec: QuantSpec

    @property
    def codes(self) -> Tensor:
        """Integers, or 8-bit floats."""
        return self.kept.values

    @property
    def factor(self) -> Factor:
        """The tensor as a factor of a product, whose scale is float32 whatever the quantizer's is."""
        return Factor(self.codes, self.params.scale.to(torch.float32), self.params.zero_point)


def encode(quantizer: Quantizer, x: Tensor, *, relu: bool = False) -> CodedTensor | None:
    """The codes of a tensor or, by fixed parameters, of its ReLU; None if it holds NaN, which has none.

    By the first that serves: what `cached_weights` holds, one operator that checks parameters too (`ops.direct`), codes
    whose gradient moves a learned scale, and the backend's own way.
    """
    spec, wants_grad = quantizer.spec, torch.is_grad_enabled()
    wants_mask = wants_grad and x.requires_grad
    if (found := quantizer.codes(x, relu=relu, mask=wants_mask)) is not None:
        return CodedTensor(x, *found, spec)
    params = quantizer.qparams(x)
    if relu and not in_one_pass(x, params, spec, codes=True):
        x, relu = torch.relu(x), False
    if wants_grad and library.are_learned(params):
        learned = encode_learned(x, params, quantizer.trained_spec)
        zero_point = None if params.zero_point is None else params.zero_point.detach()
        return None if learned is None else CodedTensor(*learned, QParams(params.scale.detach(), zero_point), spec)
    kept = keep_codes(x, params, spec, mask=wants_mask, relu=relu)
    return None if kept is None else CodedTensor(x, kept, params, spec)


def mixes_dtypes(x: Tensor, other: Tensor) -> bool:
    """Whether the dtypes of factors differ without autocast, which torch refuses."""
    return x.dtype != other.dtype and not torch.is_autocast_enabled(x.device.type)


class Ready:
    """What follows from a layer and its quantizers as they were: why it is simulated, and what its product needs.

    Kept by the layer, because every Python function costs as much as encoding thousands of elements. Copies and
    pickles of it are None.
    """

    def __init__(self, state: tuple[Any, ...], reason: str | None, places: Places) -> None:
        self.state, self.reason, self.places = state, reason, places
        self.packed: PackedWeight | None = None
        """The weight of a convolution; its codes tell whether it is still that."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class IntegerProduct(ABC):
    """How a kind of layer multiplies codes: those of its input with those of its weight, or of its other input.

    Instances have no state: compiled graphs know a product by the name of its class.
    """

    quantizers: ClassVar[tuple[str, str]] = ("_input_quantizer", "_weight_quantizer")
    """The layer's attributes that hold those of the factors."""
    fewest_axes: ClassVar[int] = 1
    """Of each factor."""

    def __call__(
        self, layer: Any, x: Tensor, other: Tensor, bias: Tensor | None = None, *, relu: bool = False
    ) -> Tensor | None:
        """The output of a layer for its factors, or None where it is to be simulated.

        Args:
            layer: whose quantizers encode the factors.
            x: the input.
            other: the weight, or the other input.
            bias: of a layer with a weight.
            relu: whether the ReLU of the input is the factor; its quantizer has fixed parameters then.
        """
        # First, because where something watches a trial of operators would fail, and that is remembered.
        if library.is_watched(x, other, bias):
            return None
        ready = self.ready(layer)
        if ready.reason is not None or mixes_dtypes(x, other):
            return None
        of_x, of_other = (layer._modules[name] for name in self.quantizers)
        if not self.fits(x, other, (of_x.spec, of_other.spec)):
            return None
        coded = encode(of_x, x, relu=relu)
        coded_other = None if coded is None else encode(of_other, other)
        if coded is None or coded_other is None:  # NaN, which is to be seen in the output
            return None
        if torch.is_grad_enabled():
            y = _Product.apply(coded.source, coded_other.source, bias, coded, coded_other, self, ready)
        else:
            y = self.multiply(ready, coded, coded_other, bias)
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        return y if y.dtype == dtype else y.to(dtype)

    def ready(self, layer: Any) -> Ready:
        """What is known of a layer as it is now."""
        quantizers = [layer._modules.get(name) for name in self.quantizers]
        state = (
            layer.execution,
            *(q and (q.mode, q.spec, _may_be_skipped(q)) for q in quantizers),
            *self.depends_on(layer),
        )
        ready = layer.__dict__.get("_ready")
        if ready is None or ready.state != state:
            ready = layer._ready = Ready(state, self.why_simulated(layer, layer.execution), self.places(layer))
        return ready

    def why_simulated(self, layer: Any, execution: Execution) -> str | None:
        """Why a layer, as it is now, does not multiply codes if it is told to, whatever its input; None if it does."""
        quantizers = [layer._modules.get(name) for name in self.quantizers]
        exact = execution is not Execution.INTEGER
        return _call_reason(quantizers) or self.cannot(layer, *(q and q.spec for q in quantizers), exact=exact)

    def depends_on(self, layer: Any) -> tuple[Any, ...]:
        """What else decides whether a layer can multiply codes, and where its windows are."""
        weight = layer.weight
        return weight.dtype, weight.device, weight.shape

    def windows(self, layer: Any) -> tuple[Any, ...]:
        """The attributes of a layer that say where its windows are; none of other layers than convolutions."""
        return ()

    def fits(self, x: Tensor, other: Tensor, specs: tuple[QuantSpec, QuantSpec] | None) -> bool:
        """Whether factors can be multiplied by what only they tell: dtypes and sizes.

        Args:
            x: the input.
            other: the weight, or the other input.
            specs: of both; None while a graph is made, which asks again with them when it runs.
        """
        return (
            x.dtype in DTYPES
            and other.dtype in DTYPES
            and min(x.dim(), other.dim()) >= self.fewest_axes
            and x.numel() > 0
            and other.numel() > 0
        )

    @abstractmethod
    def cannot(self, layer: Any, input: QuantSpec | None, other: QuantSpec | None, *, exact: bool) -> str | None:
        """Why a layer whose factors are quantized so is simulated, or None: whatever its input.

        Args:
            layer: the layer, which need not be quantized yet.
            input: of the input.
            other: of the weight, or of the other input.
            exact: whether a sum that is rounded is a reason.
        """

    def places(self, layer: Any) -> Places:
        """Where the windows of a convolution are; nowhere for other layers."""
        return Places([], [], [], 1)

    @abstractmethod
    def multiply(self, ready: Ready, x: CodedTensor, other: CodedTensor, bias: Tensor | None) -> Tensor:
        """The product in float32."""

    @abstractmethod
    def in_float(self, x: Tensor, other: Tensor, bias: Tensor | None, places: Places) -> Tensor:
        """The product of the factors' values."""

    def empty_result(self, x: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor that lies in memory as the product does."""
        return x.new_empty(shape, dtype=dtype)

    @abstractmethod
    def grad_input(self, dy: Tensor, other: Tensor, x: Laid, places: Places) -> Tensor:
        """The gradient of the input, of the product of the factors' values."""

    @abstractmethod
    def grad_other(
        self, dy: Tensor, x: Tensor, other: Laid, places: Places, *, with_bias: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The gradient of the weight or other input, and that of the bias if it is wanted."""

    def grad_bias(self, dy: Tensor, x: Laid, other: Laid, places: Places) -> Tensor:
        """The gradient of the bias alone."""
        return dy.reshape(-1, dy.shape[-1]).sum(0)


class _Product(torch.autograd.Function):
    """A product of codes; its gradients are those of the product of the values."""

    @staticmethod
    def forward(  # noqa: PLR0913  an argument for each tensor that gets a gradient
        ctx: Any,
        x_source: Tensor,
        other_source: Tensor,
        bias: Tensor | None,
        x: CodedTensor,
        other: CodedTensor,
        product: IntegerProduct,
        ready: Ready,
    ) -> Tensor:
        wants_x, wants_other, *_ = ctx.needs_input_grad
        # Of each factor the codes only if the other's gradient is wanted, which is a product with them.
        ctx.save_for_backward(*_saved(x, codes=wants_other), *_saved(other, codes=wants_x))
        # Without their tensors, which are saved.
        ctx.kept = [one.kept._replace(values=None, mask=None) for one in (x, other)]
        ctx.laid = [Laid(one.codes.shape, one.codes.stride()) for one in (x, other)]
        ctx.specs, ctx.product, ctx.places = (x.spec, other.spec), product, ready.places
        y = product.multiply(ready, x, other, bias)
        # Of a view, autograd would refuse to let anything change it in place, such as a ReLU.
        if not y._is_view():
            return y
        return y.new_empty(0).set_(y.untyped_storage(), y.storage_offset(), y.shape, y.stride())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        # Grad mode is on in a backward pass only if a gradient of this gradient will be asked for.
        if torch.is_grad_enabled():
            raise ConfigError(
                "gradients of gradients (create_graph=True) go through simulated layers only; "
                'call fakequant.set_execution(model, "simulate")'
            )
        dy, saved, product, places = grad_outputs[0], ctx.saved_tensors, ctx.product, ctx.places
        (of_x, of_other), (laid_x, laid_other) = (saved[:4], saved[4:]), ctx.laid
        wants_x, wants_other, wants_bias, *_ = ctx.needs_input_grad
        dx = d_other = d_bias = None
        # One after the other, because a factor takes four times the memory of its codes.
        if wants_x:
            values = _values(of_other, ctx.specs[1], ctx.kept[1].direct, dy)
            dx = _masked(product.grad_input(dy, values, laid_x, places), of_x[-1], ctx.kept[0])
        if wants_other:
            values = _values(of_x, ctx.specs[0], ctx.kept[0].direct, dy)
            d_other, d_bias = product.grad_other(dy, values, laid_other, places, with_bias=wants_bias)
            d_other = _masked(d_other, of_other[-1], ctx.kept[1])
        elif wants_bias:
            d_bias = product.grad_bias(dy, laid_x, laid_other, places)
        return dx, d_other, d_bias, None, None, None, None


_Saved = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]  # codes, scale, zero point, mask


def _saved(one: CodedTensor, *, codes: bool) -> _Saved:
    if not codes:
        return None, None, None, one.kept.mask
    # The parameters as they are now: a calibration or a checkpoint may change them before the backward pass.
    scale, zero_point = (None if parameter is None else parameter.clone() for parameter in one.params[:2])
    return one.codes, scale, zero_point, one.kept.mask


def _values(saved: _Saved, spec: QuantSpec, direct: Direct | None, like: Tensor) -> Tensor:
    """The values of saved codes in the dtype of `like`."""
    codes, scale, zero_point, _ = saved
    assert codes is not None, "a factor was saved that nobody reads"
    assert scale is not None, "codes without a scale"
    values = None if direct is None else values_directly(codes, scale, zero_point, direct, like)
    return library.dequantize(codes, QParams(scale, zero_point), spec, like.dtype) if values is None else values


def _masked(d: Tensor, mask: Tensor | None, kept: Kept) -> Tensor:
    """What passes of a gradient that the product has just computed, and that nobody else reads."""
    if mask is not None and kept.direct is not None and mask_directly(d, mask, kept.direct):
        return d
    return (library.masked_gradient_dense if kept.dense else library.masked_gradient)(d, mask, kept.call, over=True)


def cannot_multiply(spec: QuantSpec) -> str | None:
    """Why tensors of a specification have no codes for an integer product, or None.

    >>> cannot_multiply(QuantSpec("int4"))
    >>> cannot_multiply(QuantSpec("float8_e4m3fn"))
    'codes of float8_e4m3fn are no integers'
    """
    fmt = spec.format
    if not fmt.has_zero_point:
        return f"codes of {fmt} are no integers"
    if fmt.storage not in products.CODES:
        return f"codes of {fmt} do not fit 8 bits"
    return cannot_scale(spec)


def cannot_scale(spec: QuantSpec) -> str | None:
    """Why a sum of products of codes, whatever they are, cannot be scaled to that of the values, or None.

    >>> cannot_scale(QuantSpec("float8_e4m3fn"))
    """
    if spec.arithmetic is Arithmetic.MULTIPLIER:
        return "Arithmetic.MULTIPLIER divides codes, and a product multiplies them"
    if spec.rounding is Rounding.STOCHASTIC:
        return "stochastic rounding is simulated"
    return None


def _call_reason(quantizers: list[Quantizer | None]) -> str | None:
    """Why quantizers are to be called, which products of codes do not."""
    other = [q.mode.value for q in quantizers if q is not None and q.mode is not Mode.QUANTIZE]
    if other:
        return f"a quantizer is in mode {other[0]}"
    plain = all(q is None or _may_be_skipped(q) for q in quantizers)
    return None if plain else "a quantizer has a hook or a forward of its own, which products of codes do not call"


def _may_be_skipped(quantizer: Quantizer) -> bool:
    """Whether nobody sees that a quantizer is not called."""
    return type(quantizer).forward is Quantizer.forward and is_as_made(quantizer)
