"""The file of a checkpoint that says which layers are quantized, how, and where the tensors are.

It is read and checked in `manifest_reading.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from fakequant.model.config import TensorConfig
from fakequant.nn.integer import Execution
from fakequant.nn.learned import LearnedRange, make_learned_range
from fakequant.nn.quantizer import Kind, Mode, Quantizer

MANIFEST = "fakequant.json"
"""The name of the file."""

VERSION = 1
"""The version of the file that is written and read."""


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
        stale: the quantizers of weights, by path, whose scales were made for other weights.
    """

    tensors: TensorFile
    shared: dict[str, str]
    layers: dict[str, LayerEntry]
    versions: dict[str, int] | None = field(default=None)
    previous: str | None = field(default=None)
    sites: SitesEntry = field(default_factory=SitesEntry)
    packed: dict[str, PackedEntry] = field(default_factory=dict)
    stale: list[str] = field(default_factory=list)

    def to_bytes(self) -> bytes:
        """The content of the file."""
        values: dict[str, Any] = {
            "fakequant": VERSION,
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
        if self.stale:
            values["stale"] = self.stale
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
