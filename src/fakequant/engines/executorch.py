"""ExecuTorch on XNNPACK, as its quantizer annotates: products, sums and concatenations, in and out.

A sum or a product of two tensors and the ReLU after it are one operator. Attention and softmax stay in float. A mean
has the quantizers of what it reads and of what reads it: behind it alone, the sum in front would stay in float.
"""

from fakequant.model.engine import STATIC, Engine, register_engine
from fakequant.model.sites.targets import Target, after_products, moves

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


register_engine(
    Engine(
        "xnnpack", "not run", "phones and embedded CPUs", kinds=(STATIC,), placement=placement, aliases=("executorch",)
    )
)
