"""MLX: folders that mlx-lm, LM Studio and other programs for Macs load, as `mlx_lm.convert` writes them.

A weight [out, in] is three tensors: "weight", the codes of a row as a stream of bits in uint32; "scales" and "biases"
[out, groups]. Its values are scale * code + bias with codes from 0 on. FP4 and FP8 have no biases, and scales of 8
bits.
`config.json` has one layout for all layers, and exceptions by the path of a layer. Sources: mlx 0.32.4 (`mx.quantize`),
mlx-lm 0.32.2 (`utils.load_model`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from fakequant.delivery.folder import CONFIG, WEIGHTS, FileNames, Folder, config_file, is_of_transformers
from fakequant.delivery.format import LayeredWriter, LoadedFile, Part, Stored, dtype_of
from fakequant.delivery.layered import FLOATS, CodedWeight, LayeredFormat, LayerTensors
from fakequant.errors import CheckpointError, ExportError, ShapeError, SpecError, VerificationError
from fakequant.model.state.snapshots import Files, LazyTensor, Made, QuantizedState
from fakequant.numerics.formats import IntegerFormat
from fakequant.numerics.formats.packing import pack, unpack, viewed
from fakequant.numerics.granularity import PerBlock
from fakequant.numerics.scales import OffsetSpec, ScaleRounding, ScaleSpec
from fakequant.numerics.spec import QuantSpec

_FLOATS = {
    "mxfp4": QuantSpec.parse("float4_e2m1fn per_block(-1:32) scale=float8_e8m0fnu:floor"),
    "mxfp8": QuantSpec.parse("float8_e4m3fn per_block(-1:32) scale=float8_e8m0fnu:floor"),
    "nvfp4": QuantSpec.parse("float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn"),
}
"""By the name of a mode, its only specification; mlx-lm 0.32 reads NVFP4's second-level scale only for experts."""
_GROUPS, _BITS = (32, 64, 128), (2, 3, 4, 5, 6, 8)
_HOLDS = (
    f"files have integers of {', '.join(map(str, _BITS))} bits in groups of {', '.join(map(str, _GROUPS))} inputs, and "
    f"{', '.join(map(str, _FLOATS.values()))}"
)
_SPECS = "specifications of the weights"
"""The key in a file's header of the layers' specifications by path: the tensors do not show all of a specification."""
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 0.02, torch.bfloat16: 0.1}
"""How far logits may be off, as a share of the peak: MLX adds in another order, and rounds half precision twice."""


@dataclass(frozen=True)
class _Layout:
    """How a weight is stored, in the names of `config.json`."""

    group_size: int
    bits: int
    mode: str = "affine"


_MODES = {name: _Layout(32 if name[:2] == "mx" else 16, spec.format.bits, name) for name, spec in _FLOATS.items()}


class Mlx(LayeredFormat):
    """Integers of 2 to 8 bits, MXFP4, MXFP8 and NVFP4 in linear layers and embeddings; inputs stay in float."""

    name = "mlx"
    packages = ("mlx", "mlx_lm")
    writes = True
    with_tables = True

    def why_not(self, part: Part) -> str | None:
        if part.call or not part.is_matrix:
            return f"it quantizes linear layers and embeddings, and {part.refused}"
        if left := [name for name in part.operands if name != "weight"]:
            return f"its {left[0]} is {part.operands[left[0]]}, and activations stay in float in these files"
        spec, dtype = part.operands["weight"].spec, part.module.get_parameter("weight").dtype
        found = _layout_or_reason(spec, part.shape)
        is_affine = isinstance(found, _Layout) and found.mode == "affine"
        if is_affine and _digits(spec.scale, spec.offset) > _digits(FLOATS[dtype]):
            found = f"files have scales in the dtype of the model, {dtype}, which does not hold them all"
        return None if isinstance(found, _Layout) else f"its weight is {part.operands['weight']}, and {found}"

    def conflicts(self, model: nn.Module, parts: Sequence[Part]) -> Mapping[str, str]:
        why = "a setting of config.json has the name of this layer; put the model into a torch.nn.Sequential"
        found = {part.name: why for part in parts if part.path in vars(_Layout(64, 4))}
        return {**found, **super().conflicts(model, parts)}

    def encode(self, state: QuantizedState, model: nn.Module, parts: Sequence[Part]) -> Files:
        writer = LayeredWriter(state, model, parts, _stored, with_tables=True)
        layouts, specs = dict[str, _Layout](), dict[str, str]()
        for name, (base, *_) in writer.pieces.items():
            part = writer.coded[name]
            spec = part.operands["weight"].spec
            layouts[base], specs[base] = _layout(spec, part.shape), str(spec)
            for end in ("scales", "biases"):
                tensor = writer.tensors.get(f"{base}.{end}")
                if isinstance(tensor, LazyTensor) and tensor.dtype is torch.float16:  # float16 has the shortest range
                    tensor.make()  # raises if a scale is not exact, before anything is written
        writer.tensors.metadata[_SPECS] = json.dumps(specs)
        usual = Counter(layouts.values()).most_common(1)[0][0] if layouts else _Layout(64, 4)
        others = {base: vars(one) for base, one in layouts.items() if one != usual}
        config = config_file(model, {**vars(usual), **others}, dtype_of(state, model))
        values = json.loads(config)  # with the names that mlx-lm reads
        values["quantization"] = values["quantization_config"]
        rope = values.get("rope_parameters")
        if isinstance(rope, dict):  # the name in transformers 5; mlx-lm 0.32 reads older names
            full, local = rope.get("full_attention", rope), rope.get("sliding_attention")
            old = {key: full[key] for key in ("rope_theta", "partial_rotary_factor") if key in full}
            old |= {"rope_local_base_freq": local["rope_theta"]} if local and "rope_theta" in local else {}
            scaling = {key: one for key, one in full.items() if key != "rope_theta"}
            old["rope_scaling"] = None if scaling.get("rope_type", "default") == "default" else scaling
            values = {**old, **values}
        return {WEIGHTS: writer.tensors, CONFIG: json.dumps(values, indent=2).encode()}

    def recognizes(self, path: Path) -> bool:
        if not (path / CONFIG).is_file():
            return False
        folder = Folder(path)
        method = folder.quantization.get("quant_method") if isinstance(folder.quantization, dict) else None
        return isinstance(folder.config.get("quantization"), dict) and method is None

    def decode(self, path: Path, model: nn.Module) -> QuantizedState:
        folder = Folder(path)
        if isinstance(reason := _said(folder.config["quantization"]), str):
            raise CheckpointError(f"{path / CONFIG}: {reason}")
        if folder.config.get("quantize_activations"):
            raise CheckpointError(f"{path / CONFIG} says quantize_activations, which this reader does not know")
        return super().decode(path, model)

    def coded(self, module: LayerTensors) -> CodedWeight | None:
        weight, has_scales = module.tensors.get(f"{module.base}.weight"), module.has("scales")
        if not has_scales and (weight is None or weight.dtype is not torch.uint32):
            return None
        (rows, columns), said = module.shape, module.folder.config["quantization"].get(module.base)
        scales = module.tensors.get(f"{module.base}.scales")
        for end, one in (("weight", weight), ("scales", scales)):
            if one is None or one.dim() != 2 or not one.shape[-1]:
                module.get(end, torch.uint32 if end == "weight" else FLOATS, (rows, columns))
        assert weight is not None
        assert scales is not None
        sizes = {"group_size": columns // scales.shape[-1], "bits": weight.shape[-1] * 32 // columns}
        modes = [name for name, one in _MODES.items() if vars(one) == {**sizes, "mode": name}]
        mode = (modes or ["of 8 bits scales"])[0] if scales.dtype is torch.uint8 else "affine"
        layout = _said({**sizes, "mode": mode} if said is None else said)  # by its path, else as mlx-lm finds it
        if isinstance(layout, str):
            module.refuse(f"weight is of shape {[*weight.shape]} and scales of {[*scales.shape]}: {layout}")
        if columns % layout.group_size:
            module.refuse(f"groups of {layout.group_size} do not divide {columns} inputs")
        bits = layout.bits
        packed, groups = (rows, columns * bits // 32), (rows, columns // layout.group_size)
        stored = module.get("weight", torch.uint32, packed)
        read = module.get("scales", FLOATS if layout.mode == "affine" else torch.uint8, groups)
        if layout.mode != "affine":
            is_power, e4m3 = layout.mode != "nvfp4", torch.float8_e4m3fn
            scale = module.powers("scales", groups) if is_power else lambda: read().view(e4m3).float()
            _check_finite(module, "scales", scale())
            spec = _spec_in(module, layout)
            kind = spec.format.storage
            return CodedWeight(spec, lambda: _unpacked(stored(), bits, columns).to(torch.uint8).view(kind), scale)
        biases = module.get("biases", read().dtype, groups)
        spec = _spec_in(module, layout)
        for end, one in (("scales", read()), ("biases", biases())):
            _check_finite(module, end, one)
        if not (spec.scale.is_exact or spec.has_signed_scales) and bool((read() < 0).any()):
            module.refuse(f"scales are negative, which those of {spec} are not")
        shift = _shift(spec)

        def codes() -> Tensor:
            return (_unpacked(stored(), bits, columns) - shift).to(spec.format.storage)

        if spec.offset is not None:
            return CodedWeight(spec, codes, read, lambda: -biases().float())
        if not torch.equal(biases().float(), read().float() * -shift):
            module.refuse(f"biases are not scales * {-shift}, as {spec} has them")
        return CodedWeight(spec, codes, read)

    def engines(self, path: Path, model: nn.Module) -> Iterator[LoadedFile]:
        mx: Any = import_module("mlx.core")
        state, names = self.decode(path, model), FileNames(model, Folder(path).tensors())
        arrays: dict[str, Any] = {}
        for file in sorted(path.glob("model*.safetensors")):
            arrays |= mx.load(str(file), stream=mx.cpu)
        values, notes = dict[str, Any](), list[str]()
        for name in state.weights:
            held = state.weights[name]
            (key,) = names.split(name, torch.empty(held.shape, device="meta"))
            values[name] = partial(_by_mlx, mx, arrays, key.removesuffix(".weight"), _layout(held.spec, held.shape))
        near = list[str]()  # weights whose products of codes and scales MLX rounds, and the model does not
        for name in values:
            held = state.weights[name]
            spec = held.spec
            if spec.format.has_zero_point and spec.offset is None and spec.scale.format is None and _shift(spec) > 0:
                theirs = values[name]()
                scale = held.scale.reshape(len(theirs), -1).abs()
                most = scale.repeat_interleave(theirs.shape[1] // scale.shape[1], 1) * 2.0 ** (spec.format.bits - 23)
                if bool(((held.values().float() - theirs).abs() <= most).all()):
                    near.append(name)
        if near:
            notes.append(
                f"The values of {len(near)} weights with float32 scales are those of MLX up to rounding: it rounds "
                "scale * code before it adds the bias; scale=bfloat16 or scale=float16 makes them equal."
            )
        yield LoadedFile(
            f"mlx {version('mlx')}", Made({n: one for n, one in values.items() if n not in near}), notes=notes
        )
        name, dtype = f"mlx-lm {version('mlx-lm')}", next(model.parameters()).dtype
        if not is_of_transformers(model):
            yield LoadedFile(
                name, notes=[f"Outputs are not compared in {name}: it loads models of transformers alone."]
            )
            return
        try:
            loaded = _MlxLm(path)
        except ValueError as error:
            if not str(error).startswith("Model type"):
                raise
            yield LoadedFile(name, notes=[f"Not loaded by {name}: {error}"])
            return
        half = f"{name} rounds scale * code and the sum to {dtype}, and the model once."
        yield LoadedFile(
            name, model=loaded, tolerance=_TOLERANCE[dtype], notes=[] if dtype is torch.float32 else [half]
        )


class _MlxLm(nn.Module):
    """Runs a folder in mlx-lm on a CPU, with the model's arguments; raises ValueError for unknown architectures."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._mx: Any = import_module("mlx.core")
        with patch("resource.setrlimit"):  # its import lowers the number of files that the process may open
            utils: Any = import_module("mlx_lm.utils")
        with self._mx.stream(self._mx.cpu):
            self._model, _ = utils.load_model(path)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> dict[str, Tensor]:
        """The "logits" [rows, tokens, vocabulary] of token ids [rows, tokens]; other arguments have no effect."""
        if attention_mask is not None and not bool(attention_mask.all()):
            raise VerificationError("it runs only batches without padding; give batches of texts of equal length")
        with self._mx.stream(self._mx.cpu):
            return {"logits": _tensor(self._mx, self._model(self._mx.array(input_ids.numpy())))}


def _layout_or_reason(spec: QuantSpec, shape: Sequence[int]) -> _Layout | str:
    """The layout of a weight [out, in], or the reason why there is none."""
    try:
        block = spec.granularity.block_shape(tuple(shape))
    except ShapeError as error:
        return str(error)
    if block[0] != 1 or shape[1] % block[1]:
        return f"{_HOLDS}; groups divide the {shape[1]} inputs of a row"
    width, bits = block[1], spec.format.bits
    if not isinstance(spec.format, IntegerFormat):
        for mode, one in _FLOATS.items():
            alike = (one.format, one.scale.format, None) == (spec.format, spec.scale.format, spec.scale.granularity)
            if alike and spec.arithmetic.is_linear and width == _MODES[mode].group_size:
                return _MODES[mode]
        return _HOLDS
    if bits not in _BITS or width not in _GROUPS:
        return _HOLDS
    if not spec.arithmetic.is_linear or any(spec.shared_granularities):
        return "files multiply codes by scales, and have no scales of scales"
    if not spec.symmetric and spec.offset is None:
        return "files have biases in units of x, and no zero points among the codes: give offset=bfloat16"
    return _Layout(width, bits)


def _layout(spec: QuantSpec, shape: Sequence[int]) -> _Layout:
    """The layout of a weight; the format must be able to hold it."""
    found = _layout_or_reason(spec, shape)
    assert isinstance(found, _Layout), found
    return found


def _digits(*stored: ScaleSpec | OffsetSpec | None) -> int:
    """The largest number of fraction bits of scales and offsets; without a format, they are float32, which has 23."""
    return max(23 if one.format is None else one.format.fraction_bits for one in stored if one is not None)


def _shift(spec: QuantSpec) -> int:
    """The number that is added to codes, because files store unsigned codes."""
    return 1 << spec.format.bits - 1 if spec.format.signed else 0


def _stored(part: Part, shape: Sequence[int], dtype: torch.dtype) -> dict[str, Stored]:
    spec = part.operands["weight"].spec
    layout = _layout(spec, part.shape)
    groups, shift = (shape[0], shape[1] // layout.group_size), _shift(spec)

    def exact(change: Any, x: Tensor) -> Tensor:
        wanted = change(x)
        if not torch.equal((found := wanted.to(dtype)).to(wanted.dtype), wanted):
            raise ExportError(
                f"mlx cannot hold {part.weight}: its scales and biases are not numbers of {dtype}, the dtype of the "
                f"model; prepare the model with scale={str(dtype).removeprefix('torch.')}"
            )
        return found

    def packed(codes: Tensor) -> Tensor:
        numbers = codes if codes.dtype is torch.int8 else codes.view(torch.uint8)
        return viewed(pack(numbers, layout.bits, shift if layout.mode == "affine" else 0), torch.uint32)

    found = {"weight": Stored("codes", (shape[0], shape[1] * layout.bits // 32), torch.uint32, packed)}
    kind = spec.scale.format
    if layout.mode != "affine" and kind is not None:
        return {**found, "scales": Stored("scale", groups, torch.uint8, lambda x: kind.to_storage(x).view(torch.uint8))}
    source, change = ("scale", lambda x: x * -shift) if spec.offset is None else ("zero_point", Tensor.neg)
    return {
        **found,
        "scales": Stored("scale", groups, dtype, partial(exact, lambda x: x)),
        "biases": Stored(source, groups, dtype, partial(exact, change)),
    }


def _unpacked(stored: Tensor, bits: int, columns: int) -> Tensor:
    return unpack(viewed(stored, torch.uint8), bits, columns)


def _said(values: Any) -> _Layout | str:
    """The layout in a configuration, or a text that says what is wrong with the configuration."""
    if not isinstance(values, dict):
        return f"quantization is {values!r:.40}, and not a layout"
    mode = values.get("mode", "affine")
    if mode not in ("affine", *_MODES):
        return f"mode is {mode!r:.40}; this reader knows affine, {', '.join(_MODES)}"
    usual = _MODES.get(mode, _Layout(64, 4))
    size, bits = values.get("group_size") or usual.group_size, values.get("bits") or usual.bits
    is_known = (size, bits) == (usual.group_size, usual.bits) if mode in _MODES else size in _GROUPS and bits in _BITS
    if not is_known or not type(size) is type(bits) is int:
        return f"group_size is {size!r:.40} and bits {bits!r:.40} in the mode {mode}; {_HOLDS}"
    return _Layout(size, bits, mode)


def _spec_in(module: LayerTensors, layout: _Layout) -> QuantSpec:
    """The specification in the file's header, checked against the layout; without a header, MLX's default."""
    try:
        said = json.loads(getattr(module.tensors, "metadata", {}).get(_SPECS, "{}")).get(module.base)
        spec = None if said is None else QuantSpec.parse(said)
    except (ValueError, TypeError, AttributeError, SpecError, RecursionError) as error:
        module.refuse(f"the header has no specification: {error}")
    if spec is not None:
        if _layout_or_reason(spec, module.shape) != layout:
            module.refuse(f"the header says {spec}, and the tensors are {vars(layout)}")
        return spec
    if layout.mode != "affine":
        return _FLOATS[layout.mode]
    scale = FLOATS.get(module.tensors[f"{module.base}.scales"].dtype, FLOATS[torch.float32])
    offset = OffsetSpec(scale.format, ScaleRounding.SIGNED)
    return QuantSpec(f"uint{layout.bits}", PerBlock({-1: layout.group_size}), scale=scale, offset=offset)


def _check_finite(module: LayerTensors, end: str, values: Tensor) -> None:
    if not bool(values.isfinite().all()):
        module.refuse(f"{end} are not finite; the file is damaged")


def _by_mlx(mx: Any, arrays: Mapping[str, Any], base: str, layout: _Layout) -> Tensor:
    """The values of a weight that MLX computes from scales and biases in float32."""
    sizes = {"group_size": layout.group_size, "bits": layout.bits, "mode": layout.mode}
    held = [arrays[f"{base}.{end}"] for end in ("scales", "biases") if f"{base}.{end}" in arrays]
    if layout.mode == "affine":
        held = [one.astype(mx.float32) for one in held]
    with mx.stream(mx.cpu):
        return _tensor(mx, mx.dequantize(arrays[f"{base}.weight"], *held, **sizes, dtype=mx.float32))


def _tensor(mx: Any, array: Any) -> Tensor:
    import numpy as np

    return torch.from_numpy(np.array(array.astype(mx.float32)))
