"""XNNPACK, as ExecuTorch's quantizer annotates it: products, sums and concatenations, in and out.

A sum or a product of two tensors and the ReLU after it are one operator. Attention and softmax stay in float. A mean
has the quantizers of what it reads and of what reads it: behind it alone, the sum in front would stay in float.
"""

from __future__ import annotations

from fakequant.model.sites.targets.table import Target, after_products, moves

_PRODUCTS = frozenset({"linear", "conv1d", "conv2d", "conv_transpose2d", "addmm"})


def xnnpack() -> Target:
    """The table of XNNPACK."""
    return Target(
        name="xnnpack",
        inputs=_PRODUCTS | {"add", "mul", "cat"},
        keeps=moves() | {"relu", "hardtanh", "relu6"},
        shared=frozenset({"cat"}),
        outputs=_PRODUCTS | {"add", "mul", "cat"},
        fused=after_products("relu", "relu6", "hardtanh") | {("add", "relu"), ("mul", "relu")},
    )
