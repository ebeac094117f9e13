"""LiteRT: it computes the same int8 results as XNNPACK, but encodes floats by division by the scale."""

from dataclasses import replace

import torch
from torch import Tensor

from fakequant.engines import executorch
from fakequant.model.engine import STATIC, Engine, register_engine
from fakequant.model.placement import Target
from fakequant.nn.device import CodeGrid, Device, Operands, Sums


def placement() -> Target:
    """The placement of quantizers that LiteRT wants."""
    return replace(executorch.placement(), name="litert")


def _multiplier(ratio: Tensor) -> tuple[Tensor, Tensor]:
    """A ratio as integer * 2^(exponent - 31): the integer, of 31 bits, and the exponent, both int64."""
    mantissa, exponent = torch.frexp(ratio.double())
    multiplier = torch.floor(torch.ldexp(mantissa, torch.tensor(31, device="cpu")) + 0.5).long()
    is_over = multiplier == 1 << 31
    return torch.where(is_over, multiplier // 2, multiplier), exponent.long() + is_over.long()


def _scaled(x: Tensor, multiplier: Tensor, exponent: Tensor) -> Tensor:
    """Return x * multiplier * 2^(exponent - 31), rounded twice to the nearest.

    The product is divided by 2^31, with ties up; then a negative exponent shifts it to the right, with ties away from
    0. A positive exponent shifts x before the product.
    """
    products = (x << exponent.clamp(min=0)) * multiplier
    nudge = torch.where(products >= 0, 1 << 30, 1 - (1 << 30))
    high, right = torch.div(products + nudge, 1 << 31, rounding_mode="trunc"), (-exponent).clamp(min=0)
    mask = (torch.ones_like(right) << right) - 1
    return (high >> right) + ((high & mask) > (mask >> 1) + (high < 0).long()).long()


def _sums(parts: Sums, result: CodeGrid) -> tuple[Tensor, Tensor]:
    """The int64 sums of products of codes, with biases, and the ratio of scales."""
    of_input, of_weight = parts.of_input.float().double(), parts.of_weight.float().double()
    scale = of_input * of_weight
    bias = torch.round(parts.bias.float().double() / scale)
    return (parts.sums.double() + bias).long(), scale / result.scale.float().double()


def convolution(parts: Sums, result: CodeGrid) -> Tensor:
    """The codes that the reference kernels compute for a convolution or a matrix product."""
    sums, ratio = _sums(parts, result)
    return _scaled(sums, *_multiplier(ratio)).double().add_(result.zero_point)


def linear(parts: Sums, result: CodeGrid) -> Tensor:
    """The codes that the reference kernels compute for a linear layer: they round once, with ties up."""
    sums, ratio = _sums(parts, result)
    multiplier, exponent = _multiplier(ratio)
    right = 31 - exponent
    return ((sums * multiplier + (torch.ones_like(right) << right - 1)) >> right).double().add_(result.zero_point)


def add(parts: Operands, result: CodeGrid) -> Tensor:
    """The codes that the reference kernels compute for a sum of two tensors: 20 more bits before the last rounding."""
    of_a, of_b, of_sum = (s.float().double() for s in (*(x.grid.scale for x in parts.tensors), result.scale))
    twice = 2 * torch.maximum(of_a, of_b)
    a, b = (
        _scaled(x.codes.long() << 20, *_multiplier(scale / twice))
        for x, scale in zip(parts.tensors, (of_a, of_b), strict=True)
    )
    return _scaled(a + b, *_multiplier(twice / (of_sum * (1 << 20)))).double().add_(result.zero_point)


def mul(parts: Operands, result: CodeGrid) -> Tensor:
    """The codes that the reference kernels compute for a product of two tensors, element by element."""
    a, b = parts.tensors
    ratio = a.grid.scale.float().double() * b.grid.scale.float().double() / result.scale.float().double()
    return _scaled(a.codes.long() * b.codes.long(), *_multiplier(ratio)).double().add_(result.zero_point)


def mean(parts: Operands, result: CodeGrid) -> Tensor:
    """The codes that the reference kernels compute for a mean: the multiplier is divided by the number of elements."""
    (x,) = parts.tensors
    multiplier, exponent = _multiplier(x.grid.scale.float().double() / result.scale.float().double())
    shift = (exponent + 31).clamp(max=min(parts.summed.bit_length() - 1, 32))
    return (
        _scaled(x.codes.long(), (multiplier << shift) // parts.summed, exponent - shift)
        .double()
        .add_(result.zero_point)
    )


_LITERT = Engine(
    "litert",
    "0 codes differ under its arithmetic; the simulation is at most a step an operator away",
    serves="Android, networks of convolutions",
    kinds=(STATIC,),
    export="export_litert",
    packages=("ai-edge-litert",),
    placement=placement,
    device=Device("litert", executorch.RULES, "XNNPACK in LiteRT 2.3: 0 codes differ of 24 networks"),
    aliases=("tflite",),
    page="litert",
)
register_engine(_LITERT)
register_engine(
    replace(
        _LITERT,
        name="litert_reference",
        serves="the same files by kernels without SIMD",
        device=Device(
            "litert_reference",
            {
                "product": convolution,
                "linear": linear,
                "add": add,
                "mul": mul,
                "mean": mean,
                "adaptive_avg_pool2d": mean,
            },
            "reference kernels of LiteRT 2.3: 0 codes differ of 24 networks",
        ),
        aliases=(),
    )
)
