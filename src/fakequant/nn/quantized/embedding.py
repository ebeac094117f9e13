"""Quantized tables of embeddings, which have a quantizer for the table and none for the indices; see `layers.py`."""

from __future__ import annotations

from typing import ClassVar, cast

import torch.nn.functional as F
from torch import Tensor, nn

from fakequant.errors import ConfigError
from fakequant.nn.leaf import Proxy, as_leaf
from fakequant.nn.quantized.layers import QuantizedLayer, quantizes


class _QuantTable(QuantizedLayer):
    inputs: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def check(cls, layer: nn.Module) -> None:
        table, name = cast("nn.Embedding", layer), cls.float_class.__name__
        if table.max_norm is not None:
            raise ConfigError(
                f"{name}(max_norm=...) rescales its weight in every forward pass and cannot be quantized; "
                "leave it in float by a rule, or normalise the weight once and set max_norm=None"
            )
        if table.sparse:
            raise ConfigError(
                f"{name}(sparse=True) has a sparse gradient, which quantizers cannot pass on; "
                "leave it in float by a rule, or set sparse=False"
            )


@quantizes(nn.Embedding)
class QuantEmbedding(_QuantTable, nn.Embedding):
    """Embedding with a quantized table [rows, features], one channel per row, blocks along its features."""

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, Proxy):
            return as_leaf(self, input)
        return F.embedding(
            input,
            self.quantized_weight(),
            self.padding_idx,
            scale_grad_by_freq=self.scale_grad_by_freq,
            sparse=self.sparse,
        )


@quantizes(nn.EmbeddingBag)
class QuantEmbeddingBag(_QuantTable, nn.EmbeddingBag):
    """EmbeddingBag with a quantized table [rows, features], one channel per row, blocks along its features.

    Rows are quantized before they are summed, averaged or compared. `per_sample_weights` stay in float.

    >>> model = prepare(nn.Sequential(nn.EmbeddingBag(8, 4, mode="sum")), presets.INT8_WEIGHT_ONLY)
    >>> model[0](torch.tensor([[0, 3], [5, 5]])).shape
    torch.Size([2, 4])
    """

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """One row [bags, features] per bag, of the arguments of `nn.EmbeddingBag`."""
        if isinstance(input, Proxy):
            return as_leaf(self, input, offsets, per_sample_weights)
        return F.embedding_bag(
            input,
            self.quantized_weight(),
            offsets,
            scale_grad_by_freq=self.scale_grad_by_freq,
            mode=self.mode,
            sparse=self.sparse,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=self.padding_idx,
        )
