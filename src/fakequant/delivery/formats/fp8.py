"""FP8 as folders of DeepSeek, Qwen and Mistral have it: tiles, or the whole weight, under scales that multiply codes.

Source: transformers 5.23, `integrations/finegrained_fp8.py`; vLLM 0.32, `quantization/fp8.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fakequant.delivery.layered import FLOATS, CodedWeight, LayeredFormat, LayerTensors, Read
from fakequant.model.config import TensorConfig
from fakequant.numerics.granularity import PerBlock, PerToken
from fakequant.numerics.scales import ScaleRounding, ScaleSpec
from fakequant.numerics.spec import QuantSpec

_FP8, _E4M3 = QuantSpec("float8_e4m3fn"), torch.float8_e4m3fn
_POWERS = {torch.uint8, torch.float8_e8m0fnu}
_SCALES, _INPUTS = ("weight_scale_inv", "weight_scale"), ("activation_scale", "input_scale")
"""The names of scales in transformers, and in vLLM and AutoFP8."""


class Fp8(LayeredFormat):
    """FP8 in tiles with dynamic inputs in groups, or of the whole weight."""

    name = "fp8"

    def coded(self, module: LayerTensors) -> CodedWeight | None:
        weight = module.tensors.get(f"{module.base}.weight")
        end = next(filter(module.has, _SCALES), None)
        if weight is None or (end is None and weight.dtype in FLOATS):
            return None
        if weight.dtype is not _E4M3 or end is None:
            module.refuse(f"weight is {weight.dtype} with the scale {end}; this reader knows {_E4M3}")
        tile = _tile(module)
        rows, columns = module.shape
        groups = (1, 1) if tile is None else (-(-rows // tile[0]), -(-columns // tile[1]))
        shapes = [groups, *([(), (1,)] if groups == (1, 1) else [])]
        scale: Read = module.get(end, {*FLOATS, *_POWERS}, *shapes)
        spec = _FP8 if tile is None else _FP8.replace(granularity=PerBlock({0: tile[0], -1: tile[1]}, pad=True))
        if (dtype := scale().dtype) in _POWERS:
            spec, scale = spec.replace(scale=ScaleSpec("float8_e8m0fnu")), module.powers(end, groups)
        else:
            spec = spec.replace(scale=FLOATS[dtype])
        config, ranges = _input(module, tile)
        return CodedWeight(spec, module.get("weight", _E4M3, module.shape), scale, input=config, ranges=ranges)


def _tile(module: LayerTensors) -> tuple[int, int] | None:
    """Rows and columns of a tile; None where a scale is that of the weight."""
    size: Any = module.folder.quantization.get("weight_block_size")
    if size is None:
        return None
    if not isinstance(size, list) or len(size) != 2 or not all(type(one) is int and one > 0 for one in size):
        module.refuse(f"weight_block_size is {size!r:.60}, not two numbers of rows and columns")
    return size[0], size[1]


def _input(module: LayerTensors, tile: tuple[int, int] | None) -> tuple[TensorConfig, dict[str, Tensor]]:
    """The quantization of a layer's input, and the tensors of its range."""
    given = module.folder.quantization
    scheme, powers = str(given.get("activation_scheme", "dynamic")).lower(), given.get("scale_fmt") == "ue8m0"
    if scheme == "static":
        end = next(filter(module.has, _INPUTS), _INPUTS[0])
        return TensorConfig(_FP8), {"input.scale": module.get(end, FLOATS, (1,), ())().float()}
    if scheme != "dynamic":
        module.refuse(f"activation_scheme is {scheme!r:.40}; this reader knows 'dynamic' and 'static'")
    spec = _FP8.replace(granularity=PerToken() if tile is None else PerBlock({-1: tile[1]}, pad=True))
    if powers:  # DeepSeek V3.1 rounds scales of inputs up to powers of two, which those of its weights are, too
        spec = spec.replace(scale=ScaleSpec("float8_e8m0fnu", ScaleRounding.CEIL))
    return TensorConfig(spec, dynamic=True), {}
