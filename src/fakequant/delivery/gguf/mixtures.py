"""Mixtures such as Q4_K_M: a type for each weight of a language model, as llama-quantize chooses it.

Source: `llama_tensor_get_type_impl` in llama-quant.cpp of llama.cpp, without its cases for experts and Llama 2 70B.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from fakequant.delivery.gguf.architecture import GgufNames, architecture_of
from fakequant.delivery.gguf.lattices import spec_of
from fakequant.delivery.places import places_of
from fakequant.errors import ConfigError, nearest
from fakequant.model.config import Config, Rule
from fakequant.model.state.snapshots import shared_names
from fakequant.model.tensor_config import TensorConfig

_MIXTURES = {
    "Q4_K_S": ("Q4_K", {"attn_v": ("first 4", "Q5_K"), "ffn_down": ("first eighth", "Q5_K")}),
    "Q4_K_M": ("Q4_K", {"attn_v": ("some", "Q6_K"), "ffn_down": ("some", "Q6_K")}),
    "Q5_K_S": ("Q5_K", {}),
    "Q5_K_M": ("Q5_K", {"attn_v": ("some", "Q6_K"), "ffn_down": ("some", "Q6_K")}),
}
"""The type of most weights; of some others in which layers they have another. The head has Q6_K."""
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


def mixture(model: nn.Module, name: str) -> Config:
    """The configuration of a mixture for a language model.

    Args:
        model: of transformers, in float, of an architecture that GGUF files are written for.
        name: "Q4_K_S", "Q4_K_M", "Q5_K_S" or "Q5_K_M"; "GGUF_" may stand before it.

    Raises:
        ConfigError: an unknown name.
        CheckpointError: an unknown architecture.

    Give it to `fakequant.prepare(model, mixture(model, "Q4_K_M"), skip=[])`.
    """
    key = name.upper().removeprefix("GGUF_")
    if key not in _MIXTURES:
        raise ConfigError(f"unknown mixture {name!r:.80}{nearest(key, list(_MIXTURES))}")
    config: Any = model.config
    names, shared = GgufNames(architecture_of(model), config), shared_names(model)
    rules = []
    for weight, place in places_of(model).items():
        # A head that is tied to the embedding is one weight with it, of the type of heads.
        is_head = weight in shared or weight in shared.values() or names.of(weight) == "output.weight"
        kind = "Q6_K" if is_head else _kind(key, names.of(weight), config.num_hidden_layers)
        rules.append(Rule(place.path, weight=TensorConfig(spec_of(kind))))
    return Config(f"GGUF_{key}", tuple(rules))


def _kind(key: str, name: str, layers: int) -> str:
    default, others = _MIXTURES[key]
    found = _LAYER.fullmatch(name)
    own = found[2].replace("attn_qkv", "attn_v") if found else ""  # the three in one count as values
    where, kind = others.get(own, ("", default))
    layer = int(found[1]) if found else 0
    eighth = layers // 8
    is_in = {
        "first 4": layer < 4,
        "first eighth": layer < eighth,
        "some": layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2,
    }
    return kind if is_in.get(where, False) else default
