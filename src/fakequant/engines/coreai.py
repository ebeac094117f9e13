"""Core AI for iOS 27 and macOS 27: weights of at most 8 bits in any format, activations as codes of 8 bits."""

from fakequant.model.config import TensorConfig
from fakequant.model.engine import STATIC, WEIGHTS, Engine, register_engine
from fakequant.numerics.spec import Arithmetic


def variant(field: str, config: TensorConfig) -> TensorConfig:
    """The configuration of a tensor: Core AI divides inputs by the scale, and does not multiply by its reciprocal."""
    spec = config.spec
    if field == "weight" or spec.arithmetic is not Arithmetic.RECIPROCAL:
        return config
    return TensorConfig(spec.replace(arithmetic=Arithmetic.DIVIDE), config.dynamic)


register_engine(
    Engine(
        "coreai",
        "run on a CPU: 0 weights and quantizers differ, logits 124 dB with weights alone; no device was seen",
        serves="iPhones and Macs",
        kinds=((*WEIGHTS, "NF4_WEIGHT_ONLY", "MLX_MXFP4"), (*STATIC, "FP8")),
        export="export_coreai",
        packages=("coreai-torch", "coreai-core"),
        variant=variant,
        page="coreai",
    )
)
