"""The models of transformers for which GGUF files are written and read, as llama.cpp has them.

Source: the converters of llama.cpp, `conversion/*.py`, and its graphs, `src/models/*.cpp`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fakequant.delivery.gguf.architecture import (
    Architecture,
    head_size,
    llama3_frequencies,
    register_architecture,
    rotary_of,
)
from fakequant.integrations.gguf_tokenizer import describe_tokenizer


def _gemma2(writer: Any, config: Any) -> None:
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_sliding_window(config.sliding_window)


def _gemma3(writer: Any, config: Any) -> None:
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_freq_base_swa(rotary_of(config, "sliding_attention")["rope_theta"])


def _gemma_scale(config: Any) -> str:
    """llama.cpp knows the largest models by their layers, and scales by the size of a head in all others."""
    largest = config.num_hidden_layers in (46, 62)
    expected = config.hidden_size // config.num_attention_heads if largest else head_size(config)
    if (config.attn_logit_softcapping is None) != (config.model_type == "gemma3_text"):
        return f"its attn_logit_softcapping is {config.attn_logit_softcapping}"
    if config.query_pre_attn_scalar != expected:
        return f"its query_pre_attn_scalar is {config.query_pre_attn_scalar}, not {expected}"
    return ""


def _mistral_window(config: Any) -> str:
    window, length = config.sliding_window, config.max_position_embeddings
    if not window or window >= length:
        return ""
    return (
        f"its sliding_window is {window}, and llama.cpp attends to all of up to {length} tokens; set "
        f"config.max_position_embeddings to {window}, up to which both are equal"
    )


def _phi3(writer: Any, config: Any) -> None:
    rotary = rotary_of(config)
    length = rotary.get("original_max_position_embeddings", config.max_position_embeddings)
    writer.add_rope_scaling_orig_ctx_len(length)
    writer.add_sliding_window(config.sliding_window or 0)
    if rotary["rope_type"] == "longrope":
        longer = config.max_position_embeddings / length
        factor = math.sqrt(1 + math.log(longer) / math.log(length)) if longer > 1 else 1.0
        writer.add_rope_scaling_attn_factors(factor)


def _phi3_factors(config: Any) -> dict[str, Tensor]:
    rotary = rotary_of(config)
    kinds = ("long", "short") if rotary["rope_type"] == "longrope" else ()
    return {f"rope_factors_{kind}.weight": torch.tensor(rotary[f"{kind}_factor"]).float() for kind in kinds}


def _experts(writer: Any, config: Any) -> None:
    writer.add_expert_count(getattr(config, "num_local_experts", None) or config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if (width := getattr(config, "moe_intermediate_size", None)) is not None:
        writer.add_expert_feed_forward_length(width)
    if (width := getattr(config, "shared_expert_intermediate_size", None)) is not None:
        writer.add_expert_shared_feed_forward_length(width)


def _qwen_experts(config: Any) -> str:
    """llama.cpp has experts in all layers, and knows by the architecture whether their weights add up to 1."""
    if config.mlp_only_layers or config.decoder_sparse_step != 1:
        return "not all of its layers have experts"
    wanted = config.model_type == "qwen3_moe"
    if config.norm_topk_prob is not wanted:
        return f"its norm_topk_prob is {config.norm_topk_prob}, not {wanted}"
    return ""


_LLAMA = Architecture(
    "llama",
    interleaved={"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"},
    extra=llama3_frequencies,
    rotaries=("default", "linear", "llama3", "yarn"),
)
_EXPERTS = {"describe": _experts, "parts": {"experts.gate_up_proj": ("experts.gate_proj", "experts.up_proj")}}
_GEMMA = {"norms_from_one": True, "activation": "gelu_pytorch_tanh", "refuse": _gemma_scale}

for _type, _architecture in {
    "llama": _LLAMA,
    "mistral": replace(_LLAMA, refuse=_mistral_window),
    "mixtral": replace(_LLAMA, refuse=_mistral_window, in_transformers=False, **_EXPERTS),
    "qwen2": Architecture("qwen2"),
    "qwen2_moe": Architecture("qwen2moe", refuse=_qwen_experts, vectors=["shared_expert_gate.weight"], **_EXPERTS),
    "qwen3_moe": Architecture("qwen3moe", refuse=_qwen_experts, **_EXPERTS),
    "qwen3": Architecture("qwen3"),
    "gemma2": Architecture("gemma2", pattern=2, describe=_gemma2, **_GEMMA),
    "gemma3_text": Architecture("gemma3", pattern=6, describe=_gemma3, **_GEMMA),
    "phi3": Architecture(
        "phi3",
        describe=_phi3,
        extra=_phi3_factors,
        rotaries=("default", "linear", "longrope"),
        rotary_keys=("partial_rotary_factor", "original_max_position_embeddings"),
    ),
}.items():
    register_architecture(_type, replace(_architecture, tokenizer=describe_tokenizer))
