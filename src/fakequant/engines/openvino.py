"""OpenVINO: Intel's processors, from ONNX files."""

from fakequant.model.engine import STATIC, Engine, register_engine
from fakequant.model.placement import ATTENTION, POOLS, Target, after_products, lookups, moves, products


def placement() -> Target:
    """The placement of quantizers that OpenVINO wants."""
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


register_engine(
    Engine(
        "openvino",
        "run on a CPU, products on integers counted",
        serves="any model, Intel",
        kinds=(STATIC, ("INT8_WEIGHT_ONLY",)),
        files="portable",
        export="export_onnx",
        packages=("openvino",),
        placement=placement,
        page="openvino",
    )
)
