"""The file of a checkpoint that says which layers are quantized, how, and where the tensors are."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fakequant.errors import CheckpointError, ConfigError, SpecError
from fakequant.model.config import TensorConfig
from fakequant.model.json_values import UnexpectedValue, keys_of, mapping_of, member, number, text, texts
from fakequant.nn.integer import Execution
from fakequant.nn.learned import LearnedRange, make_learned_range
from fakequant.nn.quantizer import Kind, Mode, Quantizer

MANIFEST = "fakequant.json"
"""The name of the file."""

_VERSION = 1
_OWN_NAME = re.compile(r"model-[0-9a-f]{16}\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class TensorFile:
    """The file of the tensors: its name in the folder, the SHA-256 of its content, its size in bytes."""

    file: str
    sha256: str
    bytes: int


@dataclass(frozen=True)
class LearnedEntry:
    """How a range is learned: the method and its options."""

    method: str
    options: dict[str, Any]


@dataclass(frozen=True)
class QuantizerEntry:
    """One quantizer."""

    tensor: TensorConfig
    mode: Mode
    learned: LearnedEntry | None

    def make_learned(self) -> LearnedRange | None:
        """The object that learns the range, without parameters yet; None where nothing is learned."""
        if self.learned is None:
            return None
        return make_learned_range(self.learned.method, self.tensor.spec, **self.learned.options)


@dataclass(frozen=True)
class TransformEntry:
    """The transform of a layer's input: its kind and its options."""

    kind: str
    options: dict[str, int]


@dataclass(frozen=True)
class LayerEntry:
    """One layer: its float class by name, its quantizers by attribute, the transform of its input if it has one, and
    the rank of what it adds to its output, or 0."""

    type: str
    execution: Execution
    quantizers: dict[str, QuantizerEntry]
    transform: TransformEntry | None = None
    low_rank: int = 0


@dataclass(frozen=True)
class SiteQuantizerEntry:
    """One quantizer of a site, the path of the one that it is, where several share one, and whether it is pinned."""

    quantizer: QuantizerEntry
    kind: Kind
    group: str | None
    pinned: bool


@dataclass(frozen=True)
class SiteEntry:
    """One call of a function: its operands, and the quantizers by operand."""

    operands: list[str]
    quantizers: dict[str, SiteQuantizerEntry]
    weights: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class OwnerEntry:
    """One module whose `forward` calls functions: its class by name, the sequence of calls, and its sites by name."""

    type: str
    steps: list[str]
    sites: dict[str, SiteEntry]
    training_keys: list[str] | None = None


@dataclass(frozen=True)
class SitesEntry:
    """The sites of a model: owners by path, and the modules that they call."""

    owners: dict[str, OwnerEntry] = field(default_factory=dict)
    shielded: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class PackedEntry:
    """A weight that is stored as codes: the path of its quantizer, its shape and dtype, whether scales are codes."""

    quantizer: str
    shape: list[int]
    dtype: str
    packed_scale: bool


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        tensors: the file of the tensors.
        shared: names of tied tensors, each with the name of the one that is in the file.
        layers: by path in the model.
        versions: of modules (`_version`), by path, where they are not 1; None in checkpoints that do not have them.
        previous: the tensor file of the manifest that this one replaced; it is kept until the next save.
        sites: the functions that have quantizers.
        packed: the weights that are stored as codes, by name.
    """

    tensors: TensorFile
    shared: dict[str, str]
    layers: dict[str, LayerEntry]
    versions: dict[str, int] | None = field(default=None)
    previous: str | None = field(default=None)
    sites: SitesEntry = field(default_factory=SitesEntry)
    packed: dict[str, PackedEntry] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The content of the file."""
        values: dict[str, Any] = {
            "fakequant": _VERSION,
            "tensors": vars(self.tensors),
            "previous": self.previous,
            "shared": self.shared,
            "versions": self.versions,
            "layers": {name: layer_values(layer) for name, layer in self.layers.items()},
        }
        if self.sites.owners:
            values["sites"] = sites_values(self.sites)
        if self.packed:
            values["packed"] = {name: vars(entry) for name, entry in self.packed.items()}
        return json.dumps(values, indent=2).encode()


def layer_values(layer: LayerEntry) -> dict[str, Any]:
    """One layer for JSON."""
    values: dict[str, Any] = {
        "type": layer.type,
        "execution": layer.execution.value,
        "quantizers": {name: _quantizer_values(quantizer) for name, quantizer in layer.quantizers.items()},
    }
    if layer.transform is not None:
        values["transform"] = vars(layer.transform)
    return {**values, "low_rank": layer.low_rank} if layer.low_rank else values


def sites_values(sites: SitesEntry) -> dict[str, Any]:
    """The sites for JSON."""
    return {
        "owners": {
            path: {
                "type": owner.type,
                "steps": owner.steps,
                "sites": {key: _site_values(site) for key, site in owner.sites.items()},
                **({} if owner.training_keys is None else {"training_keys": owner.training_keys}),
            }
            for path, owner in sites.owners.items()
        },
        "shielded": sites.shielded,
    }


def _site_values(site: SiteEntry) -> dict[str, Any]:
    return {
        "operands": site.operands,
        "weights": site.weights,
        "quantizers": {
            name: {
                **_quantizer_values(held.quantizer),
                "kind": held.kind.value,
                "group": held.group,
                "pinned": held.pinned,
            }
            for name, held in site.quantizers.items()
        },
    }


def _quantizer_values(quantizer: QuantizerEntry) -> dict[str, Any]:
    return {
        "tensor": quantizer.tensor.to_text(),
        "mode": quantizer.mode.value,
        "learned": None if quantizer.learned is None else vars(quantizer.learned),
    }


def quantizer_entry(quantizer: Quantizer) -> QuantizerEntry:
    """What a manifest says of a quantizer."""
    learned = quantizer.learned
    return QuantizerEntry(
        TensorConfig(quantizer.spec, quantizer.dynamic),
        quantizer.mode,
        None if learned is None else LearnedEntry(learned.method, learned.options()),
    )


def tensor_file_name(sha256: str) -> str:
    """The name of a file of tensors by its content.

    >>> tensor_file_name("0123456789abcdef" * 4)
    'model-0123456789abcdef.safetensors'
    """
    return f"model-{sha256[:16]}.safetensors"


def named_files(folder: Path) -> list[str]:
    """The tensor files that the manifest in a folder names, the current one first; none where it cannot be read."""
    try:
        values = json.loads((folder / MANIFEST).read_bytes())
        names = [values["tensors"]["file"], values.get("previous")]
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return []
    return [name for name in names if isinstance(name, str) and _OWN_NAME.fullmatch(name)]


def read_manifest(folder: Path) -> Manifest:
    """What a checkpoint says of itself, read whole.

    Raises:
        CheckpointError: there is none, it is damaged, or it is of a later version.
    """
    path = folder / MANIFEST
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} holds no checkpoint: there is no {MANIFEST} in it") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged and cannot be read: {error}") from error
    try:
        return _manifest(values)
    except _UNUSABLE as error:
        raise _unusable(path, error) from error
    except CheckpointError as error:
        raise CheckpointError(f"{path} {error}") from error


def parse_layers(values: Any, source: str) -> dict[str, LayerEntry]:
    """Layers by path from what `layer_values` made for each.

    Raises:
        CheckpointError: it is damaged; the source is named.
    """
    try:
        return mapping_of(values, "layers", _layer)
    except _UNUSABLE as error:
        raise _unusable(source, error) from error


def parse_sites(values: Any, source: str) -> SitesEntry:
    """Sites from what `sites_values` made; none where there is nothing.

    Raises:
        CheckpointError: it is damaged; the source is named.
    """
    try:
        return _sites(values, "sites")
    except _UNUSABLE as error:
        raise _unusable(source, error) from error


def _unusable(source: object, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{source} cannot be used: {error}. It is damaged, of a later version of fakequant, or needs what your own "
        "code registers (formats, layers, learned ranges)"
    )


_UNUSABLE = (SpecError, ConfigError, UnexpectedValue, RecursionError)


def _manifest(values: Any) -> Manifest:
    version = values.get("fakequant") if isinstance(values, dict) else None
    if type(version) is int and version > _VERSION:
        raise CheckpointError(
            f"is a checkpoint of version {version}, written by a later version of fakequant; this one reads version "
            f"{_VERSION}: update fakequant"
        )
    if type(version) is not int or version != _VERSION:
        raise CheckpointError(f"is no checkpoint of version {_VERSION}")
    if missing := [key for key in ("tensors", "shared", "layers") if key not in values]:
        raise CheckpointError(f"is damaged: it lacks {', '.join(missing)}")
    versions, previous = values.get("versions"), values.get("previous")
    return Manifest(
        _tensor_file(values["tensors"]),
        mapping_of(values["shared"], "shared", text),
        mapping_of(values["layers"], "layers", _layer),
        None if versions is None else mapping_of(versions, "versions", number),
        None if previous is None else _own_name(previous, "previous"),
        _sites(values.get("sites"), "sites"),
        {} if values.get("packed") is None else mapping_of(values["packed"], "packed", _packed),
    )


def _packed(values: Any, place: str) -> PackedEntry:
    quantizer, shape, dtype, scale = keys_of(values, place, "quantizer", "shape", "dtype", "packed_scale")
    if not isinstance(shape, list):
        raise UnexpectedValue(f"{place}.shape is {shape!r:.80}, not a list")
    if not isinstance(scale, bool):
        raise UnexpectedValue(f"{place}.packed_scale is {scale!r:.80}, not true or false")
    sizes = [number(size, f"{place}.shape") for size in shape]
    return PackedEntry(text(quantizer, f"{place}.quantizer"), sizes, text(dtype, f"{place}.dtype"), scale)


def _tensor_file(values: Any) -> TensorFile:
    file, sha256, size = keys_of(values, "tensors", "file", "sha256", "bytes")
    sha256 = text(sha256, "tensors.sha256")
    if not _SHA256.fullmatch(sha256):
        raise UnexpectedValue(f"tensors.sha256 is {sha256!r:.80}, not 64 hexadecimal digits")
    return TensorFile(_own_name(file, "tensors.file"), sha256, number(size, "tensors.bytes"))


def _own_name(value: Any, place: str) -> str:
    if not _OWN_NAME.fullmatch(text(value, place)):
        raise UnexpectedValue(f"{place} is {value!r:.80}, not a name such as {tensor_file_name('0123456789abcdef')}")
    return value


def _layer(values: Any, place: str) -> LayerEntry:
    kind, held = keys_of(values, place, "type", "quantizers")
    return LayerEntry(
        text(kind, f"{place}.type"),
        member(values.get("execution", Execution.SIMULATE.value), f"{place}.execution", Execution),
        mapping_of(held, f"{place}.quantizers", _quantizer),
        None if values.get("transform") is None else _transform(values["transform"], f"{place}.transform"),
        number(values.get("low_rank", 0), f"{place}.low_rank"),
    )


def _transform(values: Any, place: str) -> TransformEntry:
    kind, options = keys_of(values, place, "kind", "options")
    return TransformEntry(text(kind, f"{place}.kind"), mapping_of(options, f"{place}.options", number))


def _sites(values: Any, place: str) -> SitesEntry:
    if values is None:
        return SitesEntry()
    owners, shielded = keys_of(values, place, "owners", "shielded")
    return SitesEntry(mapping_of(owners, f"{place}.owners", _owner), texts(shielded, f"{place}.shielded"))


def _owner(values: Any, place: str) -> OwnerEntry:
    kind, steps, sites = keys_of(values, place, "type", "steps", "sites")
    trained = values.get("training_keys")
    return OwnerEntry(
        text(kind, f"{place}.type"),
        texts(steps, f"{place}.steps"),
        mapping_of(sites, f"{place}.sites", _site),
        None if trained is None else texts(trained, f"{place}.training_keys"),
    )


def _site(values: Any, place: str) -> SiteEntry:
    operands, held = keys_of(values, place, "operands", "quantizers")
    return SiteEntry(
        texts(operands, f"{place}.operands"),
        mapping_of(held, f"{place}.quantizers", _site_quantizer),
        mapping_of(values.get("weights", {}), f"{place}.weights", text),
    )


def _site_quantizer(values: Any, place: str) -> SiteQuantizerEntry:
    kind, group, pinned = keys_of(values, place, "kind", "group", "pinned")
    if not isinstance(pinned, bool):
        raise UnexpectedValue(f"{place}.pinned is {pinned!r:.80}, not true or false")
    return SiteQuantizerEntry(
        _quantizer(values, place),
        member(kind, f"{place}.kind", Kind),
        None if group is None else text(group, f"{place}.group"),
        pinned,
    )


def _quantizer(values: Any, place: str) -> QuantizerEntry:
    tensor, mode, learned = keys_of(values, place, "tensor", "mode", "learned")
    entry = QuantizerEntry(
        TensorConfig.parse(text(tensor, f"{place}.tensor")),
        member(mode, f"{place}.mode", Mode),
        None if learned is None else _learned(learned, f"{place}.learned"),
    )
    made = entry.make_learned()
    for name, value in {} if entry.learned is None else entry.learned.options.items():
        default = inspect.signature(type(made)).parameters[name].default
        if default is not inspect.Parameter.empty and type(value) is not type(default):
            raise UnexpectedValue(f"{place}.learned.options.{name} is {value!r:.80}, not a {type(default).__name__}")
    return entry


def _learned(values: Any, place: str) -> LearnedEntry:
    method, options = keys_of(values, place, "method", "options")
    read = mapping_of(options, f"{place}.options", lambda value, _: value)
    if reserved := read.keys() & {"method", "spec"}:
        raise UnexpectedValue(f"{place}.options has {', '.join(sorted(reserved))}, which is no option")
    return LearnedEntry(text(method, f"{place}.method"), read)
