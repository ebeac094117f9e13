"""Tensors that carry, through a `forward` in torch, the integers that a device computes between two quantizers.

When a model simulates a device, a quantizer returns a `DeviceTensor`: values for torch, and the codes of the device. A
function of such tensors adds to its result the integers from which the device will store codes: a product its exact
sums, a sum of two tensors the codes of both. The next quantizer turns these integers into codes by the rule of the
device, and returns the values of the codes. Gradients are those of fake quantization. A function without a rule
computes in float. Without gradients, values that the next quantizer replaces are computed only where they are read.

Layers contain no code for this: `DeviceTensor` intercepts the functions of torch that layers and a user's `forward`
call.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fakequant.nn.functions import CalledAs, SiteOperand, arguments_of, called_as
from fakequant.numerics.products import ConvParams
from fakequant.ops import products
from fakequant.ops.products import PackedWeight

_MOVES = frozenset(
    """
    view reshape flatten unflatten squeeze unsqueeze permute transpose t contiguous movedim moveaxis swapaxes swapdims
    ravel getitem chunk split tensor_split narrow select unbind flip roll expand repeat clone detach to float
    pixel_shuffle pixel_unshuffle channel_shuffle max_pool1d max_pool2d max_pool3d
    """.split()  # noqa: SIM905
)
"""Functions that only move, copy or select elements, or take the maximum of neighbours."""
_DROPOUTS = frozenset(("dropout", "alpha_dropout", "feature_alpha_dropout", *(f"dropout{n}d" for n in (1, 2, 3))))
"""Functions that return their input in eval mode."""
_COPIES = frozenset(("contiguous", "clone", "detach", "to", "float"))
"""Of the moves, functions that leave each element at its place; exported files leave the functions out."""
_PICKS = frozenset(f"max_pool{n}d" for n in (1, 2, 3))
_OF_FORM = frozenset(
    [Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__]
    + [getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_meta")]
)
"""Properties and methods of a tensor that do not read its values."""
BOUNDS = {
    **{"relu": (0.0, math.inf), "relu6": (0.0, 6.0), "hardtanh": (-1.0, 1.0)},
    **dict.fromkeys(("clamp", "clip"), (-math.inf, math.inf)),
}
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
_PRODUCTS = ("linear", "matmul", *_CONVOLUTIONS, *(f"conv_transpose{n}d" for n in (1, 2, 3)))
_STRIDED = "strided depthwise"
_MEANS = ("mean", *(f"{kind}avg_pool{n}d" for kind in ("", "adaptive_") for n in (1, 2, 3)))

_MOST = 32
"""How many constants are cached for one product; each `CodeGrid` to which the product is rounded adds some."""
_Made = TypeVar("_Made")


class CodeGrid(NamedTuple):
    """The codes of a quantizer, and their values: (code - zero_point) * scale.

    Attributes:
        scale: float64, one number, or one number for each channel in a shape that broadcasts with the tensor.
        zero_point: the code of 0.
        low: the smallest code.
        high: the largest code.
    """

    scale: Tensor
    zero_point: int
    low: int
    high: int

    @property
    def is_wide(self) -> bool:
        """Whether the codes need more than 8 bits."""
        return self.high - self.low > 255

    @property
    def dtype(self) -> torch.dtype:
        """The smallest integer dtype that holds all codes."""
        for dtype in (torch.uint8, torch.int8, torch.int16):
            if torch.iinfo(dtype).min <= self.low and self.high <= torch.iinfo(dtype).max:
                return dtype
        return torch.int32


class Kept:
    """A quantizer's cache of its `CodeGrid`, packed weight and constants; a copy or pickle of the cache is empty."""

    stores: tuple[Any, ...] | None = None
    """The device and settings under which the last call stored codes; None before."""

    def __init__(self) -> None:
        self._grid: tuple[tuple[Any, ...], Tensor, CodeGrid] | None = None
        self._packed: PackedWeight | None = None
        self._state: tuple[Any, ...] = ()
        self._made: dict[Any, Any] = {}

    def grid(self, scale: Tensor, zero_point: Tensor | None, low: int, high: int) -> CodeGrid:
        """The `CodeGrid` with these parameters; the same object as in the last call if the parameters are equal."""
        # `item` takes 0.3 us of a number; `torch.equal` 1.5 us.
        numbers = low, high, *(x.item() if x.numel() == 1 else x.shape for x in (scale, zero_point) if x is not None)
        if self._grid is not None:
            state, last, grid = self._grid
            if state == numbers and (scale.numel() == 1 or torch.equal(scale, last)):
                return grid
        scale = scale.detach().clone()
        of_scale = scale.double().reshape(()) if scale.numel() == 1 else scale.double()
        grid = CodeGrid(of_scale, 0 if zero_point is None else int(zero_point), low, high)
        self._grid = numbers, scale, grid
        return grid

    def packed(self, codes: Tensor, places: ConvParams) -> PackedWeight:
        """The packed codes of a weight; packed again only if the codes or the parameters of the convolution changed."""
        if self._packed is None or self._packed.places != places or not self._packed.is_of(codes):
            self._packed = PackedWeight(codes, places)
        return self._packed

    def constants(self, bias: Tensor | None, *state: Any) -> dict[Any, Any]:
        """The dict of constants for this bias and these state objects; a new empty dict if any of them changed."""
        last, *others = self._state or (None,)
        is_same = len(state) == len(others) and all(a is b for a, b in zip(state, others, strict=True))
        is_same = is_same and (bias is last if bias is None or last is None else torch.equal(bias, last))
        if not is_same or len(self._made) > _MOST:
            self._state, self._made = (None if bias is None else bias.detach().clone(), *state), {}
        return self._made

    def __reduce__(self) -> tuple[type[Kept], tuple[()]]:
        return Kept, ()


class GridCodes(NamedTuple):
    """A tensor as codes in the device's memory.

    Attributes:
        stored: the codes in an integer dtype; or in a float dtype if gradients are enabled or values may be NaN.
        grid: the values of the codes.
        kept: for a weight, the cache of its quantizer.
        source: the result that a rule of the device rounded to these codes; None without a rule.
    """

    stored: Tensor
    grid: CodeGrid
    kept: Kept | None = None
    source: Computed | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all codes are integers, and none is NaN."""
        return not self.stored.is_floating_point()

    @property
    def codes(self) -> Tensor:
        """The codes minus the zero point, float32 or float64."""
        codes = self.stored.float() if self.is_whole else self.stored
        return codes - self.grid.zero_point if self.grid.zero_point else codes

    def values(self, dtype: torch.dtype) -> Tensor:
        """The values of the codes: (code - zero point) * scale [shape of the codes]."""
        return (self.codes * self.grid.scale.float()).to(dtype)


class Sums(NamedTuple):
    """A product before it is rounded to codes: sums * of_input * of_weight + bias.

    Attributes:
        sums: the exact sums of products of codes, in a dtype that holds them: int32, float32 or float64.
        of_input: the scale of the input, float64, of one element.
        of_weight: the scales of the other factor, float64, broadcasts with the sums.
        bias: float64, broadcasts with the sums.
        kept: the cache of constants that a rule computed for the same scales and bias in earlier calls.
        of_zero: the zero point of the input times the sums of the weight's codes, float64, broadcasts with the sums;
            only for an input with codes of more than 8 bits.
    """

    sums: Tensor
    of_input: Tensor
    of_weight: Tensor
    bias: Tensor
    kept: dict[Any, Any] | None = None
    of_zero: Tensor | None = None

    @property
    def is_wide(self) -> bool:
        """Whether the input has codes of more than 8 bits."""
        return self.of_zero is not None

    def values(self, dtype: torch.dtype) -> Tensor:
        """The product in float, of `dtype` [shape of the sums]."""
        return torch.addcmul(self.bias, self.sums.double(), self.of_weight * self.of_input).to(dtype)

    def once(self, key: tuple[Any, ...], grid: CodeGrid, make: Callable[[], _Made]) -> _Made:
        """The constants that `make` computes for codes in `grid`, from the cache if it has them under `key`."""
        key = *key, id(grid.scale), grid.zero_point
        kept = {} if self.kept is None else self.kept
        if key not in kept:
            kept[key] = grid.scale, make()  # with the scale, so that no other object gets its number
        return kept[key][1]


class Operands(NamedTuple):
    """The tensors of codes that a function reads; for a mean, the tensor holds sums of codes.

    Attributes:
        tensors: the tensors.
        shape: for a mean, the shape of the tensor before the sums.
        window: for a mean, the count of elements in a sum along each axis of `shape`.
    """

    tensors: tuple[GridCodes, ...]
    shape: tuple[int, ...] = ()
    window: tuple[int, ...] = ()

    @property
    def summed(self) -> int:
        """The count of elements in each sum."""
        return math.prod(self.window)

    @property
    def is_wide(self) -> bool:
        """Whether a tensor has codes of more than 8 bits."""
        return any(x.grid.is_wide for x in self.tensors)


@dataclass(frozen=True)
class Computed:
    """The result of a function before it is rounded to codes.

    Attributes:
        function: the canonical name of the function, or "strided depthwise".
        parts: the `Sums` or `Operands` from which the result is computed.
        least: the lower bound of the result, such as 0 after a ReLU.
        most: the upper bound of the result, such as 6 after a ReLU6.
        is_whole: whether all codes in `parts` are integers, and none is NaN.
        made: the codes of the result, by the parameters of the quantizer that stores them.
        moves: the functions, in order, that reshaped the result or took the maximum of neighbours; they are applied
            to the codes, which rise with their values.
    """

    function: str
    parts: Sums | Operands
    least: float = -math.inf
    most: float = math.inf
    is_whole: bool = False
    moves: tuple[Callable[[Tensor], Tensor], ...] = ()
    made: dict[Any, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)


@dataclass(frozen=True)
class Device:
    """The arithmetic of an engine: the rules that round results of functions to codes.

    Attributes:
        name: the name of the engine.
        rules: the rules by the canonical name of a function. "strided depthwise" is a depthwise convolution with a
            stride; "product" is any convolution, linear layer or matrix product without a rule by name. A rule takes
            `Sums` or `Operands`, and the quantizer's `CodeGrid`, whose first and last code are the bounds of a ReLU or
            clamp. It returns a new tensor of codes, as floats, or as integers that are clamped to the bounds.
        source: the program from which the rules come, and how far the rules were compared with that program.
        wide: the rules for functions whose inputs and result have codes of 16 bits.
        unsigned: whether codes of activations are unsigned.
        joins: a function that says whether the engine fuses a result with the ReLU or clamp that reads it; called if
            a bound is the first or the last code. A fused result is rounded once, and the other bound has no effect.
        merges: the name of the rule for two functions that the engine computes as one, by their canonical names.
    """

    name: str
    rules: Mapping[str, Callable[[Any, CodeGrid], Tensor]]
    source: str
    wide: Mapping[str, Callable[[Any, CodeGrid], Tensor]] = field(default_factory=dict)
    unsigned: bool = False
    joins: Callable[[Computed], bool] | None = None
    merges: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Device({self.name!r}, rules for {', '.join(sorted(self.rules))})"

    def codes(self, computed: Computed, grid: CodeGrid) -> Tensor | None:
        """The codes of the result `computed` for a quantizer with the codes `grid`; None without a rule for it."""
        rules = self.wide if grid.is_wide else self.rules
        rule = rules.get(computed.function)
        if rule is None and isinstance(computed.parts, Sums):
            rule = rules.get("product")
        if rule is None or computed.parts.is_wide != grid.is_wide:
            return None
        scale = float(grid.scale)
        if (made := computed.made.get(key := (scale, *grid[1:]))) is not None:
            return made
        # A bound is a code, too, and infinity none.
        low, high = (
            grid.zero_point + round(bound / scale) if math.isfinite(bound) else end
            for bound, end in ((computed.least, grid.low), (computed.most, grid.high))
        )
        source = computed.parts.tensors[0].source if computed.function in BOUNDS else None  # type: ignore[union-attr]
        if source is not None and (low <= grid.low or high >= grid.high) and self.joins and self.joins(source):
            return self.codes(replace(source, moves=(*source.moves, *computed.moves)), grid)
        low, high = min(max(low, grid.low), grid.high), max(min(high, grid.high), grid.low)
        codes = rule(computed.parts, grid._replace(low=low, high=high))
        if codes.is_floating_point():
            codes = codes.clamp_(low, high)
        codes = codes.to(grid.dtype if computed.is_whole else torch.float32)  # a dtype that holds the zero point, too
        for move in computed.moves:
            codes = move(codes)
        computed.made[key] = codes
        return codes


@lru_cache(maxsize=16)
def _nan(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((), math.nan, dtype=dtype, device=device)


class DeviceTensor(Tensor):
    """A tensor of values that also carries the device's codes, or a result that is not rounded to codes yet.

    The values may be computed only when they are read; until then the tensor itself holds NaN.
    """

    device_of: Device
    _has: GridCodes | Computed | None = None
    _written: int = 0
    """How often the values had been written to, also through views of them, when `has` was set."""
    late: Callable[[], Tensor] | None = None
    """The function that computes the values; None once they were read, or if they were there from the start."""
    read: Tensor | None = None
    """The values that `late` computed; None before."""

    @classmethod
    def of(cls, values: Tensor, has: GridCodes | Computed, device: Device) -> DeviceTensor:
        """A tensor of `values` that carries `has`: codes or an unrounded result. Gradients flow through the values."""
        made = _counting_writes(values).as_subclass(DeviceTensor)
        made.has, made.device_of = has, device
        return made

    @classmethod
    def later(
        cls,
        compute: Callable[[], Tensor],
        like: Tensor,
        shape: Sequence[int],
        has: GridCodes | Computed,
        device: Device,
    ) -> DeviceTensor:
        """A tensor as from `of`, whose values `compute` makes when they are read, in the dtype of `like`."""
        empty = _nan(like.dtype, like.device).expand(shape)
        made = cls.of(empty, has, device)
        made.late = compute
        return made

    @property
    def has(self) -> GridCodes | Computed | None:
        """The codes, or a result that is not rounded yet; None if the values were overwritten after that."""
        return self._has if self._has is None or self._written == self._writes else None

    @has.setter
    def has(self, has: GridCodes | Computed | None) -> None:
        self._has, self._written = has, self._writes

    @property
    def _writes(self) -> int:
        values: Tensor = self if self.read is None else self.read
        with torch._C.DisableTorchFunctionSubclass():
            return values._version

    @property
    def bare(self) -> Tensor:
        """A plain tensor of the same shape, dtype and torch device, whose values must not be read."""
        with torch._C.DisableTorchFunctionSubclass():  # torch sets hooks in it, with a lock that they would wait for
            return super().as_subclass(Tensor)

    @property
    def known(self) -> Tensor:
        """The values as a plain tensor, computed now if they were not read before."""
        if self.late is not None:
            has = self.has
            no_autocast = torch.autocast(self.bare.device.type, enabled=False)
            with torch.inference_mode(False), torch.no_grad(), no_autocast:
                self.read, self.late = _counting_writes(self.late()), None
            self.has = has
        return self.bare if self.read is None else self.read

    def as_subclass(self, cls: Any) -> Any:
        """The values as a tensor of the class `cls`, without a call of `__torch_function__`."""
        return plain(self).as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, result = kwargs or {}, NotImplemented
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if func in _OF_FORM:
                return func(*args, **kwargs)
            if (called := called_as(func)) is not None:
                function = called.function.name
                if function in BOUNDS:
                    result = _bounded(function, func, args, kwargs)
                else:
                    see = _product if function in _PRODUCTS else _of_stored
                    result = see(called, func, args, kwargs)
            elif name.strip("_") in BOUNDS:
                result = _bounded(name.strip("_"), func, args, kwargs)
            elif args and name in _DROPOUTS and not _trains(args, kwargs):
                result = args[0]
            elif args and name.strip("_") in _MOVES:
                result = _moved(name.strip("_"), func, args, kwargs)
            if result is NotImplemented:
                result = func(*plain(args), **plain(kwargs))
            written = name.endswith("_") and not name.endswith("__")
            if name == "copy_" and not torch.is_grad_enabled() and _are_late(*args[:2]):
                args[0].has, args[0].late = args[1].has, args[1].late
                return args[0]
            if args and (written or (called is not None and called.writes(list(args), kwargs))):
                # The device has of a tensor that was overwritten what it has of the result.
                x, source = args[0], args[1] if name == "copy_" else result
                known = source if isinstance(source, DeviceTensor) and x.shape == source.shape else None
                if isinstance(x, DeviceTensor):
                    x.has = None if known is None else known.has
                    if known is not None and known.late is not None:
                        x.late = known.late
                elif known is not None and known.has is not None and not x.is_inference():
                    return DeviceTensor.of(x, known.has, known.device_of)
                return x
        return result


def _counting_writes(values: Tensor) -> Tensor:
    """The tensor itself; a copy if it was made in inference mode, where torch does not count writes."""
    with torch.inference_mode(False):
        return values.clone() if values.is_inference() else values


def _are_late(*tensors: Any) -> bool:
    """Whether all tensors have values that were not read yet, and the same shape and dtype."""
    late = all(isinstance(x, DeviceTensor) and x.late is not None for x in tensors)
    return late and all(x.shape == tensors[0].shape and x.dtype == tensors[0].dtype for x in tensors)


def _trains(args: Any, kwargs: Any) -> bool:
    """Whether these arguments make a call of `dropout` drop elements: `training` is true, and p is not 0."""
    return bool(kwargs.get("training", args[2] if len(args) > 2 else True)) and kwargs.get("p", args[1:2] or 1) != 0


def plain(value: Any) -> Any:
    """`value` with each DeviceTensor replaced by a plain tensor of its values, also in tuples, lists and dicts."""
    if isinstance(value, DeviceTensor):
        return value.known
    if isinstance(value, tuple | list):
        return type(value)(map(plain, value))
    return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value


class _Straight(torch.autograd.Function):
    """Returns the device's values in the forward pass; in the backward pass, the simulated values get the gradient."""

    @staticmethod
    def forward(ctx: Any, simulated: Tensor, values: Tensor) -> Tensor:
        return values.clone()  # the model may write to it, which torch forbids for an input that is returned

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def stored(
    device: Device,
    x: Tensor,
    grid: CodeGrid,
    quantize: Callable[[Tensor], Tensor],
    encode: Callable[[Tensor], Tensor | None] | None,
    kept: Kept | None,
) -> Tensor:
    """The output of a quantizer that simulates `device`: x, with codes by the rule of the function that computed x.

    Args:
        device: the arithmetic.
        x: the quantizer's input.
        grid: the quantizer's codes and their values.
        quantize: fake-quantizes x; returns the output if no rule of the device computes the codes of x.
        encode: returns the codes of x, or None if x holds NaN; if `encode` is None, `quantize` is called.
        kept: the cache of a weight's quantizer.
    """
    computed = x.has if isinstance(x, DeviceTensor) and isinstance(x.has, Computed) else None
    codes = None if computed is None else device.codes(computed, grid)
    is_simulated, wants_gradient = codes is None, torch.is_grad_enabled()
    if codes is None and encode is not None and not wants_gradient:
        codes = encode(plain(x))
    source = None if is_simulated or device.joins is None else computed  # which holds its sums
    if codes is not None and not codes.is_floating_point() and not wants_gradient:
        has = GridCodes(codes, grid, kept, source)
        with torch._C.DisableTorchFunctionSubclass():
            return DeviceTensor.later(partial(has.values, x.dtype), x, codes.shape, has, device)
    values = plain(x)
    if codes is None or is_simulated:
        values = quantize(values)
        codes = torch.round(values.detach().float() / grid.scale.float()) + grid.zero_point
        return DeviceTensor.of(values, GridCodes(codes, grid, kept), device)
    has = GridCodes(codes, grid, kept, source)
    of_device = has.values(values.dtype)
    differentiable = wants_gradient and values.requires_grad
    return DeviceTensor.of(_Straight.apply(quantize(values), of_device) if differentiable else of_device, has, device)


def _device_of(*tensors: Any) -> Device | None:
    """The device of the first tensor if all tensors carry codes, else None."""
    stored = all(isinstance(x, DeviceTensor) and isinstance(x.has, GridCodes) for x in tensors)
    return tensors[0].device_of if stored and tensors else None


def _call(func: Any, args: Any, kwargs: Any, device: Device, computed: Computed, shape: Sequence[int]) -> Tensor:
    """The result of `func` on values, which carries `computed`; it is computed late if all arguments are."""
    operands = [x for x in (*args, *kwargs.values()) if isinstance(x, DeviceTensor)]
    is_late = all(x.late is not None and x.dtype == operands[0].dtype for x in operands) and "dtype" not in kwargs
    if torch.is_grad_enabled() or not is_late:
        return DeviceTensor.of(func(*plain(args), **plain(kwargs)), computed, device)
    # `compute` calls the operands' present functions again: operands may be overwritten before the result is read, and
    # an in-place function overwrites only tensors that are computed here.
    args = [x.late if isinstance(x, DeviceTensor) else x for x in args]
    kwargs = {key: x.late if isinstance(x, DeviceTensor) else x for key, x in kwargs.items()}

    def compute() -> Tensor:
        named = {key: x() if callable(x) else x for key, x in kwargs.items()}
        return func(*(x() if callable(x) else x for x in args), **named)

    return DeviceTensor.later(compute, operands[0], shape, computed, device)


def _product(called: CalledAs, func: Any, args: Any, kwargs: Any) -> Any:
    """The product of two tensors of codes, as a DeviceTensor with exact sums; NotImplemented for other arguments."""
    arguments = arguments_of(called, args, kwargs)
    factors: list[Any] = [arguments.get(operand.name) for operand in called.operands[:2]]
    if (device := _device_of(*factors)) is None or factors[0].has.grid.scale.numel() > 1:
        return NotImplemented
    x, other = factors
    if other.dim() < 2:
        return NotImplemented
    position = called.operands[1].position + 1
    bias: Any = kwargs.get(
        "bias", args[position] if len(args) > position and isinstance(args[position], Tensor) else None
    )
    steps = kwargs.get("stride", args[3] if len(args) > 3 and called.function.name.startswith("conv") else 1)
    groups = kwargs.get("groups", args[6] if len(args) > 6 and called.function.name in _CONVOLUTIONS else 1)

    def summed(*factors: Tensor) -> Tensor:
        integers = dict(zip((id(x), id(other)), factors, strict=True))

        def in_integers(value: Any) -> Any:
            return None if value is bias else integers.get(id(value), value)

        return func(*map(in_integers, args), **{key: in_integers(value) for key, value in kwargs.items()})

    with torch.no_grad():
        sums = _whole_sums(called.function.name, x.has, other.has, args, kwargs)
        if sums is None:
            sums = _exact_sums(summed, x.has, other.has.codes, called.operands[:2], groups)
        axis = 1 if called.operands[1].positions else -1
        # For 16 bits, constants contain sums of the weight's codes, which may change while the grid stays: not kept.
        keeps = None if x.has.grid.is_wide else other.has.kept
        kept = {} if keeps is None else keeps.constants(bias, x.has.grid, other.has.grid, sums.dim())
        if "scales" not in kept:
            axes = [1] * sums.dim()
            axes[axis] = -1
            of_weight = other.has.grid.scale.reshape(-1)
            if of_weight.numel() > 1:  # each group of a transposed convolution has the channels of the weight again
                of_weight = of_weight.repeat(sums.shape[axis] // of_weight.numel()).reshape(axes)
            added = of_weight.new_zeros(()) if bias is None else plain(bias).detach().double().reshape(axes)
            of_zero = None
            if x.has.grid.is_wide and other.has.kept is not None and x.dim() >= other.dim():
                whole = _without_borders(called, summed, x, other.has.codes.double(), args, kwargs)
                of_zero = x.has.grid.zero_point * (whole.reshape(axes) if whole.dim() == 1 else whole)
            kept["scales"] = of_weight, added, math.isfinite(added.sum()), of_zero
        of_weight, added, is_finite, of_zero = kept["scales"]
    strided = max(steps if isinstance(steps, tuple | list) else (steps,)) > 1
    kind = (
        _STRIDED
        if strided and groups == x.shape[1] > 1 and called.function.name in _CONVOLUTIONS
        else called.function.name
    )
    is_whole = is_finite and x.has.is_whole and other.has.is_whole
    if not is_whole:  # float64 holds NaN
        sums = sums.double()
    parts = Sums(sums, x.has.grid.scale, of_weight, added, kept, of_zero)
    computed = Computed(kind, parts, is_whole=is_whole)
    if torch.is_grad_enabled():
        return DeviceTensor.of(func(*plain(args), **plain(kwargs)), computed, device)

    return DeviceTensor.later(partial(parts.values, x.dtype), x, sums.shape, computed, device)


def _whole_sums(name: str, x: GridCodes, other: GridCodes, args: Any, kwargs: Any) -> Tensor | None:
    """Exact sums of products of codes, int32 or float32, computed by integer kernels; None if no kernel fits."""
    if not (x.is_whole and other.is_whole) or other.kept is None or other.grid.zero_point:
        return None
    if name == "linear":
        return products.linear_sums(x.stored, x.grid.zero_point, other.stored)
    if name not in _CONVOLUTIONS:
        return None
    named = {**_PLACES, **dict(zip(_PLACES, args[3:], strict=False)), **kwargs}
    chosen = (tuple(named[key]) if isinstance(named[key], list) else named[key] for key in _PLACES)
    if (places := _places(other.stored.dim() - 2, *chosen)) is None:
        return None
    return products.convolution_sums(x.stored, x.grid.zero_point, other.kept.packed(other.stored, places))


def _without_borders(
    called: CalledAs, summed: Callable[..., Tensor], x: Tensor, weight: Tensor, args: Any, kwargs: Any
) -> Tensor:
    """For each output, the sum of all codes of the weight that it multiplies, as if no border cut the window: [out].

    For `matmul` the shape is [..., 1, out]; for a transposed convolution, where sums differ by position, [1, out, ...].
    """
    if called.function.name == "matmul":
        return weight.sum(-2, keepdim=True)
    if "transpose" not in called.function.name:
        return weight.sum([*range(1, weight.dim())])
    axes = weight.dim() - 2
    named = dict(zip(("stride", "padding", "output_padding", "groups", "dilation"), args[3:], strict=False)) | kwargs
    each = (torch.tensor(named.get(key, 1), device="cpu") for key in ("stride", "dilation"))
    stride, dilation = (numbers.expand(axes).tolist() for numbers in each)
    reach = [size * by for size, by in zip(weight.shape[2:], dilation, strict=True)]
    sizes = [size + 2 * more for size, more in zip(x.shape[2:], reach, strict=True)]
    sums = summed(weight.new_ones(1, x.shape[1], *sizes), weight)
    for axis, (more, step) in enumerate(zip(reach, stride, strict=True), 2):
        sums = sums.narrow(axis, more * step, sums.shape[axis] - 2 * more * step)
    return sums


_PLACES = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}


@lru_cache(maxsize=256)
def _places(axes: int, stride: Any, padding: Any, dilation: Any, groups: int) -> ConvParams | None:
    """The parameters of a convolution over `axes` axes; None if the padding is a name, such as "same"."""
    if isinstance(padding, str):
        return None
    numbers = [[*n] if isinstance(n, tuple) else [n] for n in (stride, padding, dilation)]
    stride, padding, dilation = (n * axes if len(n) == 1 else n for n in numbers)
    return ConvParams(stride, padding, dilation, groups)


_EXACT = 1 << 24
"""float32 holds all integers up to here."""


def _exact_sums(
    summed: Callable[[Tensor, Tensor], Tensor],
    x: GridCodes,
    other: Tensor,
    operands: Sequence[SiteOperand],
    groups: int,
) -> Tensor:
    """The exact sums of products of codes, float64: float32 sums of parts that are too short to be rounded, added."""
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
    return sum((summed(*part).double() for part in parts), torch.zeros((), dtype=torch.float64, device="cpu"))


def _bounded(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Apply a ReLU or clamp to codes, or to a result that is not rounded yet; else return NotImplemented."""
    x, *rest = (*args, *kwargs.values())
    if not isinstance(x, DeviceTensor) or x.has is None or any(isinstance(bound, Tensor) for bound in rest):
        return NotImplemented
    least, most = BOUNDS[name]
    if name in ("hardtanh", "clamp", "clip"):
        words = ("min_val", "max_val") if name == "hardtanh" else ("min", "max")
        given = dict(zip(words, args[1:3], strict=False)) | kwargs
        least, most = (
            end if given.get(word) is None else given[word] for word, end in zip(words, (least, most), strict=True)
        )
    has = x.has
    if isinstance(has, GridCodes):
        if name not in x.device_of.rules:
            return NotImplemented
        has = Computed(name, Operands((has,)), is_whole=has.is_whole)
    # Bounds of several functions in a row hold together.
    low, high = (min(max(bound, has.least), has.most) for bound in (least, most))
    return _call(func, args, kwargs, x.device_of, replace(has, least=low, most=high), x.shape)


def _moved(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Apply `func`, which reshapes or takes the maximum of neighbours, to codes or an unrounded result.

    NotImplemented if the first argument carries neither.
    """
    x = args[0]
    if not isinstance(x, DeviceTensor) or x.has is None:
        return NotImplemented

    def moved(part: Tensor) -> Any:
        if name not in _PICKS or part.is_floating_point():
            return func(part, *args[1:], **kwargs)
        # torch has no kernel for integers channels-last. In float32 that takes 0.3 ms of 590,000 codes, in rows 4.8.
        by_channels = torch.channels_last if name == "max_pool2d" and part.dim() == 4 else torch.preserve_format
        picked = func(part.to(torch.float32, memory_format=by_channels), *args[1:], **kwargs).to(part.dtype)
        return picked.contiguous() if part.is_contiguous() else picked

    late = x.late if name in _PICKS and not torch.is_grad_enabled() else None
    if isinstance(x.has, Computed):
        has = replace(x.has, moves=(*x.has.moves, moved))
        if late is not None:
            shape = moved(torch.empty(x.shape, device="meta")).shape
            return DeviceTensor.later(lambda: moved(late()), x, shape, has, x.device_of)
        values = func(*plain(args), **kwargs)
        return DeviceTensor.of(values, has, x.device_of) if isinstance(values, Tensor) else values
    if (grid := x.has.grid).scale.numel() > 1:
        return func(*plain(args), **kwargs)
    codes = moved(x.has.stored)
    if late is not None:
        has = GridCodes(codes, grid)
        return DeviceTensor.later(partial(has.values, x.dtype), x, codes.shape, has, x.device_of)
    values = func(*plain(args), **kwargs)
    if isinstance(values, Tensor):
        source = x.has.source if name in _COPIES else None
        return DeviceTensor.of(values, GridCodes(codes, grid, source=source), x.device_of)
    pairs = zip(values, codes, strict=True)
    return type(values)(DeviceTensor.of(one, GridCodes(own, grid), x.device_of) for one, own in pairs)


def _window(name: str, args: Any, kwargs: Any, x: Tensor, result: Tensor) -> tuple[int, ...]:
    """How many elements of x a mean averages along each axis; () if means differ in that, or windows overlap or pad."""

    def each(value: Any) -> tuple[int, ...]:
        return tuple(value) if isinstance(value, tuple | list) else (value,)

    if name == "mean":
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        axes = [axis % x.dim() for axis in (range(x.dim()) if dim is None else each(dim))]
        return tuple(size if axis in axes else 1 for axis, size in enumerate(x.shape))
    axes = int(name[-2])
    others = (1,) * (x.dim() - axes)
    if name.startswith("adaptive"):
        return () if result[0, 0].numel() > 1 else (*others, *x.shape[-axes:])  # windows of a pool overlap
    named = dict(zip(("kernel_size", "stride", "padding", "ceil_mode"), args[1:], strict=False)) | kwargs

    def along(value: Any) -> tuple[int, ...]:
        return each(value) * axes if len(each(value)) == 1 else each(value)

    size = along(named["kernel_size"])
    is_apart = along(named.get("stride") or size) == size and not any(each(named.get("padding", 0)))
    is_plain = not named.get("ceil_mode") and named.get("divisor_override") is None
    return (*others, *size) if is_apart and is_plain else ()


def _merged(device: Device, name: str, operands: Sequence[GridCodes]) -> Computed | None:
    """The unrounded result if the device computes `name` and the function of one operand as one; else None."""
    for x, y in itertools.permutations(operands, 2):
        if (source := y.source) is None or (rule := device.merges.get((source.function, name))) is None:
            continue
        of: GridCodes = source.parts.tensors[0]  # type: ignore[union-attr]
        is_same = of.grid.zero_point == x.grid.zero_point and torch.equal(of.grid.scale, x.grid.scale)
        if is_same and not source.moves and torch.equal(of.stored, x.stored):
            return Computed(rule, source.parts, is_whole=source.is_whole)
    return None


def _of_stored(called: CalledAs, func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function of codes, such as a sum or a mean; NotImplemented if the device has no rule for the function."""
    tensors, name = tuple(arguments_of(called, args, kwargs).values()), called.function.name
    if len(tensors) < called.function.fewest or (device := _device_of(*tensors)) is None:
        return NotImplemented
    if name not in device.rules or (name in ("add", "sub") and "alpha" in kwargs):
        return NotImplemented
    if (merged := _merged(device, name, [x.has for x in tensors])) is not None:
        return _call(func, args, kwargs, device, merged, tensors[0].shape)
    # Without the sources of operands, so that no result keeps all results before it.
    parts, whole = Operands(tuple(x.has._replace(source=None) for x in tensors)), all(x.has.is_whole for x in tensors)
    if name in _MEANS:
        (x,) = tensors
        with torch.no_grad():
            means = func(x.has.codes.double(), *args[1:], **kwargs)
        window = _window(name, args, kwargs, x, means)
        if not (window and math.prod(window)):
            return NotImplemented
        sums = torch.round(means * math.prod(window)).add_(x.has.grid.zero_point)
        parts, shape = Operands((GridCodes(sums, x.has.grid),), tuple(x.shape), window), sums.shape
    else:
        shapes = {x.shape for x in tensors}
        shape = shapes.pop() if len(shapes) == 1 else torch.broadcast_shapes(*shapes)
    return _call(func, args, kwargs, device, Computed(name, parts, is_whole=whole), shape)
