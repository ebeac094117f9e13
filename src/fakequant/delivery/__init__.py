"""Files that other programs load, with the codes of a model: written, read back, and verified by these programs."""

from fakequant.delivery.delivering import deliver
from fakequant.delivery.format import DeliveryFormat, Engine, Part, delivery_formats, register_delivery
from fakequant.delivery.gguf.activations import llama_cpp_inputs
from fakequant.delivery.gguf.mixtures import mixture
from fakequant.delivery.inputs import fix_global_scales
from fakequant.delivery.reading import read
from fakequant.delivery.verifying import DeliveryReport, verify_delivery

__all__ = [
    "DeliveryFormat",
    "DeliveryReport",
    "Engine",
    "Part",
    "deliver",
    "delivery_formats",
    "fix_global_scales",
    "llama_cpp_inputs",
    "mixture",
    "read",
    "register_delivery",
    "verify_delivery",
]
