"""Functions that quantize by an amax, descriptors, and their translation to specifications and parameters.

amax broadcasts with the inputs: one number, or one per index of the axes that keep their size. float16 and bfloat16 are
computed in float32 and rounded once, at the end. A gradient passes where |inputs| <= amax; amax gets none.

The functions also take the orders of arguments of later releases, (inputs, amax, bias, num_bits, ...), and of the
user's guide, (inputs, amax, num_bits, output_dtype, unsigned).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from operator import attrgetter
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from fakequant.compat.pytorch_quantization.utils import logger
from fakequant.numerics.formats import formats
from fakequant.numerics.formats.floats import ExponentFormat, FloatFormat, Format, IntegerFormat
from fakequant.numerics.granularity import Granularity, PerBlock, PerChannel, PerTensor
from fakequant.numerics.qparams import QParams, Range, compute_dtype, is_concrete
from fakequant.numerics.scales import ScaleRounding, ScaleSpec
from fakequant.numerics.spec import Arithmetic, Gradient, QuantSpec
from fakequant.ops import library
from fakequant.ops.trt_fp8 import as_trt_fp8, writes_trt_fp8

NumBits = int | tuple[int, int]

# The smallest subnormal of float16.
SMALLEST_AMAX = 2.0**-24


def integer_format(num_bits: int, unsigned: bool = False, narrow_range: bool = False) -> IntegerFormat:
    """The integer format of `num_bits` bits; `narrow_range` excludes the lowest signed code.

    Raises:
        SpecError: fewer codes than two, or more than 24 bits.

    >>> print(integer_format(8), integer_format(8, narrow_range=True), integer_format(4, unsigned=True))
    int8 int8_narrow uint4
    """
    return IntegerFormat.of(num_bits, signed=not unsigned, narrow=narrow_range and not unsigned)


def float_format(num_bits: tuple[int, int]) -> Format:
    """The first registered float format with E exponent and M mantissa bits.

    Raises:
        TypeError: there is no such format.

    >>> print(float_format((4, 3)), float_format((2, 1)), float_format((8, 0)))
    float8_e4m3fn float4_e2m1fn float8_e8m0fnu
    """
    known: dict[tuple[int, int], Format] = {}
    for fmt in reversed(formats().values()):
        if isinstance(fmt, FloatFormat):
            known[fmt.exponent_bits, fmt.mantissa_bits] = fmt
        elif isinstance(fmt, ExponentFormat):
            known[fmt.bits, 0] = fmt
    if num_bits not in known:
        raise TypeError(
            f"num_bits must be a positive integer or one of the tuples (exponent bits, mantissa bits) "
            f"{sorted(known)}, not {num_bits!r}"
        )
    return known[num_bits]


def format_of(num_bits: NumBits, unsigned: bool = False, narrow_range: bool = False) -> Format:
    """The format for a descriptor's `num_bits`.

    Raises:
        SpecError, TypeError: there is no such format.
    """
    if isinstance(num_bits, int):
        return integer_format(num_bits, unsigned, narrow_range)
    return float_format(num_bits)


def specification(fmt: Format, granularity: Granularity) -> QuantSpec:
    """The specification of this interface; its codes are clamp(rint(x * m)), and gradients pass where |x| <= amax."""
    return QuantSpec(fmt, granularity, arithmetic=Arithmetic.MULTIPLIER, gradient=Gradient.INPUT_RANGE)


def block_specification(fmt: Format, block_sizes: dict[int | str, object]) -> QuantSpec:
    """The specification of a descriptor's `block_sizes`; the last block of an axis may be smaller.

    "scale_bits" is the format of the scales. With (8, 0) scales are powers of two, rounded up as NVIDIA does, so that
    no value saturates. In another format the scales have shared float32 scales, over blocks of "scale_block_sizes" or
    the whole tensor.

    >>> print(block_specification(format_of(4), {-1: 32}))
    int4 per_block(-1:32,pad) multiplier input_range
    >>> print(block_specification(format_of((2, 1)), {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}))
    float4_e2m1fn per_block(-1:16,pad) input_range scale=float8_e4m3fn@per_tensor
    """
    granularity = PerBlock(block_axes(block_sizes), pad=True)
    bits = block_sizes.get("scale_bits")
    if bits is None:
        return specification(fmt, granularity)
    scale_format = format_of(bits, unsigned=True)  # pyright: ignore[reportArgumentType]
    if isinstance(scale_format, ExponentFormat):
        scale = ScaleSpec(scale_format, ScaleRounding.CEIL)
    else:
        sizes = block_sizes.get("scale_block_sizes")
        shared = PerBlock(sizes, pad=True) if isinstance(sizes, dict) else PerTensor()
        scale = ScaleSpec(scale_format, granularity=shared)
    return QuantSpec(fmt, granularity, gradient=Gradient.INPUT_RANGE, scale=scale)


def block_axes(block_sizes: dict[int | str, object]) -> dict[int, int]:
    """The block size along each axis, from a descriptor's `block_sizes` without its other keys."""
    return {axis: size for axis, size in block_sizes.items() if isinstance(axis, int) and isinstance(size, int)}


class OperatorArguments(NamedTuple):
    """The arguments of the operator for an amax: the specification, the parameters, and which groups become 0."""

    spec: QuantSpec
    params: QParams
    zero: Tensor | None
    """Whether each group becomes 0, [groups per axis]: integers with an amax of at most `SMALLEST_AMAX`, floats with
    an infinite scale. A group that becomes 0 has the scale 1. None if no group becomes 0."""


def read_amax(amax: Tensor | float | None, x: Tensor, fmt: Format) -> OperatorArguments:
    """The operator's arguments for x with the range -amax to amax; for None, the scale is 1.

    Args:
        amax: broadcasts with x; an axis on which amax has several values gets separate scales.
        x: any floating tensor, in the shape to which both broadcast.
        fmt: the format, whose bound is the code of amax.

    Raises:
        ValueError: a negative amax.
    """
    zero = None
    if amax is None:
        amax = as_tensor(fmt.bound, x)
        scale = torch.ones_like(amax)
    else:
        amax = as_tensor(amax, x)
        scale = codes_per_unit(amax, fmt)
        may_be_tiny = amax.numel() > 0
        if may_be_tiny and is_concrete(amax):
            lowest = amax.item() if amax.numel() == 1 else amax.nan_to_num(nan=math.inf).min().item()
            if lowest < 0:
                raise ValueError(
                    f"Negative values in amax: {lowest:g}; give the largest magnitude, which is at least 0"
                )
            may_be_tiny = lowest <= SMALLEST_AMAX
        if may_be_tiny:
            zero = amax <= SMALLEST_AMAX if fmt.has_zero_point else scale.isinf()
            scale = torch.where(zero, 1.0, scale)
    granularity, shape = granularity_of(amax.shape, x.shape)
    amax, scale = (values.to(compute_dtype(x.dtype)).reshape(shape) for values in (amax, scale))
    return OperatorArguments(
        specification(fmt, granularity),
        QParams(scale, None, Range(-amax, amax)),
        None if zero is None else zero.reshape(shape),
    )


def codes_per_unit(amax: Tensor, fmt: Format) -> Tensor:
    """The multiplier m that maps amax to the format's bound, in the dtype of amax.

    For floats it is bound * (1 / amax), rounded twice, because torch divides a number by a tensor this way. The result
    is at most 1 ulp from the quotient.
    """
    bound = torch.full_like(amax, fmt.bound)
    return bound / amax if fmt.has_zero_point else bound * amax.reciprocal()


def as_tensor(values: Tensor | float, x: Tensor) -> Tensor:
    """Values as a tensor without a gradient, in float32 or float64 on the device of x."""
    values = torch.as_tensor(values, device=x.device).detach()
    return values if values.dtype == torch.float64 else values.float()


def granularity_of(given: torch.Size, shape: torch.Size) -> tuple[Granularity, tuple[int, ...]]:
    """The granularity for parameters of shape `given` on a tensor of shape `shape`, and `given` with all axes kept."""
    if given.numel() == 1:
        return PerTensor(), (1,) * len(shape)
    full = (1,) * (len(shape) - len(given)) + tuple(given)
    return PerChannel(*(axis for axis, n in enumerate(full) if n != 1)), full


__all__ = [
    "QUANT_DESC_8BIT_CONV1D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_CONV2D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_CONV3D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_CONVTRANSPOSE1D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_CONVTRANSPOSE2D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_CONVTRANSPOSE3D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW",
    "QUANT_DESC_8BIT_PER_TENSOR",
    "QUANT_DESC_UNSIGNED_8BIT_PER_TENSOR",
    "FakeAffineTensorQuantFunction",
    "FakeTensorQuantFunction",
    "LegacyFakeTensorQuantFunction",
    "QuantDescriptor",
    "ScaledE4M3Function",
    "ScaledQuantDescriptor",
    "TensorQuantFunction",
    "fake_affine_tensor_quant",
    "fake_tensor_quant",
    "legacy_fake_tensor_quant",
    "scaled_e4m3",
    "scaled_e4m3_abstract",
    "tensor_quant",
]


_BLOCK_KEYS = ("type", "scale_bits", "scale_block_sizes")
_BLOCK_TYPES = ("static", "dynamic")


def _field(name: str, doc: str) -> Any:
    """A property that reads an attribute."""
    return property(attrgetter(name), doc=doc)


class ScaledQuantDescriptor:
    """The description of how to quantize a tensor.

    All arguments can be given by name, or in this order as later releases take them.

    Args:
        num_bits: bits of an integer code, or (exponent bits, mantissa bits) of a float such as (4, 3).
        name: the name when printed.
        fake_quant: whether a quantizer returns values; else codes.
        axis: the axis or axes that keep one amax per index; None for one amax in all.
        block_sizes: {axis: size} for one amax per block; may also hold "type" ("static" or "dynamic"), "scale_bits"
            (the format of the scales, as num_bits) and "scale_block_sizes" ({axis: size} over the scales).
        amax: the largest magnitude, if it is known: a float, or a list or array of floats.
        learn_amax: whether training moves amax, which then begins at `amax`.
        scale_amax: multiplies amax at every use.
        calib_method: "max" or "histogram".
        unsigned: whether codes begin at 0.
        narrow_range: whether the lowest signed code is left out.
        dynamic: whether the range is taken from every tensor anew; true also for blocks of type "dynamic".

    Raises:
        TypeError: an unknown argument or one of a wrong type, or learn_amax with an axis.
        ValueError: a negative num_bits, or block_sizes that are not valid or come with an axis.

    >>> desc = QuantDescriptor(num_bits=4, axis=0, unsigned=True)
    >>> print(desc)
    QuantDescriptor(unsigned 4bit fake axis=0)
    >>> desc.dict()
    {'num_bits': 4, 'name': None, 'axis': 0, 'unsigned': True}
    >>> QuantDescriptor(**desc.dict()) == desc == QuantDescriptor.from_yaml(desc.to_yaml())
    True
    """

    def __init__(self, num_bits: NumBits = 8, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        if unknown := kwargs.keys() - _DEFAULTS.keys():
            raise TypeError(f"Unused keys: {sorted(unknown)}; known are {', '.join(_DEFAULTS)}")
        if len(args) > len(_DEFAULTS):
            raise TypeError(f"a descriptor takes at most {len(_DEFAULTS) + 2} arguments, got {len(args) + 2}")
        given = dict(zip(_DEFAULTS, args, strict=False))
        if twice := given.keys() & kwargs.keys():
            raise TypeError(f"given twice, by position and by name: {sorted(twice)}")
        options = {**_DEFAULTS, **given, **kwargs}
        if isinstance(num_bits, int):
            if num_bits < 0:
                raise ValueError(f"num_bits must be > 0, not {num_bits}.")
            if num_bits == 0:
                logger.error("num_bits is 0, which leaves nothing but zeros; use it for debugging only.")
        elif not isinstance(num_bits, tuple):
            raise TypeError(f"num_bits must be a positive integer or a tuple of two, not {type(num_bits)}")
        else:
            float_format(num_bits)
        self._num_bits = num_bits
        if not isinstance(name, str | None):
            raise TypeError(f"name must be a string or None, not {type(name)}.")
        self._name = name
        if options["learn_amax"] and options["axis"] is not None:
            got = f"got {options['axis']!r}; leave axis out, or set learn_amax=False"
            raise TypeError(f"axis is ignored and must be None when learn_amax is true, {got}")
        self._fake_quant: bool = options["fake_quant"]
        axis = options["axis"]
        if isinstance(axis, tuple | list) and all(isinstance(each, int) for each in axis):
            axis = tuple(axis)
        elif not isinstance(axis, int | None):
            raise TypeError(f"axis must be None, an int or a tuple of ints, not {axis!r}")
        self._axis: int | tuple[int, ...] | None = axis
        self._block_sizes = _checked_blocks(options["block_sizes"])
        if self._block_sizes is not None and self._axis is not None:
            raise ValueError(f"axis must be None when block_sizes are given, got {self._axis!r}")
        amax = options["amax"]
        if not isinstance(amax, float | list | np.ndarray | None):
            raise TypeError(f"amax must be float, list or ndarray, not {type(amax)}")
        self._amax = None if amax is None else np.array(amax, dtype=np.float32)
        self._learn_amax: bool = options["learn_amax"]
        self._scale_amax: float | None = options["scale_amax"]
        self._calib_method: str = options["calib_method"]
        self._unsigned: bool = options["unsigned"]
        self._narrow_range: bool = options["narrow_range"]
        self._dynamic: bool = options["dynamic"]

    num_bits: NumBits = _field("_num_bits", "Bits of an integer code, or (exponent bits, mantissa bits).")
    name: str | None = _field("_name", "The name when printed.")
    fake_quant: bool = _field("_fake_quant", "Whether a quantizer returns values; else codes.")
    axis: int | tuple[int, ...] | None = _field("_axis", "The axis or axes that keep one amax per index.")
    block_sizes: dict[int | str, Any] | None = _field("_block_sizes", "Block sizes by axis, and the options of blocks.")
    amax: np.ndarray | None = _field("_amax", "The largest magnitude, float32.")
    learn_amax: bool = _field("_learn_amax", "Whether training moves amax.")
    scale_amax: float | None = _field("_scale_amax", "The factor that multiplies amax at every use.")
    calib_method: str = _field("_calib_method", "The kind of calibrator.")
    unsigned: bool = _field("_unsigned", "Whether codes begin at 0.")
    narrow_range: bool = _field("_narrow_range", "Whether the lowest signed code is left out.")

    @property
    def dynamic(self) -> bool:
        """Whether the range is taken from every tensor anew."""
        return self._dynamic or (self._block_sizes is not None and self._block_sizes.get("type") == "dynamic")

    @staticmethod
    def get_block_quant_axes_and_sizes(block_sizes: dict[int | str, Any] | None) -> dict[int, int] | None:
        """The block size along each axis, from `block_sizes` without its other keys; None for None.

        >>> QuantDescriptor.get_block_quant_axes_and_sizes({-1: 16, "type": "dynamic", "scale_bits": (4, 3)})
        {-1: 16}
        """
        return None if block_sizes is None else block_axes(block_sizes)

    def __str__(self) -> str:
        words = [f"{'unsigned ' if self._unsigned else ''}{self._num_bits}bit", "fake" if self._fake_quant else "real"]
        words.append(f"axis={' per-tensor' if self._axis is None else self._axis}")
        if self._block_sizes is not None:
            words.append(f"block_sizes={self._block_sizes}")
        if self._amax is not None:
            words.append(f"amax={self._amax} full_range")
        if self._learn_amax:
            words.append("learn_amax")
        if self._scale_amax:
            words.append(f"scale_amax={self._scale_amax}")
        return f"{'QuantDescriptor' if self._name is None else f'{self._name}: '}({' '.join(words)})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ScaledQuantDescriptor):
            return NotImplemented
        mine, others = self.dict(), other.dict()
        return list(mine.items()) == list(others.items())

    __hash__ = None  # pyright: ignore[reportAssignmentType] # equal by value

    def dict(self) -> dict[str, Any]:
        """num_bits, name and all fields that differ from their defaults, as arguments of the constructor."""
        values = {"num_bits": self._num_bits, "name": self._name}
        for key, default in _DEFAULTS.items():
            value = getattr(self, f"_{key}")
            if isinstance(value, np.ndarray):
                values[key] = value.tolist()
            elif value != default:
                values[key] = value
        return values

    def to_yaml(self) -> str:
        """`dict()` as YAML, tuples as lists.

        Raises:
            ModuleNotFoundError: PyYAML is not installed.

        >>> print(QuantDescriptor(num_bits=(4, 3), amax=[1.0, 2.5]).to_yaml(), end="")
        amax:
        - 1.0
        - 2.5
        name: null
        num_bits:
        - 4
        - 3
        """
        return _yaml().safe_dump(self.dict(), width=120)

    @classmethod
    def from_yaml(cls, yaml_str: str) -> ScaledQuantDescriptor:
        """The descriptor from the YAML that `to_yaml`, of this package or of the original, wrote.

        Raises:
            ModuleNotFoundError: PyYAML is not installed.
            yaml.YAMLError: the text is not YAML.
            TypeError: the text is not a mapping, or has unknown keys.
        """
        yaml = _yaml()

        class Loader(yaml.SafeLoader):
            """A YAML loader that also reads the tuples that the original writes for num_bits=(4, 3)."""

        Loader.add_constructor("tag:yaml.org,2002:python/tuple", Loader.construct_sequence)
        values = yaml.load(yaml_str, Loader)
        if not isinstance(values, dict):
            raise TypeError(f"the YAML of a descriptor is a mapping such as 'num_bits: 8', not {values!r}")
        blocks = values.get("block_sizes") or {}
        # YAML has no tuples.
        for mapping, key in ((values, "num_bits"), (values, "axis"), (blocks, "scale_bits")):
            if isinstance(mapping.get(key), list):
                mapping[key] = tuple(mapping[key])
        return cls(**values)


_DEFAULTS: dict[str, Any] = {
    "fake_quant": True,
    "axis": None,
    "block_sizes": None,
    "amax": None,
    "learn_amax": False,
    "scale_amax": None,
    "calib_method": "max",
    "unsigned": False,
    "narrow_range": False,
    "dynamic": False,
}


def _yaml() -> Any:
    try:
        import yaml
    except ModuleNotFoundError as error:
        message = "descriptors as YAML need PyYAML, not installed here; run pip install 'fakequant[compat]'"
        raise ModuleNotFoundError(message, name=error.name) from error
    return yaml


def _checked_blocks(block_sizes: Any) -> dict[int | str, Any] | None:
    if block_sizes is None:
        return None
    if not isinstance(block_sizes, dict):
        raise TypeError(f"block_sizes must be a dict such as {{-1: 32}}, not {block_sizes!r}")
    sizes = {key: value for key, value in block_sizes.items() if key not in _BLOCK_KEYS}
    if not sizes or not all(isinstance(key, int) and isinstance(size, int) and size > 0 for key, size in sizes.items()):
        raise ValueError(
            f"block_sizes {block_sizes} must map at least one axis to a positive size; other keys are "
            f"{', '.join(_BLOCK_KEYS)}"
        )
    if block_sizes.get("type", "static") not in _BLOCK_TYPES:
        raise ValueError(f"the type of block_sizes is static or dynamic, not {block_sizes['type']!r}")
    return dict(block_sizes)


QuantDescriptor = ScaledQuantDescriptor

QUANT_DESC_8BIT_PER_TENSOR = QuantDescriptor(num_bits=8)
QUANT_DESC_UNSIGNED_8BIT_PER_TENSOR = QuantDescriptor(num_bits=8, unsigned=True)
QUANT_DESC_8BIT_CONV1D_WEIGHT_PER_CHANNEL = QuantDescriptor(num_bits=8, axis=0)
QUANT_DESC_8BIT_CONV2D_WEIGHT_PER_CHANNEL = QuantDescriptor(num_bits=8, axis=0)
QUANT_DESC_8BIT_CONV3D_WEIGHT_PER_CHANNEL = QuantDescriptor(num_bits=8, axis=0)
QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW = QuantDescriptor(num_bits=8, axis=0)
QUANT_DESC_8BIT_CONVTRANSPOSE1D_WEIGHT_PER_CHANNEL = QuantDescriptor(num_bits=8, axis=1)
QUANT_DESC_8BIT_CONVTRANSPOSE2D_WEIGHT_PER_CHANNEL = QuantDescriptor(num_bits=8, axis=1)
QUANT_DESC_8BIT_CONVTRANSPOSE3D_WEIGHT_PER_CHANNEL = QuantDescriptor(num_bits=8, axis=1)


_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
# Inputs below the smallest subnormal of float16 become 0 in the float formats.
_SMALLEST_INPUT = 2.0**-24
_LARGEST_HALF = torch.finfo(torch.float16).max


def _in_other_orders(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Wrap a function so that it also takes `bias` after amax and `output_dtype` after num_bits by position."""

    @wraps(function)
    def call(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        first, rest = list(args[:2]), list(args[2:])
        if rest and (rest[0] is None or isinstance(rest[0], Tensor)):
            kwargs["bias"] = rest.pop(0)
        if len(rest) > 1 and isinstance(rest[1], torch.dtype):
            kwargs["output_dtype"] = rest.pop(1)
        return function(*first, *rest, **kwargs)  # pyright: ignore[reportCallIssue]

    return call


@_in_other_orders
def fake_tensor_quant(
    inputs: Tensor,
    amax: Tensor | float,
    num_bits: int = 8,
    unsigned: bool = False,
    narrow_range: bool = True,
    *,
    bias: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Round inputs to the values of integers with `num_bits` bits; amax is the largest of these values.

    Args:
        inputs: any shape.
        amax: the largest magnitude; broadcasts with inputs. Where it is at most 2**-24 the output is 0.
        num_bits: bits of a code.
        unsigned: whether codes begin at 0, and none is negative.
        narrow_range: whether the lowest signed code is excluded, so that there are as many negative as positive codes.
        bias: subtracted from the inputs before, and added after; broadcasts with inputs.
        output_dtype: the dtype of the result; by default the dtype of inputs.

    Raises:
        TypeError: unsigned, and inputs hold negative values; inputs are no floating tensor; or amax is None.
        ValueError: a negative amax.

    >>> fake_tensor_quant(torch.tensor([0.3, -1.0, 5.0]), torch.tensor(1.27))
    tensor([ 0.3000, -1.0000,  1.2700])
    """
    if amax is None:
        raise TypeError("amax must be a number or a tensor, got None; give for example inputs.abs().max()")
    x = inputs if bias is None else inputs - bias
    y = fake_quantize(x, amax, _integers(x, num_bits, unsigned, narrow_range))
    y = y if bias is None else y + bias
    return y if output_dtype is None else y.to(output_dtype)


legacy_fake_tensor_quant = fake_tensor_quant


@_in_other_orders
def tensor_quant(
    inputs: Tensor,
    amax: Tensor | float,
    num_bits: int = 8,
    unsigned: bool = False,
    narrow_range: bool = True,
    *,
    bias: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The codes of inputs as numbers in their dtype, and the scale in codes per unit, in the shape of amax.

    Arguments and errors are those of `fake_tensor_quant`. The gradient of a code goes to its input unchanged. Where
    amax is at most 2**-24, codes are 0 and the scale is 1.

    Raises:
        ValueError: a scale by which float16 inputs cannot be multiplied.

    >>> tensor_quant(torch.tensor([0.3, -1.0, 5.0]), torch.tensor(1.27))
    (tensor([  30., -100.,  127.]), tensor(100.))
    """
    x = inputs if bias is None else inputs - bias
    fmt = _integers(x, num_bits, unsigned, narrow_range)
    x = _broadcast(x, amax)
    read = read_amax(amax, x, fmt)
    scale = read.params.scale.reshape(as_tensor(amax, x).shape)
    if x.dtype == torch.float16 and is_concrete(scale) and bool((scale > _LARGEST_HALF).any()):
        raise ValueError(f"scale is too large for FP16 with amax={amax}")
    # With a scale of 1 codes are their own values, and the range decides where the gradient goes.
    ones = QParams(torch.ones_like(read.params.scale), None, read.params.range)
    codes = library.fake_quantize(x.detach().to(read.params.scale.dtype) * read.params.scale, ones, read.spec)
    codes = _with_gradient(codes.to(x.dtype), library.fake_quantize(x, ones, read.spec))
    if read.zero is not None:
        codes = _zero_where(read.zero, codes)
    return (codes if output_dtype is None else codes.to(output_dtype)), scale.to(x.dtype)


def fake_affine_tensor_quant(
    inputs: Tensor, min_range: Tensor | float, max_range: Tensor | float, num_bits: int = 8
) -> Tensor:
    """Round inputs to 2**num_bits values from about min_range to max_range; 0.0 is one of them if it lies between.

    A gradient passes where min_range <= inputs <= max_range; min_range and max_range get no gradient.

    Source: gemmlowp, quantization.md.

    >>> fake_affine_tensor_quant(torch.tensor([-0.5, 0.1, 2.0]), -0.55, 2.0)
    tensor([-0.5000,  0.1000,  2.0000])
    """
    lo, hi = torch.broadcast_tensors(as_tensor(min_range, inputs), as_tensor(max_range, inputs))
    x = _broadcast(inputs, lo)
    fmt = IntegerFormat.of(num_bits)
    granularity, shape = granularity_of(lo.shape, x.shape)
    lo, hi = (values.to(compute_dtype(x.dtype)).reshape(shape) for values in (lo, hi))
    step = (hi - lo) / torch.full_like(lo, fmt.quant_max - fmt.quant_min)
    zero_point = fmt.quant_min - (lo / step).round()
    spec = QuantSpec(fmt, granularity, symmetric=False, gradient=Gradient.INPUT_RANGE)
    return library.fake_quantize(x, QParams(step, zero_point, Range(lo, hi)), spec)


@_in_other_orders
def scaled_e4m3(
    inputs: Tensor,
    amax: Tensor | float | None = None,
    E: int = 4,
    M: int = 3,
    *,
    bias: Tensor | None = None,
) -> Tensor:
    """Round inputs to the values of an 8-bit float with 4 exponent bits; amax is the largest of these values.

    Args:
        inputs: any shape; magnitudes below 2**-24 become 0.
        amax: the largest magnitude; broadcasts with inputs. None: 448, the format's bound.
        E: exponent bits: 4.
        M: mantissa bits: 3.
        bias: subtracted from the inputs before, and added after; broadcasts with inputs.

    Raises:
        TypeError: other numbers of bits; a `QuantDescriptor` takes them.
        ValueError: a negative amax.
        AssertionError: several amax in torch.onnx.export(dynamo=False), which writes TensorRT's operators.

    >>> scaled_e4m3(torch.tensor([0.3, -17.0, 101.0]))
    tensor([  0.3125, -16.0000, 104.0000])
    """
    if (E, M) != (4, 3):
        raise TypeError(f"only E=4 and M=3 are supported here, got E={E} and M={M}")
    x, fmt = inputs if bias is None else inputs - bias, float_format((E, M))
    if writes_trt_fp8(fmt):
        scale = None if amax is None else as_tensor(amax, x).to(compute_dtype(x.dtype)) / fmt.bound
        y = as_trt_fp8(x, scale)
    else:
        y = fake_quantize(x, amax, fmt)
    return y if bias is None else y + bias


def scaled_e4m3_abstract(input: Tensor, amax: Tensor | None = None) -> Tensor:
    """An uninitialised tensor with the shape and dtype of the result of `scaled_e4m3`.

    >>> scaled_e4m3_abstract(torch.zeros(2, 3, device="meta")).shape
    torch.Size([2, 3])
    """
    return torch.empty_like(input)


class TensorQuantFunction:
    """A class whose method `apply` is `tensor_quant`."""

    apply = staticmethod(tensor_quant)


class FakeTensorQuantFunction:
    """A class whose method `apply` is `fake_tensor_quant`."""

    apply = staticmethod(fake_tensor_quant)


class LegacyFakeTensorQuantFunction:
    """A class whose method `apply` is `legacy_fake_tensor_quant`."""

    apply = staticmethod(legacy_fake_tensor_quant)


class FakeAffineTensorQuantFunction:
    """A class whose method `apply` is `fake_affine_tensor_quant`."""

    apply = staticmethod(fake_affine_tensor_quant)


class ScaledE4M3Function:
    """A class whose method `apply` is `scaled_e4m3`."""

    apply = staticmethod(scaled_e4m3)


def fake_quantize(inputs: Tensor, amax: Tensor | float | None, fmt: Format) -> Tensor:
    """Round inputs to the values of any format, with amax as the format's bound; amax broadcasts with inputs.

    Without an amax the scale is 1.

    Raises:
        ValueError: a negative amax.
    """
    x = _broadcast(inputs, amax)
    read = read_amax(amax, x, fmt)
    y = library.fake_quantize(x, read.params, read.spec)
    if read.zero is not None:
        y = _zero_where(read.zero, y)
    if not fmt.has_zero_point:
        y = torch.where(x.detach().abs() < _SMALLEST_INPUT, _with_gradient(torch.zeros_like(y), y), y)
    return y


def _integers(x: Tensor, num_bits: int, unsigned: bool, narrow_range: bool) -> IntegerFormat:
    compute_dtype(x.dtype)
    if unsigned and x.numel() and is_concrete(x) and bool((x < 0).any()):
        raise TypeError("Negative values encountered in unsigned quantization.")
    return integer_format(num_bits, unsigned, narrow_range)


def _broadcast(x: Tensor, amax: Tensor | float | None) -> Tensor:
    """x expanded to the shape that it and amax broadcast to; an amax of one number adds no axes."""
    if not isinstance(amax, Tensor) or amax.numel() == 1:
        return x
    shape = torch.broadcast_shapes(x.shape, amax.shape)
    return x if shape == x.shape else x.expand(shape)


def _zero_where(zero: Tensor, y: Tensor) -> Tensor:
    """y with its gradient, and with zeros of the same sign where `zero` is set."""
    return torch.where(zero, _with_gradient(y.detach() * 0.0, y), y)


def _with_gradient(values: Tensor, y: Tensor) -> Tensor:
    """The values with the gradient of y; y must be finite where the result is used."""
    # Subtracting +0.0 changes no value, not even -0.0.
    return values - (y.detach() - y)
