"""ExecuTorch on XNNPACK, as its quantizer annotates: products, sums and concatenations, in and out.

A sum or a product of two tensors and the ReLU after it are one operator. Attention and softmax stay in float. A mean
has the quantizers of what it reads and of what reads it: behind it alone, the sum in front would stay in float.
"""

from dataclasses import replace

from fakequant.model.config import TensorConfig
from fakequant.model.engine import STATIC, Engine, register_engine
from fakequant.model.sites.targets import Target, after_products, moves
from fakequant.numerics.formats import IntegerFormat, parse_format
from fakequant.numerics.granularity import PerBlock
from fakequant.numerics.spec import Arithmetic

_PRODUCTS = frozenset({"linear", "conv1d", "conv2d", "conv_transpose2d", "addmm"})


def placement() -> Target:
    """Where XNNPACK wants quantizers."""
    return Target(
        name="xnnpack",
        inputs=_PRODUCTS | {"add", "mul", "cat"},
        keeps=moves() | {"relu", "hardtanh", "relu6"},
        shared=frozenset({"cat"}),
        outputs=_PRODUCTS | {"add", "mul", "cat"},
        fused=after_products("relu", "relu6", "hardtanh") | {("add", "relu"), ("mul", "relu")},
    )


def variant(field: str, config: TensorConfig) -> TensorConfig:
    """Codes of inputs by the reciprocal of the scale, and scales of groups of weights in bfloat16."""
    spec = config.spec
    if not isinstance(spec.format, IntegerFormat):
        return config
    if field != "weight" and spec.arithmetic is Arithmetic.DIVIDE:
        return TensorConfig(spec.replace(arithmetic=Arithmetic.RECIPROCAL), config.dynamic)
    if field == "weight" and isinstance(spec.granularity, PerBlock) and spec.scale.format is None:
        return TensorConfig(spec.replace(scale=replace(spec.scale, format=parse_format("bfloat16"))), config.dynamic)
    return config


register_engine(
    Engine(
        "xnnpack",
        "portable kernels 0 codes; XNNPACK at most a step an operator",
        serves="phones and embedded CPUs",
        kinds=(STATIC, ("W4A8_EXECUTORCH",)),
        packages=("executorch",),
        placement=placement,
        variant=variant,
        aliases=("executorch",),
        page="executorch",
    )
)
