"""The smallest scales of weights with which an engine's integers do not overflow."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fakequant.distributed import is_sharded
from fakequant.errors import CalibrationError, StaleScaleWarning, warn_user
from fakequant.model.weights import fresh_weight, note_weight, quantized_weights
from fakequant.nn.operands import Role
from fakequant.nn.products.product import Product
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.quantizer import Kind, Mode, Quantizer
from fakequant.numerics.blocks import blocked, blocked_groups, unblocked
from fakequant.numerics.qparams import QParams
from fakequant.numerics.spec import Rounding
from fakequant.offload import fetched
from fakequant.ops import library

_BIAS = 2.0**30
"""The largest bias in steps of input scale times weight scale. As much of int32 remains for the sum of the products:
66,000 of 127 * 127."""
_SPAN = 2.0**-40
"""The smallest scale of a weight as a share of the largest: its products with scales of inputs are normal numbers."""


@torch.no_grad()
def raise_scales(model: nn.Module) -> list[str]:
    """Raise weight scales under which an engine's int32 bias overflows, bias / (input scale * weight scale).

    Such a channel is nearly zero beside its bias, as one with a vanishing batch normalisation: what changes is below
    the precision of float32 in the sum with the bias. A scale that follows its weight is fixed by that.

    Returns:
        The paths of the quantizers that got other scales.
    """
    raised = []
    for path, weight in quantized_weights(model).items():
        quantizer, inputs = weight.quantizer, _input_scales(weight)
        plain = quantizer.spec.format.has_zero_point and quantizer.spec.arithmetic.is_linear
        plain = plain and not quantizer.spec.scale.is_exact
        if not inputs or not plain or quantizer.mode is not Mode.QUANTIZE:
            continue
        try:
            tensor = fresh_weight(weight, path)
        except CalibrationError:  # no call has shown it
            continue
        if is_sharded(tensor) or tensor.is_meta:
            continue
        params = quantizer.qparams(tensor)
        floor = _floor(params.scale, _biases(weight.owner, tensor), min(float(scale.min()) for scale in inputs))
        zero = library.measure(tensor, quantizer.spec.granularity).amax == 0
        low = params.scale < floor
        if bool((low & ~zero if quantizer.follows_input else low).any()):
            _set(weight, tensor, floor, zero)
            raised.append(path)
    return raised


def warn_raised(paths: list[str]) -> None:
    """Say, in one line, which weights got other scales when they were exported."""
    if paths:
        warn_user(
            f"the scales of {len(paths)} weights were raised, in the model, too: {', '.join(paths)}. Channels that are "
            "nearly zero beside their bias would overflow the int32 bias of an engine. The results change by less than "
            "float32 holds; if you saved the model before, save it again",
            StaleScaleWarning,
        )


def _input_scales(weight: Product) -> list[Tensor]:
    """The fixed scales of the inputs that a layer may multiply with a weight."""
    layer = weight.layer
    operands = layer.operands(layer) if isinstance(layer, QuantizedLayer) else {}
    named = [(name, q) for name, q in layer.named_children() if isinstance(q, Quantizer) and q.kind is Kind.INPUT]
    used = [q for name, q in named if name not in operands or operands[name].role is Role.INPUT]
    ready = [q for q in used if q.calibrated and not q.dynamic and q.mode is Mode.QUANTIZE]
    scales = [q.scale if q.learned is None else q.learned.qparams(1).scale for q in ready]
    return [scale for scale in scales if scale is not None]


def _biases(owner: nn.Module, weight: Tensor) -> list[Tensor]:
    """Tensors that may be added to the products of a weight: smaller parameters of its owner, and a computed bias."""
    found: dict[str, Tensor] = {n: p for n, p in owner.named_parameters(recurse=False) if p.dim() < weight.dim()}
    bias = getattr(owner, "bias", None)
    if isinstance(bias, Tensor) and all(bias is not p for p in found.values()):
        found["bias"] = bias
    return [fetched(owner, name, tensor) for name, tensor in found.items()]


def _floor(scale: Tensor, biases: list[Tensor], input_scale: float) -> Tensor:
    """The smallest scale of every group, for its own bias where there is one bias for each."""
    floor = torch.zeros_like(scale)
    for bias in biases:
        size = bias.detach().abs().to(scale.dtype)
        alone = size.numel() == scale.numel() == max(scale.shape, default=1)
        floor = floor + (size.reshape(scale.shape) if alone else size.max())
    return torch.maximum(floor / (input_scale * _BIAS), scale.max() * _SPAN)


def _set(weight: Product, tensor: Tensor, floor: Tensor, zero: Tensor) -> None:
    """Set the scales of a weight to at least a floor, those of zeros to the largest; chosen codes stay codes."""
    quantizer = weight.quantizer
    before = quantizer.encoded(tensor) if weight.has_fixed_codes else None
    if quantizer.follows_input:
        quantizer.dynamic = False
        quantizer.freeze(tensor)
    params = quantizer.qparams(tensor)
    scale = torch.maximum(params.scale, floor)
    scale = torch.where(zero & (params.scale < floor), scale.max(), scale)
    quantizer.set_qparams(QParams(scale, params.zero_point))
    if before is not None:
        spec = quantizer.spec.replace(rounding=Rounding.NEAREST_EVEN)
        after = library.encode(tensor, quantizer.qparams(tensor), spec)
        assert after is not None, "values of codes are no NaN"
        blocks = quantizer.spec.granularity.block_shape(tensor.shape)
        stays = blocked_groups(scale == params.scale, tensor.shape, blocks).expand(blocked(before[0], blocks).shape)
        weight.fix_codes(torch.where(unblocked(stays, tensor.shape, blocks), before[0], after))
    note_weight(weight)
