"""compressed-tensors: what vLLM, SGLang and transformers load.

A folder of Hugging Face whose `config.json` has schemes and names the modules that they are for. Codes are a stream of
bits in each row. Source: the package compressed-tensors 0.20.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from importlib import import_module
from importlib.metadata import version
from itertools import product
from math import prod
from operator import eq
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fakequant.delivery.calls import attention_sites
from fakequant.delivery.folder import CONFIG, WEIGHTS, Folder, Names, build, config_file, later
from fakequant.delivery.format import DeliveryFormat, Engine, Part
from fakequant.delivery.formats._compressed_tensors import (
    EXACT,
    FLOATS,
    PACKED,
    ROLES,
    Stored,
    attention_args,
    config_of,
    normalized,
    reciprocal,
    scheme_of,
    shift_of,
    stored,
)
from fakequant.delivery.places import Place, float_names, places_of
from fakequant.errors import CheckpointError, warn_user
from fakequant.model.sites.planned import site_path
from fakequant.model.state.codecs import Files, TensorFile
from fakequant.model.state.packing import Made
from fakequant.model.state.plan import LayerEntry, QuantizerEntry, SitesEntry
from fakequant.model.state.snapshots import LazyTensor, QuantizedState, shared_names
from fakequant.model.state.weight_codes import WeightCodes
from fakequant.nn.paths import join, module_at
from fakequant.nn.quantized.forms import own_class
from fakequant.numerics.spec import QuantSpec
from fakequant.text import listed


class CompressedTensors(DeliveryFormat):
    """Integers of 2 to 8 bits, FP8, NVFP4, MXFP4, MXFP6 and MXFP8 in linear layers and experts."""

    name = "compressed-tensors"
    packages = ("compressed_tensors",)

    def why_not(self, part: Part) -> str | None:
        if part.call:
            found = attention_args(part)
            return found if isinstance(found, str) else None
        if not (isinstance(part.module, (nn.Linear, nn.Embedding)) or part.is_stack):
            return f"it quantizes linear layers, embeddings and experts, and this is a {part.kind}"
        if "weight" not in part.operands:
            return "it quantizes activations of layers whose weight is quantized, too"
        found = scheme_of(part)
        return found if isinstance(found, str) else None

    def conflicts(self, model: nn.Module, parts: Sequence[Part]) -> Mapping[str, str]:
        calls = {part.path: part for part in parts if part.call}
        classes = {type(part.module) for part in calls.values()} | {own_class(part.module) for part in calls.values()}
        others = [path for path, one in model.named_modules() if type(one) in classes and path not in calls]
        schemes = {part.name: attention_args(part) for part in calls.values()}
        first = next(iter(schemes.values()), None)
        found = {
            name: "files have one scheme of keys and values for all layers"
            for name, one in schemes.items()
            if one != first
        }
        return found | dict.fromkeys(others, "files have keys and values of all layers quantized, or of none")

    def encode(self, state: QuantizedState, model: nn.Module, parts: Sequence[Part]) -> Files:
        return _Writer(state, model, parts).files()

    def recognizes(self, path: Path) -> bool:
        found = Folder(path).quantization if (path / CONFIG).is_file() else None
        return isinstance(found, dict) and bool(found) and found.get("quant_method", self.name) == self.name

    def build(self, path: Path) -> nn.Module:
        return build(path)

    def decode(self, path: Path, model: nn.Module) -> QuantizedState:
        return _Reader(path, model).state()

    def engines(self, path: Path, model: nn.Module) -> Iterator[Engine]:
        reader = _Reader(path, model)
        reader.state()
        names = {
            name: pieces
            for name, (scheme, pieces) in reader.coded.items()
            if scheme["weights"]["strategy"] != "tensor_group"
        }
        yield Engine(
            f"{self.name} {version(self.name)}",
            Made({name: partial(reader.theirs, name, pieces) for name, pieces in names.items()}),
        )
        if hasattr(model, "config_class"):
            yield _transformers(path, model, reader.groups)


class _Writer:
    """The tensors and the configuration of a model."""

    def __init__(self, state: QuantizedState, model: nn.Module, parts: Sequence[Part]) -> None:
        self.state, self.model, self.names = state, model, Names(model)
        tied = {*state.shared, *state.shared.values()}
        # Programs read these as floats, and tie them: the values of codes are the same numbers.
        self.in_float = [p.weight for p in parts if isinstance(p.module, nn.Embedding) or p.weight in tied]
        self.coded = {part.weight: part for part in parts if part.weight and part.weight not in self.in_float}
        self.calls = [part for part in parts if part.call]
        self.tensors, self.ignored = TensorFile({}, {"format": "pt"}), list[str]()
        self.groups: dict[str, dict[str, int]] = {}
        self.pieces = lru_cache(maxsize=1)(self._pieces)

    def files(self) -> Files:
        own = tuple(f"{path}." for path, _, _ in self.state.quantizers())
        for name in [*self.state.tensors, *self.state.shared]:
            if not name.startswith(own):
                tensor = later(self.state.tensors, self.state.shared.get(name, name))
                like = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                pieces = self.names.split(name, like)
                if name in self.coded:
                    scheme, (first, last) = scheme_of(self.coded[name]), (min(pieces), max(pieces))
                    alike = first[: [*map(eq, first, last), False].index(False)]
                    target = f"re:{re.escape(alike)}.*" if len(pieces) > 1 else first.removesuffix(".weight")
                    self.groups.setdefault(json.dumps(scheme), {})[target] = len(pieces)
                for key, piece in pieces.items():
                    self._add(name, key, piece, tensor)
        for part in self.calls:
            for name in part.operands:
                scale = self.state.tensors[f"{part.paths[name]}.scale"]
                self.tensors[f"{part.path}.{name[0]}_scale"] = scale.reshape(1)
        quantization = self._quantization()
        self._say([json.loads(scheme) for scheme in self.groups])
        return {WEIGHTS: self.tensors, CONFIG: config_file(self.model, quantization)}

    def _add(self, name: str, key: str, piece: Tensor, tensor: Tensor | LazyTensor) -> None:
        base = key.removesuffix(".weight")
        if name in self.coded:
            self._add_codes(self.coded[name], base, key, piece)
            return
        module = module_at(self.model, name.rpartition(".")[0])
        if base != key and piece.dim() == 2 and not isinstance(module, nn.Embedding):
            self.ignored.append(base)
        if name not in self.state.shared:
            is_whole = name not in self.in_float and piece.shape == tensor.shape
            self.tensors[key] = (
                tensor if is_whole else self._later(name, key, Stored("values", piece.shape, piece.dtype))
            )

    def _add_codes(self, part: Part, base: str, key: str, piece: Tensor) -> None:
        """Add what stands for a weight [out, in]."""
        spec, scheme = part.operands["weight"].spec, scheme_of(part)
        assert not isinstance(scheme, str), scheme
        rounded = spec.scale.format is not None and spec.scale.format.storage is piece.dtype
        for suffix, one in stored(scheme, spec.format, piece.shape, piece.dtype if rounded else torch.float32).items():
            self.tensors[f"{base}.{suffix}"] = self._later(part.weight, key, one)
            if one.field == "shared":
                exact = self.pieces(part.weight, "shared")[key].flatten()[0]
                if not torch.equal(reciprocal(reciprocal(exact))[0], exact):
                    self.tensors.metadata[f"{EXACT}{base}"] = float(exact).hex()
        if scheme["format"] == PACKED:
            self.tensors[f"{base}.weight_shape"] = torch.tensor(piece.shape)
        for role, what in product(("input", "output"), ("scale", "zero_point")):
            held = self.state.tensors.get(f"{part.paths.get(role)}.{what}")
            if held is not None:
                point = held.reshape(1) - shift_of(part.operands[role].spec.format)
                self.tensors[f"{base}.{role}_{what}"] = held.reshape(1) if what == "scale" else point.to(torch.int8)

    def _later(self, name: str, key: str, one: Stored) -> LazyTensor:
        return LazyTensor(tuple(one.shape), one.dtype, lambda: one.store(self.pieces(name, one.field)[key]))

    def _pieces(self, name: str, field: str) -> dict[str, Tensor]:
        """A field of a weight, or the values of a tensor, in the pieces that files hold."""
        if field == "values":
            coded = name in self.in_float
            return self.names.split(name, self.state.weights[name].values() if coded else self.state.tensors[name])
        if field == "codes":
            return self.names.split(name, self.state.weights[name].codes)
        part = self.coded[name]
        spec, path = part.operands["weight"].spec, part.paths["weight"]
        groups = spec.granularity.group_shape(part.shape)
        if field == "zero_point" and spec.symmetric:
            return self.names.split(name, torch.zeros(groups, dtype=torch.int32))
        one = "zero_point" if field == "zero_point" else "scale"
        held = self.state.tensors.get(f"{path}.{one}")
        found = (getattr(self.state.weights[name], one) if held is None else held).reshape(groups)
        if field in ("scale_codes", "shared"):
            split: Any = spec.scale
            codes, shared = split.split(found)
            found = codes if field == "scale_codes" else shared.expand(*groups[:-1], 1)
        return self.names.split(name, found)

    def _quantization(self) -> dict[str, Any]:
        """What `config.json` says: most layers have their scheme by their class, and others are named before it."""
        ranked = sorted(self.groups.items(), key=lambda item: sum(item[1].values()))
        groups = [{"targets": [*targets], **json.loads(scheme)} for scheme, targets in ranked]
        by_class = [one for one in groups if len(groups) == 1 or not any("re:" in target for target in one["targets"])]
        for group in by_class[-1:]:
            group["targets"] = ["Linear"]
        groups.sort(key=lambda group: group["targets"] == ["Linear"])
        formats = {group["format"] for group in groups}
        attention = attention_args(self.calls[0]) if self.calls else None
        if has_query := any("query" in part.operands for part in self.calls):
            groups.insert(0, {"targets": [part.path for part in self.calls], ROLES["input"]: attention})
        return {
            "quant_method": CompressedTensors.name,
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
            "ignore": self.ignored,
            "kv_cache_scheme": None if has_query else attention,
        }

    def _say(self, schemes: list[dict[str, Any]]) -> None:
        """Warn, once, of what one should know to load the files."""
        notes = []
        if self.in_float:
            notes.append(
                f"{listed(self.in_float)} in float, with the values of the codes: programs load no quantized embeddings"
            )
        if needs_dequantize(schemes, self.tensors, next(self.model.parameters()).dtype):
            way = "with dequantize=True in its CompressedTensorsConfig: else it fails on zero points, or rounds scales"
            if len(schemes) > 1:
                way = "in part: it needs dequantize=True, and takes the scheme of one layer for all of them then"
            notes.append(f"transformers loads these files {way}")
        if notes:
            warn_user(f"compressed-tensors: {'; '.join(notes)}")


def needs_dequantize(
    schemes: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor | LazyTensor], dtype: torch.dtype
) -> bool:
    """Whether transformers loads the same weights only where it dequantizes them at once."""
    weights = [one for one in schemes if ROLES["weight"] in one]
    if any("scale_dtype" in one["weights"] for one in weights):
        return True
    if any(one["format"] == PACKED and not one["weights"]["symmetric"] for one in weights):
        return True
    scales = (name for name in tensors if name.endswith(".weight_scale"))
    return dtype is not torch.float32 and any(tensors[name].dtype is torch.float32 for name in scales)


class _Reader:
    """The state in a folder, for a model."""

    def __init__(self, path: Path, model: nn.Module) -> None:
        folder = Folder(path)
        self.path, self.model, self.names, self.tensors = path, model, Names(model), folder.tensors()
        given, self.used = folder.quantization, set[str]()
        if given.get("quantization_status", "compressed") != "compressed" or not given.get("config_groups"):
            raise CheckpointError(
                f"{path} holds no codes: its quantization_config is of a model that is not compressed"
            )
        if left := [key for key in ("transform_config", "sparsity_config") if given.get(key)]:
            raise CheckpointError(f"{path} has {', '.join(left)}, which this reader does not know")
        self.groups = [normalized(one, given.get("format")) for one in given["config_groups"].values()]
        self.ignored, self.attention = given.get("ignore") or [], given.get("kv_cache_scheme")
        self.coded: dict[str, tuple[Mapping[str, Any], Mapping[str, Tensor]]] = {}

    def state(self) -> QuantizedState:
        shared, places, own = shared_names(self.model), places_of(self.model), self.model.state_dict()
        tensors: dict[str, Any] = {}
        weights: dict[str, Any] = {}
        layers: dict[str, LayerEntry] = {}
        for name in float_names(self.model):
            like, place = torch.empty_like(own[name], device="meta"), places.get(name)
            pieces = self.names.split(name, like)
            base = next(iter(pieces)).removesuffix(".weight")
            scheme = None if place is None or name in shared else self._scheme(place, base)
            if name in shared:
                self.used |= {*pieces}
            elif place is None or scheme is None:
                self._need(*pieces)
                tensors[name] = partial(self._float, name, pieces, place)
            else:
                scales = self.tensors.get(f"{base}.weight_scale", torch.ones(1)).dtype
                config = config_of(scheme["weights"], scales).placed(place.operand.axes())
                config = config.for_each() if place.operand.is_stack else config
                entry = layers.setdefault(place.path, LayerEntry(place.kind, {}))
                entry.quantizers[place.attribute] = QuantizerEntry(config)
                self.coded[name] = scheme, pieces
                weights[name] = partial(self._weight, name, like, place, config.spec, scheme, pieces)
                for key, piece in pieces.items():
                    self._need(
                        *(
                            f"{key.removesuffix('.weight')}.{end}"
                            for end in stored(scheme, config.spec.format, piece.shape)
                        )
                    )
                    self.used.add(f"{key.removesuffix('.weight')}.weight_shape")
                tensors |= self._activations(place, entry, scheme, [*pieces])
        sites = self._attention(tensors)
        if left := sorted({*self.tensors} - self.used):
            raise CheckpointError(f"{self.path} has tensors for which the model has no place: {listed(left)}")
        return QuantizedState(sites=sites, layers=layers, shared=shared, tensors=Made(tensors), weights=Made(weights))

    def _need(self, *keys: str) -> None:
        if missing := [key for key in keys if key not in self.tensors]:
            raise CheckpointError(f"{self.path} lacks {listed(missing)}; it is damaged, or of another model")
        self.used |= {*keys}

    def _scheme(self, place: Place, base: str) -> Mapping[str, Any] | None:
        """The scheme of a module: a target that names it goes before a pattern, and that before its class."""
        names, classes = (base, place.path), ("Linear",) if place.operand.is_stack else place.classes

        def rank(target: str) -> int:
            if target.startswith("re:"):
                return 1 if any(re.match(target[3:], name) for name in names) else 3
            return 0 if target in names else 2 if target in classes else 3

        if any(rank(target) < 3 for target in self.ignored):
            return None
        ranked = [(rank(target), number) for number, one in enumerate(self.groups) for target in one["targets"]]
        best, number = min(ranked, default=(3, 0))
        return self.groups[number] if best < 3 and "weights" in self.groups[number] else None

    def _activations(
        self, place: Place, entry: LayerEntry, scheme: Mapping[str, Any], keys: Sequence[str]
    ) -> dict[str, Any]:
        """The ranges of activations by their names in the model; those of all experts are one."""
        found: dict[str, Any] = {}
        for role, attribute in (("input", place.input), ("output", "_output_quantizer")):
            if (args := scheme.get(ROLES[role])) is None:
                continue
            config = entry.quantizers[attribute] = QuantizerEntry(config_of(args))
            for what in (
                () if config.tensor.dynamic else ("scale", *(() if config.tensor.spec.symmetric else ("zero_point",)))
            ):
                own = [f"{key.removesuffix('.weight')}.{role}_{what}" for key in keys]
                self._need(*own)
                if any(not torch.equal(self.tensors[own[0]], self.tensors[one]) for one in own[1:]):
                    raise CheckpointError(f"{self.path} has other ranges in {own[0]} than in experts beside it")
                dtype = torch.float32 if what == "scale" else torch.int32
                found[f"{join(place.path, attribute)}.{what}"] = partial(self._range, own[0], dtype)
        return found

    def theirs(self, name: str, pieces: Mapping[str, Tensor]) -> Tensor:
        """The values of a weight by the package compressed-tensors."""
        # Packages of the extra `delivery`, which type checkers need not have.
        compressor: Any = import_module("compressed_tensors.compressors").BaseCompressor
        scheme_class: Any = import_module("compressed_tensors.quantization").QuantizationScheme

        place, found = places_of(self.model)[name], {}
        for key in pieces:
            base = key.removesuffix(".weight")
            scheme = self._scheme(place, base) or {}
            own = {one.rpartition(".")[2]: self.tensors[one] for one in self.tensors if one.rpartition(".")[0] == base}
            decompress = compressor.get_value_from_registry(scheme["format"]).decompress
            found[key] = decompress(own, scheme_class.model_validate(scheme))["weight"]
        return self.names.joined(name, found, self.model.state_dict()[name].shape, place.operand.channels)

    def _attention(self, tensors: dict[str, Any]) -> SitesEntry:
        """The calls of attention with their ranges, which are added to the tensors."""
        operands = ("key", "value")
        args = self.attention and normalized({"targets": [], ROLES["input"]: self.attention}, None)
        for group in (one for one in self.groups if ROLES["weight"] not in one):
            operands, args = ("query", *operands), group
        if not args:
            return SitesEntry()
        sites = attention_sites(self.model, config_of(args[ROLES["input"]]), operands)
        for path, owner in sites.owners.items():
            for key, name in ((key, name) for key, site in owner.sites.items() for name in site.quantizers):
                if name in operands:
                    self._need(f"{path}.{name[0]}_scale")
                    place = f"{site_path(path, key)}.{name}.scale"
                    tensors[place] = partial(self._range, f"{path}.{name[0]}_scale", torch.float32)
        return sites

    def _range(self, key: str, dtype: torch.dtype) -> Tensor:
        return self.tensors[key].to(dtype).reshape(1)

    def _float(self, name: str, pieces: Mapping[str, Tensor], place: Place | None) -> Tensor:
        found = {key: self.tensors[key] for key in pieces}
        return self.names.joined(name, found, self.model.state_dict()[name].shape, place and place.operand.channels)

    def _weight(
        self,
        name: str,
        like: Tensor,
        place: Place,
        spec: QuantSpec,
        scheme: Mapping[str, Any],
        pieces: Mapping[str, Tensor],
    ) -> WeightCodes:
        groups = spec.granularity.group_shape(like.shape)
        fields: dict[str, dict[str, Tensor]] = {}
        for key, piece in pieces.items():
            base = key.removesuffix(".weight")
            found = {
                one.field: self._piece(f"{base}.{end}", one)
                for end, one in stored(scheme, spec.format, piece.shape).items()
            }
            shape = self.tensors.get(f"{base}.weight_shape")
            if shape is not None and shape.tolist() != [*piece.shape]:
                raise CheckpointError(
                    f"{self.path}: {base} is of shape {shape.tolist()}, in the model {[*piece.shape]}"
                )
            if (shared := found.pop("shared", None)) is not None:
                exact = self.tensors.metadata.get(f"{EXACT}{base}")
                found["scale"] = found.pop("scale_codes").float() * (shared if exact is None else float.fromhex(exact))
            for field, value in found.items():
                fields.setdefault(field, {})[key] = value
        whole = {
            field: self.names.joined(name, parts, groups if field != "codes" else like.shape, place.operand.channels)
            for field, parts in fields.items()
        }
        codes, scale, point = whole["codes"], whole["scale"].reshape(groups), whole.get("zero_point")
        point = None if point is None else point.to(torch.int32).reshape(groups)
        reader = (join(place.path, place.attribute),)
        return WeightCodes(codes, scale, point, spec, tuple(like.shape), like.dtype, reader)

    def _piece(self, key: str, one: Stored) -> Tensor:
        tensor = self.tensors[key]
        fits = tensor.numel() == prod(one.shape) and (tensor.dtype is one.dtype or {tensor.dtype, one.dtype} <= FLOATS)
        if not fits:
            raise CheckpointError(
                f"{self.path}: {key} is {tensor.dtype} of shape {[*tensor.shape]}, not {one.dtype} of {[*one.shape]}"
            )
        return one.load(tensor.reshape(one.shape))


def _transformers(path: Path, model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> Engine:
    """The model as transformers loads it."""
    import transformers

    coded = [one for one in groups if "weights" in one]
    name, options, note = f"transformers {transformers.__version__}", dict[str, Any](), ""
    if needs_dequantize(coded, Folder(path).tensors(), next(model.parameters()).dtype):
        options["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
        if len(coded) > 1:
            note = "dequantizes all layers by one scheme, and the file has several"
        elif ROLES["input"] in coded[0]:
            note = "leaves activations in float where it dequantizes at once"
        elif coded[0]["weights"]["strategy"] == "tensor_group":
            note = "decompresses NVFP4 in bfloat16"
    if note:
        return Engine(name, notes=[f"Outputs are not compared in {name}: it {note}."])
    architecture = getattr(transformers, Folder(path).config["architectures"][0])
    loaded = architecture.from_pretrained(path, dtype=model.dtype, **options)
    # It decompresses experts in bfloat16; of other models a conversion would round buffers that are float32.
    return Engine(name, model=(loaded.to(model.dtype) if model.dtype is torch.float32 else loaded).eval())
