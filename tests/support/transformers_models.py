"""Tiny models of transformers with random weights, and the inputs that they take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

_SIZES: Any = {"vocab_size": 32, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
_MARKS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER: Any = {"num_key_value_heads": 1, "num_hidden_layers": 1, **_MARKS}
_T5: Any = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
_WHISPER: Any = {
    **{"vocab_size": 32, "num_mel_bins": 8, "d_model": 16, "max_source_positions": 8, "max_target_positions": 16},
    **{"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32},
    **{"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 32},
    **{**_MARKS, "decoder_start_token_id": 1},
}


class Architecture(NamedTuple):
    """One architecture: names of its model and configuration in transformers, and arguments."""

    model: str
    config: str
    arguments: dict[str, Any]
    inputs: Callable[[], dict[str, Any]]
    attentions: int = 1
    """How many attention modules a model has."""

    def make(self, **further: Any) -> nn.Module:
        """The model in eval mode; the same weights every time."""
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.arguments | further)
        return getattr(transformers, self.model)(config).eval()


@contextmanager
def own_attention() -> Iterator[Callable[[Any, Any], Any]]:
    """Gives what has a model call another function as its attention, with the masks of sdpa."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    def register(model: Any, attend: Any) -> Any:
        AttentionInterface.register("by_hand", attend)
        model.set_attn_implementation("by_hand")
        return model

    AttentionMaskInterface.register("by_hand", sdpa_mask)
    yield register
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop("by_hand", None)


def tokens() -> dict[str, Any]:
    """Token ids [2, 6] of which two are padding on the left, with their mask."""
    ids = torch.arange(1, 13).view(2, 6)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def uncached() -> dict[str, Any]:
    return {**tokens(), "use_cache": False}


def _decoded() -> dict[str, Any]:
    return {**uncached(), "decoder_input_ids": tokens()["input_ids"][:, 2:]}


def _pixels() -> dict[str, Any]:
    return {"pixel_values": torch.linspace(-1, 1, 384).sin().view(2, 3, 8, 8)}


def _speech() -> dict[str, Any]:
    features = torch.linspace(-8, 8, 256).sin().view(2, 8, 16)
    return {"input_features": features, "decoder_input_ids": tokens()["input_ids"][:, 2:], "use_cache": False}


ARCHITECTURES = {
    "bert": Architecture("BertModel", "BertConfig", {**_SIZES, "num_hidden_layers": 1}, tokens),
    "vit": Architecture(
        "ViTModel",
        "ViTConfig",
        {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        | {"image_size": 8, "patch_size": 4},
        _pixels,
    ),
    "llama": Architecture("LlamaForCausalLM", "LlamaConfig", {**_SIZES, **_DECODER}, uncached),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": 32,
            "n_embd": 16,
            "n_layer": 1,
            "n_head": 2,
            "n_positions": 32,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        | {"pad_token_id": 0},
        uncached,
    ),
    "t5": Architecture("T5Model", "T5Config", _T5, _decoded, 3),
    "whisper": Architecture("WhisperModel", "WhisperConfig", _WHISPER, _speech, 3),
    "mixtral": Architecture(
        "MixtralForCausalLM", "MixtralConfig", {**_SIZES, **_DECODER, "num_local_experts": 4}, uncached
    ),
    "qwen3_moe": Architecture(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**_SIZES, **_DECODER, "head_dim": 8}
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        uncached,
    ),
    "gpt_oss": Architecture(
        "GptOssForCausalLM",
        "GptOssConfig",
        {**_SIZES, **_DECODER, "head_dim": 8} | {"num_local_experts": 4, "num_experts_per_tok": 2},
        uncached,
    ),
    "phi3": Architecture("Phi3ForCausalLM", "Phi3Config", {**_SIZES, **_DECODER}, uncached),
    "gemma": Architecture("GemmaForCausalLM", "GemmaConfig", {**_SIZES, **_DECODER, "head_dim": 8}, uncached),
}
