"""Caches with each layout of groups and windows, and what models generate with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fakequant.integrations.transformers_cache import FakeQuantCache, name_attention
from tests.support.transformers_models import ARCHITECTURES

KEYS = "uint4 per_block(-2:3) scale=float16 offset=float16:signed"
VALUES = "uint4 per_block(-1:4) scale=float16 offset=float16"
LAYOUTS: dict[str, dict[str, Any]] = {
    "groups": {"keys": KEYS, "values": VALUES},
    "groups and window": {"keys": KEYS, "values": VALUES, "residual_length": 2},
    "window": {"keys": "int4 per_token", "residual_length": 3},
    "two groups": {"keys": KEYS, "values": "uint4 per_block(-2:2)", "residual_length": 1},
    "fp8": {"keys": "float8_e4m3fn per_token"},
    "nvfp4": {"keys": "float4_e2m1fn per_block(-1:8) scale=float8_e4m3fn", "values": "int4 per_token"},
    "shared scales": {"keys": "float4_e2m1fn per_block(-2:1,-1:4) scale=float8_e4m3fn@per_block(-2:2)/float16"},
}
OPTIONS: Any = {"max_new_tokens": 9, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}


def named(name: str = "llama", **further: Any) -> Any:
    return name_attention(ARCHITECTURES[name].make(**{"num_hidden_layers": 2, **further}))  # type: ignore[type-var]


def prompt() -> dict[str, Tensor]:
    """Token ids [2, 11], of which the second has four of padding."""
    ids = torch.arange(22).view(2, 11) % 29 + 2
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def cache_of(layout: str, mask: Tensor | None = None, **further: Any) -> FakeQuantCache:
    return FakeQuantCache(**{**LAYOUTS[layout], **further}, attention_mask=mask)


def generated(model: Any, cache: Any, inputs: Any, **further: Any) -> tuple[Tensor, Tensor]:
    """Sequences and all logits."""
    found = model.generate(**inputs, past_key_values=cache, **OPTIONS | further)
    return found.sequences, torch.stack(found.logits)
