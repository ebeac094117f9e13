"""Products of quantized layers on integer units: codes times codes, exact sums, one float epilogue.

`numerics/products.py` defines the result, `ops/products.py` computes it. The gradients are those of the simulated
layer: the product passes them to what stands for the quantized tensors (`library.encode`), whose masks then hold.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fakequant.errors import ConfigError
from fakequant.nn.quantizer import Mode, Quantizer
from fakequant.numerics.granularity import PerChannel, PerTensor, PerToken
from fakequant.numerics.products import Factor, Places
from fakequant.numerics.qparams import QParams
from fakequant.numerics.spec import Arithmetic, QuantSpec, Rounding
from fakequant.ops import library, products

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Execution(Enum):
    """How a quantized layer computes its product."""

    SIMULATE = "simulate"
    """Quantized values are multiplied in float."""
    AUTO = "auto"
    """Codes are multiplied wherever that can be done; else the layer is simulated."""
    INTEGER = "integer"
    """The same, and a layer that never can is refused."""


class CodedTensor(NamedTuple):
    """A quantized tensor as codes.

    Attributes:
        stand_in: what takes the gradient of the quantized tensor, see `library.encode`.
        codes: integers, the shape of the tensor.
        params: scale and zero point, without gradients.
        spec: what the codes mean.
    """

    stand_in: Tensor
    codes: Tensor
    params: QParams
    spec: QuantSpec

    @property
    def factor(self) -> Factor:
        """The tensor as a factor of a product."""
        return Factor(self.codes, self.params.scale, self.params.zero_point)

    def values(self, dtype: torch.dtype) -> Tensor:
        """What a simulated layer multiplies."""
        return library.dequantize(self.codes, self.params, self.spec, dtype)


def encode(quantizer: Quantizer, x: Tensor) -> CodedTensor | None:
    """The codes of a tensor, or None if it holds NaN, which has none."""
    params = quantizer.qparams(x)
    found = library.encode(x, params, quantizer.spec)
    if found is None:
        return None
    if params.scale.requires_grad or (params.zero_point is not None and params.zero_point.requires_grad):
        zero_point = None if params.zero_point is None else params.zero_point.detach()
        params = QParams(params.scale.detach(), zero_point)
    return CodedTensor(*found, params, quantizer.spec)


class Ready:
    """What follows from a layer and its quantizers as they were: why it is simulated, and what its product needs.

    Kept by the layer, because every Python function costs as much as encoding thousands of elements. Copies and
    pickles of it are None.
    """

    def __init__(self, state: tuple[Any, ...], reason: str | None, places: Places) -> None:
        self.state, self.reason, self.places = state, reason, places
        self.packed: tuple[Tensor, Tensor] | None = None
        """What oneDNN made of the codes of the weight, after the codes: they tell whether it is still theirs."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class IntegerProduct(ABC):
    """How a kind of layer multiplies codes."""

    def __call__(self, layer: Any, x: Tensor) -> Tensor | None:
        """The output of a layer for an input, or None where it is to be simulated."""
        ready = self.ready(layer)
        if ready.reason is not None or library.is_watched(x, *layer._parameters.values()):
            return None
        if x.dtype not in _DTYPES or not x.numel():
            return None
        encoded = encode(layer._modules["_input_quantizer"], x)
        weight = None if encoded is None else encode(layer._modules["_weight_quantizer"], layer._parameters["weight"])
        if encoded is None or weight is None:  # NaN, which is to be seen in the output
            return None
        y = self.multiply(ready, encoded, weight, layer._parameters["bias"])
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        return y if y.dtype == dtype else y.to(dtype)

    def ready(self, layer: Any) -> Ready:
        """What is known of a layer as it is now."""
        quantizers = [layer._modules.get(name) for name in ("_input_quantizer", "_weight_quantizer")]
        weight = layer._parameters["weight"]
        state = (*(q and (q.mode, q.spec) for q in quantizers), weight.dtype, weight.device, weight.shape)
        ready = layer.__dict__.get("_ready")
        if ready is None or ready.state != state:
            reason = _mode_reason(quantizers) or self.cannot(layer, *(q and q.spec for q in quantizers))
            ready = layer._ready = Ready(state, reason, self.places(layer))
        return ready

    @abstractmethod
    def cannot(self, layer: Any, input: QuantSpec | None, weight: QuantSpec | None) -> str | None:
        """Why a layer with these quantizers is simulated, or None: whatever its input."""

    def places(self, layer: Any) -> Places:
        """Where the windows of a convolution are; nowhere for other layers."""
        return Places([], [], [], 1)

    @abstractmethod
    def multiply(self, ready: Ready, x: CodedTensor, weight: CodedTensor, bias: Tensor | None) -> Tensor:
        """The product in float32."""


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
    if spec.arithmetic is Arithmetic.MULTIPLIER:
        return "Arithmetic.MULTIPLIER divides codes, and a product multiplies them"
    if spec.rounding is Rounding.STOCHASTIC:
        return "stochastic rounding is simulated"
    return None


def _mode_reason(quantizers: list[Quantizer | None]) -> str | None:
    other = [q.mode.value for q in quantizers if q is not None and q.mode is not Mode.QUANTIZE]
    return f"a quantizer is in mode {other[0]}" if other else None


def _input_reason(spec: QuantSpec | None, *granularities: type) -> str | None:
    """Why an input has no codes for a product."""
    if spec is None:
        return "its input is in float"
    if reason := cannot_multiply(spec):
        return f"its input: {reason}"
    if not isinstance(spec.granularity, granularities):
        return f"its input: a sum of products has one scale, not {spec.granularity}"
    return None


def _weight_reason(spec: QuantSpec | None, weight: Tensor) -> str | None:
    """Why a weight with output channels on axis 0 has no codes for a product."""
    if spec is None:
        return "its weight is in float"
    if reason := cannot_multiply(spec):
        return f"its weight: {reason}"
    if not spec.symmetric or spec.format.storage != torch.int8:
        return "its weight: codes must be signed, without a zero point"
    granularity = spec.granularity
    per_output = isinstance(granularity, PerChannel) and [a % weight.dim() for a in granularity.axes] == [0]
    if not per_output and not isinstance(granularity, PerTensor):
        return f"its weight: a sum of products has one scale, not {granularity}"
    return None if weight.dtype in _DTYPES else f"its weight is {weight.dtype}"


def _sum_reason(weight: Tensor, *specs: QuantSpec | None) -> str | None:
    """Why the sums of products of a layer may leave int32."""
    size, most = weight[0].numel(), products.largest_inner_size(*(_reach(spec) for spec in specs if spec is not None))
    return f"sums of {size:,} products may leave int32; of {most:,} they cannot" if size > most else None


def _reach(spec: QuantSpec) -> int:
    """How far codes may be from 0, or from a zero point."""
    lowest, highest = int(spec.format.quant_min), int(spec.format.quant_max)
    return max(-lowest, highest) if spec.symmetric else highest - lowest


class LinearProduct(IntegerProduct):
    """Input [..., in] times the transposed weight [out, in]."""

    def cannot(self, layer: Any, input: QuantSpec | None, weight: QuantSpec | None) -> str | None:
        return (
            _input_reason(input, PerTensor, PerToken)
            or _weight_reason(weight, layer.weight)
            or products.linear_unavailable(layer.weight.device.type)
            or _sum_reason(layer.weight, input, weight)
        )

    def multiply(self, ready: Ready, x: CodedTensor, weight: CodedTensor, bias: Tensor | None) -> Tensor:
        if torch.is_grad_enabled():
            return _Linear.apply(x.stand_in, weight.stand_in, bias, x, weight)
        return products.linear(x.factor, weight.factor, bias)


class ConvolutionProduct(IntegerProduct):
    """Input [n, in, ...] convolved with weight [out, in / groups, ...]."""

    def cannot(self, layer: Any, input: QuantSpec | None, weight: QuantSpec | None) -> str | None:
        return (
            _input_reason(input, PerTensor)
            or _weight_reason(weight, layer.weight)
            or (f"padding_mode={layer.padding_mode!r} is simulated" if layer.padding_mode != "zeros" else None)
            or ("padding='same' is simulated" if layer.padding == "same" else None)
            or products.convolution_unavailable(layer.weight.device.type)
            or _sum_reason(layer.weight, input, weight)
        )

    def places(self, layer: Any) -> Places:
        padding = [0] * len(layer.kernel_size) if isinstance(layer.padding, str) else list(layer.padding)
        return Places(list(layer.stride), padding, list(layer.dilation), layer.groups)

    def __call__(self, layer: Any, x: Tensor) -> Tensor | None:
        if x.dim() == layer._parameters["weight"].dim():
            return super().__call__(layer, x)
        y = super().__call__(layer, x.unsqueeze(0))
        return None if y is None else y.squeeze(0)

    def multiply(self, ready: Ready, x: CodedTensor, weight: CodedTensor, bias: Tensor | None) -> Tensor:
        if ready.packed is None or not torch.equal(ready.packed[0], weight.codes):
            ready.packed = weight.codes, products.pack_weight(weight.codes, ready.places, x.codes.shape)
        packed = ready.packed[1]
        if torch.is_grad_enabled():
            return _Convolution.apply(x.stand_in, weight.stand_in, bias, x, weight, packed, ready.places)
        return products.convolution(x.factor, packed, weight.params.scale, bias, ready.places)


class _Linear(torch.autograd.Function):
    """A product of codes; its gradients are those of the product of the values."""

    @staticmethod
    def forward(
        ctx: Any, x_like: Tensor, weight_like: Tensor, bias: Tensor | None, x: CodedTensor, weight: CodedTensor
    ) -> Tensor:
        ctx.factors = _without_stand_in(x), _without_stand_in(weight)
        return products.linear(x.factor, weight.factor, bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        (dy,), (x, weight) = grad_outputs, ctx.factors
        wants_x, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        rows = dy.reshape(-1, dy.shape[-1])
        dx = dy @ weight.values(dy.dtype) if wants_x else None
        d_weight = rows.t() @ x.values(dy.dtype).reshape(-1, x.codes.shape[-1]) if wants_weight else None
        return dx, d_weight, rows.sum(0) if wants_bias else None, None, None


class _Convolution(torch.autograd.Function):
    """`_Linear` for convolutions."""

    @staticmethod
    def forward(  # noqa: PLR0913  an argument for each tensor that gets a gradient
        ctx: Any,
        x_like: Tensor,
        weight_like: Tensor,
        bias: Tensor | None,
        x: CodedTensor,
        weight: CodedTensor,
        packed: Tensor,
        places: Places,
    ) -> Tensor:
        ctx.factors, ctx.places = (_without_stand_in(x), _without_stand_in(weight)), places
        return products.convolution(x.factor, packed, weight.params.scale, bias, places)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        (dy,), places = grad_outputs, ctx.places
        x, weight = (factor.values(dy.dtype) for factor in ctx.factors)
        wants = list(ctx.needs_input_grad[:3])
        found = torch.ops.aten.convolution_backward(
            dy,
            x,
            weight,
            [dy.shape[1]],
            places.stride,
            places.padding,
            places.dilation,
            False,
            [0] * len(places.stride),
            places.groups,
            wants,
        )
        return (*(grad if wanted else None for grad, wanted in zip(found, wants, strict=True)), None, None, None, None)


def _refuse_second_derivatives() -> None:
    # Grad mode is on in a backward pass only if a gradient of this gradient will be asked for.
    if torch.is_grad_enabled():
        raise ConfigError(
            "gradients of gradients (create_graph=True) go through simulated layers only; "
            'call fakequant.set_execution(model, "simulate")'
        )


def _without_stand_in(x: CodedTensor) -> CodedTensor:
    """For a backward pass: the stand-in knows the graph before it, which would be a circle."""
    return x._replace(stand_in=x.codes)
