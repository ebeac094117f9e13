"""transformers: Hugging Face models in Python, from compressed-tensors."""

from torch import nn

from fakequant.errors import ExportError
from fakequant.model.engine import WEIGHTS, Engine, register_engine
from fakequant.nn.paths import join, layer_of
from fakequant.nn.quantized.forms import quantized_class
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.quantizer import Kind, Mode, quantizers
from fakequant.nn.wrappers import Role
from fakequant.numerics.formats import IntegerFormat
from fakequant.numerics.granularity import PerBlock
from fakequant.numerics.spec import QuantSpec
from fakequant.text import listed

_CURE = "prepare(..., rules={'*experts*': 'int8_weight_only'})"


def refuse_experts(model: nn.Module) -> None:
    """Raise ExportError if transformers loads other values of stacked experts than the model has.

    transformers 5.23 merges the experts of a file into stacks, and decompresses all of them by one scheme. It
    fails on files whose stacked experts have INT8 inputs, and does not quantize FP8 inputs of such experts.
    """
    held, in_float, coded = quantizers(model), list[str](), dict[str, tuple[QuantSpec, int | None]]()
    for path, layer in model.named_modules():
        form = type(layer) if isinstance(layer, QuantizedLayer) else quantized_class(layer)
        for attribute, operand in ({} if form is None else form.operands(layer)).items():
            if not operand.is_stack or operand.role is not Role.WEIGHT:
                continue
            name, own = join(path, operand.weight), held.get(join(path, attribute))
            if own is None or own.mode is not Mode.QUANTIZE:
                in_float.append(name)
                continue
            shape = layer.get_parameter(operand.weight).shape
            width = own.spec.granularity.block_shape(shape)[-1]
            has_groups = isinstance(own.spec.granularity, PerBlock) and width <= shape[-1]
            coded[name] = own.spec, width if has_groups else None
    layers, whole = {layer_of(name) for name in coded}, True
    for path, own in held.items():
        if own.kind is Kind.INPUT and layer_of(path) in layers:
            raise ExportError(
                f"{layer_of(path)}: its input is {own.spec}, and transformers takes inputs of stacked experts in "
                f"float; quantize only the weights of experts: {_CURE}"
            )
    for name, (spec, size) in coded.items():
        is_fp8 = spec.format.bits == 8 and not isinstance(spec.format, IntegerFormat)
        whole = whole and is_fp8
        has_second, is_cut = spec.scale.granularity is not None, is_fp8 and size is not None
        if has_second or is_cut:
            what = "without its second-level scale" if has_second else "with a scale for each row alone"
            raise ExportError(
                f"{name} is {spec}, and transformers loads this format of stacked experts {what}; quantize experts in "
                f"integers: {_CURE}"
            )
    if len({*coded.values()}) > 1 or (coded and in_float and not whole):
        several = f"{listed(in_float)} in float" if in_float else "several schemes"
        raise ExportError(
            f"transformers loads stacked experts of one scheme alone, and the model has {several} beside "
            f"{listed([*coded])}; quantize all experts alike: {_CURE}"
        )


register_engine(
    Engine(
        "transformers",
        "run on a CPU, bit for bit",
        serves="Hugging Face models in Python",
        kinds=(("W8A8_TRANSFORMERS", "FP8"), (*WEIGHTS, "NVFP4_WEIGHT_ONLY")),
        files="compressed-tensors",
        packages=("transformers", "compressed-tensors"),
        check=refuse_experts,
        page="transformers",
    )
)
