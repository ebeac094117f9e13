"""Scaled dot-product attention in visible parts, so that its probabilities can be quantized."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fakequant.nn.backward.products import Factor


def attend_in_parts(  # noqa: PLR0913  as torch's
    multiply: Callable[[Factor, Factor], Tensor],
    probabilities: Callable[[Tensor], Tensor],
    query: Factor,
    key: Factor,
    value: Factor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What `F.scaled_dot_product_attention` computes, in three operations, within rounding.

    Args:
        multiply: `matmul` of two factors.
        probabilities: quantizes the result of the softmax [..., queries, keys], before dropout.
        query: [..., heads, queries, features].
        key: [..., heads, keys, features].
        value: [..., heads, keys, width].
        attn_mask: True where a query sees a key, or what is added to the scores.
        dropout_p: the share of probabilities that are dropped.
        is_causal: whether queries see no later keys.
        scale: of the scores; by default 1 / sqrt(features).
        enable_gqa: whether several heads of the query share one of key and value.

    >>> from fakequant.nn.backward.products import matmul
    >>> q, k, v = torch.randn(3, 2, 4, 5, 8)
    >>> exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> factors = [Factor(x, x) for x in (q, k, v)]
    >>> found = attend_in_parts(lambda *pair: matmul(None, *pair), lambda p: p, *factors, is_causal=True)
    >>> torch.allclose(found, exact, atol=1e-6)
    True
    """
    *_, heads, _, features = query.value.shape
    if enable_gqa:
        key, value = (one.map(lambda own: own.repeat_interleave(heads // own.shape[-3], -3)) for one in (key, value))
    scores = multiply(query, key.map(lambda own: own.mT)) * (1 / math.sqrt(features) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        masked = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype is torch.bool else scores + attn_mask
        # A query that sees no key gets zeros, as from torch.
        sees_none = (masked == -math.inf).all(dim=-1, keepdim=True)
        weights = torch.softmax(masked, dim=-1).masked_fill(sees_none, 0.0)
    else:
        weights = torch.softmax(scores, dim=-1)
    factor = Factor(probabilities(weights), weights)
    if dropout_p:
        kept = F.dropout(torch.ones_like(weights), dropout_p)
        factor = factor.map(lambda own: own * kept)
    return multiply(factor, value)
