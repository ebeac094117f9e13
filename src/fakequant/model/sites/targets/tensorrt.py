"""TensorRT with explicit quantization: the inputs of layers that have kernels for INT8 and FP8, as late as possible.

A convolution, its batch normalisation, the residual sum after it and the ReLU are one kernel. A quantizer between them
keeps them apart, so that a residual sum has one on the identity branch alone. Softmax, sigmoid and norms stay in float.
"""

from __future__ import annotations

from fakequant.model.sites.targets.table import ATTENTION, MOVES, PRODUCTS, Target, after_products

TENSORRT = Target(
    name="tensorrt",
    inputs=(PRODUCTS - {"embedding"})
    | ATTENTION
    | {"add", "avg_pool1d", "avg_pool2d", "avg_pool3d"}
    | {"adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"},
    keeps=MOVES | {"relu", "cat"},
    fused=after_products("relu", "relu6", "hardtanh", "leaky_relu", "sigmoid", "silu") | {("add", "relu")},
    identity_only=True,
    symmetric=True,
)
