"""ExecuTorch on XNNPACK: inputs and results of products, sums and `cat` are quantized, as ExecuTorch's quantizer does.

A sum or a product of two tensors and the ReLU after it are one operator. Attention and softmax stay in float. A mean
gets no quantizers, only the functions around it do: a quantizer of the mean would leave a sum before it in float.
"""

from dataclasses import replace

import torch
from torch import Tensor

from fakequant.model.config import TensorConfig
from fakequant.model.engine import STATIC, Engine, register_engine
from fakequant.model.placement import Target, after_products, moves
from fakequant.nn.device import CodeGrid, Device, Operands, Sums
from fakequant.numerics.formats import IntegerFormat, parse_format
from fakequant.numerics.granularity import PerBlock
from fakequant.numerics.spec import Arithmetic

_PRODUCTS = frozenset({"linear", "conv1d", "conv2d", "conv_transpose2d", "addmm"})


def placement() -> Target:
    """The placement of quantizers that XNNPACK wants."""
    return Target(
        name="xnnpack",
        inputs=_PRODUCTS | {"add", "mul", "cat"},
        keeps=moves() | {"relu", "hardtanh", "relu6"},
        shared=frozenset({"cat"}),
        outputs=_PRODUCTS | {"add", "mul", "cat"},
        fused=after_products("relu", "relu6", "hardtanh") | {("add", "relu"), ("mul", "relu")},
    )


def variant(field: str, config: TensorConfig) -> TensorConfig:
    """The configuration of a tensor: inputs are multiplied by the scale's reciprocal; group scales are bfloat16."""
    spec = config.spec
    if not isinstance(spec.format, IntegerFormat):
        return config
    if field != "weight" and spec.arithmetic is Arithmetic.DIVIDE:
        return TensorConfig(spec.replace(arithmetic=Arithmetic.RECIPROCAL), config.dynamic)
    if field == "weight" and isinstance(spec.granularity, PerBlock) and spec.scale.format is None:
        return TensorConfig(spec.replace(scale=replace(spec.scale, format=parse_format("bfloat16"))), config.dynamic)
    return config


def product(parts: Sums, result: CodeGrid) -> Tensor:
    """The codes of a convolution, a linear layer or a matrix product: int32 sums of products of codes are converted to
    float32 and multiplied by the ratio of scales."""
    of_input, of_weight = parts.of_input.float(), parts.of_weight.float()
    sums = parts.sums.double() + torch.round(parts.bias.float() / (of_input * of_weight))
    return torch.round(sums.float() * (of_input * of_weight / result.scale.float())).add_(result.zero_point)


def add(parts: Operands, result: CodeGrid) -> Tensor:
    """The codes of a sum of two tensors: each has a multiplier of at most 21 bits; a half is rounded up."""
    ratios = [x.grid.scale.float() / result.scale.float() for x in parts.tensors]
    shift = 21 - torch.frexp(torch.maximum(*ratios)).exponent
    a, b = (
        x.codes.double() * torch.round(torch.ldexp(ratio.double(), shift))
        for x, ratio in zip(parts.tensors, ratios, strict=True)
    )
    return torch.floor(torch.ldexp(a + b, -shift) + 0.5).add_(result.zero_point)


def mul(parts: Operands, result: CodeGrid) -> Tensor:
    """The codes of a product of two tensors, element by element."""
    a, b = parts.tensors
    ratio = a.grid.scale.float() * b.grid.scale.float() / result.scale.float()
    return torch.round(a.codes * b.codes * ratio).add_(result.zero_point)


def mean(parts: Operands, result: CodeGrid) -> Tensor:
    """The codes of a mean, and of a pool over all positions."""
    (x,) = parts.tensors
    return torch.round(x.codes.float() * (x.grid.scale.float() / result.scale.float() / parts.summed)).add_(
        result.zero_point
    )


RULES = {"product": product, "add": add, "mul": mul, "mean": mean, "adaptive_avg_pool2d": mean}

register_engine(
    Engine(
        "xnnpack",
        "0 codes differ under its arithmetic; the simulation is a step an operator off, and 0 in portable kernels",
        serves="phones and embedded CPUs",
        kinds=(STATIC, ("W4A8_EXECUTORCH",)),
        export="export_executorch",
        packages=("executorch",),
        placement=placement,
        variant=variant,
        tables=False,
        device=Device("xnnpack", RULES, "XNNPACK in ExecuTorch 1.5.1: 0 codes differ of 24 networks"),
        aliases=("executorch",),
        page="executorch",
    )
)
