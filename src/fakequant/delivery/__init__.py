"""Files that other programs load, with the codes of a model: written, read back, and verified by these programs."""

from fakequant.delivery.delivering import DeliveredTensors, deliver, encode
from fakequant.delivery.format import DeliveryFormat, LoadedFile, Part, delivery_formats, read, register_delivery
from fakequant.delivery.gguf.architecture import llama_cpp_inputs, mixture
from fakequant.delivery.verifying import DeliveryReport, verify_delivery
from fakequant.model.calibrate import fix_global_scales

__all__ = [
    "DeliveredTensors",
    "DeliveryFormat",
    "DeliveryReport",
    "LoadedFile",
    "Part",
    "deliver",
    "delivery_formats",
    "encode",
    "fix_global_scales",
    "llama_cpp_inputs",
    "mixture",
    "read",
    "register_delivery",
    "verify_delivery",
]
