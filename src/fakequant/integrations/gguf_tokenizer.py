"""The metadata of a GGUF file for a transformers model's tokenizer, and the architectures that can be written.

Source: `conversion/base.py` of llama.cpp. Two things differ: scores come from the order of the merges, while
llama.cpp's converter gives all tokens one score; and merges are written for all tokenizers, because transformers reads
them.

Source: the converters of llama.cpp, `conversion/*.py`, and its graphs, `src/models/*.cpp`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from tempfile import TemporaryDirectory
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
from fakequant.delivery.gguf.blocks import require_gguf
from fakequant.errors import CheckpointError, warn_user
from fakequant.files import output_errors
from fakequant.text import listed

_SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_LOOKS_SPECIAL = re.compile(r"<([|\uff5c]).*\1>|<unused.*>|<pad>|<mask>|<2mass>|\[@BOS@\]")
_BLANK = "▁"


class _Type(IntEnum):
    """The types of tokens, as llama.cpp numbers them."""

    NORMAL = 1
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def describe_tokenizer(writer: Any, model: Any) -> None:
    """Add the tokenizer from the folder from which the model was loaded; without a tokenizer, only warn.

    Args:
        writer: a `gguf.GGUFWriter`.
        model: a model of transformers.

    Raises:
        CheckpointError: a tokenizer that llama.cpp does not know.
    """
    tokenizer = _tokenizer_of(model)
    if tokenizer is None:
        source = getattr(model, "name_or_path", "")
        why = f"there is none in {source!r}" if source else "the model was made from a configuration"
        warn_user(
            f"the file has no tokenizer, because {why}: programs that read it take token ids only; "
            "load the model by from_pretrained from a folder with its tokenizer, then deliver again"
        )
        writer.add_tokenizer_model("none")
        for name in _SPECIAL:
            if isinstance(number := getattr(model.config, f"{name}_token_id", None), int):
                getattr(writer, f"add_{name}_token_id")(number)
        return
    data = json.loads(tokenizer.backend_tokenizer.to_str())
    kind, pre = _kind_of(data)
    tokens = list(_tokens(tokenizer, model.config.vocab_size))
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_types([one for _, one in tokens])
    if kind == "llama":
        places: dict[str, int] = {}  # the sooner a token is merged, the higher its score; all others are below
        for place, pair in enumerate(data["model"]["merges"]):
            places.setdefault("".join(pair.split(" ") if isinstance(pair, str) else pair), place)
        writer.add_token_scores([-float(places.get(text, len(places))) for text, _ in tokens])
        before = any(part["type"] == "Prepend" for part in _parts(data["normalizer"]))
        blanks = [part for part in _parts(data["pre_tokenizer"]) if part["type"] == "Metaspace"]
        puts_blank_first = any(part.get("prepend_scheme", "always") != "never" for part in blanks)
        writer.add_add_space_prefix(before or puts_blank_first)
    with output_errors(Path("the temporary folder"), "to "), TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        model.config.save_pretrained(folder)
        special = require_gguf().SpecialVocab(folder, load_merges=True, n_vocab=len(tokens))
    ids = tokenizer("a").input_ids
    for name, added in (("bos", ids[0]), ("eos", ids[-1])):
        special.add_special_token[name] = added == special.special_token_ids.get(name, -1)
    special.add_to_gguf(writer, quiet=True)


def _tokenizer_of(model: Any) -> Any:
    from transformers import AutoTokenizer

    source = getattr(model, "name_or_path", "")
    if not source:
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    except (OSError, ValueError, KeyError):  # no files, or those of a model alone
        return None
    if not tokenizer("a").input_ids:  # transformers makes one without a vocabulary where there are no files
        return None
    if not getattr(tokenizer, "is_fast", False):
        raise CheckpointError(
            f"the tokenizer in {source} has no tokenizer.json; save it as a fast tokenizer, then deliver again"
        )
    return tokenizer


def _kind_of(data: Mapping[str, Any]) -> tuple[str, str]:
    """llama.cpp's names of the tokenizer and its pre-tokenizer; raises CheckpointError for unknown tokenizers."""
    model = data["model"]
    if model["type"] != "BPE":
        raise CheckpointError(f"the tokenizer is a {model['type']!r:.80}; files are written for BPE alone")
    if model.get("byte_fallback"):
        return "llama", "default"
    splits = [part["pattern"].get("Regex") for part in _parts(data["pre_tokenizer"]) if part["type"] == "Split"]
    if not splits and any(part["type"] == "ByteLevel" for part in _parts(data["pre_tokenizer"])):
        return "gpt2", "gpt-2"
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    names = [name for name, pattern in GGUF_PRE_TOKENIZER_SPLITS.items() if splits == [pattern]]
    if not names:
        raise CheckpointError(
            f"the tokenizer cuts texts by {splits!r:.200}, which llama.cpp is not known to do; deliver a model that "
            "was loaded from a folder without tokenizer, and give the programs token ids"
        )
    return "gpt2", names[0]


def _parts(step: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The steps of a sequence of steps, or a single step as a list; [] for None."""
    if step is None:
        return []
    return next((step[key] for key in ("pretokenizers", "normalizers") if key in step), [step])


def _tokens(tokenizer: Any, size: int) -> Iterator[tuple[str, int]]:
    """The text and type of every token id; ids without a text are unused."""
    texts = {number: text for text, number in tokenizer.get_vocab().items()}
    if texts and max(texts) >= size:
        raise CheckpointError(f"the tokenizer has token {max(texts)}, but the model's vocab_size is {size}")
    added = tokenizer.added_tokens_decoder
    for number in range(size):
        text = texts.get(number)
        if text is None:
            yield f"[PAD{number}]", _Type.UNUSED
        elif number not in added:
            yield text, _Type.BYTE if _BYTE.fullmatch(text) else _Type.NORMAL
        elif added[number].special or _LOOKS_SPECIAL.fullmatch(text):
            yield text, _Type.CONTROL
        else:
            yield text.replace(_BLANK, " "), _Type.USER_DEFINED


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
    """Why llama.cpp would scale a Gemma's attention differently, as for two sizes of Gemma; "" if it would not."""
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
    return {
        f"rope_factors_{kind}.weight": torch.tensor(rotary[f"{kind}_factor"], device="cpu").float() for kind in kinds
    }


def _experts(writer: Any, config: Any) -> None:
    writer.add_expert_count(getattr(config, "num_local_experts", None) or config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if (width := getattr(config, "moe_intermediate_size", None)) is not None:
        writer.add_expert_feed_forward_length(width)
    if (width := getattr(config, "shared_expert_intermediate_size", None)) is not None:
        writer.add_expert_shared_feed_forward_length(width)


def _qwen_experts(config: Any) -> str:
    """Why llama.cpp cannot store a Qwen model's experts; "" if it can. It expects experts in all layers."""
    if config.mlp_only_layers or config.decoder_sparse_step != 1:
        return "not all of its layers have experts"
    wanted = config.model_type == "qwen3_moe"
    if config.norm_topk_prob is not wanted:
        return f"its norm_topk_prob is {config.norm_topk_prob}, not {wanted}"
    return ""


def _gpt2(writer: Any, config: Any) -> None:
    writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)


def _gpt2_options(config: Any) -> str:
    """Why llama.cpp computes a GPT-2 differently; "" if it does not. It lacks options newer than the paper."""
    wanted = {"activation_function": "gelu_new", "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
    for key, value in {**wanted, "add_cross_attention": False}.items():
        if (own := getattr(config, key)) != value:
            return f"its {key} is {own}, not {value}"
    return ""


def _gpt2_unread(config: Any, said: Mapping[str, Any]) -> str:
    """The sizes that transformers 5.23 replaces by GPT-2's sizes instead of reading them, as text; "" if none."""
    width = config.n_inner or 4 * config.n_embd
    sizes = {"n_positions": (config.n_positions, 1024), "n_inner": (width, 4 * config.n_embd)}
    if "tokenizer.ggml.tokens" not in said:
        sizes["vocab_size"] = config.vocab_size, 50257
    left = [f"{key} for {theirs}, not {own}" for key, (own, theirs) in sizes.items() if own != theirs]
    return f"takes {listed(left)}" if left else ""


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
    "mixtral": replace(
        _LLAMA,
        refuse=_mistral_window,
        unread=lambda config, said: "takes the file for a model without experts",
        **_EXPERTS,
    ),
    "qwen2": Architecture("qwen2"),
    "qwen2_moe": Architecture("qwen2moe", refuse=_qwen_experts, vectors=["shared_expert_gate.weight"], **_EXPERTS),
    "qwen3_moe": Architecture("qwen3moe", refuse=_qwen_experts, **_EXPERTS),
    "qwen3": Architecture("qwen3"),
    "gemma2": Architecture("gemma2", pattern=2, describe=_gemma2, **_GEMMA),
    "gemma3_text": Architecture("gemma3", pattern=6, describe=_gemma3, **_GEMMA),
    "gpt2": Architecture("gpt2", describe=_gpt2, refuse=_gpt2_options, unread=_gpt2_unread, rotaries=()),
    "phi3": Architecture(
        "phi3",
        describe=_phi3,
        extra=_phi3_factors,
        rotaries=("default", "linear", "longrope"),
        rotary_keys=("partial_rotary_factor", "original_max_position_embeddings"),
    ),
}.items():
    register_architecture(_type, replace(_architecture, tokenizer=describe_tokenizer))
