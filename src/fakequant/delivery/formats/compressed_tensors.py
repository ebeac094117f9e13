"""compressed-tensors, the format that transformers loads, and by their documentation vLLM and SGLang.

A folder with the layout of Hugging Face; its `config.json` has schemes and names the modules for each. The codes of a
row are one stream of bits. Source: the package compressed-tensors 0.20.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from fakequant.delivery.folder import CONFIG, WEIGHTS, FileNames, Folder, config_file, initializes, is_of_transformers
from fakequant.delivery.format import LayeredWriter, LoadedFile, Part, Stored, dtype_of, undivided, weight_slots
from fakequant.delivery.layered import OTHERS, CodedWeight, LayeredFormat, LayerTensors, RangeOfCall, Read, permutation
from fakequant.delivery.schemes import (
    EXACT,
    FLOATS,
    HALF_RANGE,
    HEADS,
    LOCAL,
    PACKED,
    PLAIN,
    ROLES,
    attention_args,
    attention_sites,
    config_of,
    conflicts_of_calls,
    decompressed,
    engine_of,
    groups_of,
    how_to_load,
    is_fp8,
    missed_cache,
    normalized,
    reciprocal,
    scheme_for,
    scheme_of,
    shift_of,
    stored,
)
from fakequant.errors import ExportError, warn_user
from fakequant.model.sites import site_path
from fakequant.model.state.plan import SitesEntry, sites_entry
from fakequant.model.state.snapshots import Files, LazyTensor, Made, QuantizedState, TensorFile, lazy
from fakequant.model.weights import merged_layers
from fakequant.nn.quantizer import quantizers
from fakequant.nn.ranges import GLOBAL_SCALE
from fakequant.numerics.scales import ScaleRounding
from fakequant.text import listed

Scheme = Mapping[str, Any]
_ORDERED = {"group", "dynamic"}
"""Values of `actorder` with which the inputs of a group need not be adjacent."""


class CompressedTensors(LayeredFormat):
    """Integers of 2 to 8 bits, FP8, NVFP4, MXFP4, MXFP6 and MXFP8 in linear layers and experts."""

    name = "compressed-tensors"
    packages = ("compressed_tensors",)
    writes = True

    def why_not(self, part: Part) -> str | None:
        if part.call:
            found = attention_args(part)
            return found if isinstance(found, str) else None
        if not (part.is_matrix or part.is_stack):
            return f"it quantizes linear layers, embeddings and experts, and {part.refused}"
        if part.is_stack and part.places["weight"].channels != -2:
            return "files store each expert as [out, in], but the experts of this model are [in, out]"
        if "weight" not in part.operands:
            return "it quantizes activations only if the layer's weight is quantized"
        found = scheme_of(part)
        return found if isinstance(found, str) else None

    def conflicts(self, model: nn.Module, parts: Sequence[Part]) -> Mapping[str, str]:
        found = conflicts_of_calls(model, parts)
        fixed = {path for path, one in quantizers(model).items() if one.global_scale is not None or one.fixes_global}
        for part in parts:
            scheme = {} if part.call else scheme_of(part)
            is_local = not isinstance(scheme, str) and scheme.get(ROLES["input"], {}).get("dynamic") == LOCAL
            if is_local and part.paths["input"] not in fixed:
                found[part.name] = (
                    "files fix the scale of NVFP4 inputs: call fakequant.delivery.fix_global_scales(model, batches) or "
                    "quantize weights alone, NVFP4_WEIGHT_ONLY"
                )
        return {**undivided(model, parts), **found, **super().conflicts(model, parts)}

    def encode(self, state: QuantizedState, model: nn.Module, parts: Sequence[Part]) -> Files:
        writer = LayeredWriter(state, model, parts, _stored)
        groups: dict[str, dict[str, float]] = {}
        weights = {bases[0]: name for name, bases in writer.pieces.items() if len(bases) == 1}
        for merged in merged_layers({base: lazy(state.tensors, name).shape[-1] for base, name in weights.items()}):
            names = [weights[base] for base in merged]
            if len({part.operands["weight"].spec for part in map(writer.coded.__getitem__, names)}) == 1:
                writer.merge_scales(names)
        for name, bases in writer.pieces.items():
            scheme = json.dumps(_add_beside(writer, writer.coded[name], bases))
            # transformers looks for modules by their names in the model, others by those in the file.
            targets = {bases[0], writer.coded[name].path} if len(bases) == 1 else {_pattern(bases)}
            groups.setdefault(scheme, {}).update(dict.fromkeys(sorted(targets), len(bases) / len(targets)))
        calls = [part for part in parts if part.call]
        for call in calls:
            for name, path in call.paths.items():
                args = attention_args(call)
                shape = (-1, 1, 1) if not isinstance(args, str) and args["strategy"] == HEADS else (1,)
                writer.tensors[f"{call.path}.{name[0]}_scale"] = state.tensors[f"{path}.scale"].reshape(shape)
        missed = missed_cache(call.module for call in calls if "query" not in call.operands)
        dtype = dtype_of(state, model)
        alone = {name: bases[0] for name, bases in writer.pieces.items() if len(bases) == 1}
        packed = (writer.coded[name].path for name, base in alone.items() if f"{base}.weight_packed" in writer.tensors)
        _warn(writer, [json.loads(scheme) for scheme in groups], missed, dtype, starts=initializes(model, packed))
        said = _quantization(groups, calls, writer)
        # The configuration must not give a weight another scheme than it has.
        folder: Any = SimpleNamespace(quantization=said, path=self.name)
        for name, bases in writer.pieces.items():
            part = writer.coded[name]
            expected = normalized({"targets": [], **cast("Scheme", scheme_of(part))}, None)
            for base in dict.fromkeys((bases[0], bases[-1])):
                found = scheme_for(folder, (base, part.path), ("Linear",))
                if found is None or {**found, "targets": []} != expected:
                    raise ExportError(
                        f"compressed-tensors cannot say in config.json how {base} is quantized: programs would take "
                        f"{found}; give layers with similar names the same preset"
                    )
        return {WEIGHTS: writer.tensors, CONFIG: config_file(model, said, dtype)}

    def with_others(self, files: Files, tensors: Mapping[str, LazyTensor]) -> Files:
        weights, config = files[WEIGHTS], files[CONFIG]
        assert isinstance(weights, TensorFile)
        assert isinstance(config, bytes)
        layers = [name.removesuffix(".weight") for name, one in tensors.items() if len(one.shape) == 2]
        said = json.loads(config)
        said["quantization_config"]["ignore"] += layers
        held = TensorFile({**weights, **tensors}, {**weights.metadata, OTHERS: json.dumps([*tensors])})
        return {**files, WEIGHTS: held, CONFIG: json.dumps(said, indent=2).encode()}

    def coded(self, module: LayerTensors) -> CodedWeight | None:
        scheme = scheme_for(module.folder, (module.base, module.path), module.classes)
        if scheme is None:
            return None
        dtype = module.tensors[f"{module.base}.weight_scale"].dtype if module.has("weight_scale") else torch.float32
        spec = config_of(scheme["weights"], dtype).spec
        held = stored(scheme, spec.format, module.shape)
        fields: dict[str, Read] = {}
        for end, one in held.items():
            # A scalar or a vector stands for a shape of as many numbers.
            flat = [(torch.Size(one.shape).numel(),), ()] if one.field in ("scale", "shared") else []
            shapes = [one.shape, *(shape for shape in flat if shape or 1 in one.shape)]
            stored_as = module.get(end, FLOATS if one.dtype in FLOATS else one.dtype, *shapes)
            one.load(stored_as())  # raises if the tensor is damaged
            fields[one.field] = lambda one=one, stored_as=stored_as: one.load(stored_as())
        if module.has("weight_shape") and module.get("weight_shape", torch.int64, (2,))().tolist() != [*module.shape]:
            module.refuse(f"weight_shape is not {[*module.shape]}")

        def scale() -> Tensor:
            if "shared" not in fields:
                return fields["scale"]()
            exact = getattr(module.tensors, "metadata", {}).get(f"{EXACT}{module.base}")
            return fields["scale_codes"]().float() * (fields["shared"]() if exact is None else float.fromhex(exact))

        is_half = f"{HALF_RANGE}{module.base}" in getattr(module.tensors, "metadata", {})
        beside = {role: scheme[name] for role, name in ROLES.items() if name in scheme and role != "weight"}
        configs = {role: config_of(args, half_range=is_half) for role, args in beside.items()}
        ranges = {
            f"{role}.{what}": module.get(f"{role}_{what}", {*FLOATS, torch.int8}, (1,), ())().to(kind)
            for role, config in configs.items()
            for what, kind in (("scale", torch.float32), ("zero_point", torch.int32))
            if not config.dynamic and not (what == "zero_point" and config.spec.symmetric)
        }
        for role in configs:
            if scheme[ROLES[role]]["dynamic"] == LOCAL:
                ranges[f"{role}.{GLOBAL_SCALE}"] = module.get(f"{role}_{GLOBAL_SCALE}", torch.float32, (1,), ())()
        coded = CodedWeight(
            *(spec, fields["codes"], scale, fields.get("zero_point")),
            *(configs.get("input"), configs.get("output"), ranges),
        )
        if scheme["weights"].get("actorder") not in _ORDERED:
            return coded
        # Groups have their inputs anywhere, as `weight_g_idx` says; -1 in it says in order.
        index = None
        if module.has("weight_g_idx"):
            index = module.get("weight_g_idx", torch.int32, module.shape[1:])().long()
            index = None if bool((index == -1).all()) else index
        order, granularity, of_groups = module.in_order(module.groups(scheme["weights"]["group_size"]), index)
        point = coded.zero_point
        return replace(
            coded,
            spec=spec.replace(granularity=granularity),
            codes=lambda: coded.codes()[:, order],
            scale=lambda: scale()[:, of_groups],
            zero_point=None if point is None else (lambda: point()[:, of_groups]),
            transform=permutation(order),
        )

    def calls(self, folder: Folder, model: nn.Module) -> tuple[SitesEntry, Mapping[str, RangeOfCall]]:
        given = folder.quantization.get("kv_cache_scheme")
        operands = ("key", "value")
        args = given and normalized({"targets": [], ROLES["input"]: given}, None)
        for group in (one for one in groups_of(folder) if ROLES["weight"] not in one):
            operands, args = ("query", *operands), group
        if not args:
            return SitesEntry(), {}
        own = args[ROLES["input"]]
        sites = attention_sites(model, config_of(own), operands)
        shape = (1, -1, 1, 1) if own["strategy"] == HEADS else (1,)
        return sites, {
            f"{site_path(path, key)}.{name}.scale": RangeOfCall(f"{path}.{name[0]}_scale", shape)
            for path, owner in sites.owners.items()
            for key, site in owner.sites.items()
            for name in site.quantizers
            if name in operands
        }

    def engines(self, path: Path, model: nn.Module) -> Iterator[LoadedFile]:
        folder, names = Folder(path), FileNames(model)
        tensors, found, packed = folder.tensors(), {}, list[str]()
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for name, slot in weight_slots(model).items():
            if (like := parameters.get(name)) is None:
                continue
            pieces = [key.removesuffix(".weight") for key in names.split(name, torch.empty_like(like, device="meta"))]
            scheme = scheme_for(folder, (pieces[0], slot.path), slot.classes)
            packed += [slot.path] if f"{pieces[0]}.weight_packed" in tensors and len(pieces) == 1 else []
            if scheme is not None and scheme["weights"]["strategy"] != "tensor_group":
                own = partial(decompressed, scheme, tensors, pieces)
                channels = slot.operand.channels
                found[name] = lambda own=own, name=name, like=like, c=channels: names.joined(name, own(), like.shape, c)
        yield LoadedFile(f"{self.name} {version(self.name)}", Made(found))
        if is_of_transformers(model):
            owners = sites_entry(model).owners if folder.quantization.get("kv_cache_scheme") else ()
            yield engine_of(path, model, groups_of(folder), packed, missed_cache(map(model.get_submodule, owners)))


def _stored(part: Part, shape: Sequence[int], dtype: torch.dtype) -> Mapping[str, Stored]:
    scheme, spec = scheme_of(part), part.operands["weight"].spec
    assert not isinstance(scheme, str), scheme
    rounded = spec.scale.format is not None and spec.scale.format.storage is dtype
    return stored(scheme, spec.format, shape, dtype if rounded else torch.float32)


def _add_beside(writer: LayeredWriter, part: Part, bases: Sequence[str]) -> Scheme:
    """Add a layer's tensors other than codes and scales; return its scheme."""
    scheme = scheme_of(part)
    assert not isinstance(scheme, str), scheme
    for base in bases:
        if scheme["format"] == PACKED:
            columns = part.shape[-1]
            rows = writer.tensors[f"{base}.weight_packed"].shape[0]
            writer.tensors[f"{base}.weight_shape"] = torch.tensor([rows, columns], device="cpu")
        for role, what in product(("input", "output"), ("scale", "zero_point")):
            held = writer.state.tensors.get(f"{part.paths.get(role)}.{what}")
            if held is not None:
                point = held.reshape(1) - shift_of(part.operands[role].spec.format)
                writer.tensors[f"{base}.{role}_{what}"] = held.reshape(1) if what == "scale" else point.to(torch.int8)
        if scheme.get(ROLES["input"], {}).get("dynamic") is True:
            rule = part.operands["input"].spec.scale.rounding
            writer.tensors.metadata |= {f"{HALF_RANGE}{base}": rule.value} if rule is ScaleRounding.HALF_RANGE else {}
        if (held := writer.state.tensors.get(f"{part.paths.get('input')}.{GLOBAL_SCALE}")) is not None:
            writer.tensors[f"{base}.input_{GLOBAL_SCALE}"] = held
        if scheme["weights"]["strategy"] == "tensor_group":
            key = base if f"{base}.weight" not in writer.field(part.weight, "shared") else f"{base}.weight"
            exact = writer.field(part.weight, "shared")[key].flatten()[0]
            if not torch.equal(reciprocal(reciprocal(exact))[0], exact):
                writer.tensors.metadata[f"{EXACT}{base}"] = float(exact).hex()
    return scheme


def _pattern(bases: Sequence[str]) -> str:
    """A pattern that matches only the names of a stack's pieces, such as `...experts.12.up_proj`."""
    parts = [base.split(".") for base in bases]
    if len({*map(len, parts)}) > 1:
        return f"re:({'|'.join(map(re.escape, bases))})$"
    found = list[str]()
    for names in zip(*parts, strict=True):
        ones = [*dict.fromkeys(names)]
        several = r"\d+" if all(map(str.isdecimal, ones)) else f"({'|'.join(map(re.escape, ones))})"
        found.append(re.escape(ones[0]) if len(ones) == 1 else several)
    return f"re:{'[.]'.join(found)}$"


def _quantization(
    found: Mapping[str, Mapping[str, float]], calls: Sequence[Part], writer: LayeredWriter
) -> dict[str, Any]:
    """The quantization in `config.json`: the scheme of most layers names a class; others name layers and come first."""
    ranked = sorted(found.items(), key=lambda item: sum(item[1].values()))
    groups = [{"targets": [*targets], **json.loads(scheme)} for scheme, targets in ranked]
    by_class = [one for one in groups if len(groups) == 1 or not any("re:" in target for target in one["targets"])]
    for group in by_class[-1:]:
        group["targets"] = ["Linear"]
    groups.sort(key=lambda group: group["targets"] == ["Linear"])
    formats = {group["format"] for group in groups}
    attention = attention_args(calls[0]) if calls else None
    if has_query := any("query" in part.operands for part in calls):
        groups.insert(0, {"targets": [part.path for part in calls], ROLES["input"]: attention})
    if writer.divided and not any(part.is_stack for part in writer.coded.values()):
        eight = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
        groups.append({"targets": [PLAIN], ROLES["weight"]: eight, "format": "naive-quantized"})
    return {
        "quant_method": CompressedTensors.name,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
        "ignore": [*writer.ignored],
        "kv_cache_scheme": None if has_query else attention,
    }


def _warn(writer: LayeredWriter, schemes: Sequence[Scheme], missed: str, dtype: torch.dtype, *, starts: bool) -> None:
    """Warn once of conditions for loading the files, and of keys and values that stay in float."""
    notes = [missed] if missed else []
    stacks = [
        scheme for part in writer.coded.values() if part.is_stack and not isinstance(scheme := scheme_of(part), str)
    ]
    if writer.divided and not all(map(is_fp8, stacks)):
        notes.append(f"transformers does not load {listed(writer.divided)} in float beside experts with such codes")
    if writer.in_float:
        notes.append(
            f"{listed(writer.in_float)} in float, with the values of the codes: programs load no quantized embeddings"
        )
    way = how_to_load(schemes, writer.tensors, dtype, starts=starts, merged=writer.merged, unmerged=writer.unmerged)
    if way:
        is_half = any("scale_dtype" in one["weights"] for one in stacks)
        then = "; call to(torch.float32) on it, whose experts are in bfloat16" if is_half else ""
        notes.append(f"transformers loads these files {way}{then if dtype is torch.float32 else ''}")
    if notes:
        warn_user(f"compressed-tensors: {'; '.join(notes)}")
