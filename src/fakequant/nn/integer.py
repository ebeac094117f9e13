"""Products of quantized layers in integers: codes times codes, exact sums, then scales and bias in float.

`numerics/products.py` defines the result, which `ops/products.py` computes. Integer products are for inference: if a
gradient is needed, the layer computes in float on quantized values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping
from enum import Enum
from functools import lru_cache
from itertools import chain
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fakequant.errors import ConfigError
from fakequant.memory import fetched
from fakequant.nn.quantizer import Mode, Quantizer
from fakequant.numerics.granularity import PerChannel, PerTensor, PerToken
from fakequant.numerics.products import ConvParams, QuantizedOperand
from fakequant.numerics.qparams import QParams
from fakequant.numerics.spec import QuantSpec, Rounding
from fakequant.ops import library, products
from fakequant.ops.products import PackedWeight


class Watched:
    """Base of modules that pass tensors from inside their `forward`, which no hook of torch sees, to functions."""

    _watching: Mapping[int, Callable[..., None]] = MappingProxyType({})

    def watch(self, see: Callable[..., None]) -> RemovableHandle:
        """Register the function `see`, which `show` calls; the returned handle removes it, as for hooks of torch."""
        watching: dict[int, Any] = vars(self).setdefault("_watching", OrderedDict())
        handle = RemovableHandle(watching)
        watching[handle.id] = see
        return handle

    @property
    def is_watched(self) -> bool:
        """Whether `watch` has registered a function."""
        return len(self._watching) > 0  # Dynamo takes an empty mapping proxy for true

    def show(self, *values: Any) -> None:
        """Call all functions that `watch` has registered with the values."""
        for see in tuple(self._watching.values()):  # a lane of `improve` may stop in one, while others come
            see(*values)


DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Execution(Enum):
    """How a quantized layer computes its product: in float on quantized values, or on integer codes."""

    SIMULATE = "simulate"
    """Quantized values are multiplied in float."""
    AUTO = "auto"
    """Codes are multiplied wherever that is exact; else quantized values are multiplied in float."""
    INTEGER = "integer"
    """As AUTO, but a layer that can never multiply codes raises an error."""


def as_execution(value: Execution | str) -> Execution:
    """The `Execution` with a name; an `Execution` is returned unchanged. Raises ConfigError for other values."""
    try:
        return Execution(value)
    except ValueError as error:
        names = ", ".join(repr(known.value) for known in Execution)
        raise ConfigError(f"execution must be one of {names}, got {value!r}") from error


class CodedTensor(NamedTuple):
    """A quantized tensor as integer codes [shape of the tensor], with scale and zero point."""

    codes: Tensor
    params: QParams

    @property
    def factor(self) -> QuantizedOperand:
        """The tensor as a factor of an integer product, with its scale as float32."""
        return QuantizedOperand(self.codes, self.params.scale.to(torch.float32), self.params.zero_point)


def encode(quantizer: Quantizer, x: Tensor) -> CodedTensor | None:
    """The codes, scale and zero point of a tensor; None if it holds NaN, which has no code."""
    found = quantizer.codes(x)
    return None if found is None else CodedTensor(*found)


def wants_gradient(layer: Any, *tensors: Tensor | None) -> bool:
    """Whether autograd needs a gradient of one of the tensors, or of a parameter or buffer of the layer."""
    if not torch.is_grad_enabled():
        return False
    given = chain(tensors, layer.parameters(), layer.buffers())
    return any(x is not None and x.requires_grad for x in given)


def mixes_dtypes(x: Tensor, other: Tensor) -> bool:
    """Whether two factors have different dtypes, and no autocast makes them equal: torch refuses such products."""
    return x.dtype != other.dtype and not torch.is_autocast_enabled(x.device.type)


class Ready:
    """The cache of a layer for integer products: the packed weight, or the reason why the layer is simulated.

    To compute the reason at each call would cost as much as encoding thousands of elements.
    """

    def __init__(self, state: tuple[Any, ...], reason: str | None, places: ConvParams) -> None:
        self.state, self.reason, self.places = state, reason, places
        self.packed: PackedWeight | None = None
        """The packed weight of a convolution; its codes tell whether it is still valid."""


_READY: WeakKeyDictionary[nn.Module, Ready] = WeakKeyDictionary()
"""The cache of each layer. It is no attribute of the layer, because a run's changes of attributes are undone."""


class IntegerProduct(ABC):
    """The integer product of one kind of layer: codes of its input times codes of its weight or other input."""

    quantizers: ClassVar[tuple[str, str]] = ("_input_quantizer", "_weight_quantizer")
    """The attributes of the layer that hold the quantizers of both factors."""
    fewest_axes: ClassVar[int] = 1
    """The smallest number of axes of each factor."""

    def __call__(self, layer: Any, x: Tensor, other: Tensor, bias: Tensor | None = None) -> Tensor | None:
        """The output of a layer in integer execution, or None if the layer must be simulated in float.

        `other` is the weight, or the other input; `bias` is the bias of a layer with a weight.
        """
        # First, because where something watches a trial of operators would fail, and that is remembered.
        if wants_gradient(layer, x, other) or library.needs_tracing(x, other, bias):
            return None
        ready = self.ready(layer)
        if ready.reason is not None or mixes_dtypes(x, other):
            return None
        of_x, of_other = (layer._modules[name] for name in self.quantizers)
        if (transform := layer._modules.get("_input_transform")) is not None:
            x = transform(x)
        if not self.fits(x, other, (of_x.spec, of_other.spec)):
            return None
        coded = encode(of_x, x)
        coded_other = None if coded is None else encode(of_other, other)
        if coded is None or coded_other is None:  # NaN must be seen in the output
            return None
        y = self.multiply(ready, coded, coded_other, bias)
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        return y if y.dtype == dtype else y.to(dtype)

    def ready(self, layer: Any) -> Ready:
        """The cache of a layer; a new one if the execution, the state of quantizers or `depends_on` changed."""
        quantizers = [layer._modules.get(name) for name in self.quantizers]
        state = (
            layer.execution,
            *(q and (q.mode, q.spec, q.may_be_skipped) for q in quantizers),
            *self.depends_on(layer),
        )
        ready = _READY.get(layer)
        if ready is None or ready.state != state:
            ready = _READY[layer] = Ready(state, self.why_simulated(layer, layer.execution), self.places(layer))
        return ready

    def why_simulated(self, layer: Any, execution: Execution) -> str | None:
        """Why a layer in integer execution is simulated for all inputs; None if the layer multiplies integers."""
        quantizers = [layer._modules.get(name) for name in self.quantizers]
        if modes := [q.mode.value for q in quantizers if q is not None and q.mode is not Mode.QUANTIZE]:
            return f"a quantizer is in mode {modes[0]}"
        if not all(q is None or q.may_be_skipped for q in quantizers):
            return "a quantizer has a hook or a forward of its own, which integer execution does not call"
        return self.cannot(layer, *(q and q.spec for q in quantizers))

    def depends_on(self, layer: Any) -> tuple[Any, ...]:
        """The properties of a layer, besides its quantizers, that decide whether and how it multiplies integers."""
        weight = layer.weight
        return weight.dtype, weight.device, weight.shape

    def fits(self, x: Tensor, other: Tensor, specs: tuple[QuantSpec, QuantSpec]) -> bool:
        """Whether the dtypes and sizes of two factors with these specifications allow an integer product."""
        return (
            x.dtype in DTYPES
            and other.dtype in DTYPES
            and min(x.dim(), other.dim()) >= self.fewest_axes
            and x.numel() > 0
            and other.numel() > 0
        )

    @abstractmethod
    def cannot(self, layer: Any, input: QuantSpec | None, other: QuantSpec | None) -> str | None:
        """Why a layer with these specifications is simulated for all inputs; None if it can multiply integers."""

    def places(self, layer: Any) -> ConvParams:
        """The stride, padding, dilation and groups of a convolution; empty lists and 1 for other layers."""
        return ConvParams([], [], [], 1)

    @abstractmethod
    def multiply(self, ready: Ready, x: CodedTensor, other: CodedTensor, bias: Tensor | None) -> Tensor:
        """The product [shape of the output] in float32, with scales and bias."""


def cannot_multiply(spec: QuantSpec) -> str | None:
    """Why tensors of a specification have no codes for an integer product; None if they have such codes.

    >>> cannot_multiply(QuantSpec("int4"))
    >>> cannot_multiply(QuantSpec("float8_e4m3fn"))
    'codes of float8_e4m3fn are not integers'
    """
    fmt = spec.format
    if not fmt.has_zero_point:
        return f"codes of {fmt} are not integers"
    if fmt.storage not in products.CODES:
        return f"codes of {fmt} do not fit 8 bits"
    if not spec.arithmetic.is_linear:
        return f"{spec.arithmetic} does not multiply codes by their scale, as an integer product must"
    if spec.rounding is Rounding.STOCHASTIC:
        return "stochastic rounding is simulated"
    if spec.offset is not None:
        return "its offset is not a code"
    return None


class LinearProduct(IntegerProduct):
    """The integer product of input [..., in] and transposed weight [out, in]."""

    def cannot(self, layer: Any, input: QuantSpec | None, other: QuantSpec | None) -> str | None:
        return (
            _input_reason(input, PerTensor, PerToken)
            or _weight_reason(other, layer.weight)
            or products.linear_unavailable(fetched(layer, "weight", layer.weight).device.type)
            or _sum_reason(layer.weight, input, other)
        )

    def fits(self, x: Tensor, other: Tensor, specs: tuple[QuantSpec, QuantSpec]) -> bool:
        # torch says what is wrong with other sizes.
        return super().fits(x, other, specs) and x.shape[-1] == other.shape[-1]

    def multiply(self, ready: Ready, x: CodedTensor, other: CodedTensor, bias: Tensor | None) -> Tensor:
        return products.linear(x.factor, other.factor, bias)


class ConvolutionProduct(IntegerProduct):
    """The integer convolution of input [n, in, ...] with weight [out, in / groups, ...]."""

    def depends_on(self, layer: Any) -> tuple[Any, ...]:
        windows = layer.stride, layer.padding, layer.dilation, layer.groups, layer.padding_mode
        return *super().depends_on(layer), *windows

    def cannot(self, layer: Any, input: QuantSpec | None, other: QuantSpec | None) -> str | None:
        return (
            _input_reason(input, PerTensor)
            or _weight_reason(other, layer.weight)
            or (f"padding_mode={layer.padding_mode!r} is simulated" if layer.padding_mode != "zeros" else None)
            or ("padding='same' is simulated" if layer.padding == "same" else None)
            or products.convolution_unavailable(fetched(layer, "weight", layer.weight).device.type)
            or _sum_reason(layer.weight, input, other)
        )

    def places(self, layer: Any) -> ConvParams:
        padding = 0 if isinstance(layer.padding, str) else layer.padding
        # Layers are made with a number for each axis, but may be given one number for all of them later.
        stride, padding, dilation = (
            [value] * len(layer.kernel_size) if isinstance(value, int) else list(value)
            for value in (layer.stride, padding, layer.dilation)
        )
        return ConvParams(stride, padding, dilation, layer.groups)

    def multiply(self, ready: Ready, x: CodedTensor, other: CodedTensor, bias: Tensor | None) -> Tensor:
        packed, codes = ready.packed, other.codes
        if packed is None or not packed.is_of(codes):
            ready.packed = packed = PackedWeight(codes, ready.places)
        return products.convolution(x.factor, packed, other.factor.scale, bias)


class MatMulProduct(IntegerProduct):
    """The integer product of input [..., n, k] and other input [..., k, m]."""

    quantizers = ("_input_quantizer", "_other_quantizer")
    fewest_axes = 2

    def cannot(self, layer: Any, input: QuantSpec | None, other: QuantSpec | None) -> str | None:
        return (
            _input_reason(input, PerTensor, PerToken)
            or _input_reason(other, PerTensor, name="other input")
            or products.linear_unavailable(next((own.device.type for own in layer.buffers()), "cpu"))
        )

    def depends_on(self, layer: Any) -> tuple[Any, ...]:
        return ()

    def fits(self, x: Tensor, other: Tensor, specs: tuple[QuantSpec, QuantSpec]) -> bool:
        if not super().fits(x, other, specs) or x.shape[-1] != other.shape[-2]:
            return False
        return products.linear_unavailable(x.device.type) is None and x.shape[-1] <= _most(*specs)

    def multiply(self, ready: Ready, x: CodedTensor, other: CodedTensor, bias: Tensor | None) -> Tensor:
        return products.matmul(x.factor, other.factor)


def _input_reason(spec: QuantSpec | None, *granularities: type, name: str = "input") -> str | None:
    """Why an input with a specification has no codes for an integer product; None if it has such codes."""
    if spec is None:
        return f"its {name} is in float"
    if reason := cannot_multiply(spec):
        return f"its {name}: {reason}"
    if not isinstance(spec.granularity, granularities):
        return f"its {name}: a sum of products has one scale, not {spec.granularity}"
    return None


def _weight_reason(spec: QuantSpec | None, weight: Tensor) -> str | None:
    """Why a weight [out, ...] with a specification has no codes for an integer product; None if it has such codes."""
    if spec is None:
        return "its weight is in float"
    if reason := cannot_multiply(spec):
        return f"its weight: {reason}"
    if spec.format.has_zero_point and (not spec.symmetric or spec.format.storage != torch.int8):
        return "its weight: codes must be signed, without a zero point"
    granularity = spec.granularity
    per_output = isinstance(granularity, PerChannel) and [a % weight.dim() for a in granularity.axes] == [0]
    if not per_output and not isinstance(granularity, PerTensor):
        return f"its weight: a sum of products has one scale, not {granularity}"
    return None if weight.dtype in DTYPES else f"its weight is {weight.dtype}"


def _sum_reason(weight: Tensor, *specs: QuantSpec | None) -> str | None:
    """Why the layer's sums of products may overflow int32; None if they cannot."""
    size, most = weight[0].numel(), _most(*(spec for spec in specs if spec is not None))
    return f"sums of {size:,} products may leave int32; of {most:,} they cannot" if size > most else None


@lru_cache
def _most(input: QuantSpec, other: QuantSpec) -> int:
    """The largest count of products of codes whose sum cannot overflow int32."""
    return products.largest_inner_size(_reach(input), _reach(other))


def _reach(spec: QuantSpec) -> int:
    """The largest magnitude of code - zero point, over all codes and zero points (0 if the codes are symmetric)."""
    lowest, highest = int(spec.format.quant_min), int(spec.format.quant_max)
    return max(-lowest, highest) if spec.symmetric else highest - lowest
