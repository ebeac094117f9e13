"""Qualcomm's HTP: where it wants quantizers, and how it stores results as codes of 8 and 16 bits.

The rules of codes were found by giving all codes to the emulation that Qualcomm ships (libQnnHtp.so of onnxruntime-qnn
2.7) and comparing the codes that come out. Whether a real HTP gives the same codes was not tested.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fakequant.model.config import TensorConfig
from fakequant.model.engine import STATIC, Engine, register_engine
from fakequant.model.placement import (
    ATTENTION_IN_PARTS,
    ATTENTION_LAYER,
    RECURRENT,
    FixedRange,
    InnerFunction,
    Target,
    after_products,
    lookups,
    moves,
)
from fakequant.nn.device import BOUNDS, CodeGrid, Computed, Device, Operands, Sums
from fakequant.nn.functions import SITE_FUNCTIONS
from fakequant.numerics.formats import IntegerFormat
from fakequant.numerics.products import FixedPoint
from fakequant.ops.products import fixed_point

_ZERO_TO_ONE = FixedRange(0.0, 1.0, has_high=True)


def placement() -> Target:
    """The placement of quantizers that QNN wants."""
    keeps = moves() | {"maximum", "minimum"}
    inputs = frozenset(SITE_FUNCTIONS) - keeps - {"batch_norm", "relu", "relu6", "hardtanh"}
    return Target(
        name="qnn",
        inputs=inputs,
        keeps=keeps,
        shared=frozenset({"cat", "stack"}),
        fixed={
            "softmax": _ZERO_TO_ONE,
            "sigmoid": _ZERO_TO_ONE,
            "hardsigmoid": _ZERO_TO_ONE,
            "tanh": FixedRange(-1.0, 1.0, has_high=True),
        },
        outputs=(inputs | RECURRENT | {ATTENTION_LAYER}) - lookups(),
        fused=after_products(*BOUNDS) | {("add", "relu")},
        parts=ATTENTION_IN_PARTS | {"silu": InnerFunction("sigmoid", "sigmoid", most_bits=8)},
    )


def variant(field: str, config: TensorConfig) -> TensorConfig:
    """The configuration of a tensor; activations become unsigned, because a session refuses signed integers."""
    spec = config.spec
    if field == "weight" or config.dynamic or not isinstance(spec.format, IntegerFormat) or not spec.symmetric:
        return config
    return TensorConfig(spec.replace(format=f"uint{spec.format.bits}", symmetric=False))


def _exponent(ratio: Tensor) -> Tensor:
    """The int64 number floor(log2(ratio))."""
    return torch.frexp(ratio).exponent.long() - 1


def product(parts: Sums, result: CodeGrid) -> Tensor:
    """The codes of a convolution, a linear layer or a matrix product, from the exact sums of products of codes.

    Bias and zero point are added to the sums, and bits more than 3 below a code's lowest bit are cut off. The rest is
    multiplied by a number of 11 bits, and a half is rounded up. The ratio of scales is computed for the largest weight
    scale, then multiplied by each channel's scale over the largest. Ratio, bias and zero point are float32 numbers.
    """
    return _scaled(parts, result, bits=11, below=3)


def strided_depthwise(parts: Sums, result: CodeGrid) -> Tensor:
    """The codes of a depthwise convolution with a stride: no bits are cut off, and the multiplier has 15 bits.

    With 16 bits, 1 of 2,500 codes differs from the emulation, by 1.
    """
    return _scaled(parts, result, bits=15, below=32)


def product_of_16_bits(parts: Sums, result: CodeGrid) -> Tensor:
    """The codes of a product whose input has 16 bits: sums lose their last 8 bits before a multiplier of 11 bits.

    The sums are of codes from which no zero point is subtracted. After the cut, a constant is added: the bias and the
    result's zero point, rounded down, minus the zero point's part of the sums, rounded. In 3 of 5,760 channels this
    constant differed by 1.
    """

    def make() -> FixedPoint:
        ratio, constant = _ratio_and_constant(parts, result)
        assert parts.of_zero is not None
        kept = torch.floor(constant / 256) - torch.floor((parts.of_zero + 128) / 256)
        by = _fixed_point(256 * ratio, kept, bits=11, below=32)
        return FixedPoint(parts.of_zero + 256 * kept, by.down / 256, by.factor)

    return fixed_point(parts.sums, parts.once((16,), result, make), result.low, result.high)


def _scaled(parts: Sums, result: CodeGrid, bits: int, below: int) -> Tensor:
    def make() -> FixedPoint:
        ratio, constant = _ratio_and_constant(parts, result)
        return _fixed_point(ratio, constant, bits, below)

    return fixed_point(parts.sums, parts.once((bits,), result, make), result.low, result.high)


def _ratio_and_constant(parts: Sums, result: CodeGrid) -> tuple[Tensor, Tensor]:
    """The factor of sums, and the constant of bias and zero point that is added to sums; both are float32 values."""
    of_input, of_weight, of_output = (scale.float() for scale in (parts.of_input, parts.of_weight, result.scale))
    largest = of_weight.max()
    ratio = of_input * largest / of_output * (of_weight / largest)
    bias = torch.round(parts.bias.float() / (of_input * of_weight))
    return ratio.double(), torch.floor((bias + ratio.new_tensor(result.zero_point) / ratio) + 0.5).double()


def _fixed_point(ratio: Tensor, constant: Tensor, bits: int, below: int) -> FixedPoint:
    exponent = _exponent(1 / ratio)
    dropped = (exponent - below).clamp(min=0)
    multiplier = torch.floor(torch.ldexp(ratio, exponent + bits) + 0.5)
    # The multiplier over a power of two is exact in float64, and so is its product with what is kept.
    factor = torch.ldexp(multiplier, dropped - exponent - bits)
    return FixedPoint(constant, torch.exp2(-dropped.double()), factor)


def _is_joined(source: Computed) -> bool:
    """Whether HTP computes a function and a ReLU or clamp of its result as one: not for a linear layer or matrix
    product with more than two axes, because HTP reshapes its result."""
    if isinstance(source.parts, Sums):
        return source.parts.sums.dim() == 2 or source.function not in ("linear", "matmul")
    return source.function in ("add", "sub", "mul")


def add(parts: Operands, result: CodeGrid) -> Tensor:
    """The codes of a sum of two tensors: each has a multiplier; the added constant is rounded to a multiple of 256."""
    return _added(parts, result, 1)


def sub(parts: Operands, result: CodeGrid) -> Tensor:
    """The codes of a difference of two tensors: as for `add`, with a negative multiplier for the second tensor."""
    return _added(parts, result, -1)


def _added(parts: Operands, result: CodeGrid, sign: int) -> Tensor:
    a, b = parts.tensors
    numbers = ((float(grid.scale), grid.zero_point) for grid in (a.grid, b.grid, result))
    of_a, of_b, by = _addition(sign, *numbers)
    # Both multipliers together have 14 bits: float32 holds all sums.
    sums = torch.add(a.stored.float() * of_a, b.stored.float(), alpha=of_b)
    return fixed_point(sums if a.is_whole and b.is_whole else sums.double(), by, result.low, result.high)


@lru_cache(maxsize=1024)
def _addition(sign: int, *numbers: tuple[float, int]) -> tuple[float, float, FixedPoint]:
    """The multipliers of two tensors, and the rule for their sum, from scale and zero point of both and of the sum."""
    scales = torch.tensor([scale for scale, _ in numbers], dtype=torch.float32, device="cpu").double()
    of_a, of_b, of_result = (zero_point for _, zero_point in numbers)
    ratios = scales[:2] / scales[2]
    largest = ratios.sum() if sign > 0 else ratios.max()
    shift = 13 - _exponent(largest / (1 - 2**-12))  # in 11 bits, which may round up to a power of two
    of_first, of_second = torch.round(torch.ldexp(ratios, shift)) * torch.tensor([1, sign], device="cpu")
    half_up = torch.ldexp(torch.tensor(of_result + 0.5, dtype=torch.float64, device="cpu"), shift)
    constant = 256 * torch.ceil((half_up - of_first * of_a - of_second * of_b) / 256 - 0.5)
    down = torch.exp2(-shift.double())
    return float(of_first), float(of_second), FixedPoint(constant, down, torch.ones_like(down))


def mul(parts: Operands, result: CodeGrid) -> Tensor:
    """The codes of a product of two tensors: a multiplier of 15 bits, and a constant of 16 bits in units of 2^15.

    The middle of the range of products, rounded to a multiple of 256, is subtracted from each product before the
    multiplier; the constant is added after it. If the constant needs more bits, the multiplier gets fewer bits. Where
    the result's scale is below 3 times the product of scales, 1 of 80 codes differs.
    """
    a, b = parts.tensors
    multiplier, constant, shift = _multiplication(*((float(x.scale), x.zero_point) for x in (a.grid, b.grid, result)))
    return torch.floor((a.codes.double() * b.codes.double() * multiplier + constant) * 2.0**-shift)


@lru_cache(maxsize=1024)
def _multiplication(*numbers: tuple[float, int]) -> tuple[int, int, int]:
    """Multiplier, constant and shift for products of codes minus zero points, from the scales and zero points of both
    tensors and of the result."""
    of_a, of_b, of_result = (float(np.float32(scale)) for scale, _ in numbers)
    a, b, zero_point = (point for _, point in numbers)
    ratio = of_a * of_b / of_result
    middle = 256 * round((255 - 2 * a) * (255 - 2 * b) / 512)
    shift = min(15 - math.frexp(ratio)[1], 22)
    while True:
        multiplier = round(math.ldexp(ratio, shift))
        units = math.floor(math.ldexp(zero_point + 0.5, shift - 15) + middle * multiplier / 2**15 + 0.5)
        if units < 2**15:
            return multiplier, units * 2**15 - middle * multiplier, shift
        shift -= 1


def add_of_16_bits(parts: Operands, result: CodeGrid) -> Tensor:
    """The codes of a sum of two tensors of 16 bits: the larger multiplier has 15 bits; the added constant is even."""
    a, b = parts.tensors
    scales = torch.stack([grid.scale.float().double() for grid in (a.grid, b.grid, result)])
    ratios = scales[:2] / scales[2]
    shift = 14 - _exponent(ratios.max())
    of_a, of_b = torch.round(torch.ldexp(ratios, shift))
    half_up = torch.ldexp(torch.tensor(result.zero_point + 0.5, dtype=torch.float64, device="cpu"), shift)
    constant = 2 * torch.ceil((half_up - of_a * a.grid.zero_point - of_b * b.grid.zero_point) / 2)
    return torch.floor(torch.ldexp(a.stored.double() * of_a + b.stored.double() * of_b + constant, -shift))


def bounded(parts: Operands, result: CodeGrid) -> Tensor:
    """The codes of a ReLU or clamp of codes, with halves rounded up. Tested: 61,440 codes of 240 pairs of scales."""
    (x,) = parts.tensors
    ratio = x.grid.scale.float().double() / result.scale.float().double()
    return torch.floor(x.codes * ratio + 0.5) + result.zero_point


def sigmoid(parts: Operands, result: CodeGrid) -> Tensor:
    """The codes of a sigmoid of codes, a half rounded up."""
    return _function(torch.sigmoid, parts, result)


def swish(parts: Operands, result: CodeGrid) -> Tensor:
    """The codes of x * sigmoid(x), which HTP computes as one function of the codes of x, a half rounded up.

    All codes of 30 grids are equal. Without a quantizer of the sigmoid, HTP computes SiLU as if every fourth code of x
    were the next code; so `placement` quantizes the sigmoid, too.
    """
    return _function(F.silu, parts, result)


def _function(function: Callable[[Tensor], Tensor], parts: Operands, result: CodeGrid) -> Tensor:
    (x,) = parts.tensors
    values = function(x.codes.double() * x.grid.scale.float().double())
    return torch.floor(values / result.scale.float().double() + (result.zero_point + 0.5))


def mean(parts: Operands, result: CodeGrid) -> Tensor:
    """The codes of a mean or a pool over all positions, from a multiplier of 15 bits.

    The product of sum and multiplier, and the constant of both zero points, are rounded before they are added: the
    product to the nearest, the constant up. The bits that they lose are those below 256 elements; all, if the ratio of
    the input's scale over the result's and the elements is at least 1/2. Ratio and multiplier are float32 numbers. Of
    90,008 codes of 600 pairs of scales 0 differ; of pools of 1,024 elements 2 of 1,280 that lie beside a half.
    """
    (x,) = parts.tensors
    one, half = np.float32(1), np.float32(0.5)
    ratio = np.float32(float(x.grid.scale)) / np.float32(parts.summed) * (one / np.float32(float(result.scale)))
    mantissa, exponent = np.frexp(ratio)
    # HTP reads a batch, rows, columns and channels. ONNX Runtime moves the channels of pictures to the end; a mean over
    # axes 1 and 2 alone is of channels that are there. In a network without convolutions and pools nothing is moved,
    # which is not known here: of 4 axes, means over others may differ there. There are other functions where no row and
    # no column is left, and for means of up to four channels: other units of the multiplier, rounded at the end alone.
    moved = len(parts.shape) == 4 and parts.window[1:] != (*parts.shape[1:3], 1)
    places = (0, 2, 3, 1) if moved else range(-4, 0)
    padded = [(1,) * (4 - len(axes)) + axes for axes in (parts.shape, parts.window)]
    (_, *sizes), (_, *window) = ([axes[place] for place in places] for axes in padded)
    is_small = window == [*sizes[:2], 1] or (window[1:] == [1, sizes[2]] and sizes[2] <= 4)
    multiplier = float(np.floor(np.float32(mantissa) * np.float32(2**15 - (not is_small)) + half))
    shift = 15 - int(exponent)
    first = 0 if is_small else shift if ratio >= half else max(parts.summed.bit_length() - 8, 0)
    of_zero = x.grid.zero_point * parts.summed
    half_up = 2.0 ** (shift - 1) if first < shift else 0.0
    constant = math.ceil((result.zero_point * 2.0**shift + half_up - multiplier * of_zero) / 2.0**first)
    products = torch.floor(((x.codes.double() + of_zero) * multiplier) * 2.0**-first + 0.5)
    return torch.floor((products + constant) * 2.0 ** (first - shift))


def pool_of_16_bits(parts: Operands, result: CodeGrid) -> Tensor:
    """The codes of 16 bits of a pool over all positions; over more than 64 positions half of the codes differ, by 1."""
    return _mean(parts, result, 2**15)


def windows(parts: Operands, result: CodeGrid) -> Tensor:
    """The codes of a pool whose windows do not overlap: units of 1 / 32768; means of four values are rounded twice."""
    return _mean(parts, result, 2**15, first=12 if parts.summed == 4 else 0)


def _mean(parts: Operands, result: CodeGrid, units: int, first: int = 0) -> Tensor:
    """The codes of a mean. For ratios below 1/2, it is also rounded at the bit `first` before the last rounding."""
    (x,) = parts.tensors
    ratio = x.grid.scale.float().double() / result.scale.float().double() / parts.summed
    shift = 14 - _exponent(ratio)
    multiplier = torch.round(torch.ldexp(ratio, shift - 15) * units)
    half_up = torch.ldexp(torch.tensor(result.zero_point + 0.5, dtype=torch.float64, device="cpu"), shift)
    if first:
        half_up = half_up + torch.where(ratio < 0.5, 2.0 ** (first - 1), 0.0)
    return torch.floor(torch.ldexp(multiplier * x.codes + half_up, -shift))


register_engine(
    Engine(
        "qnn",
        "0 codes differ from the emulation that Qualcomm ships, for functions with a rule; silicon was not seen",
        serves="networks of convolutions",
        kinds=(STATIC[1:],),
        files="portable",
        export="export_onnx",
        packages=("onnxruntime-qnn",),
        placement=placement,
        variant=variant,
        device=Device(
            "qnn",
            {
                "product": product,
                "strided depthwise": strided_depthwise,
                "add": add,
                "sub": sub,
                "mul": mul,
                "sigmoid": sigmoid,
                "swish": swish,
                **dict.fromkeys(BOUNDS, bounded),
                "mean": mean,
                "adaptive_avg_pool2d": mean,
                "avg_pool2d": windows,
            },
            "the emulation of HTP in onnxruntime-qnn 2.7, inputs on codes of the first quantizer (of other floats 1 of "
            "150 is rounded otherwise): 0 codes differ of 33 small networks, ResNet-18, MobileNetV2 and a keyword "
            "spotter; of 16 bits 0 of 24 small networks, but 1 of 2,500 of strided depthwise convolutions",
            wide={
                "product": product_of_16_bits,
                "strided depthwise": strided_depthwise,
                "add": add_of_16_bits,
                "adaptive_avg_pool2d": pool_of_16_bits,
                "avg_pool2d": windows,
            },
            unsigned=True,
            joins=_is_joined,
            merges={("sigmoid", "mul"): "swish"},
        ),
        page="qnn",
    )
)
