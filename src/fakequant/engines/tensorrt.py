"""TensorRT with explicit quantization: the inputs of layers that have kernels for INT8 and FP8, as late as possible.

A convolution, its batch normalisation, the residual sum after it and the ReLU are one kernel. A quantizer between them
would split the kernel, so only the identity branch of a residual sum has one. Softmax, sigmoid and norms stay in float.
"""

from fakequant.model.engine import Engine, register_engine
from fakequant.model.placement import ATTENTION, POOLS, Target, after_products, moves, products


def placement() -> Target:
    """The placement of quantizers that TensorRT wants."""
    return Target(
        name="tensorrt",
        inputs=products() | ATTENTION | POOLS | {"add"},
        keeps=moves() | {"relu", "cat"},
        fused=after_products("relu", "relu6", "hardtanh", "leaky_relu", "sigmoid", "silu") | {("add", "relu")},
        identity_only=True,
        symmetric=True,
    )


register_engine(
    Engine(
        "tensorrt",
        "not run; its operators computed as documented",
        serves="any model, NVIDIA",
        kinds=(("INT8", "FP8"), ("INT4_GROUP64", "INT4_GROUP128", "NVFP4_WEIGHT_ONLY")),
        files="trt",
        export="export_onnx",
        placement=placement,
        page="tensorrt",
    )
)
