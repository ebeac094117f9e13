"""torchao: tensor subclasses, in safetensors files that torchao and transformers can load.

A weight "0.weight" is stored as "0._weight_qdata", "0._weight_scale", ..., with JSON in the header of the file.
Integers are signed. Source: torchao 0.18, `prototype/safetensors`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache, partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fakequant.delivery.folder import CONFIG, WEIGHTS, Folder, config_file, later
from fakequant.delivery.format import Engine, Part
from fakequant.delivery.layered import CodedWeight, LayeredFormat, LayerTensors
from fakequant.delivery.packing import pack
from fakequant.delivery.torchao import E4M3, FP8, INT8, INTX, NVFP4, NVFP4_SPEC, READERS
from fakequant.delivery.writing import written_in_float
from fakequant.errors import ShapeError, warn_user
from fakequant.model.bake import bake_weights
from fakequant.model.state.codecs import Files, TensorFile
from fakequant.model.state.snapshots import LazyTensor, QuantizedState
from fakequant.nn.paths import module_at
from fakequant.numerics.formats import IntegerFormat
from fakequant.numerics.scales import ScaleRounding
from fakequant.numerics.spec import Arithmetic, QuantSpec
from fakequant.text import listed

_HOLDS = f"files have integers of 2 to 8 bits, {E4M3}, and {NVFP4_SPEC}"
_CONFIGS: dict[str, tuple[str, int, dict[str, Any]]] = {
    INT8: ("Int8WeightOnlyConfig", 2, {}),
    INTX: ("IntxWeightOnlyConfig", 2, {}),
    FP8: ("Float8WeightOnlyConfig", 2, {}),
    NVFP4: ("NVFP4WeightOnlyConfig", 1, {}),
}
"""What transformers asks for in a configuration, by the class of tensors; the header of the file says what they are."""


class TorchAo(LayeredFormat):
    """Integers of 2 to 8 bits, FP8 and NVFP4 in linear layers whose inputs stay in float."""

    name = "torchao"
    packages = ("torchao",)
    writes = True

    def why_not(self, part: Part) -> str | None:
        if part.call or not isinstance(part.module, (nn.Linear, nn.Embedding)):
            return f"it quantizes weights of linear layers, and this is a {part.kind}"
        if left := [name for name in part.operands if name != "weight"]:
            return f"its {left[0]} is {part.operands[left[0]]}, and activations stay in float in these files"
        found = _class_of(part.operands["weight"].spec, part.shape)
        return None if found in _CONFIGS else f"its weight is {part.operands['weight']}, and {found}"

    def conflicts(self, model: nn.Module, parts: Sequence[Part]) -> Mapping[str, str]:
        bare = [name for name in model.state_dict() if "." not in name]
        found = dict.fromkeys(bare, "files name a module before each tensor, and this one is of the model itself")
        return {**found, **super().conflicts(model, parts)}

    def encode(self, state: QuantizedState, model: nn.Module, parts: Sequence[Part]) -> Files:
        return _TorchAoWriter(state, model, parts).files()

    def coded(self, module: LayerTensors) -> CodedWeight | None:
        text = getattr(module.tensors, "metadata", {}).get(f"{module.base}.weight")
        said = None if text is None else json.loads(text)
        if said is None or said["_type"] == "Tensor":
            return None
        reader = READERS.get(said["_type"])
        if reader is None:
            module.refuse(f"weight is a {said['_type']!r:.60}; this reader knows {', '.join(READERS)}")
        kinds = "act_quant_kwargs", "activation_quantization", "act_pre_scale", "is_swizzled_scales"
        if left := [kind for kind in kinds if said["_data"].get(kind)]:
            module.refuse(f"weight has {left[0]} = {said['_data'][left[0]]!r:.80}, which this reader does not know")
        if left := [end for end in ("act_quant_scale", "act_pre_scale") if module.has(f"_weight_{end}")]:
            module.refuse(f"weight has {left[0]}, which this reader does not know")
        return reader(module, said["_data"])

    def engines(self, path: Path, model: nn.Module) -> Iterator[Engine]:
        support: Any = import_module("torchao.prototype.safetensors.safetensors_support")
        tensors = Folder(path).tensors()
        theirs, _ = support.unflatten_tensor_state_dict(dict(tensors), tensors.metadata)
        names = [name for name, one in theirs.items() if type(one) is not Tensor]
        copied = bake_weights(deepcopy(model)).eval()
        for name in names:
            parent, _, own = name.rpartition(".")
            setattr(module_at(copied, parent), own, nn.Parameter(theirs[name], requires_grad=False))
        values = {name: theirs[name].dequantize() for name in names}
        dtype = next(model.parameters()).dtype
        # Kernels for 8 bits multiply sums by scales: they round elsewhere than torch does with the values.
        tolerance = 1e-5 if dtype is torch.float32 else 4 * torch.finfo(dtype).eps
        yield Engine(f"torchao {version('torchao')}", values, copied, tolerance)
        if hasattr(model, "config_class"):
            import transformers

            architecture = getattr(transformers, Folder(path).config["architectures"][0])
            loaded = architecture.from_pretrained(path, dtype=dtype)
            yield Engine(f"transformers {transformers.__version__}", model=loaded.eval(), tolerance=tolerance)


def _class_of(spec: QuantSpec, shape: Sequence[int]) -> str:
    """The tensor subclass for a weight, or the reason why there is none."""
    try:
        block = spec.granularity.block_shape(tuple(shape))
    except ShapeError as error:
        return str(error)
    whole = block[0] >= shape[0]
    if spec.scale.rounding is ScaleRounding.SIGNED:
        return "programs take scales for positive, and these are signed"
    if spec.arithmetic is Arithmetic.MULTIPLIER or spec.offset is not None:
        return "files multiply codes by scales, without offsets in units of x"
    if len(shape) != 2 or any(size % by for size, by in zip(shape, block, strict=True)):
        return f"groups divide weights, and {list(shape)} are no multiples of {list(block)}"
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


class _TorchAoWriter:
    """The tensors of a model, and the JSON texts that describe them."""

    def __init__(self, state: QuantizedState, model: nn.Module, parts: Sequence[Part]) -> None:
        self.state, self.model = state, model
        self.in_float = [part.weight for part in written_in_float(parts, state.shared)]
        self.coded = {part.weight: part for part in parts if part.weight not in self.in_float}
        self.tensors, self.classes = TensorFile({}, {"format": "pt"}), list[str]()
        self.codes = lru_cache(maxsize=1)(lambda name: state.weights[name])

    def files(self) -> Files:
        own = tuple(f"{path}." for path, _, _ in self.state.quantizers())
        names = [name for name in self.state.tensors if not name.startswith(own)]
        for name in names:
            if name in self.coded:
                self._add(self.coded[name])
                continue
            tensor = later(self.state.tensors, name)
            if name in self.in_float:
                tensor = LazyTensor(tuple(tensor.shape), tensor.dtype, partial(self._values, name))
            self.tensors[name], self.tensors.metadata[name] = tensor, json.dumps({"_type": "Tensor"})
        self.tensors.metadata["tensor_names"] = json.dumps(names)
        if self.in_float:
            warn_user(f"torchao: {listed(self.in_float)} in float, with the values of the codes")
        return {WEIGHTS: self.tensors, CONFIG: config_file(self.model, self._quantization())}

    def _values(self, name: str) -> Tensor:
        return self.codes(name).values()

    def _quantization(self) -> dict[str, Any]:
        kind = max(self.classes, key=self.classes.count, default=INT8)
        name, number, data = _CONFIGS[kind]
        coded = {name.removesuffix(".weight") for name in self.coded}
        linear = [path for path, module in self.model.named_modules() if isinstance(module, nn.Linear)]
        default = {"_type": name, "_version": number, "_data": data}
        left = [path for path in linear if path not in coded]
        return {"quant_method": "torchao", "quant_type": {"default": default}, "modules_to_not_convert": left}

    def _add(self, part: Part) -> None:
        config, shape, path = part.operands["weight"], part.shape, part.paths["weight"]
        spec, dtype = config.spec, part.module.get_parameter("weight").dtype
        kind, groups = _class_of(spec, shape), spec.granularity.group_shape(shape)
        block = [size // count for size, count in zip(shape, groups, strict=True)]
        shift = 0 if spec.format.signed else 1 << spec.format.bits - 1
        self.classes.append(kind)

        def held(field: str) -> Tensor:
            found = self.state.tensors.get(f"{path}.{field}")
            return (getattr(self.codes(part.weight), field) if found is None else found).reshape(groups)

        def codes() -> Tensor:
            return self.codes(part.weight).codes

        def points() -> Tensor:
            return (torch.zeros(groups) if spec.symmetric else held("zero_point") - shift).to(torch.int8)

        data: dict[str, Any] = {"block_size": block, "dtype": _dtype(dtype)}
        found = {"qdata": LazyTensor(shape, torch.int8, lambda: (codes().to(torch.int32) - shift).to(torch.int8))}
        found["scale"] = LazyTensor(groups, torch.float32, lambda: held("scale").float())
        if kind == INTX:
            target = {"target_dtype": _dtype(f"int{spec.format.bits}")}
            data = {**target, **data, "activation_quantization": None}
            found["zero_point"] = LazyTensor(groups, torch.int8, points)
        elif kind == INT8:
            data = {"act_quant_kwargs": None, "reduce_range": False, **data}
        elif kind == FP8:
            preference = {"_type": "KernelPreference", "_data": "AUTO"}
            data = {"mm_config": None, "act_quant_kwargs": None, "kernel_preference": preference, **data}
            found["qdata"] = LazyTensor(shape, torch.float8_e4m3fn, codes)
        else:
            given = {"is_swizzled_scales": False, "use_triton_kernel": False, "act_quant_kwargs": None}
            data = {**given, "block_size": block[1], "orig_dtype": _dtype(dtype)}
            found = self._nvfp4(spec, shape, groups, held, codes)
        base = part.path
        said = {"_type": kind, "_data": data, "_tensor_data_names": [*found]}
        self.tensors.metadata[part.weight] = json.dumps(said)
        self.tensors |= {f"{base}._weight_{end}": tensor for end, tensor in found.items()}

    def _nvfp4(
        self,
        spec: QuantSpec,
        shape: Sequence[int],
        groups: tuple[int, ...],
        held: Callable[[str], Tensor],
        codes: Callable[[], Tensor],
    ) -> dict[str, LazyTensor]:
        def shared() -> Tensor:
            found = spec.scale.split(held("scale")).shared
            assert found is not None
            return found.reshape(())

        return {
            "per_tensor_scale": LazyTensor((), torch.float32, shared),
            "qdata": LazyTensor((shape[0], shape[1] // 2), torch.uint8, lambda: pack(codes(), 4)),
            "scale": LazyTensor(groups, torch.float8_e4m3fn, lambda: spec.scale.split(held("scale")).codes),
        }
