"""OpenVINO, as NNCF places quantizers for its CPU plugin: at the inputs of quantizable operators.

Concatenations have one scale. Operators that NNCF calls agnostic keep the scale of their input.
"""

from __future__ import annotations

from fakequant.model.sites.targets.table import ATTENTION, POOLS, Target, after_products, lookups, moves, products


def openvino() -> Target:
    """The table of OpenVINO."""
    return Target(
        name="openvino",
        inputs=products()
        | lookups()
        | ATTENTION
        | {"add", "mul", "cat", "stack", "layer_norm", "group_norm", "instance_norm", "rms_norm", "interpolate", "mean"}
        | POOLS,
        keeps=moves() | {"maximum", "minimum"},
        shared=frozenset({"cat", "stack"}),
        fused=after_products("relu", "relu6", "hardtanh", "leaky_relu", "sigmoid", "silu", "gelu", "hardswish")
        | {("add", "relu")},
    )
