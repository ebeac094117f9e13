"""OpenVINO, as NNCF places quantizers for its CPU plugin: at the inputs of quantizable operators.

Concatenations have one scale. Operators that NNCF calls agnostic keep the scale of their input.
"""

from __future__ import annotations

from fakequant.model.sites.targets.table import ATTENTION, MOVES, PRODUCTS, Target, after_products

OPENVINO = Target(
    name="openvino",
    inputs=PRODUCTS
    | ATTENTION
    | {"add", "mul", "cat", "stack", "layer_norm", "group_norm", "instance_norm", "rms_norm", "interpolate", "mean"}
    | {"avg_pool1d", "avg_pool2d", "avg_pool3d"}
    | {"adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"},
    keeps=MOVES | {"maximum", "minimum"},
    shared=frozenset({"cat", "stack"}),
    fused=after_products("relu", "relu6", "hardtanh", "leaky_relu", "sigmoid", "silu", "gelu", "hardswish")
    | {("add", "relu")},
)
