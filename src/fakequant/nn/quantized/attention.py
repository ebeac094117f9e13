"""`nn.MultiheadAttention` as separate projections, scores, softmax and weighted sum, each with quantizers.

The operations and their order are those of `torch.nn.functional.multi_head_attention_forward`, so that results without
quantizers have the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fakequant.errors import CalibrationError, ShapeError
from fakequant.nn.backward import Factor, LinearSum, WeightedSum, is_trained, matmul, multiplied
from fakequant.nn.integer import Watched
from fakequant.nn.products import InProjection, OutProjection, Product
from fakequant.nn.quantized.layers import QuantizedLayer, quantizes
from fakequant.nn.quantizer import Mode, Proxy, as_leaf
from fakequant.nn.wrappers import Operand, Role

_torch: Any = F
"""torch.nn.functional without types: its stub lacks the private functions that are called here."""
_SEPARATE = ("q_proj", "k_proj", "v_proj")


class _Masks(NamedTuple):
    """The two float masks that an attention layer adds to the scores; each is None without a mask."""

    attention: Tensor | None
    """[queries, keys] or [n * heads, queries, keys]"""
    padding: Tensor | None
    """[n, keys]"""

    def padded(self) -> _Masks:
        """The masks for one more key, which they do not hide."""
        return _Masks(*(None if mask is None else F.pad(mask, (0, 1)) for mask in self))

    def merged(self, n: int, heads: int, keys: int) -> Tensor | None:
        """The sum of the two masks [1 or n * heads, 1 or queries, keys]; None without masks."""
        attention = self.attention
        if attention is not None and attention.dim() == 2:
            attention = attention.unsqueeze(0)
        if self.padding is None:
            return attention
        _torch._check_key_padding_mask(self.padding, keys, n)
        padding = self.padding.view(n, 1, 1, keys).expand(-1, heads, -1, -1).reshape(n * heads, 1, keys)
        return padding if attention is None else attention + padding


@quantizes(nn.MultiheadAttention)
class QuantMultiheadAttention(Watched, QuantizedLayer, nn.MultiheadAttention):
    """MultiheadAttention with quantized inputs, weights, factors of both products, and input of the output projection.

    Inputs are quantized before their projections. A tensor that is passed for two of them, such as query and key, is
    quantized once, by the quantizer of the first; calibration removes quantizers that no call uses. Query, key and
    value are quantized after their projections as [n, heads, length, head_dim], the query after scaling. Probabilities
    [n, heads, queries, keys] are quantized before dropout. If a rule quantizes the output, its specification also
    quantizes the results of the input projections.

    With `need_weights=False` torch computes `scaled_dot_product_attention`. So does this layer, unless the quantizer of
    the probabilities is on, or gradients are quantized: then it computes softmax(query @ key.T + mask) @ value in three
    operations.

    Functions that `watch` registers get each input [queries, n, embed_dim] of the output projection, unquantized.
    """

    @classmethod
    def factors(cls, layer: nn.Module) -> dict[str, Operand]:
        packed = cast("nn.MultiheadAttention", layer)._qkv_same_embed_dim
        weights = ("in_proj",) if packed else _SEPARATE
        return {
            "_input_quantizer": Operand(Role.INPUT),
            "_key_input_quantizer": Operand(Role.INPUT, optional=True),
            "_value_input_quantizer": Operand(Role.INPUT, optional=True),
            **{f"_{name}_weight_quantizer": Operand(Role.WEIGHT, weight=f"{name}_weight") for name in weights},
            "_in_proj_output_quantizer": Operand(Role.OUTPUT),
            "_query_quantizer": Operand(Role.INPUT),
            "_key_quantizer": Operand(Role.INPUT),
            "_probability_quantizer": Operand(Role.INPUT),
            "_value_quantizer": Operand(Role.INPUT, -2),
            "_out_proj_input_quantizer": Operand(Role.INPUT),
            "_out_proj_weight_quantizer": Operand(Role.WEIGHT, weight="out_proj.weight"),
        }

    @classmethod
    def weighted_sum(cls, layer: nn.Module) -> WeightedSum | None:
        return LinearSum()

    @classmethod
    def products_of(cls, layer: nn.Module) -> list[Product]:
        return [
            (OutProjection if "." in own.weight else InProjection).of(layer, attribute, own.weight)
            for attribute, own in cls.factors(layer).items()
            if own.weight
        ]

    def forward(  # noqa: PLR0913  as torch's
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The output and weights that `nn.MultiheadAttention` returns for these arguments."""
        if isinstance(query, Proxy):
            others = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
            return as_leaf(self, query, key, value, *others)
        if query.is_nested or key.is_nested or value.is_nested:
            raise ShapeError(
                "a quantized MultiheadAttention got a nested tensor, and takes only padded tensors; pad the inputs, "
                "and give a mask"
            )
        is_batched = _torch._mha_shape_check(query, key, value, key_padding_mask, attn_mask, self.num_heads)
        # As torch: -inf where a mask of bool is True.
        of_mask, dtype = _torch._none_or_dtype(attn_mask), query.dtype
        padding = _torch._canonical_mask(key_padding_mask, "key_padding_mask", of_mask, "attn_mask", dtype)
        attention = _torch._canonical_mask(attn_mask, "attn_mask", None, "", dtype, check_other=False)
        masks = _Masks(attention, padding.unsqueeze(0) if padding is not None and padding.dim() == 1 else padding)
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal=True says that attn_mask is the causal mask, but there is no attn_mask")
        # Alone, the hint takes the place of the mask.
        is_causal = is_causal and key_padding_mask is None
        if is_causal and not need_weights:
            masks = masks._replace(attention=None)
        inputs = self._quantized_inputs(query, key, value)
        if not is_batched:
            inputs = tuple(x.map(lambda own: own.unsqueeze(1)) for x in inputs)
        elif self.batch_first:  # inputs that are one tensor stay one, as torch has it
            turned = {id(x): x.map(lambda own: own.transpose(1, 0)) for x in inputs}
            inputs = tuple(turned[id(x)] for x in inputs)
        y, weights = self._attend(inputs, masks, need_weights=need_weights, is_causal=is_causal)
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        if not is_batched:
            return y.squeeze(1), None if weights is None else weights.squeeze(0)
        return y.transpose(1, 0) if self.batch_first else y, weights

    def _quantized_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Factor, ...]:
        """The quantized query, key and value; if a tensor is passed for two of them, both are the same object."""
        q = Factor.of(self, "_input_quantizer", query)
        k = q if key is query else self._other_input("_key_input_quantizer", key, "key")
        if value is key or value is query:
            return q, k, k if value is key else q
        return q, k, self._other_input("_value_input_quantizer", value, "value")

    def _other_input(self, attribute: str, x: Tensor, name: str) -> Factor:
        if getattr(self, attribute) is None and self._input_quantizer is not None:
            raise CalibrationError(
                f"the {name} of this attention is a separate tensor, but in calibration no call had a separate {name}, "
                f"so that {attribute} was removed; prepare the model again, and calibrate it with such calls, too"
            )
        return Factor.of(self, attribute, x)

    def _attend(
        self, inputs: Sequence[Factor], masks: _Masks, *, need_weights: bool, is_causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The output [queries, n, embed_dim], and with `need_weights` the probabilities [n, heads, queries, keys].

        `inputs` are query, key and value [length, n, features]. `is_causal` masks later keys if there is no mask.
        """
        of_query, of_key, of_value = (x.value.shape for x in inputs)
        (queries, n, width), keys = of_query, of_key[0]
        if width != self.embed_dim:
            raise AssertionError(f"the query must have {self.embed_dim} features, got {width}")
        same = 3 if self._qkv_same_embed_dim else 2
        if of_key[:same] != of_value[:same]:
            raise AssertionError(
                f"key and value must have the same length and batch, got shapes {list(of_key)} and {list(of_value)}"
            )
        if masks.attention is not None:
            expected = (n * self.num_heads, queries, keys)[-masks.attention.dim() :]
            if masks.attention.shape != expected:
                raise RuntimeError(
                    f"attn_mask must have shape {[queries, keys]} or {[n * self.num_heads, queries, keys]}, got "
                    f"{list(masks.attention.shape)}"
                )
        q, k, v = self._projected(*inputs)
        if self.bias_k is not None and self.bias_v is not None:
            k, v = torch.cat([k, self.bias_k.repeat(1, n, 1)]), torch.cat([v, self.bias_v.repeat(1, n, 1)])
            masks = masks.padded()
        q, k, v = (x.view(x.shape[0], n * self.num_heads, width // self.num_heads).transpose(0, 1) for x in (q, k, v))
        if self.add_zero_attn:
            k, v = (torch.cat([x, x.new_zeros(x.shape[0], 1, x.shape[2])], dim=1) for x in (k, v))
            masks = masks.padded()
        mask = masks.merged(n, self.num_heads, k.shape[1])
        weights = None
        if need_weights or self.is_on("_probability_quantizer") or is_trained(self.gradient):
            if is_causal and mask is None:
                mask = torch.full((queries, k.shape[1]), -math.inf, dtype=q.dtype, device=q.device).triu(1).unsqueeze(0)
            query = self._heads("_query_quantizer", q * math.sqrt(1.0 / float(q.shape[2])))
            key = self._heads("_key_quantizer", k).map(lambda own: own.transpose(-2, -1))
            scores = self._times(query, key, mask)
            if mask is not None and not need_weights:
                # A query without keys gets zeros, as from `scaled_dot_product_attention`, and not NaN.
                hidden = (scores == -math.inf).all(-1, keepdim=True)
                weights = F.softmax(scores.masked_fill(hidden, 0.0), dim=-1).masked_fill(hidden, 0.0)
            else:
                weights = F.softmax(scores, dim=-1)
            factor = self._heads("_probability_quantizer", weights)
            if self.training and self.dropout > 0.0:
                kept = F.dropout(torch.ones_like(weights), p=self.dropout)
                factor = factor.map(lambda own: own * kept)
            y, weights = self._times(factor, self._heads("_value_quantizer", v)).transpose(0, 1), factor.value
        else:
            options = {}
            if self.is_on("_query_quantizer"):
                q = self._heads("_query_quantizer", q * math.sqrt(1.0 / float(q.shape[2]))).value
                options["scale"] = 1.0
            k, v = self._heads("_key_quantizer", k).value, self._heads("_value_quantizer", v).value
            if mask is not None:
                mask = mask.unsqueeze(0) if mask.shape[0] == 1 else mask.view(n, self.num_heads, -1, k.shape[1])
            q, k, v = (x.view(n, self.num_heads, *x.shape[1:]) for x in (q, k, v))
            dropout = self.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal, **options).permute(2, 0, 1, 3)
        self.show(y.reshape(queries, n, width))
        last = Factor.of(self, "_out_proj_input_quantizer", y.reshape(queries * n, width))
        of_weight = Factor.of(self, "_out_proj_weight_quantizer", self.out_proj.weight)
        y = self._product(last, of_weight, self.out_proj.bias)
        weights = weights.view(n, self.num_heads, queries, -1) if need_weights and weights is not None else None
        return y.view(queries, n, y.shape[1]), weights

    def _product(self, x: Factor, weight: Factor, bias: Tensor | None) -> Tensor:
        return multiplied(LinearSum(), self.backward_of(), x, weight, bias)

    def _projected(self, query: Factor, key: Factor, value: Factor) -> list[Tensor]:
        """Query, key and value [length, n, embed_dim] after their projections.

        If one weight projects all three, adjacent inputs that are the same tensor are projected in one product.
        """
        if self._qkv_same_embed_dim:
            packed, width = Factor.of(self, "_in_proj_weight_quantizer", self.in_proj_weight), self.embed_dim
            if query is key is value:  # nothing is split, so that exported products see the weight as it is quantized
                return self._in_parts(self._product(query, packed, self.in_proj_bias), 3)
            sizes = [width, 2 * width] if key is value else [width] * 3
            of_parts = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.split(sizes)
            parts = [packed.map(lambda own, place=place: own.split(sizes)[place]) for place in range(len(sizes))]
            found: list[Tensor] = []
            for x, part, bias, size in zip((query, key, value), parts, of_parts, sizes, strict=False):
                found += self._in_parts(self._product(x, part, bias), size // width)
            return found
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        projected = []
        for x, name, bias in zip((query, key, value), _SEPARATE, biases, strict=True):
            weight = Factor.of(self, f"_{name}_weight_quantizer", getattr(self, f"{name}_weight"))
            projected.append(self.quantized("_in_proj_output_quantizer", self._product(x, weight, bias)))
        return projected

    def _in_parts(self, projected: Tensor, count: int) -> list[Tensor]:
        """The quantized result of a projection, split in `count` parts with the strides that they have in torch."""
        y = self.quantized("_in_proj_output_quantizer", projected)
        if count == 1:
            return [y]
        parts = y.unflatten(-1, (count, self.embed_dim)).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()
        return [parts[place] for place in range(count)]

    def _times(self, x: Factor, other: Factor, mask: Tensor | None = None) -> Tensor:
        """x @ other + mask, with x and other [n * heads, ...]; one operation unless gradients are quantized."""
        if is_trained(self.gradient):
            y = matmul(self.backward_of(), x, other)
            return y if mask is None else y + mask
        return torch.bmm(x.value, other.value) if mask is None else torch.baddbmm(mask, x.value, other.value)

    def _heads(self, attribute: str, x: Tensor) -> Factor:
        """x [n * heads, ...], quantized in the shape [n, heads, ...] by the quantizer in the attribute `attribute`."""
        quantizer = getattr(self, attribute)
        if quantizer is None or quantizer.mode is Mode.OFF:
            return Factor(x, x)
        value = quantizer(x.unflatten(0, (-1, self.num_heads))).flatten(0, 1)
        return Factor(value, value if self.gradient is None else x)
