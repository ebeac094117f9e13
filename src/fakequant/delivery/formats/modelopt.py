"""ModelOpt's folder of Hugging Face ("unified checkpoint"): FP8, NVFP4, MXFP8, MXFP4, INT8 and INT4 in groups.

The tensors of a layer show its layout. Scales multiply codes; NVFP4 has a second scale for the tensor. A byte holds two
rows of INT4, or two inputs of FP4, the first in its low bits. Source: ModelOpt's `torch/export`, 2026.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fakequant.delivery.layered import FLOATS, CodedWeight, LayeredFormat, LayerTensors
from fakequant.delivery.schemes import reciprocal
from fakequant.model.config import TensorConfig
from fakequant.nn.ranges import GLOBAL_SCALE
from fakequant.numerics.granularity import PerBlock, PerChannel, PerToken
from fakequant.numerics.spec import QuantSpec

_OWN = "hf_quant_config.json"
_UNKNOWN = {
    "svdquant_lora_a": "a product of low rank is added to its output",
    "weight_scale_inv": "its weight has the layout of DeepSeek's files",
}
_E4M3, _E8M0, _F32 = torch.float8_e4m3fn, torch.uint8, torch.float32
_NVFP4 = QuantSpec.parse("float4_e2m1fn per_block(-1:16,pad) scale=float8_e4m3fn@per_tensor")
_MXFP4, _MXFP8 = (
    QuantSpec.parse(f"{name} per_block(-1:32,pad) scale=float8_e8m0fnu:floor")
    for name in ("float4_e2m1fn", "float8_e4m3fn")
)
_FP8, _INT8 = QuantSpec("float8_e4m3fn"), QuantSpec("int8")
_TILE = 128
_STATIC = {"FP8": _FP8, "W4A8_NVFP4_FP8": _FP8, "W4A8_MXFP4_FP8": _FP8, "W8A8_SQ_PER_CHANNEL": _INT8}
"""By the name of a method, its quantization of inputs whose range is `input_scale`."""
_DYNAMIC = {
    "FP8_PER_CHANNEL_PER_TOKEN": _FP8.replace(granularity=PerToken()),
    "MXFP8": _MXFP8,
    "NVFP4": _NVFP4,
    "NVFP4_AWQ": _NVFP4,
}
"""By the name of a method, its quantization of inputs with dynamic ranges."""
_WEIGHT_ONLY = {"W4A16_NVFP4", "W4A16_AWQ", "W8A16", "MXFP4", "FP8_PB_WO", "FP8_PB_REAL"}


class ModelOpt(LayeredFormat):
    """FP8, NVFP4, MXFP8, MXFP4, INT8 and INT4 in groups."""

    name = "modelopt"

    def recognizes(self, path: Path) -> bool:
        return (path / _OWN).is_file() or super().recognizes(path)

    def coded(self, module: LayerTensors) -> CodedWeight | None:
        for end, reason in _UNKNOWN.items():
            if module.has(end):
                module.refuse(f"{reason}, which this reader does not know")
        if not module.has("weight_scale"):
            return None
        weight = module.tensors.get(f"{module.base}.weight")
        dtype = None if weight is None else weight.dtype
        if dtype not in (_E4M3, torch.int8, torch.uint8):
            module.refuse(f"weight is {dtype}, and it has a weight_scale")
        rows, columns = module.shape
        if dtype is not torch.uint8:
            coded = _eight_bits(module, _FP8 if dtype is _E4M3 else _INT8)
        elif module.tensors[f"{module.base}.weight"].shape[-1] == columns:
            coded = _four_bit_integers(module)
        elif not module.has("weight_scale_2"):
            codes = module.fours("weight", rows, columns)
            coded = CodedWeight(_MXFP4, codes, module.powers("weight_scale", (rows, -(-columns // 32))))
        else:
            codes = module.fours("weight", rows, columns)
            scale = module.get("weight_scale", _E4M3, (rows, -(-columns // 16)))
            shared = module.get("weight_scale_2", _F32, (1,), ())
            coded = CodedWeight(_NVFP4, codes, lambda: scale().float() * shared())
        transform, given = None, module.folder.quantization
        if (module.folder.path / _OWN).is_file():
            given = module.folder.json(_OWN).get("quantization", {})
        layers = given.get("quantized_layers") or {}
        own = layers.get(module.base, {}) if isinstance(layers, dict) else {}
        method = str((own if isinstance(own, dict) else {}).get("quant_algo") or given.get("quant_algo") or "")
        if method not in {*_STATIC, *_DYNAMIC, *_WEIGHT_ONLY}:
            module.refuse(f"quant_algo is {method!r:.40}, which this reader does not know")
        if module.has("pre_quant_scale"):
            if not module.is_alone:
                module.refuse("pre_quant_scale is that of one weight of a stack, which has no transform of its own")
            factor = module.get("pre_quant_scale", FLOATS, (columns,), (1, columns))().float()
            transform = "channel_scale", {"scale": factor}
        step = module.get("input_scale", FLOATS, (1,), ())().float() if module.has("input_scale") else None
        config, ranges = None, dict[str, Tensor]()
        if method in _STATIC and step is not None:
            config, ranges = TensorConfig(_STATIC[method]), {"input.scale": step}
        elif method in _DYNAMIC and (step is not None or _DYNAMIC[method] != _NVFP4):
            config = TensorConfig(_DYNAMIC[method], dynamic=True)
            if step is not None and config.spec == _NVFP4:
                ranges = {f"input.{GLOBAL_SCALE}": reciprocal(step)}
        return replace(coded, input=config, ranges=ranges, transform=transform)

    def skips(self, name: str) -> str | None:
        if name.endswith((".k_scale", ".v_scale", ".k_proj.output_scale", ".v_proj.output_scale")):
            return "the cache of keys and values stays in float, and its scales in the file are ignored"
        return super().skips(name)


def _eight_bits(module: LayerTensors, spec: QuantSpec) -> CodedWeight:
    rows, columns = module.shape
    tiles = -(-rows // _TILE), -(-columns // _TILE)
    stored = module.tensors[f"{module.base}.weight_scale"]
    codes = module.get("weight", spec.format.storage, (rows, columns))
    if stored.dtype is _E8M0 and spec == _FP8:
        return CodedWeight(_MXFP8, codes, module.powers("weight_scale", (rows, -(-columns // 32))))
    if stored.numel() == 1:
        shapes = [(1, 1), (), (1,), (1, 1, 1, 1)]
    elif stored.numel() == rows:
        shapes, spec = [(rows, 1), (rows,)], spec.replace(granularity=PerChannel(0))
    else:
        shapes = [tiles, (tiles[0], 1, tiles[1], 1)]
        spec = spec.replace(granularity=PerBlock({0: _TILE, -1: _TILE}, pad=True))
    scale = module.get("weight_scale", FLOATS, *shapes)
    return CodedWeight(spec.replace(scale=FLOATS[scale().dtype]), codes, scale)


def _four_bit_integers(module: LayerTensors) -> CodedWeight:
    rows, columns = module.shape
    if module.has("weight_scale_2"):
        module.refuse("weight_scale_2 says that codes of 4 bits are scaled to FP8, which this reader does not know")
    stored = module.tensors[f"{module.base}.weight_scale"]
    count = stored.shape[-1] if stored.dim() == 2 else 0
    if not count or columns % count:
        module.refuse(f"weight_scale is of shape {[*stored.shape]}, which gives no groups of {columns} inputs")
    packed = module.get("weight", torch.uint8, (-(-rows // 2), columns))
    scale = module.get("weight_scale", FLOATS, (rows, count))

    def codes() -> Tensor:
        two = packed()
        pairs = torch.stack([two & 15, two >> 4], 1).flatten(0, 1)[:rows]
        return (pairs.to(torch.int8) ^ 8) - 8

    spec = QuantSpec("int4", module.groups(columns // count).granularity, scale=FLOATS[stored.dtype])
    return CodedWeight(spec, codes, scale)
