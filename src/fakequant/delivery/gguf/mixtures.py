"""Mixtures such as Q4_K_M: a type for each weight of a language model, as llama-quantize chooses it.

Source: `llama_tensor_get_type_impl` and `tensor_type_fallback` in llama-quant.cpp of llama.cpp, without an importance
matrix, and without the cases for experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from fakequant.delivery.gguf.architecture import GgufNames, architecture_of
from fakequant.delivery.gguf.blocks import LAYOUTS
from fakequant.delivery.gguf.lattices import for_rows, spec_of
from fakequant.delivery.places import places_of
from fakequant.errors import ConfigError, nearest
from fakequant.model.config import Config, Rule
from fakequant.model.presets import with_llama_cpp_inputs
from fakequant.model.state.snapshots import shared_names
from fakequant.model.tensor_config import TensorConfig


class _Layer(NamedTuple):
    """A layer of a model: its number, the number of layers, and the queries for each key."""

    number: int
    layers: int
    shares: int


def _some(at: _Layer) -> bool:
    eighth = at.layers // 8
    return at.number < eighth or at.number >= 7 * at.layers // 8 or (at.number - eighth) % 3 == 2


_Choice = tuple[Callable[[_Layer], bool], str]
_ALL: Callable[[_Layer], bool] = lambda at: True  # noqa: E731
_FIRST_EIGHTH: Callable[[_Layer], bool] = lambda at: at.number < at.layers // 8  # noqa: E731
_SHARED: Callable[[_Layer], bool] = lambda at: at.shares >= 4  # noqa: E731
_MORE: dict[str, list[_Choice]] = {"attn_v": [(_some, "Q6_K")], "ffn_down": [(_some, "Q6_K")]}
_IQ4: dict[str, list[_Choice]] = {"attn_v": [(_SHARED, "Q5_K")], "ffn_down": [(_FIRST_EIGHTH, "Q5_K")]}
_MIXTURES: dict[str, tuple[str, dict[str, list[_Choice]]]] = {
    **{kind: (kind, {}) for kind in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q6_K")},
    "IQ4_NL": ("IQ4_NL", _IQ4),
    "IQ4_XS": ("IQ4_XS", _IQ4),
    "Q2_K": (
        "Q2_K",
        {"attn_v": [(_SHARED, "Q4_K"), (_ALL, "Q3_K")], "ffn_down": [(_ALL, "Q3_K")], "attn_output": [(_ALL, "Q3_K")]},
    ),
    "Q3_K_S": ("Q3_K", {}),
    "Q3_K_M": (
        "Q3_K",
        {
            "attn_v": [(lambda at: at.number < 2, "Q5_K"), (_ALL, "Q4_K")],
            "ffn_down": [(lambda at: at.number < at.layers // 16, "Q5_K"), (_ALL, "Q4_K")],
            "attn_output": [(_ALL, "Q4_K")],
        },
    ),
    "Q3_K_L": ("Q3_K", {name: [(_ALL, "Q5_K")] for name in ("attn_v", "ffn_down", "attn_output")}),
    "Q4_K_S": ("Q4_K", {"attn_v": [(lambda at: at.number < 4, "Q5_K")], "ffn_down": [(_FIRST_EIGHTH, "Q5_K")]}),
    "Q4_K_M": ("Q4_K", _MORE),
    "Q5_K_S": ("Q5_K", {}),
    "Q5_K_M": ("Q5_K", _MORE),
}
"""The type of most weights, and for weights by name their exceptions: (in which layers, type), the first that holds."""
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
_LAYERS_OF_70B = 80


def mixture(model: nn.Module, name: str) -> Config:
    """The configuration of a mixture for a language model: each weight gets the type that llama-quantize gives it.

    Args:
        model: of transformers, in float, of an architecture that GGUF files are written for.
        name: as llama-quantize names it: "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M",
            "Q6_K", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL" or "IQ4_XS"; "GGUF_" may stand before it, and
            "_A8" behind it for llama.cpp's inputs of products.

    Raises:
        ConfigError: an unknown name, or a model with experts.
        CheckpointError: an unknown architecture.

    `fakequant.prepare(model, "GGUF_Q4_K_M")` does this for the names with an ending. For the others, whose names are
    those of presets with one type, write `fakequant.prepare(model, mixture(model, "Q6_K"))`.
    """
    key = name.upper().removeprefix("GGUF_")
    if key.endswith("_A8"):
        return with_llama_cpp_inputs(mixture(model, key.removesuffix("_A8")))
    if key not in _MIXTURES:
        raise ConfigError(f"unknown mixture {name!r:.80}{nearest(key, list(_MIXTURES))}")
    architecture, shared = architecture_of(model), shared_names(model)
    if architecture.parts:
        raise ConfigError(
            "llama-quantize has rules of its own for experts, which are not known here; give all weights one type, "
            "such as GGUF_Q4_K"
        )
    config: Any = model.config
    names, heads = GgufNames(architecture, config), config.num_attention_heads
    shares = heads // (getattr(config, "num_key_value_heads", None) or heads)
    rules = []
    for weight, place in places_of(model).items():
        # A head that is tied to the embedding is one weight with it, of the type of heads.
        is_head = weight in shared or weight in shared.values() or names.of(weight) == ["output.weight"]
        columns = model.get_parameter(weight).shape[-1]
        kind = _MIXTURES[key][0]
        if is_head:
            kind = "Q6_K" if kind != "Q8_0" and columns % LAYOUTS[kind].weights == 0 else "Q8_0"
        elif found := _LAYER.fullmatch(names.of(weight)[-1]):
            own = found[2].replace("attn_qkv", "attn_v")  # the three in one count as values
            at = _Layer(int(found[1]), config.num_hidden_layers, shares)
            kind = next((other for holds, other in _MIXTURES[key][1].get(own, ()) if holds(at)), kind)
            is_70b = architecture.name == "llama" and at.layers == _LAYERS_OF_70B and shares > 1
            kind = "Q5_K" if is_70b and own == "attn_v" and kind in ("Q3_K", "Q4_K") else kind
        rules.append(Rule(place.path, weight=TensorConfig(spec_of(for_rows(kind, columns)))))
    return Config(f"GGUF_{key}", tuple(rules))
