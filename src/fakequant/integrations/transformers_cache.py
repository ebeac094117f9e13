"""A key/value cache of Hugging Face's transformers that quantizes what is written to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import DynamicCache

from fakequant.errors import CalibrationError, ConfigError
from fakequant.nn.quantizer import Quantizer
from fakequant.numerics.spec import QuantSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Quantizers = QuantSpec | str | Iterable[Quantizer]


class FakeQuantCache(DynamicCache):
    """A `DynamicCache` of fake-quantized keys and values [n, heads, length, features].

    Every call of an attention module writes the keys and values of its new positions. They are quantized then, after
    the rotary embedding, and never again. The states of linear attention and of indexers stay in float.

    With a specification the range is that of what one call writes. Per token, or in blocks of features, every position
    has its own range, so that results do not depend on padding or on the number of positions in a call. Coarser
    granularities need fixed ranges for that: give the calibrated quantizers of every layer.

    Args:
        keys: how to quantize keys: one specification for all layers, or one quantizer with a range for each layer.
        values: how to quantize values; by default as keys.
        config: of the model, as for `DynamicCache`: layers with a sliding window keep the positions of it alone.

    Raises:
        CalibrationError: a quantizer has no range.
        ConfigError: something that is neither a specification nor quantizers.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    ... )
    >>> model, ids = LlamaForCausalLM(config).eval(), torch.tensor([[3, 1, 4]])
    >>> cache = FakeQuantCache("int8 per_token", config=config)
    >>> length = dict(min_new_tokens=2, max_new_tokens=2)
    >>> model.generate(ids, **length, do_sample=False, past_key_values=cache, pad_token_id=0).shape
    torch.Size([1, 5])
    >>> list(cache.layers[0].keys.shape)
    [1, 2, 4, 4]
    """

    def __init__(
        self, keys: Quantizers, values: Quantizers | None = None, *, config: PreTrainedConfig | None = None
    ) -> None:
        own_keys = _quantizers(keys, "keys")
        own_values = own_keys if values is None else _quantizers(values, "values")
        super().__init__(config=config)
        self._key_quantizers, self._value_quantizers = own_keys, own_values

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new positions of a layer; all of its keys and values are returned."""
        keys = _of_layer(self._key_quantizers, layer_idx, "keys")(key_states)
        values = _of_layer(self._value_quantizers, layer_idx, "values")(value_states)
        return super().update(keys, values, layer_idx, *args, **kwargs)


def _quantizers(given: Quantizers, what: str) -> Quantizer | list[Quantizer]:
    if isinstance(given, (QuantSpec, str)):
        return Quantizer(given, dynamic=True)
    quantizers: list[Any] = list(given) if isinstance(given, Iterable) else [given]
    for layer, quantizer in enumerate(quantizers):
        if not isinstance(quantizer, Quantizer):
            raise ConfigError(
                f"{what} of a cache must be a QuantSpec, its text, or a quantizer for each layer, got {quantizer!r:.80}"
            )
        if quantizer.needs_calibration:
            raise CalibrationError(
                f"the quantizer of the {what} of layer {layer} has no range; calibrate it first, or make it dynamic"
            )
    return quantizers


def _of_layer(quantizers: Quantizer | list[Quantizer], layer: int, what: str) -> Quantizer:
    if isinstance(quantizers, Quantizer):
        return quantizers
    if layer >= len(quantizers):
        raise ConfigError(
            f"the model writes {what} of layer {layer} to a cache with quantizers for {len(quantizers)} layers; give "
            "one for each layer of the model"
        )
    return quantizers[layer]
