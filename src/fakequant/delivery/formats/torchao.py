"""torchao: tensor subclasses, in safetensors files that torchao and transformers can load.

A weight "0.weight" is stored as "0._weight_qdata", "0._weight_scale", ..., with JSON in the header of the file.
Integers are signed. Source: torchao 0.18, `prototype/safetensors`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fakequant.delivery.folder import (
    CONFIG,
    WEIGHTS,
    FileNames,
    Folder,
    by_transformers,
    config_file,
    is_of_transformers,
)
from fakequant.delivery.format import LayeredWriter, LoadedFile, Part, Stored, dtype_of
from fakequant.delivery.layered import FLOATS, CodedWeight, LayeredFormat, LayerTensors
from fakequant.errors import ShapeError, warn_user
from fakequant.model.bake import bake_weights
from fakequant.model.state.snapshots import Files, QuantizedState, lazy
from fakequant.nn.paths import module_at
from fakequant.nn.quantized.layers import is_linear
from fakequant.numerics.formats import IntegerFormat, parse_format
from fakequant.numerics.formats.packing import pack
from fakequant.numerics.granularity import PerBlock, PerChannel, PerTensor
from fakequant.numerics.scales import ScaleRounding
from fakequant.numerics.spec import QuantSpec
from fakequant.text import listed

INT8, INTX, FP8, NVFP4 = "Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor", "NVFP4Tensor"
E4M3 = parse_format("float8_e4m3fn")
NVFP4_SPEC = QuantSpec.parse("float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn@per_tensor")
_HOLDS = f"files have integers of 2 to 8 bits, {E4M3}, and {NVFP4_SPEC}"
_CONFIGS: dict[str, tuple[str, int, dict[str, Any]]] = {
    INT8: ("Int8WeightOnlyConfig", 2, {}),
    INTX: ("IntxWeightOnlyConfig", 2, {}),
    FP8: ("Float8WeightOnlyConfig", 2, {}),
    NVFP4: ("NVFP4WeightOnlyConfig", 1, {}),
}
"""By tensor subclass, the entries that transformers requires in `config.json`; the header names the real subclass."""


class TorchAo(LayeredFormat):
    """Integers of 2 to 8 bits, FP8 and NVFP4 in linear layers whose inputs stay in float."""

    name = "torchao"
    packages = ("torchao",)
    writes = True

    def why_not(self, part: Part) -> str | None:
        if part.call or not part.is_matrix:
            return f"it quantizes weights of linear layers, and {part.refused}"
        if left := [name for name in part.operands if name != "weight"]:
            return f"its {left[0]} is {part.operands[left[0]]}, and activations stay in float in these files"
        found = _class_of(part.operands["weight"].spec, part.shape)
        return None if found in _CONFIGS else f"its weight is {part.operands['weight']}, and {found}"

    def conflicts(self, model: nn.Module, parts: Sequence[Part]) -> Mapping[str, str]:
        bare = [name for name in model.state_dict() if "." not in name]
        found = dict.fromkeys(bare, "files name the module of each tensor, but this tensor belongs to the model itself")
        return {**found, **super().conflicts(model, parts)}

    def encode(self, state: QuantizedState, model: nn.Module, parts: Sequence[Part]) -> Files:
        writer = LayeredWriter(state, model, parts, _stored)
        said = dict[str, dict[str, Any]]()  # of each weight, in the header of the file
        for name, part in writer.coded.items():
            spec, dtype = part.operands["weight"].spec, _dtype(lazy(state.tensors, name).dtype)
            kind, groups = _class_of(spec, part.shape), spec.granularity.group_shape(part.shape)
            block = [size // count for size, count in zip(part.shape, groups, strict=True)]
            data: dict[str, Any] = {"block_size": block, "dtype": dtype}
            if kind == INTX:
                target = {"target_dtype": _dtype(f"int{spec.format.bits}")}
                data = {**target, **data, "activation_quantization": None}
            elif kind == INT8:
                data = {"act_quant_kwargs": None, "reduce_range": False, **data}
            elif kind == FP8:
                preference = {"_type": "KernelPreference", "_data": "AUTO"}
                data = {"mm_config": None, "act_quant_kwargs": None, "kernel_preference": preference, **data}
            else:
                given = {"is_swizzled_scales": False, "use_triton_kernel": False, "act_quant_kwargs": None}
                data = {**given, "block_size": block[1], "orig_dtype": dtype}
            names = [end.removeprefix("_weight_") for end in _stored(part, part.shape, torch.float32)]
            said[name] = {"_type": kind, "_data": data, "_tensor_data_names": names}
        texts = {f"{base}.weight": said[name] for name, bases in writer.pieces.items() for base in bases}
        for key in writer.tensors:
            base, is_field, _ = key.rpartition("._weight_")
            if not (is_field and f"{base}.weight" in texts):
                texts[key] = {"_type": "Tensor"}
        writer.tensors.metadata |= {key: json.dumps(text) for key, text in texts.items()}
        writer.tensors.metadata["tensor_names"] = json.dumps([*texts])
        if writer.in_float:
            warn_user(f"torchao: {listed(writer.in_float)} in float, with the values of the codes")
        other = [(name, f"{bases[0]}.weight") for name, bases in writer.pieces.items() if len(bases) == 1]
        if other := [pair for pair in other if pair[0] != pair[1]]:
            warn_user(
                f"torchao: transformers does not load these files, because {other[0][0]} of the model is called "
                f"{other[0][1]} there; for transformers, deliver the model as compressed-tensors"
            )
        # The configuration names the class that most weights have.
        kinds = [one["_type"] for one in said.values()]
        name, number, data = _CONFIGS[max(kinds, key=kinds.count, default=INT8)]
        linear = [path for path, module in model.named_modules() if is_linear(module)]
        quantization = {
            "quant_method": "torchao",
            "quant_type": {"default": {"_type": name, "_version": number, "_data": data}},
            "modules_to_not_convert": [path for path in linear if f"{path}.weight" not in said],
        }
        return {WEIGHTS: writer.tensors, CONFIG: config_file(model, quantization, dtype_of(state, model))}

    def coded(self, module: LayerTensors) -> CodedWeight | None:
        text = getattr(module.tensors, "metadata", {}).get(f"{module.base}.weight")
        said = None if text is None else json.loads(text)
        if said is None or said["_type"] == "Tensor":
            return None
        if (kind := said["_type"]) not in _CONFIGS:
            module.refuse(f"weight is a {kind!r:.60}; this reader knows {', '.join(_CONFIGS)}")
        data = said["_data"]
        unknown = "act_quant_kwargs", "activation_quantization", "act_pre_scale", "is_swizzled_scales"
        if left := [key for key in unknown if data.get(key)]:
            module.refuse(f"weight has {left[0]} = {data[left[0]]!r:.80}, which this reader does not know")
        if left := [end for end in ("act_quant_scale", "act_pre_scale") if module.has(f"_weight_{end}")]:
            module.refuse(f"weight has {left[0]}, which this reader does not know")
        if kind == NVFP4:
            (rows, columns), block = module.shape, data["block_size"]
            if block != 16 or columns % 16:
                module.refuse(f"block_size is {block!r:.40} for {columns} inputs; NVFP4 has groups of 16")
            scale = module.get("_weight_scale", E4M3.storage, (rows, columns // 16))
            shared = module.get("_weight_per_tensor_scale", torch.float32, (1,), ())
            codes = module.fours("_weight_qdata", rows, columns)
            return CodedWeight(NVFP4_SPEC, codes, lambda: scale().float() * shared())
        target = "int8" if kind == INT8 else data["target_dtype"]["_data"] if kind == INTX else E4M3
        if kind != FP8 and target not in {f"int{n}" for n in range(2, 9)}:
            module.refuse(f"target_dtype is {target!r:.40}; this reader knows int2 to int8")
        (rows, columns), block = module.shape, data["block_size"] or (kind == FP8 and [*module.shape])
        if not isinstance(block, list) or len(block) != 2 or not all(type(one) is int and one > 0 for one in block):
            module.refuse(f"block_size is {block!r:.60}, not two numbers")
        high, wide = block
        is_whole = block == [rows, columns]
        if not is_whole and (high != 1 or columns % wide):
            module.refuse(f"block_size is {block}, not the whole weight, rows, or groups that divide {columns} inputs")
        groups = (1, 1) if is_whole else (rows, columns // wide)
        by_rows = PerChannel(0) if wide == columns else PerBlock({-1: wide})
        granularity = PerTensor() if is_whole else by_rows
        shapes = [groups, *([(), (1,)] if groups == (1, 1) else [])]
        codes = module.get("_weight_qdata", E4M3.storage if kind == FP8 else torch.int8, module.shape)
        scale, point = module.get("_weight_scale", FLOATS, *shapes), None
        if kind == FP8:
            return CodedWeight(QuantSpec(E4M3, granularity), codes, scale)
        if module.has("_weight_zero_point"):
            point = module.get("_weight_zero_point", [torch.int8, torch.int32, torch.int64, *FLOATS], *shapes)
            values = point()
            if not bool((values == values.round()).all()):
                module.refuse("zero points are not whole numbers, which this reader does not know")
            point = point if bool(values.any()) else None
        spec = QuantSpec(target, granularity, symmetric=point is None, scale=FLOATS[scale().dtype])
        return CodedWeight(spec, codes, scale, point)

    def engines(self, path: Path, model: nn.Module) -> Iterator[LoadedFile]:
        support: Any = import_module("torchao.prototype.safetensors.safetensors_support")
        tensors = Folder(path).tensors()
        theirs, _ = support.unflatten_tensor_state_dict(dict(tensors), tensors.metadata)
        copied, names = bake_weights(deepcopy(model)).eval(), FileNames(model)
        like = {name: torch.empty_like(x, device="meta") for name, x in copied.state_dict().items()}
        places = {key: name for name, x in like.items() for key in names.split(name, x)}
        coded = {places[key]: one for key, one in theirs.items() if type(one) is not Tensor}
        for name, one in coded.items():
            parent, _, own = name.rpartition(".")
            setattr(module_at(copied, parent), own, nn.Parameter(one, requires_grad=False))
        values = {name: one.dequantize() for name, one in coded.items()}
        dtype = next(model.parameters()).dtype
        # Kernels for 8 bits multiply sums by scales: they round elsewhere than torch does with the values.
        tolerance = 1e-5 if dtype is torch.float32 else 4 * torch.finfo(dtype).eps
        yield LoadedFile(f"torchao {version('torchao')}", values, copied, tolerance)
        if is_of_transformers(model):
            name = f"transformers {version('transformers')}"
            yield LoadedFile(name, model=by_transformers(path, dtype), tolerance=tolerance)


def _class_of(spec: QuantSpec, shape: Sequence[int]) -> str:
    """The tensor subclass for a weight, or the reason why there is none."""
    try:
        block = spec.granularity.block_shape(tuple(shape))
    except ShapeError as error:
        return str(error)
    whole = block[0] >= shape[0]
    if spec.scale.rounding is ScaleRounding.SIGNED:
        return "programs expect positive scales, but these have signs"
    if not spec.arithmetic.is_linear or spec.offset is not None:
        return "files multiply codes by scales, without offsets in units of x"
    if len(shape) != 2 or any(size % by for size, by in zip(shape, block, strict=True)):
        return f"groups must divide the weight, but its shape {list(shape)} is not a multiple of {list(block)}"
    if spec.format == NVFP4_SPEC.format and block == (1, 16) and spec.scale == NVFP4_SPEC.scale:
        return NVFP4
    if not (block[0] == 1 or (whole and block[1] >= shape[1])):
        return f"{_HOLDS}, with scales of tensors, rows or groups of inputs"
    if spec.format == E4M3:
        return FP8 if block[1] >= shape[1] else f"{E4M3} has scales of tensors or rows"
    if not isinstance(spec.format, IntegerFormat) or not 2 <= spec.format.bits <= 8:
        return _HOLDS
    return INT8 if spec.symmetric and spec.format.signed and spec.format.bits == 8 and block[1] >= shape[1] else INTX


def _dtype(dtype: torch.dtype | str) -> dict[str, str]:
    return {"_type": "torch.dtype", "_data": str(dtype).removeprefix("torch.")}


def _stored(part: Part, shape: Sequence[int], dtype: torch.dtype) -> dict[str, Stored]:
    """The tensors of a weight [out, in], in the order in which its tensor subclass lists them."""
    spec = part.operands["weight"].spec
    kind, groups = _class_of(spec, shape), spec.granularity.group_shape(tuple(shape))
    if kind == NVFP4:
        packed = Stored("codes", (shape[0], shape[1] // 2), torch.uint8, partial(pack, bits=4))
        return {
            "_weight_per_tensor_scale": Stored("shared", (), torch.float32, lambda x: x.flatten()[0]),
            "_weight_qdata": packed,
            "_weight_scale": Stored("scale_codes", groups, torch.float8_e4m3fn),
        }
    shift = 0 if spec.format.signed else 1 << spec.format.bits - 1
    codes = Stored("codes", shape, torch.int8, lambda x: (x.to(torch.int32) - shift).to(torch.int8))
    if kind == FP8:
        codes = Stored("codes", shape, torch.float8_e4m3fn)
    found = {"_weight_qdata": codes, "_weight_scale": Stored("scale", groups, torch.float32, Tensor.float)}
    if kind == INTX:
        middle = 0 if spec.symmetric else shift
        found["_weight_zero_point"] = Stored("zero_point", groups, torch.int8, lambda x: (x - middle).to(torch.int8))
    return found
