"""Paths of torch that compute a module from the weights of its layers, without calling the layers."""

from __future__ import annotations

from torch import nn

from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.quantizer import Quantizer


def leave_fast_paths(model: nn.Module) -> None:
    """Have every transformer encoder with quantized layers call them, in place.

    In eval mode without gradients torch computes an encoder layer in one operator from the weights themselves, so that
    it would stay in float. `nn.MultiheadAttention` has such a path too, which its quantized form does not have.
    """
    for module in model.modules():
        if not isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerEncoder)):
            continue
        if not any(isinstance(child, (QuantizedLayer, Quantizer)) for child in module.modules()):
            continue
        if isinstance(module, nn.TransformerEncoderLayer):
            # What it computes is `activation`; this number is only asked for by the fast path, and 0 keeps it off.
            module.activation_relu_or_gelu = 0
        else:
            # It makes padded inputs nested tensors for the fast path of its layers, and quantizers take none.
            module.use_nested_tensor = False
