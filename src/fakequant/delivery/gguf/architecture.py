"""The description of a language model in a GGUF file: names of tensors, order of rows, metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from fakequant.delivery.gguf.file import GgufFile, require_gguf
from fakequant.errors import CheckpointError

_TABLE = "fakequant.integrations.gguf"
"""Registers the architectures: names of other people's models stand there alone."""

MADE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that a file has and a model has not: they are made from its configuration."""


@dataclass(frozen=True)
class Architecture:
    """The form in which llama.cpp stores models of one architecture.

    Args:
        name: as llama.cpp names it.
        interleaved: the layers that make queries and keys: the last parts of the path, and the attribute of the
            configuration that counts the heads. In the file the rows of a head's two halves alternate.
        norms_from_one: whether norms multiply by 1 + weight; the file then holds 1 + weight.
        activation: the function that llama.cpp computes between the matrices.
        pattern: one layer in so many attends to all tokens, the others to a window; 1 if each attends to all.
        describe: adds metadata beside the usual.
        extra: more tensors by name, made from the configuration.
        rotaries: types of rotary positions that its graph computes.
        rotary_keys: more of their keys that the file says.
        refuse: names the parts of a configuration that a file cannot hold; "" if there are none.
        tokenizer: adds the tokenizer of a model to the metadata.
        parts: tensors whose rows the file has in several tensors: the end of the name, and those of the parts.
        vectors: the ends of names of matrices with one row, which the file has as vectors.
        in_transformers: whether transformers builds the model of a file.
    """

    name: str
    interleaved: Mapping[str, str] = field(default_factory=dict)
    norms_from_one: bool = False
    activation: str = "silu"
    pattern: int = 1
    describe: Callable[[Any, Any], None] = lambda writer, config: None
    extra: Callable[[Any], Mapping[str, Tensor]] = lambda config: {}
    rotaries: Sequence[str] = ("default", "linear", "yarn")
    rotary_keys: Sequence[str] = ()
    refuse: Callable[[Any], str] = lambda config: ""
    tokenizer: Callable[[Any, nn.Module], None] = lambda writer, model: None
    parts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    vectors: Sequence[str] = ()
    in_transformers: bool = True


_known: dict[str, Architecture] = {}


def register_architecture(model_type: str, architecture: Architecture) -> None:
    """Add models for `deliver` and `read`, by the `model_type` of their configuration."""
    _known[model_type] = architecture


def architecture_of(model: Any) -> Architecture:
    """The architecture of a model.

    Raises:
        CheckpointError: the architecture is unknown, or a file cannot describe the model's computation.
    """
    import_module(_TABLE)
    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    if model_type not in _known:
        raise CheckpointError(
            f"GGUF files are written for models of transformers whose config.model_type is one of "
            f"{', '.join(sorted(_known))}; got {model_type or type(model).__name__!r:.80}"
        )
    architecture = _known[model_type]
    if reason := _refused(architecture, config) or architecture.refuse(config):
        raise CheckpointError(f"llama.cpp would not compute this model as it is: {reason}")
    return architecture


def _refused(architecture: Architecture, config: Any) -> str:
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", architecture.activation)
    if activation != architecture.activation:
        return f"its activation is {activation}, not {architecture.activation}"
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    every = architecture.pattern
    wanted = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(len(kinds))]
    if list(kinds) != wanted:
        return (
            f"its layer_types are {kinds!r:.200}, but it is taken for granted that each {every}. attends to all tokens"
        )
    rotary, around = rotary_of(config), rotary_of(config, "sliding_attention")
    known = {kind: keys for kind, keys in _ROTARIES.items() if kind in architecture.rotaries}
    if rotary["rope_type"] not in known:
        return f"its rope_type is {rotary['rope_type']!r:.80}, not one of {', '.join(known)}"
    if every > 1 and around["rope_type"] != "default" and around != rotary:
        return f"the rope_type of its layers with a window is {around['rope_type']!r:.80}, not default"
    said = {"rope_type", "rope_theta", *known[rotary["rope_type"]], *architecture.rotary_keys}
    if left := sorted(key for key, one in rotary.items() if key not in said and one not in (None, 1.0)):
        return f"the file cannot say {', '.join(left)} of its rope_parameters"
    both = getattr(config, "use_bidirectional_attention", None)
    return "it attends in both directions" if both else ""


_LONGER = ("factor", "original_max_position_embeddings")
_ROTARIES = {
    "default": (),
    "linear": ("factor",),
    "llama3": (*_LONGER, "low_freq_factor", "high_freq_factor"),
    "yarn": _LONGER,
    "longrope": ("long_factor", "short_factor", *_LONGER),
}
"""The keys that a file says of each type of rotary positions, beside the base."""


def rotary_of(config: Any, kind: str = "full_attention") -> dict[str, Any]:
    """The rotary parameters of a configuration; those of one kind of layers if each kind has its own."""
    found = dict(getattr(config, "rope_parameters", None) or {})
    found = dict(found.get(kind) or {}) if any(isinstance(one, dict) for one in found.values()) else found
    return {"rope_type": "default", **found}


def head_size(config: Any) -> int:
    """The number of rows of a head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def describe(writer: Any, architecture: Architecture, model: nn.Module) -> None:
    """Add the metadata of a model, with its tokenizer.

    Args:
        writer: a `gguf.GGUFWriter`.
        architecture: of the model.
        model: of transformers.
    """
    gguf, name = require_gguf(), Path(getattr(model, "name_or_path", "")).name or architecture.name
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _describe_settings(writer, architecture, cast(Any, model.config))
    architecture.tokenizer(writer, model)


def _describe_settings(writer: Any, architecture: Architecture, config: Any) -> None:
    """Add what changes the computation."""
    heads = config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", None) or heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_key_length(head_size(config))
    writer.add_value_length(head_size(config))
    _describe_rotary(writer, config)
    architecture.describe(writer, config)


def _describe_rotary(writer: Any, config: Any) -> None:
    gguf, rotary = require_gguf(), rotary_of(config)
    writer.add_rope_dimension_count(int(head_size(config) * rotary.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rotary["rope_theta"])
    if rotary["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rotary["rope_type"]))
        writer.add_rope_scaling_factor(rotary["factor"])
    if rotary["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rotary["original_max_position_embeddings"])


def check_settings(file: GgufFile, architecture: Architecture, config: Any) -> None:
    """Raise where a file says anything else of a model than one that is written of a configuration.

    Raises:
        CheckpointError: the key or tensor, with both values.
    """
    writer, begin = require_gguf().GGUFWriter(None, architecture.name), f"{architecture.name}."
    _describe_settings(writer, architecture, config)
    built = {key.removeprefix(begin): one.value for key, one in writer.kv_data[0].items() if key.startswith(begin)}
    said = {key.removeprefix(begin): one for key, one in file.metadata.items() if key.startswith(begin)}
    said = _defaults(said, file) | said
    for key in sorted({*built, *said} - {"rope.scaling.finetuned"}):
        ours, theirs = built.get(key), said.get(key)
        if not _same(ours, theirs):
            raise CheckpointError(
                f"{file.path} says that {begin}{key} is {theirs!r:.80}, but the model has {ours!r:.80}"
            )
    extra = architecture.extra(config)
    for name in MADE:
        values = (
            extra[name].numpy() if name in extra else None,
            file.tensors[name].make() if name in file.tensors else None,
        )
        if not _same(*values):
            raise CheckpointError(f"{file.path} has other rotary positions, {name}, than the model")


def _same(one: Any, other: Any) -> bool:
    """Whether two values of metadata are equal in float32, which files have."""
    if one is None or other is None:
        return one is other
    if isinstance(one, (float, np.ndarray)):
        return np.array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))
    return bool(np.array_equal(one, other))


def _defaults(said: Mapping[str, Any], file: GgufFile) -> dict[str, Any]:
    """What llama.cpp takes where the metadata of a file do not say it."""
    heads, width = said.get("attention.head_count"), said.get("embedding_length")
    size = said.get("attention.key_length") or (width // heads if heads and width else None)
    rows = file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else None
    return {
        "attention.head_count_kv": heads,
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.dimension_count": size,
        "rope.freq_base": 10000.0,
        "vocab_size": rows,
    }


class GgufNames:
    """The names of a model's tensors in a file, and the order of their rows there."""

    def __init__(self, architecture: Architecture, config: Any) -> None:
        gguf = require_gguf()
        (kind,) = (key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
        self._names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
        self._architecture, self._config = architecture, config

    def of(self, name: str) -> list[str]:
        """The names in the file of a tensor of the model, in the order of its rows; mostly one.

        Raises:
            CheckpointError: there is none.
        """
        parts = self._architecture.parts
        names = [name.removesuffix(end) + own for end, all in parts.items() if name.endswith(end) for own in all]
        found = [self._names.get_name(one, try_suffixes=(".weight", ".bias")) for one in names or [name]]
        if None in found:
            raise CheckpointError(f"{name} has no place in a file of {self._architecture.name} for llama.cpp")
        return [one if one.endswith((".weight", ".bias")) else f"{one}.weight" for one in found if one is not None]

    def shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a tensor in the file, from that in the model."""
        return tuple(shape[1:]) if name.endswith(tuple(self._architecture.vectors)) else tuple(shape)

    def rows(self, name: str, count: int) -> Sequence[int] | None:
        """The model's row numbers in the order of the file; None if both orders are the same."""
        owner = name.rpartition(".")[0]
        for end, heads in self._architecture.interleaved.items():
            if owner.endswith(end):
                order = np.arange(count).reshape(
                    getattr(self._config, heads) or self._config.num_attention_heads, 2, -1
                )
                return order.swapaxes(1, 2).reshape(-1)
        return None

    def shift(self, name: str) -> float:
        """The number that is added to a tensor for the file."""
        return float(self._architecture.norms_from_one and name.endswith("norm.weight"))


def llama3_frequencies(config: Any) -> dict[str, Tensor]:
    """The divisors of Llama 3.1's rotary frequencies; llama.cpp reads them as a tensor."""
    rotary = rotary_of(config)
    if rotary["rope_type"] != "llama3":
        return {}
    base, size, factor = rotary["rope_theta"], head_size(config), rotary["factor"]
    length, low, high = (
        rotary[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    waves = 2 * torch.pi * base ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    smooth = ((length / waves - low) / (high - low)).clamp(0, 1)
    return {"rope_freqs.weight": (1 / ((1 - smooth) / factor + smooth)).float()}
