"""transformers: Hugging Face models in Python, from compressed-tensors."""

from torch import nn

from fakequant.errors import ExportError
from fakequant.model.engine import WEIGHTS, Engine, register_engine
from fakequant.model.weights import quantized_weights
from fakequant.nn.paths import layer_of
from fakequant.nn.quantizer import Kind, quantizers


def refuse_inputs_of_experts(model: nn.Module) -> None:
    """Raise ExportError if stacked experts have quantized inputs.

    transformers 5.23 does not load stacked experts with INT8 inputs, and leaves FP8 inputs of such experts in float.
    """
    stacks = {layer_of(path) for path, weight in quantized_weights(model).items() if weight.is_stack}
    for path, quantizer in quantizers(model).items():
        if quantizer.kind is Kind.INPUT and layer_of(path) in stacks:
            raise ExportError(
                f"{layer_of(path)}: its input is {quantizer.spec}, and transformers takes inputs of stacked experts in "
                "float; quantize only the weights of experts: prepare(..., rules={'*experts*': 'int8_weight_only'})"
            )


register_engine(
    Engine(
        "transformers",
        "run on a CPU, bit for bit",
        serves="Hugging Face models in Python",
        kinds=(("W8A8_TRANSFORMERS", "FP8"), (*WEIGHTS, "NVFP4_WEIGHT_ONLY")),
        files="compressed-tensors",
        packages=("transformers", "compressed-tensors"),
        check=refuse_inputs_of_experts,
        page="transformers",
    )
)
