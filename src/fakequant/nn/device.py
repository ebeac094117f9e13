"""What a device computes between two quantizers: tensors that carry its integers through a forward in torch.

In the execution of a device a quantizer gives a `DeviceTensor`: values for torch, and the codes that the device has. A
function of such tensors keeps what the device keeps until it stores codes again: a product its exact sums, a sum of two
tensors their codes. The next quantizer turns that into codes by the rule of the device, and gives their values.
Gradients are those of the simulation. A function without a rule computes in float.

No layer knows of this: `DeviceTensor` sees the functions of torch that layers and a user's `forward` call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fakequant.nn.functions import CalledAs, SiteOperand, arguments_of, called_as

_MOVES = frozenset(
    """
    view reshape flatten unflatten squeeze unsqueeze permute transpose t contiguous movedim moveaxis swapaxes swapdims
    ravel getitem chunk split tensor_split narrow select unbind flip roll expand repeat clone detach to float
    pixel_shuffle pixel_unshuffle channel_shuffle max_pool1d max_pool2d max_pool3d
    """.split()  # noqa: SIM905
)
"""Functions that copy numbers of a tensor to other places, or pick the largest of neighbours."""
_DROPOUTS = frozenset(("dropout", "alpha_dropout", "feature_alpha_dropout", *(f"dropout{n}d" for n in (1, 2, 3))))
"""Functions that return their input where they do not train."""
_BOUNDS = {"relu": (0.0, math.inf), "relu6": (0.0, 6.0), "hardtanh": (-1.0, 1.0)}
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
_PRODUCTS = ("linear", "matmul", *_CONVOLUTIONS, *(f"conv_transpose{n}d" for n in (1, 2, 3)))
_STRIDED = "strided depthwise"
_MEANS = ("mean", *(f"{kind}avg_pool{n}d" for kind in ("", "adaptive_") for n in (1, 2, 3)))


class CodeGrid(NamedTuple):
    """The values of a quantizer's codes: (code - zero_point) * scale.

    Attributes:
        scale: float64, of one element, or of one for each channel with the tensor's axes.
        zero_point: the code of 0.
        low: the smallest code.
        high: the largest code.
    """

    scale: Tensor
    zero_point: int
    low: int
    high: int


class GridCodes(NamedTuple):
    """A tensor as the device has it in memory: codes counted from the zero point, float32, and their grid."""

    codes: Tensor
    grid: CodeGrid


class Sums(NamedTuple):
    """A product before it is stored: sums * of_input * of_weight + bias.

    Attributes:
        sums: exact integers, float64.
        of_input: the scale of the input, float64, of one element.
        of_weight: the scales of the other factor, float64, broadcasts with the sums.
        bias: float64, broadcasts with the sums.
    """

    sums: Tensor
    of_input: Tensor
    of_weight: Tensor
    bias: Tensor


class Operands(NamedTuple):
    """The tensors that a function reads; of a mean their sums, and how many elements are summed."""

    tensors: tuple[GridCodes, ...]
    summed: int = 1


@dataclass(frozen=True)
class Computed:
    """The result of a function that is not stored yet.

    Attributes:
        function: the canonical name of the function, or "strided depthwise".
        parts: what it is computed from.
        least: the value at which a ReLU bounds it below.
        most: the value at which a ReLU6 bounds it above.
        moves: what gave it another shape, or picked the largest of neighbours, one after the other. Codes rise with
            what they stand for, so that codes may be picked in its place.
    """

    function: str
    parts: Sums | Operands
    least: float = -math.inf
    most: float = math.inf
    moves: tuple[Callable[[Tensor], Tensor], ...] = ()


@dataclass(frozen=True)
class Device:
    """The arithmetic of an engine: how it stores results as codes.

    Attributes:
        name: of the engine.
        rules: by the canonical name of a function, "strided depthwise" for these convolutions, and "product" for all
            convolutions, linear layers and matrix products without a rule of their own. They give codes, a
            new tensor that is not clamped, from `Sums` or `Operands` and the grid of the quantizer that stores them.
        source: the program from which the rules come, and how far they were compared with it.
        bits: the widest codes for which the rules are known.
        unsigned: whether codes of activations have no sign.
    """

    name: str
    rules: Mapping[str, Callable[[Any, CodeGrid], Tensor]]
    source: str
    bits: int = 8
    unsigned: bool = False

    def __repr__(self) -> str:
        return f"Device({self.name!r}, rules for {', '.join(sorted(self.rules))})"

    def codes(self, computed: Computed, to: CodeGrid) -> Tensor | None:
        """The codes of a result, or None where there is no rule."""
        rule = self.rules.get(computed.function)
        if rule is None and isinstance(computed.parts, Sums):
            rule = self.rules.get("product")
        if rule is None:
            return None
        codes = rule(computed.parts, to)
        # A bound is a code, too, and infinity none.
        low, high = (
            to.zero_point + round(bound / float(to.scale)) if math.isfinite(bound) else end
            for bound, end in ((computed.least, to.low), (computed.most, to.high))
        )
        codes = codes.clamp_(min(max(low, to.low), to.high), max(min(high, to.high), to.low))
        for move in computed.moves:
            codes = move(codes)
        return codes


class DeviceTensor(Tensor):
    """Values, and what the device has of them: codes, or a result that is not stored yet."""

    has: GridCodes | Computed | None
    device_of: Device

    @classmethod
    def of(cls, values: Tensor, has: GridCodes | Computed, device: Device) -> DeviceTensor:
        """Values with what the device has; their gradient stays."""
        made = values.as_subclass(DeviceTensor)
        made.has, made.device_of = has, device
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, result = kwargs or {}, NotImplemented
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if (called := called_as(func)) is not None:
                function = called.function.name
                see = _product if function in _PRODUCTS else _bounded if function in _BOUNDS else _of_stored
                result = see(called, func, args, kwargs)
            elif args and name in _DROPOUTS and not _trains(args, kwargs):
                result = args[0]
            elif args and name.strip("_") in _MOVES:
                result = _moved(func, args, kwargs)
            if result is NotImplemented:
                result = func(*plain(args), **plain(kwargs))
            written = name.endswith("_") and not name.endswith("__")
            if args and (written or (called is not None and called.writes(list(args), kwargs))):
                return cls._overwritten(args[0], args[1] if name == "copy_" else result)
        return result

    @staticmethod
    def _overwritten(x: Tensor, result: Any) -> Tensor:
        """A tensor that a function in place has overwritten: the device has what it has of the result."""
        known = result if isinstance(result, DeviceTensor) and x.shape == result.shape else None
        if isinstance(x, DeviceTensor):
            x.has = None if known is None else known.has
        elif known is not None and known.has is not None:
            return DeviceTensor.of(x, known.has, known.device_of)
        return x


def _trains(args: Any, kwargs: Any) -> bool:
    """Whether a dropout drops."""
    return bool(kwargs.get("training", args[2] if len(args) > 2 else True)) and kwargs.get("p", args[1:2] or 1) != 0


def plain(value: Any) -> Any:
    """Values of arguments, without what the device has."""
    if isinstance(value, DeviceTensor):
        return value.as_subclass(Tensor)
    if isinstance(value, tuple | list):
        return type(value)(map(plain, value))
    return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value


class _Straight(torch.autograd.Function):
    """The values of the device forward, the gradient of the simulation backward."""

    @staticmethod
    def forward(ctx: Any, simulated: Tensor, values: Tensor) -> Tensor:
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def stored(device: Device, x: Tensor, grid: CodeGrid, quantize: Callable[[Tensor], Tensor]) -> Tensor:
    """The tensor that a quantizer gives under a device: codes by the rule of the function that computed x.

    Args:
        device: the arithmetic.
        x: the quantizer's input.
        grid: of the quantizer.
        quantize: the simulation, whose values count where x was not computed by a function with a rule.
    """
    values, scale = plain(x), grid.scale.float()
    computed = x.has if isinstance(x, DeviceTensor) and isinstance(x.has, Computed) else None
    codes = None if computed is None else device.codes(computed, grid)
    if codes is None:
        values = quantize(values)
        centred = torch.round(values.detach().float() / scale)
    else:
        centred = (codes - grid.zero_point).float()
        of_device = (centred * scale).to(values.dtype)
        differentiable = torch.is_grad_enabled() and values.requires_grad
        values = _Straight.apply(quantize(values), of_device) if differentiable else of_device
    return DeviceTensor.of(values, GridCodes(centred, grid), device)


def _device_of(*tensors: Any) -> Device | None:
    """The device that has stored all of several tensors."""
    stored = all(isinstance(x, DeviceTensor) and isinstance(x.has, GridCodes) for x in tensors)
    return tensors[0].device_of if stored and tensors else None


def _call(func: Any, args: Any, kwargs: Any, device: Device, computed: Computed) -> Tensor:
    """The values of a call, with what the device has of its result."""
    return DeviceTensor.of(func(*plain(args), **plain(kwargs)), computed, device)


def _product(called: CalledAs, func: Any, args: Any, kwargs: Any) -> Any:
    """The exact sums of a product of two tensors that are stored."""
    arguments = arguments_of(called, args, kwargs)
    factors: list[Any] = [arguments.get(operand.name) for operand in called.operands[:2]]
    if (device := _device_of(*factors)) is None or factors[0].has.grid.scale.numel() > 1:
        return NotImplemented
    x, other = factors
    position = called.operands[1].position + 1
    bias = kwargs.get("bias", args[position] if len(args) > position and isinstance(args[position], Tensor) else None)
    steps = kwargs.get("stride", args[3] if len(args) > 3 and called.function.name.startswith("conv") else 1)
    groups = kwargs.get("groups", args[6] if len(args) > 6 and called.function.name in _CONVOLUTIONS else 1)

    def summed(*factors: Tensor) -> Tensor:
        integers = dict(zip((id(x), id(other)), factors, strict=True))

        def in_integers(value: Any) -> Any:
            return None if value is bias else integers.get(id(value), value)

        return func(*map(in_integers, args), **{key: in_integers(value) for key, value in kwargs.items()})

    with torch.no_grad():
        sums = _exact_sums(summed, x.has, other.has.codes, called.operands[:2], groups)
        axes = [1] * sums.dim()
        axis = 1 if called.operands[1].positions else -1
        axes[axis] = -1
        of_weight = other.has.grid.scale.reshape(-1)
        if of_weight.numel() > 1:  # each group of a transposed convolution has the channels of the weight again
            of_weight = of_weight.repeat(sums.shape[axis] // of_weight.numel()).reshape(axes)
        added = sums.new_zeros(()) if bias is None else plain(bias).detach().double().reshape(axes)
    strided = max(steps if isinstance(steps, tuple | list) else (steps,)) > 1
    kind = (
        _STRIDED
        if strided and groups == x.shape[1] > 1 and called.function.name in _CONVOLUTIONS
        else called.function.name
    )
    parts = Sums(sums, x.has.grid.scale, of_weight, added)
    if torch.is_grad_enabled():
        return _call(func, args, kwargs, device, Computed(kind, parts))
    values = torch.addcmul(added, sums, of_weight * parts.of_input).to(x.dtype)
    return DeviceTensor.of(values, Computed(kind, parts), device)


_EXACT = 1 << 24
"""float32 holds all integers up to here."""


def _exact_sums(
    summed: Callable[[Tensor, Tensor], Tensor],
    x: GridCodes,
    other: Tensor,
    operands: Sequence[SiteOperand],
    groups: int,
) -> Tensor:
    """The sums of products of codes, float64: by products in float32 of parts so short that all sums are exact."""
    grid, (of_x, of_other) = x.grid, operands
    reach = max(abs(grid.low - grid.zero_point), abs(grid.high - grid.zero_point))
    axes = [of_other.reduction, *range(-of_other.positions, 0)]
    largest = 256 * reach * math.prod(other.shape[axis] for axis in axes)
    if largest > _EXACT:  # in float32 such sums are off by less than 1 of 1,000
        largest = 1.001 * reach * float(other.abs().sum(axes).max())
    count = math.ceil(largest / _EXACT)
    if count <= 1:
        return summed(x.codes, other).double()
    if groups > 1 or count > other.shape[of_other.reduction]:
        return summed(x.codes.double(), other.double())
    parts = zip(x.codes.chunk(count, of_x.reduction), other.chunk(count, of_other.reduction), strict=True)
    return sum((summed(*part).double() for part in parts), torch.zeros((), dtype=torch.float64))


def _bounded(called: CalledAs, func: Any, args: Any, kwargs: Any) -> Any:
    """A ReLU or ReLU6 behind a function that is not stored yet, which engines compute together."""
    (x,) = arguments_of(called, args, kwargs).values()
    if not isinstance(x, DeviceTensor) or not isinstance(x.has, Computed):
        return NotImplemented
    least, most = _BOUNDS[called.function.name]
    if called.function.name == "hardtanh":
        named = dict(zip(("min_val", "max_val"), args[1:3], strict=False)) | kwargs
        least, most = named.get("min_val", least), named.get("max_val", most)
    # Bounds of several functions in a row hold together.
    low, high = (min(max(bound, x.has.least), x.has.most) for bound in (least, most))
    return _call(func, args, kwargs, x.device_of, replace(x.has, least=low, most=high))


def _moved(func: Any, args: Any, kwargs: Any) -> Any:
    """Codes, or a result before it is stored, in other places; and the largest of neighbours."""
    x = args[0]
    if not isinstance(x, DeviceTensor) or x.has is None:
        return NotImplemented

    def moved(part: Tensor) -> Any:
        return func(part, *args[1:], **kwargs)

    values = func(*plain(args), **kwargs)
    if isinstance(x.has, Computed):
        is_one = isinstance(values, Tensor)
        has = replace(x.has, moves=(*x.has.moves, moved))
        return DeviceTensor.of(values, has, x.device_of) if is_one else values
    if (grid := x.has.grid).scale.numel() > 1:
        return values
    codes = moved(x.has.codes)
    if isinstance(values, Tensor):
        return DeviceTensor.of(values, GridCodes(codes, grid), x.device_of)
    pairs = zip(values, codes, strict=True)
    return type(values)(DeviceTensor.of(one, GridCodes(own, grid), x.device_of) for one, own in pairs)


def _summed(name: str, args: Any, kwargs: Any, x: Tensor, result: Tensor) -> int:
    """How many elements each number of a mean or a pool is the mean of; 0 where numbers differ in that."""
    if not name.startswith("avg_pool"):
        summed, rest = divmod(x.numel(), max(result.numel(), 1))
        return 0 if rest or (name != "mean" and result[0, 0].numel() > 1) else summed  # windows of a pool overlap
    named = dict(zip(("kernel_size", "stride", "padding", "ceil_mode"), args[1:], strict=False)) | kwargs
    axes = int(name[-2])

    def each(value: Any) -> tuple[int, ...]:
        several = tuple(value) if isinstance(value, tuple | list) else (value,)
        return several * axes if len(several) == 1 else several

    size = each(named["kernel_size"])
    is_apart = each(named.get("stride") or size) == size and not any(each(named.get("padding", 0)))
    is_plain = not named.get("ceil_mode") and named.get("divisor_override") is None
    return math.prod(size) if is_apart and is_plain else 0


def _of_stored(called: CalledAs, func: Any, args: Any, kwargs: Any) -> Any:
    """A function of tensors that are stored, for which the device may have a rule."""
    tensors, name = tuple(arguments_of(called, args, kwargs).values()), called.function.name
    if len(tensors) < called.function.fewest or (device := _device_of(*tensors)) is None:
        return NotImplemented
    if name not in device.rules or (name == "add" and "alpha" in kwargs):
        return NotImplemented
    parts = Operands(tuple(x.has for x in tensors))
    result = func(*plain(args), **plain(kwargs))
    if name in _MEANS:
        (x,) = tensors
        if not (summed := _summed(name, args, kwargs, x, result)):
            return result
        with torch.no_grad():
            sums = torch.round(func(x.has.codes.double(), *args[1:], **kwargs) * summed)
        parts = Operands((GridCodes(sums, x.has.grid),), summed)
    return DeviceTensor.of(result, Computed(name, parts), device)
